"""What the Hopper backend says of itself, without a GPU: refusals, tiles, the keys that a band leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.backends.hopper import BACKEND, tiles
from tilewise.backends.hopper.backend import _empty_backward, _empty_forward
from tilewise.backends.triton.backend import BACKEND as TRITON
from tilewise.descale import BLOCK, FP8
from tilewise.device import DeviceFacts
from tilewise.dispatch.choose import choose_among
from tilewise.inputs import Inputs
from tilewise.masks import band
from tilewise.problem import Problem

H200 = DeviceFacts(type="cuda", name="NVIDIA H200", arch="sm_90", multiprocessors=132, triton="3.6.0")
SMALL: dict[str, Any] = {
    "batch": 1,
    "seqlen_q": 300,
    "seqlen_k": 400,
    "nheads": 4,
    "nheads_k": 2,
    "headdim": 128,
    "headdim_v": 128,
    "dtype": torch.bfloat16,
    "device_type": "cuda",
    "softmax_scale": 0.1,
}


def problem(**changes: Any) -> Problem:
    return Problem(**(SMALL | changes))


def test_large_softcaps_go_elsewhere() -> None:
    assert not BACKEND.supports(problem(softcap=4096.0), H200)
    (reason,) = BACKEND.supports(problem(softcap=4097.0), H200)
    assert (reason.what, reason.has, reason.needs) == ("softcap", "4097", "at most 4096")


@pytest.mark.parametrize(
    ("changes", "behind"),
    [
        ({}, False),
        ({"causal": "bottom_right"}, True),
        ({"window_left": 5, "window_right": 0}, True),
        ({"window_left": 5, "window_right": 1}, False),
        ({"causal": "top_left"}, True),
        ({"causal": "top_left", "seqlen_q": 301}, False),
        ({"causal": "top_left", "seqlen_k": 301}, True),
    ],
)
def test_keys_behind_their_queries(changes: dict[str, Any], behind: bool) -> None:
    found = problem(**({"seqlen_q": 300, "seqlen_k": 300} | changes))
    assert tiles.keys_behind(found) == behind
    limits = band(found)
    assert behind == (limits.upper is not None and limits.upper <= found.seqlen_k - found.seqlen_q)


@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
def test_is_chosen_for_capped_scores(headdim: int) -> None:
    long = problem(
        seqlen_q=8192, seqlen_k=8192, headdim=headdim, headdim_v=headdim, causal="bottom_right", softcap=30.0,
        alibi=True, needs_grad=("q", "k", "v", "alibi_slopes"), derivative="backward",
    )  # fmt: skip
    assert BACKEND.cost(long, H200) < TRITON.cost(long, H200)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": "bottom_right", "needs_grad": ("q", "k", "v")},
        {"window_left": 5, "window_right": 0, "dtype": torch.float16},
        {"softcap": 30.0, "alibi": True, "sink": True, "needs_grad": ("q", "sink")},
        {"headdim": 192, "needs_grad": ("q",)},
        {"headdim": 8, "headdim_v": 256},
        {"varlen": True, "total_q": 10, "total_k": 10, "needs_grad": ("k",)},
        {"varlen": True, "sink": True, "needs_grad": ("sink",)},
        {"deterministic": True},
        {"softmax_scale": -1.0, "needs_grad": ("v",)},
        {"softmax_scale": 0.0, "needs_grad": ("q",)},
        {"segments": True, "causal": "bottom_right", "needs_grad": ("q", "k", "v")},
        {"alibi": True, "varlen": True, "needs_grad": ("alibi_slopes",)},
        {"alibi": True, "softcap": 9.0, "headdim": 136, "needs_grad": ("alibi_slopes",)},
    ],
)
def test_takes(changes: dict[str, Any]) -> None:
    assert BACKEND.supports(problem(**changes), H200) == ()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"device_type": "cpu"}, "device"),
        ({"dtype": torch.float32}, "dtype"),
        ({"headdim": 100}, "headdim"),
        ({"headdim_v": 264}, "headdim_v"),
        ({"inner_contiguous": False}, "strides"),
        ({"mask_shape": (1, 1, 300, 400)}, "mask"),
        ({"bias_shape": (1, 1, 300, 400)}, "bias"),
        ({"segments": True, "dtype": FP8, "descales": ("q", "k", "v")}, "segments"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"derivative": "jvp"}, "derivative"),
        ({"deterministic": True, "needs_grad": ("q",)}, "deterministic"),
        ({"seqlen_k": 1 << 30}, "seqlen"),
    ],
)
def test_refuses_with_the_reason(changes: dict[str, Any], what: str) -> None:
    assert [reason.what for reason in BACKEND.supports(problem(**changes), H200)] == [what]


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        (DeviceFacts(type="cuda", arch="sm_100", triton="3.6.0"), "arch"),
        (DeviceFacts(type="cuda", arch="sm_90", triton=None), "triton"),
        (DeviceFacts(type="cuda", arch="sm_90", triton="3.5.1"), "triton"),
    ],
)
def test_refuses_other_machines(facts: DeviceFacts, what: str) -> None:
    assert [reason.what for reason in BACKEND.supports(problem(), facts)] == [what]


def test_a_scale_that_fp32_cannot_hold_stays_out_of_the_exponent() -> None:
    assert tiles.mode_of(problem(softmax_scale=1e-30)).raw_scale
    assert not tiles.mode_of(problem(softmax_scale=1e-46)).raw_scale  # 0 times the -inf of an excluded key


def test_a_full_forward_draws_one_key_head_after_the_other() -> None:
    sizes = {"batch": 16, "seqlen_q": 1024, "seqlen_k": 1024, "nheads": 16, "nheads_k": 4}
    assert tiles.heads_in_flight(problem(**sizes)) == 4
    assert tiles.heads_in_flight(problem(**sizes, causal="bottom_right")) == 4 * (32 << 20) // (1024 * 256 * 2)
    assert tiles.heads_in_flight(problem(**(sizes | {"batch": 1}), causal="bottom_right")) == 16


def test_deterministic_gradients_go_to_triton_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """dq is summed in any order here; the Triton kernels have no atomics."""
    pytest.importorskip("triton")
    from tilewise.backends.triton import BACKEND as TRITON

    monkeypatch.setattr(type(BACKEND), "auto_devices", frozenset({"cuda"}))
    wanted = problem(deterministic=True, needs_grad=("q", "k", "v"))
    name, trace = choose_among(wanted, H200, "auto", (BACKEND, TRITON))
    assert name == "triton"
    assert [reason.what for reason in trace[0].reasons] == ["deterministic"]
    assert choose_among(wanted, H200, "hopper", (BACKEND, TRITON))[0] is None
    assert choose_among(wanted.replace(deterministic=False), H200, "auto", (BACKEND, TRITON))[0] == "hopper"


def test_tile_and_cost() -> None:
    assert BACKEND.tile(problem(), H200) == (128, 128)
    assert BACKEND.tile(problem(headdim=256, headdim_v=256), H200) == (128, 64)
    assert BACKEND.cost(problem(), H200) < BACKEND.cost(problem(seqlen_q=30000), H200)


@pytest.mark.parametrize("headdim", [8, 64, 72, 128, 136, 192, 256])
@pytest.mark.parametrize("headdim_v", [8, 64, 96, 128, 256])
def test_every_pair_of_head_dimensions_has_a_tile(headdim: int, headdim_v: int) -> None:
    shape = problem(headdim=headdim, headdim_v=headdim_v)
    tile, back = tiles.forward_tile(shape), tiles.backward_tile(shape)
    assert tile.block_d >= headdim
    assert tile.block_dv >= headdim_v
    assert back.block_d >= max(headdim, headdim_v)
    assert back.parts in (2, 4)


def test_heads_are_drawn_together_where_their_tiles_differ() -> None:
    """A wave and a half of tiles in a group, and as many heads in every group."""
    for heads, blocks in ((16, 128), (64, 32), (256, 8), (16, 64), (7, 16), (1, 8), (3, 1)):
        assert tiles.key_heads_in_flight(problem(), heads, blocks, 132) == 1
        count = tiles.key_heads_in_flight(problem(causal="bottom_right"), heads, blocks, 132)
        assert heads % count == 0
        assert count == heads or count * blocks >= 198
        assert tiles.key_heads_in_flight(problem(causal="bottom_right", window_left=20), heads, blocks, 132) == 1


@pytest.mark.parametrize("causal", [None, "bottom_right", "top_left"])
@pytest.mark.parametrize("window", [(None, None), (3, None), (None, 2), (4, 1), (0, 0)])
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 7), (1, 6)])
def test_seen_keys_are_those_of_the_definition(
    causal: str | None, window: tuple[int | None, int | None], lengths: tuple[int, int]
) -> None:
    length_q, length_k = lengths
    shape = problem(seqlen_q=length_q, seqlen_k=length_k, causal=causal, window_left=window[0], window_right=window[1])
    shift = length_k - length_q
    kept = {
        (i, j)
        for i in range(length_q)
        for j in range(length_k)
        if (causal is None or j <= i + (shift if causal == "bottom_right" else 0))
        and (window[0] is None or j >= i + shift - window[0])
        and (window[1] is None or j <= i + shift + window[1])
    }
    seen, mode = tiles.seen_keys(shape), tiles.mode_of(shape)
    keys = range(seen.begin, seen.end)
    assert {j for _, j in kept} <= set(keys)
    assert {(i, j) for i in range(length_q) for j in keys if seen.lower <= j - seen.begin - i <= seen.upper} == kept
    inside = [(i, j - seen.begin) for i in range(length_q) for j in keys]
    assert mode.lower or all(j - i >= seen.lower for i, j in inside)
    assert mode.upper or all(j - i <= seen.upper for i, j in inside)


def test_nothing_seen_is_zeros_and_the_sink() -> None:
    shape = problem(sink=True, needs_grad=("q", "sink"), window_right=-500)
    tensors = {name: torch.ones(1, 300, 4, 128, dtype=torch.bfloat16) for name in ("q", "k", "v")}
    inputs = Inputs(**tensors, sink=torch.arange(4.0)[None])
    out, lse = _empty_forward(shape, inputs)
    assert not out.any()
    assert torch.equal(lse, torch.arange(4.0)[None, :, None].expand(1, 4, 300))
    grads = _empty_backward(shape, inputs, lse, torch.ones_like(lse))
    assert not grads["q"].any()
    assert torch.equal(grads["sink"], torch.full((1, 4), 300.0))


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({"batch": 16, "nheads": 16, "nheads_k": 16, "seqlen_q": 1024, "seqlen_k": 1024}, 1),  # the machine is full
        ({"nheads": 2, "seqlen_q": 128, "seqlen_k": 512}, 1),  # merging would cost more
        ({"nheads": 100, "nheads_k": 100, "seqlen_q": 128, "seqlen_k": 512}, 1),
        ({"nheads": 2, "seqlen_q": 128, "seqlen_k": 131072}, 64),
        ({"nheads": 2, "seqlen_q": 128, "seqlen_k": 131072, "varlen": True, "total_q": 128, "total_k": 131072}, 1),
    ],
)
def test_splits(changes: dict[str, Any], splits: int) -> None:
    shape = problem(**changes)
    assert tiles.key_splits(shape, tiles.forward_tile(shape), 132) == splits


@pytest.mark.parametrize(
    ("changes", "block_m"),
    [
        ({}, 192),
        ({"causal": "bottom_right"}, 128),
        ({"causal": "bottom_right", "seqlen_q": 2048, "seqlen_k": 2048}, 192),
        ({"seqlen_q": 128, "seqlen_k": 9000}, 128),
        ({"softcap": 5.0}, 128),
        ({"varlen": True, "batch": 4, "total_q": 6000, "total_k": 6000}, 192),
        ({"varlen": True, "batch": 4, "total_q": 400, "total_k": 6000}, 128),
        ({"varlen": True, "batch": 9, "total_q": 6000, "total_k": 6000, "causal": "top_left"}, 128),
        ({"varlen": True, "batch": 4, "total_q": 6000, "total_k": 6000, "window_left": 100}, 128),
    ],
)
def test_headdim_64_takes_three_warpgroups_for_many_keys(changes: dict[str, Any], block_m: int) -> None:
    sizes = {"headdim": 64, "headdim_v": 64, "seqlen_q": 1024, "seqlen_k": 1024}
    assert tiles.forward_tile(problem(**(sizes | changes))).block_m == block_m


@pytest.mark.parametrize(
    ("headdim", "changes", "tile"),
    [
        (96, {}, (192, 128, 96)),
        (96, {"causal": "bottom_right"}, (192, 128, 96)),
        (96, {"seqlen_k": 1400}, (128, 128, 96)),
        (96, {"seqlen_q": 128}, (128, 128, 96)),
        (88, {}, (192, 128, 96)),
        (72, {}, (192, 128, 80)),
        (80, {"softcap": 5.0}, (128, 128, 80)),
        (160, {}, (128, 64, 160)),
        (168, {}, (128, 64, 192)),
        (128, {"window_left": 127, "window_right": 0}, (192, 64, 128)),
        (128, {"window_left": 2000, "causal": "bottom_right"}, (192, 64, 128)),
        (128, {"window_left": 4095, "window_right": 0, "seqlen_q": 16384, "seqlen_k": 16384}, (192, 64, 128)),
        (128, {"window_left": 8191, "window_right": 0, "seqlen_q": 16384, "seqlen_k": 16384}, (128, 128, 128)),
        (128, {"window_left": 127, "alibi": True}, (128, 128, 128)),
        (128, {}, (128, 128, 128)),  # a round of 192 rows is longer than one of 128
        (128, {"batch": 16}, (192, 64, 128)),
        (128, {"batch": 16, "causal": "bottom_right"}, (128, 128, 128)),
        (128, {"batch": 16, "causal": "bottom_right", "seqlen_q": 8192, "seqlen_k": 8192}, (192, 64, 128)),
        (128, {"batch": 16, "seqlen_q": 1024, "seqlen_k": 1024}, (128, 128, 128)),
        (128, {"batch": 16, "alibi": True}, (128, 128, 128)),
        (128, {"nheads": 32, "seqlen_q": 2048, "seqlen_k": 32768, "causal": "bottom_right"}, (128, 128, 128)),
        (64, {"window_left": 127, "window_right": 0}, (192, 64, 64)),
    ],
)
def test_tile_of_a_problem(headdim: int, changes: dict[str, Any], tile: tuple[int, int, int]) -> None:
    """Rows, keys and channels of a tile."""
    sizes = {"headdim": headdim, "headdim_v": headdim, "seqlen_q": 4096, "seqlen_k": 4096}
    found = tiles.forward_tile(problem(**(sizes | changes)))
    assert (found.block_m, found.block_n, found.block_d) == tile
    assert found.block_dv == found.block_d


def test_two_consumers_take_turns_where_tiles_differ() -> None:
    assert not tiles.forward_tile(problem()).turns
    assert tiles.forward_tile(problem(causal="bottom_right")).turns
    assert tiles.forward_tile(problem(varlen=True, total_q=600, total_k=600)).turns


@pytest.mark.parametrize(
    ("headdim", "headdim_v", "rows", "expected"),
    [
        (64, 64, 300, (128, 64, 64)),
        (40, 64, 16384, (192, 64, 64)),
        (72, 96, 300, (128, 96, 96)),
        (96, 64, 300, (128, 96, 96)),
        (96, 104, 300, (128, 96, 128)),
        (104, 8, 300, (128, 128, 128)),
        (192, 128, 300, (128, 192, 128)),
        (136, 192, 300, (128, 192, 192)),
        (200, 128, 300, (128, 256, 128)),
        (64, 256, 300, (128, 192, 256)),
    ],
)
def test_forward_tiles(headdim: int, headdim_v: int, rows: int, expected: tuple[int, int, int]) -> None:
    tile = tiles.forward_tile(problem(headdim=headdim, headdim_v=headdim_v, seqlen_q=rows, seqlen_k=rows))
    assert (tile.block_m, tile.block_d, tile.block_dv) == expected
    assert tile.turns_barrier + (tile.consumers if tile.turns else 0) <= 16  # named barriers of a CTA
    assert tile.parts * tile.part_d >= tile.block_d
    assert tile.wide + tile.narrow == tile.block_dv <= tile.box_dv


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"headdim": 64, "headdim_v": 64}, 192),
        ({"headdim": 64, "headdim_v": 64, "seqlen_q": 9000}, 256),
        ({"headdim": 64, "headdim_v": 64, "seqlen_q": 9000, "alibi": True}, 128),
        ({"alibi": True}, 128),
        ({"headdim": 192, "alibi": True}, 128),
        ({"headdim": 64, "headdim_v": 64, "seqlen_q": 9000, "window_left": 5}, 192),
        ({"headdim": 64, "headdim_v": 64, "seqlen_q": 9000, "descales": ("k",), "block_descales": ("k",)}, 192),
        ({}, 192),
        ({"headdim": 256, "headdim_v": 256}, 128),
        ({"headdim": 192}, 192),
    ],
)
def test_fp8_tiles(changes: dict[str, Any], rows: int) -> None:
    """Registers and named barriers are enough for the warpgroups of every tile."""
    tile = tiles.fp8_tile(problem(dtype=FP8, **changes))
    assert tile.block_m == rows
    assert tile.block_n == BLOCK
    assert tile.turns_barrier + tile.consumers <= 16
    assert tile.stages & (tile.stages - 1) == 0
    others = 128 * ((tile.consumers - 1) * tile.registers + tile.small_registers)
    assert others + 128 * tile.registers <= 65536


@pytest.mark.parametrize(
    ("changes", "ahead"),
    [
        ({}, True),
        ({"causal": "bottom_right"}, False),
        ({"causal": "bottom_right", "seqlen_q": 8192, "seqlen_k": 8192}, True),
        ({"seqlen_q": 1024}, False),
        ({"seqlen_q": 1024, "nheads": 8, "nheads_k": 2}, True),
        ({"headdim_v": 128}, False),
        ({"softcap": 30.0}, False),
        ({"alibi": True}, False),
        ({"window_left": 4000}, False),
        ({"descales": ("k",), "block_descales": ("k",)}, False),
        ({"descales": ("q",), "block_descales": ("q",)}, True),
        ({"varlen": True, "total_q": 4096, "total_k": 4096}, False),
    ],
)
def test_v_is_transposed_ahead_where_many_queries_meet_a_key(changes: dict[str, Any], ahead: bool) -> None:
    facts = {"headdim": 256, "headdim_v": 256, "seqlen_q": 4096, "seqlen_k": 4096, "nheads": 4, "nheads_k": 4}
    assert (tiles.fp8_tile(problem(dtype=FP8, **(facts | changes))).turners == 0) == ahead


def test_key_blocks_are_those_of_their_descales() -> None:
    """With descales by block a window's first key may lie inside a block: what is before it is cut off all the same."""
    facts = {"dtype": FP8, "seqlen_q": 200, "seqlen_k": 777, "window_left": 100}
    plain = tiles.seen_keys(problem(**facts))
    seen = tiles.seen_keys(problem(**facts, descales=("v",), block_descales=("v",)))
    assert (plain.begin, plain.unseen) == (477, 0)
    assert (seen.begin, seen.unseen, seen.end) == (384, 93, 777)
    assert seen.lower - plain.lower == seen.shift - plain.shift == 93
    mode = tiles.mode_of(problem(**facts, descales=("v",), block_descales=("v",)))
    assert mode.by_block
    assert mode.lower
    assert not tiles.mode_of(problem(**facts, descales=("q",), block_descales=("q",))).by_block
