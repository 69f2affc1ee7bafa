"""The operands of one span of (batch item, K/V head) units, and the scores of its tiles.

Everything is (units, rows or keys, dim) in the state dtype; the rows of a unit are its group's query heads below each
other, so that K and V are never expanded. Scores live in scratch memory the size of a tile.

Two ways lead from scores to weights, chosen for each block of rows. By Cauchy-Schwarz |s| <= |q_i| |k_j|, and where
that bound is small exp(s) can neither overflow nor lose digits: no maximum is subtracted and hidden weights are zeroed
after the exp ("bounded"). Everywhere else hidden scores become -inf and the running maximum is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise import rng
from tilewise.backends.cpu.tiles import Span, Tile, Tiling, Visibility, pairs
from tilewise.inputs import Inputs
from tilewise.problem import Problem

# exp(32) * 1e15 * a million keys stays below fp32's largest number, exp(-32) * 1e-15 above its smallest normal one
_SCORE_BOUND, _VALUE_BOUND = 32.0, 1e15
# an lse beyond this has lost more than four bits of its fraction, and P recomputed from it needs normalising
_PRECISE_LSE = 64.0
_LOG2E = math.log2(math.e)


def exponential(x: torch.Tensor) -> torch.Tensor:
    """exp(x) in place. torch.exp on the CPU (MKL) is a hundred times slower where it underflows; exp2 is not."""
    return x.mul_(_LOG2E).exp2_() if x.device.type == "cpu" else x.exp_()


class Scratch:
    """Tile-sized memory, taken once and handed out under a name in the shape asked for."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = like, dtype
        self._flat: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Uninitialised memory; what was taken under the same name before is overwritten."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            flat = self._flat[name] = self._like.new_empty(size, dtype=self._dtype)
        return flat[:size].view(shape)


@dataclass(slots=True)
class Rows:
    """One block of query rows.

    ``q`` is multiplied by softmax_scale (by softmax_scale / softcap with a softcap). Once ``lse`` is known, its last
    column holds -lse against K's column of ones, so that the product gives s - lse. ``normaliser`` (None: 1)
    multiplies P where lse alone is too coarse.
    """

    queries: slice
    q: torch.Tensor
    bounded: bool
    lse: torch.Tensor | None = None
    normaliser: torch.Tensor | None = None


