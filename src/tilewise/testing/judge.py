"""One call of tilewise held to the oracle: out, lse and every gradient, in poisoned memory, within the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilewise import functional
from tilewise.testing.budget import Verdict, within_budget
from tilewise.testing.factories import Sample
from tilewise.testing.oracle import attention_oracle, varlen_oracle, visible_pairs
from tilewise.testing.poison import poison_unseen, poisoned_memory

State = tuple[torch.Tensor, torch.Tensor]
ORDERS = 3  # of the channels, in which plain PyTorch may try again


class Yardstick(NamedTuple):
    """What plain PyTorch makes of a sample."""

    out: torch.Tensor
    lse: torch.Tensor
    grads: dict[str, torch.Tensor]


def _run_oracle(sample: Sample, dtype: torch.dtype, order: torch.Tensor | None = None) -> State:
    """The oracle, with the channels of q and k in another ``order``: the same sums, rounded otherwise."""
    function: Callable[..., State] = varlen_oracle if sample.spec.varlen else attention_oracle
    q, k = (sample.q, sample.k) if order is None else (sample.q[..., order], sample.k[..., order])
    return function(q, k, sample.v, dtype=dtype, **sample.oracle_options())


def _measure(sample: Sample, lse_dtype: torch.dtype, through_lse: bool, order: torch.Tensor | None) -> Yardstick:
    plain = _run_oracle(sample, sample.spec.yardstick_dtype, order)
    lse = plain[1] if plain[1].dtype == lse_dtype else _run_oracle(sample, lse_dtype, order)[1]
    return Yardstick(plain[0], lse, _gradients(sample, plain, through_lse))


def _gradients(sample: Sample, state: State, through_lse: bool) -> dict[str, torch.Tensor]:
    """Gradients of <dout, out> [+ <dlse, lse>] for every tensor of the sample that requires grad."""
    named = sample.differentiable()
    out, lse = state
    outputs, sent = [out], [sample.dout.to(out.dtype)]
    if through_lse:
        outputs, sent = [out, lse], [sent[0], sample.dlse.to(lse.dtype)]
    if not any(output.requires_grad for output in outputs):
        return {}
    grads = torch.autograd.grad(outputs, list(named.values()), sent, allow_unused=True)
    zeros = (
        torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(named.values(), grads, strict=True)
    )
    return dict(zip(named, zeros, strict=True))


def _floors(exact: Sample, out: torch.Tensor, lse: torch.Tensor) -> dict[str, float]:
    """What one rounding of the products that add up, and mostly cancel, in each result may cost.

    In out these are p and |v|, in dv exp(s - lse) with its rounded lse. In the other gradients they are sum_d |dout_d
    v_d|, which stands twice in dp - delta, and |dout_d out_d|, in which out was rounded to its own dtype; then what
    that is multiplied by, and summed over: independent roundings of many rows add up like their square root.
    """
    spec = exact.spec
    epsilon = torch.finfo(torch.float64 if spec.dtype == torch.float64 else torch.float32).eps
    sizes = {name: float(t.detach().abs().max()) if t.numel() else 0.0 for name, t in exact.float_tensors().items()}
    with torch.no_grad():
        v = exact.v.abs().repeat_interleave(spec.nheads // spec.nheads_k, dim=-2)
        dp = torch.einsum("...ihd,...jhd->...hij", exact.dout.abs(), v)
        delta = (exact.dout * out).abs().sum(-1)
        height = max(1.0, float(lse.masked_fill(lse.isinf(), 0.0).abs().max())) if lse.numel() else 1.0
    if not dp.numel():
        return {}
    kept = 1 - min(0.9, exact.options.get("dropout_p", 0.0))
    cancelling = 2 * epsilon * float(dp.max()) / kept + torch.finfo(spec.dtype).eps * float(delta.max())
    cancelling += epsilon * float(exact.dlse.abs().max())
    scale = exact.options.get("softmax_scale")
    scale = abs(spec.headdim**-0.5 if scale is None else scale)
    seqlen_q, seqlen_k = exact.q.shape[-3], exact.k.shape[-3]
    rows = float(seqlen_q * spec.nheads / spec.nheads_k) ** 0.5
    typical = float(exact.dout.square().mean().sqrt())
    return {
        "out": 2 * epsilon * sizes["v"] / kept,
        "q": scale * cancelling * sizes["k"],
        "k": scale * cancelling * sizes["q"] * rows,
        "v": epsilon * height * max(float(exact.dout.abs().max()), typical * rows) / kept,
        "bias": cancelling,
        "alibi_slopes": cancelling * rows * max(seqlen_q, seqlen_k),
        "sink": cancelling * rows,
    }


def poison(sample: Sample, value: float = float("nan")) -> int:
    """Write ``value`` into every key of the sample that no query may see, and, packed, into tokens of no sequence."""
    spec, options = sample.spec, sample.options
    rules: dict[str, Any] = {name: options[name] for name in ("causal", "window_size") if name in options}
    if spec.lengths_q is None:
        rules |= {name: options[name] for name in ("segments", "mask") if name in options}
        return poison_unseen(sample.k, sample.v, visible_pairs(sample.q, sample.k, **rules), value)
    starts_q, starts_k = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    count = 0
    for index in range(len(starts_q) - 1):
        q, k, v = (
            tensor.detach()[None, starts[index] : starts[index + 1]]
            for tensor, starts in ((sample.q, starts_q), (sample.k, starts_k), (sample.v, starts_k))
        )
        count += poison_unseen(k, v, visible_pairs(q, k, **rules), value)
    for tensor, starts in ((sample.q, starts_q), (sample.k, starts_k), (sample.v, starts_k)):
        tensor.detach()[starts[-1] :, : 1 if tensor.stride(1) == 0 else None] = value
    return count


def judge(
    sample: Sample,
    backend: str,
    *,
    through_lse: bool = True,
    poison_value: float | None = float("nan"),
    lse_dtype: torch.dtype | None = None,
    **options: Any,
) -> list[Verdict]:
    """Verdicts on out, lse and the gradient of every tensor that requires grad.

    The call runs in poisoned memory, and with ``poison_value`` (None: untouched) in every key that no query may see.
    ``through_lse`` sends a gradient into lse as well. ``lse_dtype`` is what plain PyTorch's lse is computed in to
    measure lse: by default fp32 even for half inputs, since lse is never stored in a half dtype. ``options`` are added
    to the sample's. Where a few pairs of scores decide the largest error, as they do when all are large, plain
    PyTorch's own is a matter of the order in which it adds: so what is over its budget is measured in ORDERS others.
    """
    exact = sample.converted(torch.float64)
    expected = _run_oracle(exact, torch.float64)
    lse_dtype = torch.float32 if lse_dtype is None else lse_dtype
    plain = _measure(sample, lse_dtype, through_lse, None)
    expected_grads = _gradients(exact, expected, through_lse)
    if poison_value is not None:
        poison(sample, poison_value)
    function = functional.attention_varlen_with_lse if sample.spec.varlen else functional.attention_with_lse
    with poisoned_memory():
        out, lse = function(sample.q, sample.k, sample.v, **(sample.options | options), backend=backend)
        grads = _gradients(sample, (out, lse), through_lse)
    floors = _floors(exact, *expected)
    for name, grad in grads.items():
        if grad.dtype != sample.float_tensors()[name].dtype:
            raise AssertionError(f"d{name}: dtype is {grad.dtype}, must be that of {name}")

    def compare(plain: Yardstick) -> list[Verdict]:
        verdicts = [
            within_budget(out, expected[0], plain.out, floor=floors.get("out", 0.0)),
            within_budget(lse, expected[1], plain.lse, name="lse"),
        ]
        for name, grad in grads.items():
            floor = floors.get(name, 0.0)
            verdicts.append(within_budget(grad, expected_grads[name], plain.grads[name], name=f"d{name}", floor=floor))
        return verdicts

    verdicts = compare(plain)
    dtypes = {name: tensor.dtype for name, tensor in sample.float_tensors().items()}
    for seed in range(ORDERS):
        if all(verdict.ok for verdict in verdicts):
            break
        generator = torch.Generator("cpu").manual_seed(seed)
        order = torch.randperm(sample.spec.headdim, generator=generator, device="cpu").to(out.device)
        again = compare(_measure(exact.converted(sample.spec.dtype, dtypes), lse_dtype, through_lse, order))
        verdicts = [old if old.ok else new for old, new in zip(verdicts, again, strict=True)]
    return verdicts


def assert_exact(sample: Sample, backend: str, **keywords: Any) -> None:
    """``judge``, raising AssertionError with every verdict that is over its budget."""
    failed = [str(verdict) for verdict in judge(sample, backend, **keywords) if not verdict.ok]
    if failed:
        raise AssertionError(f"{backend}: {sample.spec}\n" + "\n".join(failed))
