"""Runs one made-up call on the Triton backend and holds output, lse and every gradient against fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import tilewise
from tilewise.testing import Sample, Spec, assert_within_budget, attention_oracle, make, varlen_oracle

SINGLE: tuple[tuple[str, ...], ...] = (
    (), ("causal",), ("top_left",), ("window",), ("window_left",), ("window_right",), ("segments",), ("mask",),
    ("padding",), ("bias",), ("bias_shared",), ("bias_rows",), ("softcap",), ("alibi",), ("alibi_batch",), ("sink",),
    ("sink_batch",), ("dropout",), ("scale",),
)  # fmt: skip
COMBINED: tuple[tuple[str, ...], ...] = (
    ("causal", "window_left", "sink", "dropout"),
    ("mask", "bias", "alibi", "softcap", "causal"),
    ("segments", "top_left", "bias_rows", "sink_batch"),
    ("mask", "bias_shared", "dropout", "scale"),
    ("window", "segments", "mask", "alibi_batch", "softcap", "sink", "dropout"),
)
PACKED: tuple[tuple[str, ...], ...] = (
    (), ("causal",), ("window",), ("top_left", "alibi_batch"), ("softcap", "sink_batch", "dropout"),
)  # fmt: skip


def ids(value: Any) -> str | None:
    """A readable test id for a tuple of features."""
    return "+".join(value) or "plain" if isinstance(value, tuple) and all(isinstance(v, str) for v in value) else None


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor) and value.device.type != device:
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, device) for item in value)
    return value


def on_device(sample: Sample) -> Sample:
    """The sample with every option on its device."""
    device = sample.spec.device
    options = {name: _moved(value, device) for name, value in sample.options.items()}
    return dataclasses.replace(sample, options=options)


def run(sample: Sample, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the Triton backend."""
    function = tilewise.attention_varlen_with_lse if sample.spec.varlen else tilewise.attention_with_lse
    return function(sample.q, sample.k, sample.v, backend="triton", **{**sample.options, **changes})


def gradients(sample: Sample, out: torch.Tensor, lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of <out, dout> + <lse, dlse> over the rows that see a key, by name."""
    named = sample.differentiable()
    if not named:
        return {}
    finite = torch.where(lse.isfinite(), lse, 0.0)
    loss = (out * sample.dout.to(out.dtype)).sum() + (finite * sample.dlse.to(lse.dtype)).sum()
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(named.items(), found, strict=True)}


def judge(sample: Sample, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """out, lse and gradients of the oracle, computed in ``dtype``."""
    oracle = varlen_oracle if sample.spec.varlen else attention_oracle
    twin = sample.converted(dtype)
    options = {name: _moved(value, sample.spec.device) for name, value in twin.oracle_options().items()}
    out, lse = oracle(twin.q, twin.k, twin.v, dtype=dtype, **options)
    return out, lse, gradients(twin, out, lse)


def check(spec: Spec, seed: int = 0) -> None:
    """Output, lse and every gradient within the budget of plain PyTorch."""
    sample = on_device(make(spec, seed))
    expected, yardstick = judge(sample, torch.float64), judge(sample, spec.dtype)
    out, lse = run(sample)
    assert_within_budget(out, expected[0], yardstick[0])
    assert_within_budget(lse, expected[1], yardstick[1], name="lse", rounding=spec.dtype)
    for name, grad in gradients(sample, out, lse).items():
        assert_within_budget(grad, expected[2][name], yardstick[2][name], name=f"d{name}", rounding=spec.dtype)
