"""Which tile a problem gets, with the reason beside each row, and the facts that a kernel is specialised on."""

from __future__ import annotations

import math
from operator import ge
from typing import NamedTuple

from tilewise.backends.hopper.arguments import OPEN, BackwardTile, ForwardTile, Fp8Tile, Mode, Scalars
from tilewise.backends.hopper.forward_tiles import CAUSAL, FORWARD, FULL, LONG, MANY, WINDOWS
from tilewise.descale import BLOCK, FP8
from tilewise.masks import band, kept_pairs
from tilewise.problem import SMALLEST_SCALE, Problem

LOG2E = math.log2(math.e)
L2_KEYS = 32 << 20  # bytes of k and v that stay in the 50 MB of L2 beside everything else
MAX_HEADDIM = 256
TILE_BLOCKS = 2.5  # a tile's first loads and last stores, in key blocks: 5500 of 2300 clocks
MERGE_BLOCKS = 4  # a second launch
PROCESSORS = 132  # multiprocessors of an H200, for choosing among tiles

_FP8 = {
    (64, 64): Fp8Tile(128, 64, 64, 2, 3, 160, 32),
    # +9 % full and +15 % causal over two warpgroups with products and softmax under way together
    (128, 128): Fp8Tile(128, 128, 128, 2, 3, 160, 32, turners=3),
    # a third warp that transposes v: +1 % full and +2 % causal at 16384, with 128 channels the same as two
    (256, 256): Fp8Tile(128, 256, 256, 2, 2, 240, 32, turners=3),
    (256, 128): Fp8Tile(128, 256, 128, 2, 3, 160, 32, turners=3),
}
# +4 % full and +7 % causal over three at 16384; a mask at both ends, slopes or descales by block would spill
_FP8_LONG_64 = Fp8Tile(128, 64, 64, 2, 4, 112, 24, held=0)
FP8_LONG = 8192  # query rows; between what was measured
# v transposed by a kernel of its own, not by every tile of queries: the same bits, +5 % full and +3 % causal at 16384,
# +5 % full at 4096, nothing causal there; it takes 20 us for 32 MB, so -6 % full and -12 % causal at 1024
_FP8_AHEAD_256 = _FP8[256, 256]._replace(turners=0)
FP8_AHEAD = 3000  # queries that meet a key; between what was measured
# slopes take registers that three warpgroups do not have: two, or the loop would spill hundreds of words
_FP8_SLOPES = {
    (64, 64): Fp8Tile(128, 64, 64, 2, 2, 240, 32),
    (128, 128): Fp8Tile(128, 128, 128, 2, 2, 240, 32),
    (256, 128): Fp8Tile(128, 256, 128, 2, 2, 240, 32),
}
_BACKWARD = {
    # 128 rows a step: half the barriers, and q is read once for 128 columns of s^T; +10 % over 64. Slower: dp issued
    # before the exponentials, dk from registers and nothing across steps (-13 %), p rounded before ds to make room for
    # k and v in registers or for dp before dq is handed over (-5 %), a second slot for k and v (-2 %)
    64: BackwardTile(128, 128, 64, 2, 2, 240),
    # dk and dv take 128 registers, which leaves room for score tiles of 64 x 64 alone; a third stage was slower, and so
    # was p rounded before ds (-2 %)
    128: BackwardTile(64, 128, 128, 2, 2, 240),
    # half the channels for each consumer; shared memory has room for one dout
    256: BackwardTile(64, 64, 256, 2, 1, 240),
}


# (pass, channels of a tile) -> FLOP/s, low in what was measured on an H200 at 4096 and 16384; fp8 has one pass
RATES = {
    ("forward", 64): 4.6e14,
    ("forward", 128): 6.0e14,
    ("forward", 256): 6.5e14,
    ("fp8", 64): 5.2e14,
    ("fp8", 128): 7.3e14,
    ("fp8", 256): 8.4e14,
    ("backward", 64): 4.9e14,
    ("backward", 128): 5.3e14,
    ("backward", 256): 4.0e14,
}


def rate(problem: Problem) -> float:
    """FLOP/s of a pass, for choosing among backends.

    At 8192 tokens a softcap and slopes made it less, but triton's rate still more: docs/hopper.md.
    """
    what = "fp8" if problem.dtype == FP8 else "backward" if problem.derivative == "backward" else "forward"
    return RATES[what, block_of(max(problem.headdim, problem.headdim_v))]


def block_of(dim: int) -> int:
    """The power of two, at least 64, that a head dimension is padded to inside a tile."""
    return max(64, 1 << (dim - 1).bit_length())


