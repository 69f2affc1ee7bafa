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
from tilewise.dispatch.backend import Gradients, Reason, State, old_triton
from tilewise.inputs import Inputs
from tilewise.problem import DTYPE_NAMES, Problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON = (3, 6)  # the oldest whose language and launcher the kernels are written for
PLAN_LIMIT = 4096  # plans hold no tensors; past this many the cache starts anew


class Triton:
    """Exact attention in Triton. The backward uses no atomics: equal inputs give equal bits, every run."""

    name = "triton"
    auto_devices = frozenset({"cuda"})

    def __init__(self) -> None:
        self._plans: dict[object, Any] = {}

    def supports(self, problem: Problem, facts: DeviceFacts) -> tuple[Reason, ...]:
        """Every feature, forward and backward; not fp64, and second derivatives are the cpu backend's."""
        reasons = [*old_triton(facts, TRITON)]
        if facts.type != "cuda" and not INTERPRETED:
            reasons.append(Reason("device", facts.type, "cuda", "TRITON_INTERPRET=1 runs it slowly on the CPU"))
        if facts.arch.startswith("sm_") and int(facts.arch[3:]) < 80:
            reasons.append(Reason("arch", facts.arch, "sm_80 or later"))
        if problem.dtype not in DTYPES:
            reasons.append(Reason("dtype", DTYPE_NAMES.get(problem.dtype, str(problem.dtype)), "bf16, fp16 or fp32"))
        elif INTERPRETED and problem.dtype == torch.bfloat16:
            reasons.append(Reason("dtype", "bf16", "fp16 or fp32 under Triton's interpreter"))
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

        tile = tiles.choose_shape("forward", problem, facts, host.VECTOR_BYTES).tile
        return tile.block_m, tile.block_n

    def copies(self, problem: Problem) -> dict[str, int]:
        """None."""
        return {}

    def forward(self, problem: Problem, inputs: Inputs) -> State:
        """(out, lse) in one launch; masks and segments are scanned first, packed tokens that nobody owns cleared."""
        plan = self._plan(_forward_plan, problem, inputs, inputs[:3])
        state: State
        if _is_elsewhere(plan.index):
            with _on_device(inputs.q.device):
                state = plan.run(inputs)
        else:
            state = plan.run(inputs)
        return state

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        """The gradients named in ``problem.needs_grad``; memory beside them is two fp32 numbers a row.

        dout is copied where its channels are not contiguous, as autograd's expanded ones are: one pass over it costs
        less than what reading it that way would.
        """
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        lse = lse.contiguous()  # saved tensors may come back in another layout
        if dlse is not None:
            dlse = dlse.contiguous()
        plan = self._plan(_backward_plan, problem, inputs, (*inputs[:3], out, dout), dlse is not None)
        gradients: Gradients
        if _is_elsewhere(plan.index):
            with _on_device(inputs.q.device):
                gradients = plan.run(inputs, out, lse, dout, dlse)
        else:
            gradients = plan.run(inputs, out, lse, dout, dlse)
        return gradients

    def _plan(self, make: Any, problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...], *more: Any) -> Any:
        """The launches of a call, kept by all that they depend on: facts, strides, alignment, optional tensors."""
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        extras = None
        if host.has_extras(problem):
            extras = host.is_paired(inputs), *[
                None if t is None else (t.dtype, t.stride(), t.data_ptr() % host.VECTOR_BYTES) for t in inputs[3:-1]
            ]
        key = (make, problem, addresses % host.VECTOR_BYTES, tensors[0].get_device(), extras, inputs.batch_offset, more,
               host.precision(problem), *[t.stride() for t in tensors])  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLAN_LIMIT:
                self._plans.clear()
            from tilewise.backends.triton.launch import side_by_side

            with _on_device(inputs.q.device), side_by_side():  # compiled for the current device and loaded there
                plan = self._plans[key] = make(problem, inputs, tensors, *more)
        return plan


def _forward_plan(problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...]) -> Any:
    from tilewise.backends.triton.plans import ForwardPlan

    return ForwardPlan(problem, inputs, tensors)


def _backward_plan(problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...], has_dlse: bool) -> Any:
    from tilewise.backends.triton.backward_plan import BackwardPlan

    return BackwardPlan(problem, inputs, tensors, has_dlse)


def _is_elsewhere(index: int | None) -> bool:
    """Whether another device is current than that of the call: a kernel is launched on the current one."""
    return index is not None and torch._C._cuda_getDevice() != index


def _on_device(device: torch.device) -> Any:
    """``device`` made current."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


BACKEND = Triton()
