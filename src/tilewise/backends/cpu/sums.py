"""Where gradients are added up: those of k and v over a span, that of q over a block of rows."""

from __future__ import annotations

import torch

from tilewise.backends.cpu.chunk import Chunk, KnownRows
from tilewise.backends.cpu.layout import RowSide, Strips, store_keys
from tilewise.backends.cpu.tiles import Tile
from tilewise.dispatch.backend import Gradients
from tilewise.inputs import Inputs
from tilewise.problem import Problem


class GradientSums:
    """The gradients named in ``problem.needs_grad``; what is added to any other name is not even computed."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self._inputs = inputs
        self._totals: Gradients = {}
        for name in problem.needs_grad:
            like = getattr(inputs, name)
            dtype = like.dtype if name in ("q", "k", "v") else problem.state_dtype
            self._totals[name] = torch.zeros(like.shape, dtype=dtype, device=like.device)
        self._keys: dict[str, Strips] = {}
        self._q: torch.Tensor | None = None
        self._q_side: RowSide | None = None
        self.wants_scores = any(name not in ("v", "sink") for name in self._totals)

    def __contains__(self, name: str) -> bool:
        return name in self._totals

    def start(self, chunk: Chunk) -> None:
        """Fresh sums for the keys and values of a span."""
        self._q_side = chunk.row_side(self._totals["q"]) if "q" in self._totals else None
        for name in {"k", "v"} & self._totals.keys():
            shape = (chunk.k if name == "k" else chunk.v).whole.shape
            self._keys[name] = Strips(chunk.scratch.take(f"d{name}", shape).zero_(), 1)

    def finish(self, chunk: Chunk) -> None:
        """Store the sums of a span."""
        for name in {"k", "v"} & self._totals.keys():
            values = self._keys.pop(name).whole
            store_keys(self._totals[name], chunk.span, values.mul_(chunk.scale) if name == "k" else values)

    def add_keys(self, name: str, tile: Tile, pairs: torch.Tensor, rows: torch.Tensor) -> None:
        """Add pairs^T rows to the gradient of k (times 1 / chunk.scale) or v."""
        if name in self._keys:
            self._keys[name][tile.keys].baddbmm_(pairs.transpose(1, 2), rows)

    def add_queries(self, pairs: torch.Tensor, keys: torch.Tensor) -> None:
        """Add pairs keys to the gradient of the current block's rows of q."""
        if "q" in self._totals:
            if self._q is None:
                self._q = torch.bmm(pairs, keys)
            else:
                self._q.baddbmm_(pairs, keys)

    def add_product(self, chunk: Chunk, block: KnownRows, tile: Tile, dz: torch.Tensor) -> None:
        """Add what ``dz``, the gradient by the rows' product with k, gives to q and k."""
        self.add_queries(dz, chunk.k[tile.keys])
        self.add_keys("k", tile, dz, block.q_plain)

    def finish_block(self, block: KnownRows) -> None:
        """Store the current block's rows of q."""
        if self._q_side is not None and self._q is not None:
            self._q_side.store(block.queries, self._q)
            self._q = None

    def add_pairs(self, chunk: Chunk, tile: Tile, ds: torch.Tensor) -> None:
        """Add what ``ds``, the gradient by the biased scores, gives to bias and ALiBi slopes."""
        if "bias" in self._totals:
            part = chunk.pair_view(self._totals["bias"], tile)
            part += chunk.five(ds, tile).sum_to_size(part.shape)
        if "alibi_slopes" in self._totals:
            self.add_per_head("alibi_slopes", chunk, -(ds * chunk.distance(tile)).sum(-1, keepdim=True))

    def add_per_head(self, name: str, chunk: Chunk, rows: torch.Tensor) -> None:
        """Add (units, rows, 1), summed over queries, to a (batch, nheads) gradient."""
        chunk.add_per_head(self._totals[name], rows)

    def result(self) -> Gradients:
        """The gradients, each with shape and dtype of its tensor."""
        return {name: total.to(getattr(self._inputs, name).dtype) for name, total in self._totals.items()}
