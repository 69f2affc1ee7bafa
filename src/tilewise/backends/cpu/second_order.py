"""Forward mode and the gradient of forward mode, tile by tile: two passes over the keys of each block of rows.

With z the product of the rows as ``Rows.q`` holds them and k, s(z) the capped score, and T the tangent of the biased
scores,

    T           = s'(z) T_z + T_bias - T_alibi * distance
    lse_tangent = sum_j p_j T_j + p_sink T_sink
    out_tangent = sum_j drop_j p_j (T_j - lse_tangent) v_j + drop_j p_j T_v_j

``second`` is the gradient by the primals of L = <dout, out_tangent> + <dlse, lse_tangent>. With a = drop * (dout v^T),
b = drop * (dout T_v^T), the row mean E[x] = sum_j p_j x_j and g = dlse - E[a], a row gives

    L        = E[T a + b] + g lse_tangent
    dL/dT_j  = p_j (a_j + g)                                                        "dt"
    dL/ds_j  = p_j (w_j - W),    w = T (a + g) + b - a lse_tangent                  "ds"
    dL/dsink = p_sink (g T_sink - W),    W = E[T a + b] + (g - E[a]) lse_tangent
    dL/dz    = s'(z) ds + s''(z) T_z dt,    dL/dT_z = s'(z) dt,    dL/dv_j = sum_i drop p (T - lse_tangent) dout_i
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.backends.cpu.chunk import Chunk, KnownRows, chunks
from tilewise.backends.cpu.sums import GradientSums
from tilewise.backends.cpu.tiles import Tile
from tilewise.dispatch.backend import Gradients, State
from tilewise.inputs import Inputs
from tilewise.problem import Problem


class TileTangents(NamedTuple):
    """P of a tile, the tangents of its products and of its biased scores, and s'(z) (None: 1)."""

    p: torch.Tensor
    z: torch.Tensor
    s: torch.Tensor
    slope: torch.Tensor | None


class Tangents:
    """The tangents of one span's inputs; a missing one is zero."""

    def __init__(self, chunk: Chunk, tangents: Gradients) -> None:
        self.chunk, self.named = chunk, tangents
        self.q = chunk.row_side(tangents["q"]) if "q" in tangents else None
        self.k = chunk.key_side(tangents["k"], "k_tangent", chunk.scale) if "k" in tangents else None
        self.v = chunk.key_side(tangents["v"], "v_tangent") if "v" in tangents else None

    def query_rows(self, block: KnownRows) -> torch.Tensor | None:
        """q's tangent."""
        return None if self.q is None else self.q.load(block.queries, self.chunk.dtype)

    def sink_rows(self, block: KnownRows) -> torch.Tensor:
        """The sink's tangent, (units, rows, 1)."""
        if "sink" not in self.named:
            return block.q.new_zeros(*block.q.shape[:2], 1)
        return self.chunk.per_head(self.named["sink"], block.queries)

    def tile(self, block: KnownRows, q_tangent: torch.Tensor | None, tile: Tile) -> TileTangents:
        """The tangents of one tile, recomputed."""
        chunk = self.chunk
        p = chunk.probabilities(block, tile)
        z = torch.zeros_like(p)
        if q_tangent is not None:
            z.baddbmm_(q_tangent, chunk.k[tile.keys].mT)
        if self.k is not None:
            z.baddbmm_(block.q_plain, self.k[:, tile.keys].mT)
        slope = chunk.slope(p) if chunk.problem.softcap else None
        s = z.clone() if slope is None else z * slope
        if "bias" in self.named:
            chunk.five(s, tile).add_(chunk.pair_view(self.named["bias"], tile))
        if "alibi_slopes" in self.named:
            s -= chunk.per_head(self.named["alibi_slopes"], tile.queries) * chunk.distance(tile)
        if tile.keep is not None:
            chunk.five(s, tile).masked_fill_(~tile.keep, 0.0)
        return TileTangents(p, z, s, slope)

    def lse_rows(self, block: KnownRows, mean: torch.Tensor) -> torch.Tensor:
        """lse's tangent from E[T]."""
        p_sink = self.chunk.sink_probability(block)
        return mean if p_sink is None else mean + p_sink * self.sink_rows(block)


def jvp(problem: Problem, inputs: Inputs, lse: torch.Tensor, tangents: Gradients) -> State:
    """Tangents of (out, lse), in their layouts and dtypes."""
    out_tangent = inputs.q.new_zeros(problem.batch, problem.seqlen_q, problem.nheads, problem.headdim_v)
    lse_tangent = torch.zeros_like(lse)
    for chunk in chunks(problem, inputs, ones=True):
        spanned = Tangents(chunk, tangents)
        out_rows, lse_rows, lse_tangent_rows = chunk.row_side(out_tangent), *map(chunk.row_scalars, (lse, lse_tangent))
        for queries in chunk.query_blocks():
            block_out, block_lse = _jvp_block(chunk, chunk.rows_with_lse(queries, lse_rows), spanned)
            out_rows.store(queries, block_out)
            lse_tangent_rows.store(queries, block_lse)
    return out_tangent, lse_tangent


