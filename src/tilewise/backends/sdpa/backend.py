"""When torch's CPU kernel means the same as the semantics, what it costs, and how a problem is laid out for it."""

from __future__ import annotations

import torch

from tilewise.backends.sdpa import cost, kernel, rowwise
from tilewise.backends.sdpa.kernel import Part, Rows
from tilewise.backends.sdpa.whole import Whole, whole
from tilewise.device import DeviceFacts
from tilewise.dispatch.backend import Gradients, Reason, State
from tilewise.inputs import FLOAT_DTYPES, Inputs, narrowed, sequences
from tilewise.masks import band
from tilewise.problem import DTYPE_NAMES, SMALLEST_SCALE, Problem
from tilewise.states import merge_states


def _layout_reasons(problem: Problem) -> list[Reason]:
    reasons = []
    if problem.device_type != "cpu":
        reasons.append(Reason("device", problem.device_type, "cpu"))
    if problem.dtype not in FLOAT_DTYPES:
        has = DTYPE_NAMES.get(problem.dtype, str(problem.dtype))
        reasons.append(Reason("dtype", has, "fp64, fp32, bf16 or fp16"))
    if problem.headdim_v != problem.headdim:
        reasons.append(Reason("headdim_v", str(problem.headdim_v), f"headdim, {problem.headdim}"))
    if not problem.inner_contiguous:
        hint = "q.contiguous() makes a copy; torch's kernel reads wrong numbers otherwise"
        reasons.append(Reason("last stride of q, k, v", "another", "1", hint))
    return reasons


def _feature_reasons(problem: Problem) -> list[Reason]:
    left = problem.window_left
    reasons = []
    checks = (
        (left is not None and left < problem.seqlen_k - 1, "window_left", str(left), "none that cuts keys off"),
        (problem.segments, "segments", "ids", "none"),
        (problem.softcap > 0, "softcap", f"{problem.softcap:g}", "0"),
        (problem.alibi, "alibi_slopes", "slopes", "none"),
        (problem.sink, "sink", "one", "none"),
        (problem.dropout_p > 0, "dropout_p", f"{problem.dropout_p:g}", "0"),
        ("bias" in problem.needs_grad, "bias", "gradient", "a bias that needs none"),
        (problem.derivative in ("jvp", "second"), "derivative", problem.derivative, "forward or backward"),
    )
    if problem.banded and problem.softmax_scale < SMALLEST_SCALE:
        hint = "torch's kernel scales after excluding, so -inf would turn to NaN or +inf"
        needs = f"{SMALLEST_SCALE:.3g} or more"
        reasons.append(Reason("softmax_scale with causal", f"{problem.softmax_scale:g}", needs, hint))
    return reasons + [Reason(what, has, needs) for wrong, what, has, needs in checks if wrong]


def _pair_reasons(problem: Problem) -> list[Reason]:
    """mask and bias are added up beforehand: refused where the sum would be larger than either."""
    mask, bias = problem.mask_shape, problem.bias_shape
    if mask is None or bias is None:
        return []
    both = tuple(max(pair) if min(pair) else 0 for pair in zip(mask, bias, strict=True))
    if both in (mask, bias):
        return []
    return [
        Reason("mask and bias", f"{mask} and {bias}", "one that covers the other", "their sum would be written out")
    ]


def _additive(problem: Problem, inputs: Inputs) -> torch.Tensor | None:
    """What torch's kernel adds to the scores: the bias, and -inf where the mask excludes; 4-D, broadcast dims 1."""
    if inputs.bias is None and inputs.mask is None:
        return None
    bias = None if inputs.bias is None else narrowed(inputs.bias)
    mask = None if inputs.mask is None else narrowed(inputs.mask)
    if bias is not None and bias.dtype != problem.dtype:
        bias = bias.to(problem.state_dtype)
    if mask is None:
        return bias
    if bias is None:
        return torch.zeros_like(mask, dtype=problem.dtype).masked_fill_(~mask, -torch.inf)
    return bias.masked_fill(~mask, -torch.inf)


