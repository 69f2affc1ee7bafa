"""The operands of one span of units, and the scores and probabilities of its tiles, in scratch memory.

Two ways lead from scores to weights. By Cauchy-Schwarz |s| <= |q_i| |k_j|, and where that bound is small exp(s) can
neither overflow nor lose digits: no maximum is subtracted, and hidden weights are zeroed after the exp ("bounded").
Everywhere else hidden scores become -inf and the running maximum is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise import rng
from tilewise.backends.cpu.layout import RowSide, Scratch, Span, Strips, load_keys, pairs, row_scalars
from tilewise.backends.cpu.tiles import Tile, Tiling, Visibility
from tilewise.descale import FP8, by_row
from tilewise.inputs import Inputs
from tilewise.problem import Problem

# exp(32) * 1e15 * a million keys stays below fp32's largest number; exp(-32) times values whose norm is 1e-9, of which
# the largest of a billion is 1e-14 or more, loses nothing of their digits to denormal numbers
_SCORE_BOUND, _VALUE_BOUNDS = 32.0, (1e-9, 1e15)
# an lse beyond this has lost more than four bits of its fraction, and P recomputed from it needs normalising
_PRECISE_LSE = 64.0
_LOG2E = math.log2(math.e)


def exponential(x: torch.Tensor) -> torch.Tensor:
    """exp(x) in place. torch.exp on the CPU (MKL) is a hundred times slower where it underflows; exp2 is not."""
    return x.mul_(_LOG2E).exp2_() if x.device.type == "cpu" else x.exp_()


@dataclass(slots=True)
class Rows:
    """One block of query rows, the forward pass's."""

    queries: slice
    q: torch.Tensor


@dataclass(slots=True)
class KnownRows(Rows):
    """One block of query rows whose lse is known, for the passes that recompute P.

    ``lse`` is 0 where it is -inf, the rows that are ``empty``. Where nothing is added to the product, the last column
    of ``q`` holds -lse against a column of ones, so that the product gives s - lse; ``q_plain`` is without it.
    ``normaliser`` (None: 1) multiplies P where lse alone is too coarse.
    """

    q_plain: torch.Tensor
    lse: torch.Tensor
    empty: torch.Tensor
    normaliser: torch.Tensor | None = None


