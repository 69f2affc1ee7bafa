"""Forward mode and the gradient of forward mode, as formulas over whole matrices.

With z = softmax_scale * q k^T, c = cap, and T the tangent of the biased scores,

    T           = c'(z) T_z + T_bias - T_alibi * distance,   T_z = softmax_scale * (T_q k^T + q T_k^T)
    lse_tangent = sum_j p_j T_j + p_sink T_sink
    out_tangent = (drop * p * (T - lse_tangent)) v + (drop * p) T_v

``second`` differentiates L = <dout, out_tangent> + <dlse, lse_tangent> by the primals. Per row, with a = drop * (dout
v^T), b = drop * (dout T_v^T) and g = dlse - sum_j p_j a_j,

    L      = sum_j p_j (T_j a_j + b_j) + g * lse_tangent
    dL/dT  = p (a + g)                                          =: H
    dL/ds  = p (w - W),  dL/dsink = p_sink (g T_sink - W)        =: G
             w = T (a + g) + b - a * lse_tangent,  W = sum_j p_j w_j + p_sink g T_sink
    dL/dz  = G c'(z) + H c''(z) T_z,  and q, k also enter through T_z
"""

from __future__ import annotations

import torch

from tilewise import scores
from tilewise.backends.reference.formulas import (
    Gradients,
    Matrices,
    dropped,
    heads_second,
    keep_pairs,
    matrices,
    to_layout,
    visible,
)
from tilewise.inputs import Inputs
from tilewise.problem import Problem


def _tangent(name: str, tangents: Gradients, problem: Problem, like: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The tangent of q, k or v, heads second; zeros when it is missing, and where no query sees a key."""
    if name not in tangents:
        return torch.zeros_like(like)
    nheads = problem.nheads if name == "q" else problem.nheads_k
    tangent = heads_second(tangents[name], problem, nheads)
    return tangent if name == "q" else visible(tangent, seen)


class _Tangents:
    """The tangents of a problem's matrices."""

    def __init__(self, m: Matrices, problem: Problem, inputs: Inputs, tangents: Gradients) -> None:
        keep = keep_pairs(problem, inputs)
        seen = keep.expand(problem.batch, problem.nheads, problem.seqlen_q, problem.seqlen_k).any(-2)
        self.q = _tangent("q", tangents, problem, m.q, seen)
        self.k = _tangent("k", tangents, problem, m.k, seen)
        self.v = _tangent("v", tangents, problem, m.v, seen)
        self.z = problem.softmax_scale * (self.q @ m.k.mT + m.q @ self.k.mT)
        scored = m.slope * self.z
        if "bias" in tangents:
            scored = scored + tangents["bias"].to(scored.dtype)
        if "alibi_slopes" in tangents:
            slopes = tangents["alibi_slopes"].to(scored.dtype)[:, :, None, None]
            scored = scored - slopes * scores.distance(problem, scored.device, scored.dtype)
        self.s = torch.where(keep, scored, torch.zeros_like(scored))
        self.sink = tangents["sink"].to(scored.dtype)[:, :, None] if "sink" in tangents else None
        self.lse = (m.p * self.s).sum(-1)
        if self.sink is not None and m.p_sink is not None:
            self.lse = self.lse + m.p_sink * self.sink


def jvp(problem: Problem, inputs: Inputs, tangents: Gradients) -> tuple[torch.Tensor, torch.Tensor]:
    """Tangents of (out, lse), in their layouts and dtypes."""
    m = matrices(problem, inputs)
    t = _Tangents(m, problem, inputs, tangents)
    p_tangent = m.p * (t.s - t.lse[..., None])
    out = dropped(p_tangent, m.drop) @ m.v + dropped(m.p, m.drop) @ t.v
    return out.transpose(1, 2).to(problem.dtype).contiguous(), t.lse


def second(problem: Problem, inputs: Inputs, tangents: Gradients, dout: torch.Tensor, dlse: torch.Tensor) -> Gradients:
    """Gradient of <dout, out_tangent> + <dlse, lse_tangent> by the primals in ``problem.needs_grad``."""
    m = matrices(problem, inputs)
    t = _Tangents(m, problem, inputs, tangents)
    dout = heads_second(dout, problem, problem.nheads)
    a, b = dropped(dout @ m.v.mT, m.drop), dropped(dout @ t.v.mT, m.drop)
    g = (dlse - (m.p * a).sum(-1))[..., None]
    w = t.s * (a + g) + b - a * t.lse[..., None]
    total = (m.p * w).sum(-1)
    w_sink = g[..., 0] * t.sink if t.sink is not None else torch.zeros_like(total)
    if m.p_sink is not None:
        total = total + m.p_sink * w_sink
    by_tangent = m.p * (a + g)
    by_score = m.p * (w - total[..., None])
    by_z = by_score * m.slope + by_tangent * curvature(m, problem) * t.z
    through = problem.softmax_scale * by_tangent * m.slope
    grads = {
        "q": problem.softmax_scale * (by_z @ m.k) + through @ t.k,
        "k": problem.softmax_scale * (by_z.mT @ m.q) + through.mT @ t.q,
        "v": dropped(m.p * (t.s - t.lse[..., None]), m.drop).mT @ dout,
        "bias": by_score,
    }
    if inputs.alibi_slopes is not None:
        grads["alibi_slopes"] = -(by_score * scores.distance(problem, w.device, w.dtype)).sum((-1, -2))
    if m.p_sink is not None:
        grads["sink"] = (m.p_sink * (w_sink - total)).sum(-1)
    return to_layout(grads, problem, inputs)


def curvature(m: Matrices, problem: Problem) -> torch.Tensor:
    """c''(z) of the softcap: -2 tanh(z / softcap) c'(z) / softcap; 0 without it."""
    if not problem.softcap:
        return torch.zeros_like(m.slope)
    return -2.0 * torch.tanh(m.s_scaled / problem.softcap) * m.slope / problem.softcap
