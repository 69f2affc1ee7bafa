"""States over disjoint ranges of keys become one: the algebra of ``tilewise.states``, over any number of them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_kernel(outs_ptr, lses_ptr, out_ptr, lse_ptr, splits, rows, seqlen_q, nheads, headdim_v, ROWS: tl.constexpr,
                   COLS: tl.constexpr):
    """ROWS rows of all heads: lse = log(sum exp(lse_i)), out = sum exp(lse_i - lse) out_i; empty states weigh nothing.

    outs (splits, rows, COLS) and lses (splits, rows), fp32, rows = batch nheads seqlen_q; out (batch, seqlen_q, nheads,
    headdim_v); lse (rows,).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    real = row < rows
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for i in range(0, splits):
        top = tl.maximum(top, tl.load(lses_ptr + i * rows + row, mask=real, other=float("-inf")))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for i in range(0, splits):
        weight = tl.exp(tl.load(lses_ptr + i * rows + row, mask=real, other=float("-inf")) - safe)
        at = outs_ptr + (i * rows + row).to(tl.int64)[:, None] * COLS + col[None, :]
        acc += weight[:, None] * tl.load(at, mask=real[:, None], other=0.0)
        total += weight
    empty = top == float("-inf")
    total = tl.where(empty, 1.0, total)
    out = acc / total[:, None]
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), safe + tl.log(total)), mask=real)
    head = row // seqlen_q
    place = ((head // nheads) * seqlen_q + row % seqlen_q).to(tl.int64) * nheads + head % nheads
    at = out_ptr + place[:, None] * headdim_v + col[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (col < headdim_v)[None, :])
