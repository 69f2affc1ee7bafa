"""The forward's tiles, with the reason beside each row; ``tiles.forward_tile`` chooses among them."""

from __future__ import annotations

from tilewise.backends.hopper.arguments import FREE, ForwardTile

# (block_d, block_dv) -> tile; percentages are of one process on an H200
FORWARD = {
    # for few keys, where three warpgroups with their 192 rows lose 7 %: see MANY; a lazy maximum lost 3 to 7 %, a
    # cubic on the FMA units for every 8th or 16th exponential -1 to +4 %
    (64, 64): ForwardTile(128, 64, 64, 4, 2, 240, q_in_registers=True, out_parts=1, lazy=False, held=FREE),
    # 6 of the 8 steps of q k^T that padding to 128 takes; a lazy maximum -1 %
    (96, 128): ForwardTile(128, 96, 128, 2, 2, 240, q_in_registers=False, out_parts=1, lazy=False),
    # for few keys: see MANY; with q in registers the two products get into each other's way, -6 % full at 1024
    (80, 80): ForwardTile(128, 80, 80, 2, 2, 240, False, out_parts=2, lazy=True, votes=True, held=FREE, turns=True),
    (96, 96): ForwardTile(128, 96, 96, 2, 2, 240, False, out_parts=2, lazy=True, votes=True, held=FREE, turns=True),
    # q in registers frees its shared memory for the next tile, +1..2 %; a third stage was no faster; a lazy maximum
    # +2.5 to +3.7 % from 4096 on, -2 to +1 % at 1024
    (128, 128): ForwardTile(128, 128, 128, 2, 2, 240, q_in_registers=True, out_parts=1, lazy=True, held=FREE),
    # three boxes of 64 channels, not a tile of 256 and half the keys; a lazy maximum +1 %; room for half of out
    (192, 128): ForwardTile(128, 192, 128, 2, 2, 240, q_in_registers=False, out_parts=2, lazy=True),
    (192, 256): ForwardTile(64, 192, 256, 2, 2, 240, q_in_registers=False, out_parts=2, lazy=True),
    (192, 192): ForwardTile(64, 192, 192, 2, 2, 240, q_in_registers=False, out_parts=2, lazy=True),
    # without the padding to 192 +10 %
    (160, 160): ForwardTile(64, 160, 160, 2, 2, 240, q_in_registers=True, out_parts=2, lazy=True, held=FREE),
    # the accumulator takes 128 registers, so a score tile may take 32; out has room of its own for a half, so that the
    # next q comes early; a lazy maximum +7 % full and +2 % causal at 16384, +1 and -2 % at 1024
    (256, 256): ForwardTile(64, 256, 256, 2, 2, 240, q_in_registers=False, out_parts=2, lazy=True, held=FREE),
    (256, 128): ForwardTile(64, 256, 128, 2, 2, 240, q_in_registers=False, out_parts=2, lazy=True, held=FREE),
}
# without a window. q in registers, of which a window leaves none: +5 % causal and +7 % full at 16384 with 192/128. The
# wait for p v held in its place: +5 % at 1024 and +7 % at 16384 with 128 channels, where the assembler lets it stand
# before the softmax, +2 % with 160; with votes and q in registers +8 % with 192
FULL = {
    (128, 128): FORWARD[128, 128]._replace(held=2),
    (160, 160): FORWARD[160, 160]._replace(held=2),
    (192, 128): FORWARD[192, 128]._replace(q_in_registers=True, votes=True, held=FREE),
    (192, 192): FORWARD[192, 192]._replace(q_in_registers=True, votes=True, held=3),
}
# at 192 q in registers is +5 % at 16384 and +25 % at 4096
CAUSAL = {
    (192, 128): FULL[192, 128],
    (192, 192): FORWARD[192, 192]._replace(q_in_registers=True, held=FREE),
}
# the softmax takes as long as the products: a third warpgroup fills the gaps, and its warps vote before they compare
# maxima. (block_d, block_dv) -> kept keys of a query, between what was measured, from which on it does; and the tile
MANY = {
    # against two warpgroups +6 % full and +12 % causal at 4096, +5 % full at 1024, -7 % causal there
    (64, 64): (700, ForwardTile(128, 64, 64, 4, 3, 160, False, 1, True, votes=True, held=FREE, one_loop=True)),
    # against two +11 % causal and +9 % full at 16384, -1 % causal at 2048, -2 % full at 1024. Half of the scores are
    # beside p v, for want of registers; all of them after it, -3 % causal and -2 % full
    (80, 80): (1500, FORWARD[80, 80]._replace(consumers=3, registers=160, halved=True)),
    (96, 96): (1500, FORWARD[96, 96]._replace(consumers=3, registers=160, halved=True)),
}
# windows waste less of blocks of 64 keys. (block_d, block_dv) -> kept keys of a query, up to which; and the tile
WINDOWS = {
    # +33 % at 128, +13 % at 1024
    (64, 64): ((3000, ForwardTile(64, 64, 64, 4, 3, 160, True, 1, lazy=True, votes=True, one_loop=True)),),
    # +13 to +17 % at 128, with three loops +8 %; +9 % at 256, +11 % at 512 and 1024, +10 % at 4096
    (128, 128): (
        (200, ForwardTile(64, 128, 128, 4, 3, 160, False, 2, lazy=True, votes=True, one_loop=True)),
        (4000, ForwardTile(64, 128, 128, 4, 3, 160, False, 2, lazy=True, votes=True, held=FREE)),
    ),
}
# three warpgroups and blocks of 64 keys, where the rows fill them. (block_d, block_dv) -> kept keys of a query, between
# what was measured, from which on full problems take them, and causal ones; and the tile
LONG = {
    # +13 % full from 4096 on, +10 % at 2048, -1 % at 1024; +3 to +5 % causal from 8192 on, -1 to 0 % at 4096
    (128, 128): (1500, 3000, WINDOWS[128, 128][1][1]),
}
