"""Triton as a backend: every feature on CUDA and ROCm devices, and on the CPU under Triton's interpreter.

This module imports without Triton, so that dispatch can ask what it supports; the first call imports the kernels.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tilewise import masks
from tilewise.backends.triton import facts as host
from tilewise.backends.triton.facts import INTERPRETED
from tilewise.device import DeviceFacts
from tilewise.dispatch.backend import Gradients, Reason, State
from tilewise.inputs import Inputs
from tilewise.problem import Problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAN_LIMIT = 4096  # plans hold no tensors; past this many the cache starts anew


class Triton:
    """Exact attention in Triton. The backward uses no atomics: equal inputs give equal bits, every run."""

    name = "triton"
    auto_devices = frozenset({"cuda"})

    def __init__(self) -> None:
        self._plans: dict[object, Any] = {}

    def supports(self, problem: Problem, facts: DeviceFacts) -> tuple[Reason, ...]:
        """Every feature, forward and backward; not fp64, and second derivatives are the cpu backend's."""
        reasons = []
        if facts.triton is None:
            reasons.append(Reason("triton", "not installed", "triton 3.6", "pip install triton"))
        if facts.type != "cuda" and not INTERPRETED:
            reasons.append(Reason("device", facts.type, "cuda", "TRITON_INTERPRET=1 runs it slowly on the CPU"))
        if facts.arch.startswith("sm_") and int(facts.arch[3:]) < 80:
            reasons.append(Reason("arch", facts.arch, "sm_80 or later"))
        if problem.dtype not in DTYPES:
            reasons.append(Reason("dtype", str(problem.dtype).removeprefix("torch."), "bfloat16, float16 or float32"))
        elif INTERPRETED and problem.dtype == torch.bfloat16:
            reasons.append(Reason("dtype", "bfloat16", "float16 or float32 under Triton's interpreter"))
        if problem.derivative in ("jvp", "second"):
            reasons.append(Reason("derivative", problem.derivative, "forward or backward", 'backend="cpu" has it'))
        return tuple(reasons)

    def cost(self, problem: Problem, facts: DeviceFacts) -> float:
        """Seconds at the rates measured on an H200 (benchmarks/results), scaled by the number of multiprocessors."""
        if facts.type != "cuda":
            return 1e3
        pairs = (
            masks.kept_pairs(masks.band(problem), problem.seqlen_q, problem.seqlen_k) * problem.batch * problem.nheads
        )
        products = 3.5 if problem.derivative == "backward" else 1.0
        rate = 20e12 if problem.dtype == torch.float32 else 450e12
        flops = 2.0 * pairs * (problem.headdim + problem.headdim_v) * products
        return 2e-5 + flops / (rate * max(facts.multiprocessors, 1) / 132)

    def tile(self, problem: Problem, facts: DeviceFacts) -> tuple[int, int]:
        """(query rows, key columns) of the forward's tile for aligned tensors."""
        from tilewise.backends.triton import tiles

        row = tiles.choose_row("forward", problem, facts, host.VECTOR_BYTES)
        return row.block_m, row.block_n

    def forward(self, problem: Problem, inputs: Inputs) -> State:
        """(out, lse) in one launch; masks and segments are scanned first, packed tokens that nobody owns cleared."""
        from tilewise.backends.triton.plans import ForwardPlan

        q = inputs.q
        out = torch.empty((*q.shape[:-1], problem.headdim_v), dtype=q.dtype, device=q.device)
        rows = (
            (problem.nheads, problem.total_q) if problem.varlen else (problem.batch, problem.nheads, problem.seqlen_q)
        )
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        with _on_device(q.device):
            plan = self._plan(ForwardPlan, problem, inputs, (q, inputs.k, inputs.v, out))
            plan.run(inputs, out, lse)
        return out, lse

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        """The gradients named in ``problem.needs_grad``; memory beside them is delta, one fp32 number a row.

        dout is copied where its channels are not contiguous, as autograd's expanded ones are: one pass over it costs
        less than what reading it that way would.
        """
        from tilewise.backends.triton.backward_plan import BackwardPlan

        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        if dlse is not None:
            dlse = dlse.contiguous()
        with _on_device(dout.device):
            plan = self._plan(
                BackwardPlan, problem, inputs, (inputs.q, inputs.k, inputs.v, out, dout), dlse is not None
            )
            gradients: Gradients = plan.run(inputs, out, lse, dout, dlse)
        return gradients

    def _plan(self, kind: Any, problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...], *more: Any) -> Any:
        """The launches of a call, kept by all that they depend on: facts, strides, alignment, optional tensors."""
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        extras = None
        if host.has_extras(problem):
            extras = tuple(
                None if t is None else (t.dtype, t.stride(), t.data_ptr() % host.VECTOR_BYTES)
                for t in (inputs.bias, inputs.mask, inputs.alibi_slopes, inputs.sink, inputs.segments_q,
                          inputs.segments_k, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
            )  # fmt: skip
        key = (kind, problem, inputs.batch_offset, addresses % host.VECTOR_BYTES, extras, tensors[0].device, more,
               host.precision(problem), *[t.stride() for t in tensors])  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLAN_LIMIT:
                self._plans.clear()
            plan = self._plans[key] = kind(problem, inputs, tensors, *more)
        return plan


def _on_device(device: torch.device) -> Any:
    """``device`` made current if it is not: a kernel is launched on the current one."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        return torch.cuda.device(device)
    return contextlib.nullcontext()


BACKEND = Triton()