def _jvp_block(chunk: Chunk, block: KnownRows, tangents: Tangents) -> State:
    q_tangent = tangents.query_rows(block)
    mean = block.q.new_zeros(*block.q.shape[:2], 1)
    for tile in chunk.tiles(block.queries):
        t = tangents.tile(block, q_tangent, tile)
        mean += (t.p * t.s).sum(-1, keepdim=True)
    lse_tangent = tangents.lse_rows(block, mean)
    acc = block.q.new_zeros(*block.q.shape[:2], chunk.problem.headdim_v)
    for tile in chunk.tiles(block.queries):
        t = tangents.tile(block, q_tangent, tile)
        weights = chunk.dropped(t.p, tile)
        if tangents.v is not None:
            acc.baddbmm_(weights, tangents.v[:, tile.keys])
        acc.baddbmm_(t.s.sub_(lse_tangent).mul_(weights), chunk.v[tile.keys])
    return acc, lse_tangent


def second(
    problem: Problem,
    inputs: Inputs,
    lse: torch.Tensor,
    tangents: Gradients,
    dout: torch.Tensor,
    dlse: torch.Tensor,
) -> Gradients:
    """Gradient of <dout, out_tangent> + <dlse, lse_tangent> by the primals in ``problem.needs_grad``."""
    sums = GradientSums(problem, inputs)
    for chunk in chunks(problem, inputs, ones=True):
        sums.start(chunk)
        spanned = Tangents(chunk, tangents)
        dout_rows, lse_rows, dlse_rows = chunk.row_side(dout), *map(chunk.row_scalars, (lse, dlse))
        for queries in chunk.query_blocks():
            block = chunk.rows_with_lse(queries, lse_rows)
            dout_block = dout_rows.load(queries, chunk.dtype).masked_fill_(block.empty, 0.0)
            _second_block(chunk, block, spanned, sums, dout_block, dlse_rows.load(queries, chunk.dtype))
        sums.finish(chunk)
    return sums.result()


def _second_block(
    chunk: Chunk, block: KnownRows, tangents: Tangents, sums: GradientSums, dout: torch.Tensor, dlse: torch.Tensor
) -> None:
    q_tangent = tangents.query_rows(block)
    mean_t, mean_a, mean_tab = torch.zeros_like(dlse), torch.zeros_like(dlse), torch.zeros_like(dlse)
    for tile in chunk.tiles(block.queries):
        t = tangents.tile(block, q_tangent, tile)
        a, b = _weighted_values(chunk, tangents, tile, dout)
        mean_t += (t.p * t.s).sum(-1, keepdim=True)
        mean_a += (t.p * a).sum(-1, keepdim=True)
        mean_tab += (t.p * (t.s * a + b)).sum(-1, keepdim=True)
    lse_tangent, g = tangents.lse_rows(block, mean_t), dlse - mean_a
    total = mean_tab + (g - mean_a) * lse_tangent
    for tile in chunk.tiles(block.queries):
        t = tangents.tile(block, q_tangent, tile)
        a, b = _weighted_values(chunk, tangents, tile, dout)
        by_tangent = t.p * (a + g)
        by_score = t.p * (t.s * (a + g) + b - a * lse_tangent - total)
        sums.add_pairs(chunk, tile, by_score)
        sums.add_keys("v", tile, chunk.dropped(t.p, tile).mul_(t.s - lse_tangent), dout)
        by_z, by_z_tangent = by_score, by_tangent
        if t.slope is not None:
            by_z_tangent = by_tangent * t.slope
            by_z = by_score * t.slope - 2.0 * chunk.tanh(t.slope) * t.z * by_z_tangent
        sums.add_product(chunk, block, tile, by_z)
        if tangents.k is not None:
            sums.add_queries(by_z_tangent, tangents.k[:, tile.keys])
        if q_tangent is not None:
            sums.add_keys("k", tile, by_z_tangent, q_tangent)
    sums.finish_block(block)
    p_sink = chunk.sink_probability(block)
    if "sink" in sums and p_sink is not None:
        sums.add_per_head("sink", chunk, p_sink * (g * tangents.sink_rows(block) - total))


def _weighted_values(
    chunk: Chunk, tangents: Tangents, tile: Tile, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """a = drop * (dout v^T) and b = drop * (dout T_v^T)."""
    a = chunk.dropped(torch.bmm(dout, chunk.v[tile.keys].mT), tile)
    if tangents.v is None:
        return a, torch.zeros_like(a)
    return a, chunk.dropped(torch.bmm(dout, tangents.v[:, tile.keys].mT), tile)
