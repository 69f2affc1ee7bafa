"""Before and after the backward's main kernel, in plain Triton: row statistics, a zeroed fp32 dq, and its conversion."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def before_kernel(out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse_out_ptr, delta_out_ptr, dq_ptr, out_stride, dout_stride,
                  nheads, seqlen, padded_rows, headdim_v, lse_factor, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    """lse times ``lse_factor``, -delta = dlse - rowsum(out * dout), and zeros for dq; heads padded to ``padded_rows``.

    Strides are (batch, row, head) in elements. Rows past the sequence get zeros; so does lse where it is -inf, for such a
    row is masked throughout.
    """
    per_head = padded_rows // ROWS
    head = tl.program_id(0) // per_head
    rows = tl.program_id(0) % per_head * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    batch = (head // nheads).to(tl.int64)
    inside = rows < seqlen
    mask = inside[:, None] & (cols < headdim_v)[None, :]
    at = rows.to(tl.int64)[:, None]
    out_at = out_ptr + batch * out_stride[0] + (head % nheads) * out_stride[2] + at * out_stride[1] + cols[None, :]
    dout_at = dout_ptr + batch * dout_stride[0] + (head % nheads) * dout_stride[2] + at * dout_stride[1] + cols[None, :]
    out = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_at, mask=mask, other=0.0).to(tl.float32)
    minus_delta = -tl.sum(out * dout, 1)
    lse = tl.load(lse_ptr + head.to(tl.int64) * seqlen + rows, mask=inside, other=0.0)
    if dlse_ptr is not None:
        minus_delta += tl.load(dlse_ptr + head.to(tl.int64) * seqlen + rows, mask=inside, other=0.0)
    padded = head.to(tl.int64) * padded_rows + rows
    tl.store(lse_out_ptr + padded, tl.where(lse == float("-inf"), 0.0, lse * lse_factor))
    tl.store(delta_out_ptr + padded, minus_delta)
    tl.store(dq_ptr + padded[:, None] * BLOCK_D + cols[None, :], tl.zeros([ROWS, BLOCK_D], tl.float32))


@triton.jit
def after_kernel(acc_ptr, dq_ptr, dq_stride, nheads, seqlen, padded_rows, headdim, softmax_scale,
                 BLOCK_D: tl.constexpr):
    """fp32 dq of 64 rows from fragment order (backward.fragment_order) to rows, scaled, in the gradient's dtype."""
    head = tl.program_id(0) // (padded_rows // 64)
    block = tl.program_id(0) % (padded_rows // 64)
    x = tl.load(acc_ptr + tl.program_id(0).to(tl.int64) * (64 * BLOCK_D) + tl.arange(0, 64 * BLOCK_D))
    x = tl.reshape(x, [BLOCK_D // 64, 8, 4, 4, 2, 4, 2, 2])  # part, i, warp, row / 2, row % 2, quad, high row, pair
    x = tl.reshape(tl.permute(x, (2, 6, 3, 4, 0, 1, 5, 7)), [64, BLOCK_D])
    rows = block * 64 + tl.arange(0, 64)
    cols = tl.arange(0, BLOCK_D)
    batch = (head // nheads).to(tl.int64)
    at = dq_ptr + batch * dq_stride[0] + (head % nheads) * dq_stride[2] + rows.to(tl.int64)[:, None] * dq_stride[1]
    mask = (rows < seqlen)[:, None] & (cols < headdim)[None, :]
    tl.store(at + cols[None, :], (x * softmax_scale).to(dq_ptr.dtype.element_ty), mask=mask)
