"""The features that the Triton backend is tested on, with and without a GPU, and the check that they share."""

from __future__ import annotations

from typing import Any

import torch

import tilewise
from tilewise.testing import Sample, Spec, make
from tilewise.testing.judge import assert_exact

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


def check(spec: Spec, seed: int = 0, **keywords: Any) -> None:
    """Output, lse and every gradient within the budget of plain PyTorch, unseen keys and fresh memory poisoned."""
    assert_exact(make(spec, seed), "triton", **keywords)


def check_rising(spec: Spec, step: float) -> None:
    """Scores that rise by ``step`` from key to key, so that a row's maximum moves from tile to tile, or lags behind.

    The channel that does it is the last one: what tensor cores add to a large sum they cut off.
    """
    sample = make(spec, seed=4)
    with torch.no_grad():
        sample.q[..., -1] = sample.spec.headdim**0.5
        keys = torch.arange(sample.k.shape[1], device=sample.k.device)
        sample.k[..., -1] = (step * keys)[:, None].to(sample.k.dtype)
    assert_exact(sample, "triton")


def run(sample: Sample, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the Triton backend."""
    function = tilewise.attention_varlen_with_lse if sample.spec.varlen else tilewise.attention_with_lse
    return function(sample.q, sample.k, sample.v, backend="triton", **{**sample.options, **changes})


def gradients(sample: Sample, state: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of <out, dout> + <lse, dlse> by name."""
    named = sample.differentiable()
    found = torch.autograd.grad(list(state), list(named.values()), [sample.dout, sample.dlse])
    return dict(zip(named, found, strict=True))


def check_paired(spec: Spec) -> None:
    """Packed sequences whose queries and keys share one tensor of offsets, as their plan knows."""
    sample = make(spec, seed=2)
    sample.options["cu_seqlens_k"] = sample.options["cu_seqlens_q"]
    assert_exact(sample, "triton")


def check_neighbours(spec: Spec, apart: bool = False) -> None:
    """Packed sequences beside one of NaNs: the same bits as beside ordinary numbers.

    Keys have the queries' offsets; apart: equal ones in a tensor of their own, as a plan cannot know.
    """
    sample = make(spec, seed=3)
    starts = sample.options["cu_seqlens_q"].tolist()
    sample.options["cu_seqlens_k"] = sample.options["cu_seqlens_q"].clone() if apart else sample.options["cu_seqlens_q"]
    ill = slice(starts[1], starts[2])
    rows = torch.ones(starts[-1], dtype=torch.bool)
    rows[ill] = False
    found = []
    for value in (0.5, float("nan")):
        with torch.no_grad():
            for tensor in (sample.q, sample.k, sample.v, sample.dout):
                tensor[ill] = value
        out, lse = run(sample)
        grads = torch.autograd.grad(out, (sample.q, sample.k, sample.v), sample.dout)
        found.append([t[: starts[-1]][rows.to(t.device)] for t in (out, lse.transpose(0, 1), *grads)])
    for clean, beside in zip(*found, strict=True):
        assert torch.equal(clean, beside)
