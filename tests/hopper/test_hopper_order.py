"""The order in which the forward draws its tiles, without a GPU."""

from __future__ import annotations

import heapq
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from tilewise.backends.hopper import plans, tiles, works
from tilewise.backends.hopper.arguments import Sizes
from tilewise.problem import Problem

PROCESSORS = 132


@pytest.fixture
def locate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``works.locate`` as plain Python; a tile is (batch, head, block, split)."""
    monkeypatch.setattr(works, "gl", SimpleNamespace(minimum=min))
    monkeypatch.setattr(works, "dense_tile", lambda block, head, batch, split, sizes, mode: (batch, head, block, split))
    return works.locate.fn


def sizes_of(batch: int, seqlen: int, nheads: int, nheads_k: int, dims: tuple[int, int], splits: int = 1) -> Sizes:
    problem = Problem(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, nheads=nheads, nheads_k=nheads_k, headdim=dims[0],
                      headdim_v=dims[1], dtype=torch.bfloat16, device_type="cuda", softmax_scale=0.1,
                      causal="bottom_right")  # fmt: skip
    return plans.forward_sizes(problem, tiles.forward_tile(problem), 0, splits)


def drawn(locate: Any, sizes: Sizes, split: bool = False) -> list[Any]:
    mode = SimpleNamespace(varlen=False, split=split)
    return [locate(tile, None, sizes, mode) for tile in range(sizes.tiles)]


@pytest.mark.parametrize(
    ("nheads", "nheads_k", "dims", "splits"),
    [(16, 16, (96, 96), 1), (16, 16, (192, 128), 1), (8, 2, (128, 128), 3), (7, 7, (256, 256), 2)],
)
def test_every_tile_is_drawn_once(locate: Any, nheads: int, nheads_k: int, dims: tuple[int, int], splits: int) -> None:
    sizes = sizes_of(2, 5000, nheads, nheads_k, dims, splits)
    found = drawn(locate, sizes, splits > 1)
    wanted = {(b, h, m, s) for b in range(2) for h in range(nheads) for m in range(sizes.blocks) for s in range(splits)}
    assert len(found) == sizes.tiles == len(wanted)
    assert set(found) == wanted


@pytest.mark.parametrize("nheads", [7, 8, 16, 20])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_causal_tiles_end_together(locate: Any, nheads: int, dims: tuple[int, int]) -> None:
    """Multiprocessors that draw tile after tile have all done within 5 % of the mean."""
    sizes = sizes_of(1, 16384, nheads, nheads, dims)
    costs = [block + 2 for _, _, block, _ in drawn(locate, sizes)]  # its keys, and what starting and ending it takes
    busy = [0] * PROCESSORS
    for cost in costs:
        heapq.heapreplace(busy, busy[0] + cost)
    assert max(busy) < 1.05 * sum(costs) / PROCESSORS