class SdpaBackend:
    """torch's ``scaled_dot_product_attention`` kernel for CPUs."""

    name = "sdpa"
    auto_devices = frozenset({"cpu"})

    def supports(self, problem: Problem, facts: DeviceFacts) -> tuple[Reason, ...]:
        """Every reason why torch's kernel would refuse, be wrong, or lack a gradient."""
        return (*_layout_reasons(problem), *_feature_reasons(problem), *_pair_reasons(problem))

    def cost(self, problem: Problem, facts: DeviceFacts) -> float:
        """Seconds."""
        return cost.seconds(problem, facts)

    def tile(self, problem: Problem, facts: DeviceFacts) -> tuple[int, int]:
        """(query rows, key columns) that torch's CPU kernel takes at a time, by the number of queries."""
        rows = 256 if problem.seqlen_q >= 768 else 64 if problem.seqlen_q >= 192 else 32
        return min(rows, max(problem.seqlen_q, 1)), min(512, max(problem.seqlen_k, 1))

    def copies(self, problem: Problem) -> dict[str, int]:
        """None."""
        return {}

    def forward(self, problem: Problem, inputs: Inputs) -> State:
        """(out, lse); the packed form goes sequence by sequence."""
        if not problem.varlen:
            return _forward(problem, inputs)
        out = inputs.q.new_zeros((*inputs.q.shape[:-1], problem.headdim_v))
        lse = inputs.q.new_full((problem.nheads, problem.total_q), -torch.inf, dtype=problem.state_dtype)
        for dense, part, tokens_q, _ in sequences(problem, inputs):
            if dense.seqlen_q and dense.seqlen_k:
                one_out, one_lse = _forward(dense, part)
                out[tokens_q], lse[:, tokens_q] = one_out[0], one_lse[0]
        return out, lse

    def prepared(self, problem: Problem) -> Whole | None:
        """A shorter way for problems that are one call of torch's kernel."""
        return whole(problem)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        """dq, dk and dv come out together; those that are needed are returned."""
        if not problem.varlen:
            return _backward(problem, inputs, out, lse, dout, dlse)
        grads = {name: torch.zeros_like(getattr(inputs, name)) for name in problem.needs_grad}
        for dense, part, tokens_q, tokens_k in sequences(problem, inputs):
            if not dense.seqlen_q or not dense.seqlen_k:
                continue
            one_dlse = None if dlse is None else dlse[None, :, tokens_q]
            one = _backward(dense, part, out[None, tokens_q], lse[None, :, tokens_q], dout[None, tokens_q], one_dlse)
            for name, grad in one.items():
                grads[name][tokens_q if name == "q" else tokens_k] = grad[0]
        return grads


def _forward(problem: Problem, inputs: Inputs) -> State:
    q, k, v = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    added = None if inputs.bias is None and inputs.mask is None else _additive(problem, inputs)
    scale = problem.softmax_scale
    only = kernel.only_part(problem)
    if only is not None:
        out, lse = kernel.forward(q, k, v, added, only.causal, scale)
        return out.transpose(1, 2), lse
    found = kernel.parts(problem)
    states = []
    for part in found:
        keys = slice(part.first, part.last)
        cut = kernel.cut(added, part)
        out, lse = kernel.forward(q[:, :, part.row :], k[:, :, keys], v[:, :, keys], cut, part.causal, scale)
        states.append((out.transpose(1, 2), lse))
    if len(states) == 2:
        states = [_anew_where_large(problem, inputs, added, merge_states(*states[0], *states[1]))]
    if states and not found[0].row:
        return states[0]
    full_out = inputs.q.new_zeros((*inputs.q.shape[:-1], problem.headdim_v))
    full_lse = inputs.q.new_full(q.shape[:-1], -torch.inf, dtype=problem.state_dtype)
    for out, lse in states:
        full_out[:, found[0].row :], full_lse[:, :, found[0].row :] = out, lse
    return full_out, full_lse