class Chunk:
    """K and V of one span, and what turns them into tiles of scores and probabilities.

    ``k`` is multiplied by ``scale``: softmax_scale, with a softcap softmax_scale / softcap. With ``ones`` the columns
    of the products carry one row more, of ones.
    """

    def __init__(
        self, visibility: Visibility, span: Span, scratch: Scratch, bounded: torch.Tensor, *, ones: bool
    ) -> None:
        self.problem, self.inputs = visibility.problem, visibility.inputs
        self.visibility, self.span, self.scratch = visibility, span, scratch
        self.group, self.dtype = self.problem.group, self.problem.state_dtype
        self.scale = self.problem.softmax_scale / (self.problem.softcap or 1.0)
        # what the forward pass adds to the product is added before lse goes, or it would round otherwise than there
        plain = not self.problem.softcap and self.inputs.bias is None and self.inputs.alibi_slopes is None
        self.fold = ones and plain
        self.q = self.row_side(self.inputs.q)
        self.seen: torch.Tensor | None = None
        k = load_keys(self.inputs.k, span, scratch, "k", scale=self.scale, ones=ones)
        v = load_keys(self.inputs.v, span, scratch, "v", ones=ones)
        dim, dim_v = self.problem.headdim, self.problem.headdim_v
        self._descale(k[..., :dim], self.inputs.q_descale)
        self._descale(k[..., :dim], self.inputs.k_descale)
        self._descale(v[..., :dim_v], self.inputs.v_descale)
        self.k, self.v = Strips(k[..., :dim], 1), Strips(v[..., :dim_v], 1)
        self.k_columns, self.v_columns = Strips(k.mT, 2), Strips(v.mT, 2)
        self.units = k.shape[0]
        self.bounded = bool(bounded[span].all())
        if not self.bounded and visibility.by_pair and not all(bool(side.isfinite().all()) for side in (k, v)):
            self.seen = visibility.seen(span).flatten(0, 1)[..., None]
            self.visible(k), self.visible(v)

    # --- operands

    def _descale(self, keys: torch.Tensor, descale: torch.Tensor | None) -> None:
        """Stored numbers become real ones, in place; q's descale multiplies k, since a unit has one of each."""
        if descale is None:
            return
        own = descale[self.span.batch, self.span.heads]
        if descale.ndim == 3:
            keys *= by_row(own, keys.shape[1]).reshape(*keys.shape[:2], 1)
        else:
            keys *= own.reshape(-1, 1, 1)

    def row_side(self, tensor: torch.Tensor) -> RowSide:
        """This span's rows of a (batch, seqlen_q, nheads, dim) tensor."""
        return RowSide(tensor, self.span, self.group)

    def row_scalars(self, tensor: torch.Tensor) -> RowSide:
        """This span's rows of a (batch, nheads, seqlen_q) tensor."""
        return row_scalars(tensor, self.span, self.group)

    def per_head(self, tensor: torch.Tensor, queries: slice) -> torch.Tensor:
        """(batch, nheads) as (units, rows, 1)."""
        return self.row_scalars(tensor[..., None].expand(*tensor.shape, queries.stop)).load(queries, self.dtype)

    def key_side(self, tensor: torch.Tensor, name: str, scale: float = 1.0) -> torch.Tensor:
        """A copy (units, seqlen_k, dim) of a tensor like k or v, times ``scale``, 0 where no query sees the key."""
        return self.visible(load_keys(tensor, self.span, self.scratch, name, scale=scale))

    def visible(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys that no query sees become 0, in place, so that what they hold (NaN, Inf) never enters a product."""
        return keys if self.seen is None else keys.masked_fill_(~self.seen, 0.0)

    def add_per_head(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Add (units, rows, 1), summed over queries, to a (batch, nheads) tensor."""
        sums = rows.view(*self.span.sizes, self.group, -1).sum(-1).flatten(1)
        target[self.span.batch, self.span.heads.start * self.group : self.span.heads.stop * self.group] += sums

    def five(self, matrix: torch.Tensor, tile: Tile) -> torch.Tensor:
        """A tile's (units, rows, keys) as (batch, heads, group, queries, keys)."""
        return matrix.view(*self.span.sizes, self.group, -1, tile.keys.stop - tile.keys.start)

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
        return Rows(queries, self.q.load(queries, self.dtype))

    def rows_with_lse(self, queries: slice, lse: RowSide) -> KnownRows:
        """A block of query rows for the passes that recompute P from lse."""
        q, values = self.q.load(queries, self.dtype, extra=1), lse.load(queries, self.dtype)
        empty = values == -math.inf
        values.masked_fill_(empty, 0.0)
        if not self.bounded:  # rows that see nothing, padding perhaps, must not bring a NaN into dk and dv
            q.masked_fill_(empty, 0.0)
        q[..., -1:] = -values if self.fold else 0.0
        block = KnownRows(queries, q, q[..., :-1], values, empty)
        if not self.bounded and bool((values.abs() > _PRECISE_LSE).any()):
            block.normaliser = self._normaliser(block)
        return block

    def _normaliser(self, block: KnownRows) -> torch.Tensor:
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
        k = self.k_columns[tile.keys]
        s = torch.bmm(block.q, k, out=self.scratch.take("s", (self.units, block.q.shape[1], k.shape[2])))
        if self.problem.softcap:
            tanh = torch.tanh(s, out=self.tanh(s))
            torch.mul(tanh, self.problem.softcap, out=s)
        if self.inputs.bias is not None:
            self.five(s, tile).add_(self.pair_view(self.inputs.bias, tile))
        if self.inputs.alibi_slopes is not None:
            s -= self.per_head(self.inputs.alibi_slopes, tile.queries) * self.distance(tile)
        if isinstance(block, KnownRows) and not self.fold:
            s -= block.lse
        return s

    def distance(self, tile: Tile) -> torch.Tensor:
        """|i + seqlen_k - seqlen_q - j|, (rows, keys): what ALiBi slopes multiply."""
        device, shift = self.inputs.q.device, self.problem.seqlen_k - self.problem.seqlen_q
        i = torch.arange(tile.queries.start, tile.queries.stop, device=device) + shift
        j = torch.arange(tile.keys.start, tile.keys.stop, device=device)
        return (i[:, None] - j).abs().to(self.dtype).repeat(self.group, 1)

    def exclude(self, s: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Hidden scores become -inf, in place."""
        if tile.keep is not None:
            self.five(s, tile).masked_fill_(~tile.keep, -math.inf)
        return s

    def clear(self, matrix: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Hidden entries of a finite matrix become 0, in place."""
        if tile.band is not None:
            triangles = matrix.view(self.units * self.group, -1, matrix.shape[-1])
            if tile.band.upper is not None:
                triangles.tril_(tile.band.upper)
            if tile.band.lower is not None:
                triangles.triu_(tile.band.lower)
        elif tile.keep is not None:
            self.five(matrix, tile).mul_(tile.keep)
        return matrix

    def dropped(self, matrix: torch.Tensor, tile: Tile, into: str | None = None) -> torch.Tensor:
        """``matrix`` times keep / (1 - dropout_p): in place, or in the scratch ``into``."""
        problem, seed = self.problem, self.inputs.dropout_seed
        if not problem.dropout_p or seed is None:
            return matrix
        device, span = matrix.device, self.span
        keep = rng.dropout_keep(
            seed,
            problem.dropout_p,
            torch.arange(span.batch.start, span.batch.stop, device=device) + self.inputs.batch_offset,
            torch.arange(span.heads.start * self.group, span.heads.stop * self.group, device=device),
            (tile.queries.start, tile.queries.stop),
            (tile.keys.start, tile.keys.stop),
        )
        result = matrix if into is None else self.scratch.take(into, matrix.shape)
        return torch.mul(matrix, keep.view(matrix.shape), out=result).mul_(rng.keep_scale(problem.dropout_p))

    def probabilities(self, block: KnownRows, tile: Tile) -> torch.Tensor:
        """P of a tile from lse, before dropout, in scratch memory; exactly 0 where the pair is hidden."""
        s = self.scores(block, tile)
        if self.bounded:
            return self.clear(s.exp_(), tile)
        p = exponential(self.exclude(s, tile))
        return p if block.normaliser is None else p.mul_(block.normaliser)

    def sink_probability(self, block: KnownRows) -> torch.Tensor | None:
        """The sink's share of each row, (units, rows, 1); None without a sink."""
        if self.inputs.sink is None:
            return None
        p = torch.exp(self.per_head(self.inputs.sink, block.queries) - block.lse)
        return p if block.normaliser is None else p * block.normaliser

    def tanh(self, like: torch.Tensor) -> torch.Tensor:
        """tanh(s / softcap) of the last tile of scores, in scratch memory."""
        return self.scratch.take("tanh", like.shape)

    def slope(self, like: torch.Tensor) -> torch.Tensor:
        """d(capped) / d(product of the rows and k) of the last tile of scores: softcap * (1 - tanh^2)."""
        return self.tanh(like).square().neg_().add_(1.0).mul_(self.problem.softcap)


def bounded_units(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """Boolean (batch, nheads_k), on the CPU: whether every |s| is below the bound, and the values and the sink fit."""
    none = torch.zeros(problem.batch, problem.nheads_k, dtype=torch.bool, device="cpu")
    if problem.dtype == FP8:  # torch has no norm of it
        return none
    if problem.device_type != "cpu" or problem.bias_shape is not None or problem.alibi or problem.is_empty:
        return none
    if inputs.sink is not None and not float(inputs.sink.amin()) > -_SCORE_BOUND:
        return none
    q, k, v = (
        torch.linalg.vector_norm(tensor, dim=-1, dtype=problem.state_dtype).amax(1)
        for tensor in (inputs.q, inputs.k, inputs.v)
    )
    bound = torch.unflatten(q, 1, (-1, problem.group)).amax(2) * k * abs(problem.softmax_scale)
    if problem.softcap:
        bound = torch.where(bound.isfinite(), bound.clamp(max=problem.softcap), bound)
    fits: torch.Tensor = (bound < _SCORE_BOUND) & (v > _VALUE_BOUNDS[0]) & (v < _VALUE_BOUNDS[1])
    return fits


def chunks(problem: Problem, inputs: Inputs, *, ones: bool) -> Iterator[Chunk]:
    """The whole problem, one span at a time; ``ones`` for the passes that start from lse."""
    tiling, bounded = Tiling.of(problem), bounded_units(problem, inputs)
    visibility, scratch = Visibility(problem, inputs, tiling), Scratch(inputs.q, problem.state_dtype)
    for span in tiling.spans(problem):
        yield Chunk(visibility, span, scratch, bounded, ones=ones)
