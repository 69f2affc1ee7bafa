"""The forward pass, by online softmax, and the backward pass, by recomputation from lse."""

from __future__ import annotations

import math

import torch

from tilewise.backends.cpu.chunk import Chunk, KnownRows, Rows, chunks, exponential
from tilewise.backends.cpu.sums import GradientSums
from tilewise.dispatch.backend import Gradients, State
from tilewise.inputs import Inputs
from tilewise.problem import Problem


def forward(problem: Problem, inputs: Inputs) -> State:
    """out (batch, seqlen_q, nheads, headdim_v) in the output dtype, lse (batch, nheads, seqlen_q)."""
    shape = (problem.batch, problem.seqlen_q, problem.nheads, problem.headdim_v)
    out = inputs.q.new_empty(shape, dtype=problem.out_dtype)
    lse = inputs.q.new_empty(problem.batch, problem.nheads, problem.seqlen_q, dtype=problem.state_dtype)
    for chunk in chunks(problem, inputs, ones=False):
        out_rows, lse_rows = chunk.row_side(out), chunk.row_scalars(lse)
        for queries in chunk.query_blocks():
            block_out, block_lse = _forward_block(chunk, chunk.rows(queries))
            out_rows.store(queries, block_out)
            lse_rows.store(queries, block_lse)
    return out, lse


def _forward_block(chunk: Chunk, block: Rows) -> State:
    """(out, lse) of one block of rows, (units, rows, headdim_v) and (units, rows, 1)."""
    acc = block.q.new_zeros(*block.q.shape[:2], chunk.problem.headdim_v)
    row_sum = acc.new_zeros(*acc.shape[:2], 1)
    row_max = torch.full_like(row_sum, 0.0 if chunk.bounded else -math.inf)
    for tile in chunk.tiles(block.queries):
        s = chunk.scores(block, tile)
        if chunk.bounded:
            p = chunk.clear(s.exp_(), tile)
        else:
            new_max = torch.maximum(row_max, chunk.exclude(s, tile).amax(-1, keepdim=True))
            reference = new_max.masked_fill(new_max == -math.inf, 0.0)
            rescale = exponential(row_max - reference)
            acc *= rescale
            row_sum *= rescale
            row_max, p = new_max, exponential(s.sub_(reference))
        row_sum += p.sum(-1, keepdim=True)
        acc.baddbmm_(chunk.dropped(p, tile), chunk.v[tile.keys])
    return _normalised(chunk, block, acc, row_sum, row_max)


def _normalised(chunk: Chunk, block: Rows, acc: torch.Tensor, row_sum: torch.Tensor, row_max: torch.Tensor) -> State:
    """Divide by the softmax denominator, the sink's part included; a row that sees nothing gives 0."""
    log_sum = row_sum.log()
    out, lse = acc.div_(row_sum.clamp_min_(torch.finfo(acc.dtype).tiny)), row_max + log_sum
    if chunk.inputs.sink is not None:
        sink = chunk.per_head(chunk.inputs.sink, block.queries)
        share = torch.sigmoid(row_max - sink + log_sum)
        out *= share.masked_fill_(lse == -math.inf, 0.0)
        lse = torch.logaddexp(lse, sink)
    return out, lse


def backward(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    """dv = P^T dout, ds = P (dout v^T - delta), dq = scale ds k, dk = scale ds^T q, delta = rowsum(dout out) - dlse."""
    sums = GradientSums(problem, inputs)
    for chunk in chunks(problem, inputs, ones=True):
        out_rows, dout_rows, lse_rows = chunk.row_side(out), chunk.row_side(dout), chunk.row_scalars(lse)
        dlse_rows = None if dlse is None else chunk.row_scalars(dlse)
        sums.start(chunk)
        for queries in chunk.query_blocks():
            block = chunk.rows_with_lse(queries, lse_rows)
            # a row that sees nothing is constant, whatever came back through it
            dout_block = dout_rows.load(queries, chunk.dtype, extra=1).masked_fill_(block.empty, 0.0)
            delta = (out_rows.load(queries, chunk.dtype) * dout_block[..., :-1]).sum(-1, keepdim=True)
            if dlse_rows is not None:
                delta -= dlse_rows.load(queries, chunk.dtype)
            _backward_block(chunk, block, sums, dout_block, delta)
        sums.finish(chunk)
    return sums.result()


def _backward_block(
    chunk: Chunk, block: KnownRows, sums: GradientSums, dout: torch.Tensor, delta: torch.Tensor
) -> None:
    """Add what one block of rows gives; ``dout`` has a last column to carry -delta against V's column of ones."""
    fold = not chunk.problem.dropout_p
    dout[..., -1:] = -delta if fold else 0.0
    dout_plain = dout[..., :-1]
    for tile in chunk.tiles(block.queries):
        p = chunk.probabilities(block, tile)
        sums.add_keys("v", tile, chunk.dropped(p, tile, into="dropped"), dout_plain)
        if not sums.wants_scores:
            continue
        ds = torch.bmm(dout, chunk.v_columns[tile.keys], out=chunk.scratch.take("ds", p.shape))
        if not fold:
            chunk.dropped(ds, tile).sub_(delta)
        ds *= p
        sums.add_pairs(chunk, tile, ds)
        if chunk.problem.softcap:
            ds *= chunk.slope(ds)
        sums.add_product(chunk, block, tile, ds)
    sums.finish_block(block)
    p_sink = chunk.sink_probability(block)
    if "sink" in sums and p_sink is not None:
        sums.add_per_head("sink", chunk, -p_sink * delta)