def _anew_where_large(problem: Problem, inputs: Inputs, added: torch.Tensor | None, merged: State) -> State:
    """The rows whose lse is too large for the weights of a merge, computed in one piece: as a rule, none."""
    out, lse = merged
    limit = kernel.LSE_LIMIT[problem.dtype]
    if _largest(lse) <= limit:
        return merged
    large = (lse.abs() > limit) & lse.isfinite()
    if not bool(large.any()):
        return merged
    at = large.flatten(0, 1).any(0).nonzero()[:, 0]
    pairs = rowwise.Pairs(at, problem.seqlen_k, added, band(problem).upper, problem.state_dtype)
    q, k, v = inputs.q.transpose(1, 2), inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    out_rows, lse[:, :, at] = rowwise.forward(q, k, v, pairs, problem.softmax_scale)
    out[:, at] = out_rows.transpose(1, 2)
    return out, lse


def _backward(
    problem: Problem,
    inputs: Inputs,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> Gradients:
    found = kernel.parts(problem)
    if not found:
        return {name: torch.zeros_like(getattr(inputs, name)) for name in problem.needs_grad}
    row = found[0].row
    k, v = inputs.k.transpose(1, 2), inputs.v.transpose(1, 2)
    added, scale = _additive(problem, inputs), problem.softmax_scale
    rows = Rows(inputs.q.transpose(1, 2), out.transpose(1, 2), lse, dout.transpose(1, 2), dlse)
    if row:
        q, out_rows, lse_rows, dout_rows = (t[:, :, row:] for t in rows[:4])
        rows = Rows(q, out_rows, lse_rows, dout_rows, None if dlse is None else dlse[:, :, row:])
    limit = kernel.LSE_LIMIT[problem.dtype]
    most = _largest(rows.lse)
    if most == torch.inf:
        rows = kernel.without_empty(rows)
        most = _largest(rows.lse)
    if most > limit and _is_asked_for(rows, limit):
        upper = band(problem).upper
        cut = kernel.cut(added, Part(row, 0, problem.seqlen_k, False))
        dq, dk, dv = rowwise.backward(rows, k, v, cut, None if upper is None else upper + row, scale)
        return _named(problem, torch.nn.functional.pad(dq, (0, 0, row, 0)), dk, dv)
    only = kernel.only_part(problem)
    if only is not None:
        return _named(problem, *kernel.backward(rows, k, v, added, only.causal, scale))
    # the rectangle and the triangle share their rows, and no key
    dq = torch.zeros_like(inputs.q, dtype=problem.state_dtype).transpose(1, 2)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for part in found:
        keys = slice(part.first, part.last)
        grads = kernel.backward(rows, k[:, :, keys], v[:, :, keys], kernel.cut(added, part), part.causal, scale)
        dq[:, :, row:] += grads[0]
        dk[:, :, keys], dv[:, :, keys] = grads[1], grads[2]
    return _named(problem, dq, dk, dv)


def _largest(lse: torch.Tensor) -> float:
    """|lse| at most; two plain reductions take a third of the time of a norm where little else is in the caches."""
    return max(float(lse.max()), -float(lse.min()))


def _is_asked_for(rows: Rows, limit: float) -> bool:
    """Whether a gradient flows into any row whose lse is too large."""
    large = rows.lse.abs() > limit
    asked = (rows.dout != 0).any(-1)
    if rows.dlse is not None:
        asked = asked | (rows.dlse != 0)
    return bool((large & asked).any())


def _named(problem: Problem, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Gradients:
    """The gradients that are needed, heads back in third place, in the inputs' dtype."""
    named = {}
    for name, grad in (("q", dq), ("k", dk), ("v", dv)):
        if name in problem.needs_grad:
            grad = grad.transpose(1, 2)
            named[name] = grad if grad.dtype == problem.dtype else grad.to(problem.dtype)
    return named


BACKEND = SdpaBackend()