def keys_of_query(problem: Problem) -> float:
    """Keys that a query sees, on average; of packed sequences, whose lengths only the device knows, an estimate."""
    if not problem.varlen:
        return kept_pairs(band(problem), problem.seqlen_q, problem.seqlen_k) / max(1, problem.seqlen_q)
    keys = problem.total_k / max(1, problem.batch) / (2 if problem.causal else 1)
    return keys if problem.window_left is None else min(keys, problem.window_left)


def queries_of_key(problem: Problem) -> float:
    """Queries that meet a key, on average, all heads of its group together; dense problems only."""
    pairs = kept_pairs(band(problem), problem.seqlen_q, problem.seqlen_k)
    return pairs / max(1, problem.seqlen_k) * problem.nheads / max(1, problem.nheads_k)


def fills(problem: Problem, block_m: int, waste: float) -> bool:
    """Whether tiles of so many rows have at most ``waste`` times as many rows as the smallest, of 128."""
    rows = problem.total_q // max(1, problem.batch) if problem.varlen else problem.seqlen_q
    return -(-rows // block_m) * block_m <= waste * -(-rows // 128) * 128


def rounds(problem: Problem, block_m: int) -> int:
    """Query rows that a multiprocessor has in turn, of the dense form, if all tiles are as long."""
    tiles = -(-problem.seqlen_q // block_m) * problem.batch * problem.nheads
    return -(-tiles // PROCESSORS) * block_m


def forward_tile(problem: Problem) -> ForwardTile:
    """The forward's tile: of those that hold the head dimensions the one with the smallest products.

    Where tiles have different numbers of blocks, two consumers start their products in turn: +1 to +4 % causal and
    packed, -1 % elsewhere.
    """
    dims, mode = (problem.headdim, problem.headdim_v), mode_of(problem)
    sides = min((sides for sides in FORWARD if all(map(ge, sides, dims))), key=sum)
    if fills(problem, 192, 1.125) and not problem.softcap and not problem.segments:
        keys, plain = keys_of_query(problem), mode.raw_scale and not problem.varlen
        if mode.lower and plain:
            for most, tile in WINDOWS.get(sides, ()):
                if keys <= most:
                    return tile
        if sides in MANY and keys >= MANY[sides][0]:
            return MANY[sides][1]
        if sides in LONG and plain and rounds(problem, 192) <= 1.06 * rounds(problem, 128):
            full, causal, tile = LONG[sides]
            if keys >= (causal if mode.upper else full):
                return tile
    differ = problem.varlen or mode.upper
    if problem.segments:  # leaders take the registers that q would
        return FORWARD[sides]._replace(q_in_registers=False, turns=True)
    tile = FORWARD[sides] if mode.lower else (CAUSAL if differ else FULL).get(sides, FORWARD[sides])
    return tile._replace(turns=True) if differ else tile


def fp8_tile(problem: Problem) -> Fp8Tile:
    """The fp8 forward's tile."""
    block_d, block_dv = block_of(problem.headdim), block_of(problem.headdim_v)
    side = max(block_d, block_dv)
    sides = (block_d, block_dv) if (block_d, block_dv) in _FP8 else (side, side)
    tile = _FP8[sides]
    plain = not (problem.softcap or problem.alibi or problem.window_left is not None or scaled_by_block(problem))
    if side == 64 and problem.seqlen_q >= FP8_LONG and plain:
        tile = _FP8_LONG_64
    elif sides == (256, 256) and plain and not problem.varlen and queries_of_key(problem) >= FP8_AHEAD:
        tile = _FP8_AHEAD_256
    elif problem.alibi:
        tile = _FP8_SLOPES.get(sides, tile)
    return tile._replace(columns=problem.headdim_v)


def backward_tile(problem: Problem) -> BackwardTile:
    """The backward's tile."""
    tile = _BACKWARD[block_of(max(problem.headdim, problem.headdim_v))]
    return tile._replace(channels=summed(problem.headdim), channels_v=summed(problem.headdim_v))


def slopes_apart(problem: Problem) -> bool:
    """Whether the slopes' gradient has a launch of its own.

    Beside dk and dv of over 128 channels and a softcap's derivative the registers do not hold it: the assembler makes
    every product wait for the one before.
    """
    wide = max(problem.headdim, problem.headdim_v) > 128
    return "alibi_slopes" in problem.needs_grad and problem.softcap > 0 and wide


def keys_behind(problem: Problem) -> bool:
    """Whether every key that is kept lies behind its query or beside it, as ALiBi counts."""
    if problem.varlen:
        return problem.causal == "bottom_right" or problem.window_right == 0
    seen = seen_keys(problem)
    return seen.upper <= seen.shift


def summed(dim: int) -> int:
    """The channels that one product, or two of powers of two, sum over."""
    return next(count for count in (64, 96, 128, 192, 256) if count >= dim)


class Seen(NamedTuple):
    """The keys [begin, end) that some query sees, and the band and ALiBi's shift counted from ``begin``.

    Where descales go by block ``begin`` is the first key of a block, whose first ``unseen`` keys no query sees.
    """

    begin: int
    end: int
    lower: int
    upper: int
    shift: int
    unseen: int = 0


def scaled_by_block(problem: Problem) -> bool:
    """k or v has a descale for each block of keys."""
    return not {"k", "v"}.isdisjoint(problem.block_descales)


def seen_keys(problem: Problem) -> Seen:
    """Dense problems only. Keys no query sees are cut off, so that what they hold never meets a product."""
    limits = band(problem)
    begin = 0 if limits.lower is None else min(max(0, limits.lower), problem.seqlen_k)
    unseen = begin % BLOCK if scaled_by_block(problem) else 0
    begin -= unseen
    end = problem.seqlen_k if limits.upper is None else min(problem.seqlen_k, problem.seqlen_q + limits.upper)
    lower = -OPEN if limits.lower is None else max(limits.lower - begin, -OPEN)
    upper = OPEN if limits.upper is None else min(limits.upper - begin, OPEN)
    return Seen(begin, max(begin + unseen, end), lower, upper, problem.seqlen_k - problem.seqlen_q - begin, unseen)


def key_splits(problem: Problem, tile: ForwardTile, processors: int) -> int:
    """Ranges that the keys of each query tile are cut into, so that few tiles with many keys fill the machine.

    Costs are counted in key blocks: each tile's own, and those that starting and ending it and merging the states
    take. Cutting must gain a tenth.
    """
    if problem.varlen or problem.segments:
        return 1
    seen = seen_keys(problem)
    wanted = -(-problem.seqlen_q // tile.block_m) * problem.batch * problem.nheads
    blocks = -(-(seen.end - seen.begin) // tile.block_n)
    if wanted >= processors:
        return 1

    def cost(splits: int) -> float:
        rounds = -(-wanted * splits // processors)
        return rounds * (-(-blocks // splits) + TILE_BLOCKS) + (MERGE_BLOCKS if splits > 1 else 0)

    best = min(range(1, min(blocks, processors) + 1), key=cost)
    return best if cost(best) < 0.9 * cost(1) else 1


def mode_of(problem: Problem) -> Mode:
    """The features of a problem; a bound that no pair reaches is none."""
    by_block = scaled_by_block(problem)
    plain = problem.softmax_scale >= SMALLEST_SCALE and not problem.softcap and not problem.alibi and not by_block
    features = Mode(
        varlen=problem.varlen,
        softcap=problem.softcap > 0,
        alibi=problem.alibi,
        sink=problem.sink,
        segments=problem.segments,
        by_block=by_block,
        raw_scale=plain,
    )
    if problem.varlen:
        return features._replace(
            lower=problem.window_left is not None,
            upper=problem.window_right is not None or problem.causal is not None,
            top_left=problem.causal == "top_left",
        )
    seen = seen_keys(problem)
    return features._replace(
        lower=problem.seqlen_q - 1 + seen.lower > 0,
        upper=seen.upper < seen.end - seen.begin - 1,
    )


def scalars_of(problem: Problem) -> Scalars:
    """Floating-point facts for the kernels."""
    scale, cap = problem.softmax_scale, problem.softcap
    return Scalars(
        softmax_scale=float(scale),
        scale_log2=scale * LOG2E,
        softcap_in=2 * LOG2E * scale / cap if cap else 0.0,
        softcap_out=cap * LOG2E,
    )


def heads_in_flight(problem: Problem) -> int:
    """Query heads whose tiles the forward draws together: those whose k and v fit L2, the longest tiles first.

    Without a right bound all tiles are as long, so one key head after the other needs the least of L2: +8 % at 1024,
    +3 % at 4096 with 128 channels, +6 and +1 % with 256, where k and v came three times from memory.
    """
    if not mode_of(problem).upper:
        return problem.group
    bytes_of_head = max(1, problem.seqlen_k * (problem.headdim + problem.headdim_v) * problem.dtype.itemsize)
    heads_k = max(1, L2_KEYS // bytes_of_head)
    return min(heads_k * problem.group, problem.batch * problem.nheads)


def key_heads_in_flight(problem: Problem, heads: int, blocks: int, multiprocessors: int) -> int:
    """Key heads, a divisor of ``heads``, whose tiles the backward draws together, the heaviest first.

    A causal head's first tile is twice as heavy as its mean one. Drawn among the last it would leave the other
    multiprocessors idle, so a group holds a wave and a half; a larger one would only need more of L2. Where all tiles
    weigh the same, one head after the other needs the least.
    """
    mode = mode_of(problem)
    if not mode.upper or mode.lower:
        return 1
    wanted = min(heads, -(-3 * multiprocessors // (2 * max(1, blocks))))
    return next(count for count in range(wanted, heads + 1) if heads % count == 0)