class Chunk:
    """K and V of one span, and what turns them into tiles of scores and probabilities."""

    def __init__(self, visibility: Visibility, span: Span, scratch: Scratch, *, with_ones: bool) -> None:
        problem, inputs = visibility.problem, visibility.inputs
        self.problem, self.inputs, self.visibility = problem, inputs, visibility
        self.span, self.scratch, self.group = span, scratch, problem.group
        self.sizes = (span.batch.stop - span.batch.start, span.heads.stop - span.heads.start)
        self.query_heads = slice(span.heads.start * self.group, span.heads.stop * self.group)
        self.fold = with_ones and not problem.softcap
        self.scale = problem.softmax_scale / (problem.softcap or 1.0)
        k, v = self.key_side(inputs.k), self.key_side(inputs.v)
        self.seen: torch.Tensor | None = None
        self.key_norm = self._bound(k, v)
        if not math.isfinite(self.key_norm) and visibility.by_pair:
            self.seen = visibility.seen(span).flatten(0, 1)[..., None]
        k, v = self.visible(k), self.visible(v)
        self.k = self.with_ones(k) if with_ones else k
        self.v = self.with_ones(v) if with_ones else v

    def _bound(self, k: torch.Tensor, v: torch.Tensor) -> float:
        """The largest |k_j|, or inf where the bounded way is closed."""
        problem = self.problem
        if problem.device_type != "cpu" or problem.bias_shape is not None or problem.alibi or not k.numel():
            return math.inf
        largest = float(torch.linalg.vector_norm(v, math.inf)) if v.numel() else math.inf
        usable = largest == 0.0 or 1 / _VALUE_BOUND < largest < _VALUE_BOUND
        return float(torch.linalg.vector_norm(k, dim=-1).max()) if usable else math.inf

    def _is_bounded(self, q: torch.Tensor) -> bool:
        """Whether every |s| of these rows is below the bound."""
        if not math.isfinite(self.key_norm) or not q.numel():
            return False
        bound = float(torch.linalg.vector_norm(q, dim=-1).max()) * self.key_norm
        if self.problem.softcap and bound < math.inf:
            return self.problem.softcap < _SCORE_BOUND
        return bound < _SCORE_BOUND

    # --- layouts

    def key_side(self, tensor: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen_k, nheads_k, dim) to (units, seqlen_k, dim): a copy, or a view where one block reads it."""
        part = tensor[self.span.batch, :, self.span.heads].permute(0, 2, 1, 3).to(self.problem.state_dtype)
        units = part.flatten(0, 1)
        return units.contiguous() if self.problem.seqlen_q > self.visibility.tiling.block_q else units

    def visible(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys that no query sees become 0, so that what they hold (NaN, Inf) never enters a product."""
        return keys if self.seen is None else torch.where(self.seen, keys, torch.zeros_like(keys))

    def with_ones(self, units: torch.Tensor) -> torch.Tensor:
        """A last column of ones."""
        result = units.new_ones(*units.shape[:-1], units.shape[-1] + 1)
        result[..., :-1] = units
        return result

    def query_side(self, tensor: torch.Tensor, queries: slice) -> torch.Tensor:
        """(batch, seqlen_q, nheads, dim) to (units, group * queries, dim), a copy."""
        part = tensor[self.span.batch, queries, self.query_heads]
        five = torch.unflatten(part, 2, (self.sizes[1], self.group)).permute(0, 2, 3, 1, 4)
        result = torch.empty(five.shape, dtype=self.problem.state_dtype, device=tensor.device)
        return result.copy_(five).flatten(2, 3).flatten(0, 1)

    def row_scalars(self, tensor: torch.Tensor, queries: slice) -> torch.Tensor:
        """(batch, nheads, seqlen_q) to (units, group * queries, 1)."""
        part = tensor[self.span.batch, self.query_heads, queries].to(self.problem.state_dtype)
        return part.reshape(self.sizes[0] * self.sizes[1], -1, 1)

    def per_head(self, tensor: torch.Tensor, queries: slice) -> torch.Tensor:
        """(batch, nheads) to (units, group * queries, 1)."""
        return self.row_scalars(tensor[..., None].expand(*tensor.shape, queries.stop), queries)

    def store_rows(self, target: torch.Tensor, queries: slice, values: torch.Tensor) -> None:
        """The inverse of query_side, into a (batch, seqlen_q, nheads, dim) tensor."""
        five = values.view(*self.sizes, self.group, queries.stop - queries.start, values.shape[-1])
        part = target[self.span.batch, queries, self.query_heads]
        part.copy_(five.permute(0, 3, 1, 2, 4).flatten(2, 3))

    def store_row_scalars(self, target: torch.Tensor, queries: slice, values: torch.Tensor) -> None:
        """The inverse of row_scalars."""
        part = target[self.span.batch, self.query_heads, queries]
        part.copy_(values.view(part.shape))

    def store_keys(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """The inverse of key_side, into a (batch, seqlen_k, nheads_k, dim) tensor."""
        part = target[self.span.batch, :, self.span.heads]
        part.copy_(torch.unflatten(values, 0, self.sizes).permute(0, 2, 1, 3))

    def add_per_head(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Add (units, group * queries, 1), summed over queries, to a (batch, nheads) tensor."""
        part = target[self.span.batch, self.query_heads]
        part += values.view(*part.shape, -1).sum(-1)

    def five(self, matrix: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A tile's (units, rows, keys) as (batch, heads, group, queries, keys)."""
        lengths = (part.stop - part.start for part in (tile.queries, tile.keys))
        return matrix.view(*self.sizes, self.group, *lengths)

    def pair_view(self, tensor: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A tile's part of a (batch, nheads, seqlen_q, seqlen_k) tensor, broadcastable to ``five``."""
        return pairs(tensor, self.group, self.span, tile.queries, tile.keys)

    # --- tiles

    def query_blocks(self) -> Iterator[slice]:
        """All queries, block by block."""
        return self.visibility.tiling.query_blocks(self.problem)

    def tiles(self, queries: slice) -> Iterator[Tile]:
        """The tiles these queries visit."""
        return self.visibility.tiles(self.span, queries)

    def rows(self, queries: slice) -> Rows:
        """A block of query rows for the forward pass, lse unknown."""
        q = self.query_side(self.inputs.q, queries).mul_(self.scale)
        return Rows(queries, q, self._is_bounded(q))

    def rows_with_lse(self, queries: slice, lse: torch.Tensor) -> Rows:
        """A block of query rows for the passes that recompute P from lse (batch, nheads, seqlen_q)."""
        block = self.rows(queries)
        values = self.row_scalars(lse, queries)
        empty = values == -math.inf
        block.lse = values.masked_fill(empty, 0.0)
        # rows that see nothing, padding perhaps, must not bring a NaN into dk and dv
        block.q = self.with_ones(block.q.masked_fill_(empty, 0.0) if bool(empty.any()) else block.q)
        block.q[..., -1:] = -block.lse if self.fold else 0.0
        if not block.bounded and bool((block.lse.abs() > _PRECISE_LSE).any()):
            block.normaliser = self._normaliser(block)
        return block

    def _normaliser(self, block: Rows) -> torch.Tensor:
        """1 / sum_j exp(s_j - lse), the sink's part included: 1 but for the rounding of a large lse."""
        total = self.sink_probability(block)
        if total is None:
            total = block.q.new_zeros(*block.q.shape[:2], 1)
        for tile in self.tiles(block.queries):
            total += self.probabilities(block, tile).sum(-1, keepdim=True)
        return torch.where(total == 0, torch.ones_like(total), 1 / total)

    def scores(self, block: Rows, tile: Tile) -> torch.Tensor:
        """s, or s - lse once it is known, in scratch memory; hidden pairs are not marked yet.

        With a softcap, the scratch "tanh" then holds tanh(s / softcap).
        """
        k = self.k[:, tile.keys]
        s = self.scratch.take("s", k.shape[0], block.q.shape[1], k.shape[1])
        torch.bmm(block.q, k.mT, out=s)
        if self.problem.softcap:
            tanh = torch.tanh(s, out=self.tanh(s))
            torch.mul(tanh, self.problem.softcap, out=s)
            if block.lse is not None:
                s -= block.lse
        if self.inputs.bias is not None:
            self.five(s, tile).add_(self.pair_view(self.inputs.bias, tile))
        if self.inputs.alibi_slopes is not None:
            s -= self.per_head(self.inputs.alibi_slopes, tile.queries) * self.distance(tile)
        return s

    def distance(self, tile: Tile) -> torch.Tensor:
        """|i + seqlen_k - seqlen_q - j|, (group * queries, keys): what ALiBi slopes multiply."""
        device, shift = self.k.device, self.problem.seqlen_k - self.problem.seqlen_q
        i = torch.arange(tile.queries.start, tile.queries.stop, device=device) + shift
        j = torch.arange(tile.keys.start, tile.keys.stop, device=device)
        return (i[:, None] - j).abs().to(self.problem.state_dtype).repeat(self.group, 1)

    def exclude(self, s: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Hidden scores become -inf, in place."""
        if tile.keep is not None:
            self.five(s, tile).masked_fill_(~tile.keep, -math.inf)
        return s

    def clear(self, matrix: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Hidden entries of a finite matrix become 0, in place."""
        if tile.keep is not None:
            self.five(matrix, tile).mul_(tile.keep)
        return matrix

    def dropped(self, matrix: torch.Tensor, tile: Tile, into: str | None = None) -> torch.Tensor:
        """``matrix`` times keep / (1 - dropout_p): in place, or in the scratch ``into``."""
        problem, seed = self.problem, self.inputs.dropout_seed
        if not problem.dropout_p or seed is None:
            return matrix
        device = matrix.device
        keep = rng.dropout_keep(
            seed,
            problem.dropout_p,
            torch.arange(self.span.batch.start, self.span.batch.stop, device=device) + self.inputs.batch_offset,
            torch.arange(self.query_heads.start, self.query_heads.stop, device=device),
            (tile.queries.start, tile.queries.stop),
            (tile.keys.start, tile.keys.stop),
        )
        out = matrix if into is None else self.scratch.take(into, *matrix.shape)
        return torch.mul(matrix, keep.view(matrix.shape), out=out).mul_(rng.keep_scale(problem.dropout_p))

    def probabilities(self, block: Rows, tile: Tile) -> torch.Tensor:
        """P of a tile from lse, before dropout, in scratch memory; exactly 0 where the pair is hidden."""
        s = self.scores(block, tile)
        p = self.clear(s.exp_(), tile) if block.bounded else exponential(self.exclude(s, tile))
        return p if block.normaliser is None else p.mul_(block.normaliser)

    def sink_probability(self, block: Rows) -> torch.Tensor | None:
        """The sink's share of each row, (units, rows, 1); None without a sink."""
        if self.inputs.sink is None or block.lse is None:
            return None
        p = torch.exp(self.per_head(self.inputs.sink, block.queries) - block.lse)
        return p if block.normaliser is None else p * block.normaliser

    def tanh(self, like: torch.Tensor) -> torch.Tensor:
        """tanh(s / softcap) of the last tile of scores, in scratch memory."""
        return self.scratch.take("tanh", *like.shape)

    def slope(self, like: torch.Tensor) -> torch.Tensor:
        """d(capped) / d(product of the rows and k) of the last tile of scores: softcap * (1 - tanh^2)."""
        return self.tanh(like).square().neg_().add_(1.0).mul_(self.problem.softcap)


def chunks(problem: Problem, inputs: Inputs, *, with_ones: bool) -> Iterator[Chunk]:
    """The whole problem, one span at a time."""
    tiling = Tiling.of(problem)
    visibility, scratch = Visibility(problem, inputs, tiling), Scratch(inputs.q, problem.state_dtype)
    for span in tiling.spans(problem):
        yield Chunk(visibility, span, scratch, with_ones=with_ones)
