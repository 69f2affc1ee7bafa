"""Attention and its derivatives as formulas over whole matrices: the definition the other backends are held to.

Heads come second here: q (batch, nheads, seqlen_q, headdim), and k, v are repeated to nheads. Everything is computed
in the state dtype (fp64 for fp64 inputs, else fp32).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise import masks, rng, scores
from tilewise.descale import real
from tilewise.inputs import Inputs
from tilewise.problem import Problem

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Matrices:
    """What every derivative starts from; s_scaled is softmax_scale * q k^T, slope is d(capped)/d(s_scaled)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    s_scaled: torch.Tensor
    slope: torch.Tensor
    p: torch.Tensor
    drop: torch.Tensor | None
    p_sink: torch.Tensor | None
    lse: torch.Tensor


def heads_second(tensor: torch.Tensor, problem: Problem, nheads: int) -> torch.Tensor:
    """(batch, seqlen, nheads, dim) to (batch, nheads, seqlen, dim) in the state dtype, K/V heads repeated."""
    tensor = tensor.to(problem.state_dtype).transpose(1, 2)
    return tensor if nheads == problem.nheads else tensor.repeat_interleave(problem.group, dim=1)


def _real(tensor: torch.Tensor, descale: torch.Tensor | None) -> torch.Tensor:
    """A tensor as it is, or the real values of one that is stored in fp8."""
    return tensor if descale is None else real(tensor, descale)


def keep_pairs(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """Boolean, broadcastable to (batch, nheads, seqlen_q, seqlen_k): causal, window, segments and mask together."""
    keep = masks.band_tile(masks.band(problem), 0, problem.seqlen_q, 0, problem.seqlen_k, inputs.q.device)[None, None]
    if inputs.segments_q is not None and inputs.segments_k is not None:
        keep = keep & (inputs.segments_q[:, None, :, None] == inputs.segments_k[:, None, None, :])
    return keep if inputs.mask is None else keep & inputs.mask


def drop_factor(problem: Problem, inputs: Inputs) -> torch.Tensor | None:
    """keep / (1 - dropout_p) for every pair, or None without dropout."""
    if not problem.dropout_p or inputs.dropout_seed is None:
        return None
    device = inputs.q.device
    keep = rng.dropout_keep(
        inputs.dropout_seed,
        problem.dropout_p,
        torch.arange(problem.batch, device=device) + inputs.batch_offset,
        torch.arange(problem.nheads, device=device),
        (0, problem.seqlen_q),
        (0, problem.seqlen_k),
    )
    return keep.to(problem.state_dtype) * rng.keep_scale(problem.dropout_p)


def visible(tensor: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Rows of K or V that no query sees become 0, so that what they hold (NaN, Inf) never enters a product."""
    return torch.where(seen[..., None], tensor, torch.zeros_like(tensor))


def matrices(problem: Problem, inputs: Inputs) -> Matrices:
    """Recompute scores and probabilities of the whole problem."""
    q = heads_second(_real(inputs.q, inputs.q_descale), problem, problem.nheads)
    k = heads_second(_real(inputs.k, inputs.k_descale), problem, problem.nheads_k)
    v = heads_second(_real(inputs.v, inputs.v_descale), problem, problem.nheads_k)
    keep = keep_pairs(problem, inputs).expand(problem.batch, problem.nheads, problem.seqlen_q, problem.seqlen_k)
    k, v = visible(k, keep.any(-2)), visible(v, keep.any(-2))
    s_scaled = problem.softmax_scale * (q @ k.mT)
    capped = scores.cap(s_scaled, problem.softcap)
    slope = 1 - (capped / problem.softcap) ** 2 if problem.softcap else torch.ones_like(capped)
    s = scores.add_bias(capped, problem, inputs)
    s = torch.where(keep, s, torch.full_like(s, -torch.inf))
    sink = None if inputs.sink is None else inputs.sink[:, :, None]
    p, p_sink, lse = softmax(s, sink)
    return Matrices(q, k, v, s_scaled, slope, p, drop_factor(problem, inputs), p_sink, lse)


def softmax(s: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """p, the sink's probability, and lse (-inf for a row without anything, whose p is 0).

    p is divided by its sum, not taken as exp(s - lse): beside scores of finfo.min, lse has no digits left for the sum.
    """
    top = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    if sink is not None:
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -torch.inf, 0.0)
    p = torch.exp(s - top[..., None])
    p_sink = None if sink is None else torch.exp(sink - top)
    total = p.sum(-1) if p_sink is None else p.sum(-1) + p_sink
    lse = top + torch.log(total)
    total = total.masked_fill(total == 0, 1.0)
    return p / total[..., None], None if p_sink is None else p_sink / total, lse


def dropped(matrix: torch.Tensor, drop: torch.Tensor | None) -> torch.Tensor:
    """Dropout on a matrix of pairs."""
    return matrix if drop is None else matrix * drop


def forward(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, seqlen_q, nheads, headdim_v) in the output dtype, lse (batch, nheads, seqlen_q)."""
    m = matrices(problem, inputs)
    out = dropped(m.p, m.drop) @ m.v
    return out.transpose(1, 2).to(problem.out_dtype).contiguous(), m.lse


def to_layout(grads: Gradients, problem: Problem, inputs: Inputs) -> Gradients:
    """Gradients in the layouts and dtypes of the inputs: heads back in third place, K/V heads of a group summed."""
    result = {}
    for name in problem.needs_grad:
        grad, like = grads[name], getattr(inputs, name)
        if name in ("k", "v"):
            grad = grad.reshape(problem.batch, problem.nheads_k, problem.group, *grad.shape[2:]).sum(2)
        if name in ("q", "k", "v"):
            grad = grad.transpose(1, 2)
        result[name] = grad.sum_to_size(like.shape).to(like.dtype).contiguous()
    return result


def score_gradients(m: Matrices, problem: Problem, inputs: Inputs, ds: torch.Tensor) -> Gradients:
    """From ds, the gradient by the biased scores: q, k (through cap and scale), bias and ALiBi slopes."""
    chained = problem.softmax_scale * ds * m.slope
    grads = {"q": chained @ m.k, "k": chained.mT @ m.q, "bias": ds}
    if inputs.alibi_slopes is not None:
        grads["alibi_slopes"] = -(ds * scores.distance(problem, ds.device, ds.dtype)).sum((-1, -2))
    return grads


def backward(
    problem: Problem, inputs: Inputs, out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """dv = P^T dout, dp = dout v^T, ds = P (dp - delta), delta = rowsum(dout * out) - dlse."""
    m = matrices(problem, inputs)
    dout = of_rows_that_see(m, heads_second(dout, problem, problem.nheads))
    delta = row_delta(heads_second(out, problem, problem.nheads), dout, dlse)
    ds = m.p * (dropped(dout @ m.v.mT, m.drop) - delta[..., None])
    grads = score_gradients(m, problem, inputs, ds)
    grads["v"] = dropped(m.p, m.drop).mT @ dout
    if m.p_sink is not None:
        grads["sink"] = -(m.p_sink * delta).sum(-1)
    return to_layout(grads, problem, inputs)


def of_rows_that_see(m: Matrices, dout: torch.Tensor) -> torch.Tensor:
    """dout, 0 where a row sees nothing: its out is constant, whatever came back through it."""
    return dout.masked_fill(m.lse[..., None] == -torch.inf, 0.0)


def row_delta(out: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor | None) -> torch.Tensor:
    """rowsum(dout * out) - dlse, heads second."""
    delta = (dout * out).sum(-1)
    return delta if dlse is None else delta - dlse
