"""The Hopper backend: what it takes, and a call's way to its plan."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.backends.hopper.tiles import MAX_HEADDIM, forward_tile, fp8_tile, rate, seen_keys
from tilewise.descale import BLOCK, FP8
from tilewise.device import DeviceFacts
from tilewise.dispatch.backend import Gradients, Reason, State, forward_only, old_triton
from tilewise.inputs import Inputs
from tilewise.masks import band, kept_pairs
from tilewise.problem import DTYPE_NAMES, Problem

TRITON = (3, 6)
PLANS = 4096
OVERHEAD = 1.0e-5  # seconds


def _machine_reasons(problem: Problem, facts: DeviceFacts) -> list[Reason]:
    found = []
    if problem.device_type != "cuda":
        found.append(Reason("device", problem.device_type, "cuda"))
    if facts.arch != "sm_90":
        found.append(Reason("arch", facts.arch or "unknown", "sm_90"))
    found += old_triton(facts, TRITON)
    if problem.dtype not in (torch.float16, torch.bfloat16, FP8):
        found.append(Reason("dtype", DTYPE_NAMES.get(problem.dtype, str(problem.dtype)), "fp16, bf16 or fp8"))
    return found


def _shape_reasons(problem: Problem) -> list[Reason]:
    found = []
    step = 16 // problem.dtype.itemsize  # channels in what the copy engine's strides are multiples of
    for name, dim in (("headdim", problem.headdim), ("headdim_v", problem.headdim_v)):
        if dim > MAX_HEADDIM or dim % step:
            found.append(Reason(name, str(dim), f"a multiple of {step}, at most {MAX_HEADDIM}"))
    if not problem.inner_contiguous:
        found.append(Reason("strides", "a last stride that is not 1", "contiguous channels", "call .contiguous()"))
    rows = max(problem.total_q, problem.total_k, problem.seqlen_q, problem.seqlen_k)
    if rows >= 1 << 29:
        found.append(Reason("seqlen", str(rows), "less than 2**29"))
    return found


SOFTCAP_EXACT = 4096  # primitives.capped is off by up to the cap times 2**-22, here a thousandth of a score


def _feature_reasons(problem: Problem) -> list[Reason]:
    found = [
        Reason(name, "one", "none")
        for name, present in (
            ("mask", problem.mask_shape is not None),
            ("bias", problem.bias_shape is not None),
        )
        if present
    ]
    if problem.segments and problem.dtype == FP8:
        found.append(Reason("segments", "one with fp8", "none, or fp16 or bf16"))
    if problem.softcap > SOFTCAP_EXACT:
        found.append(Reason("softcap", f"{problem.softcap:g}", f"at most {SOFTCAP_EXACT}"))
    if problem.dropout_p:
        found.append(Reason("dropout_p", f"{problem.dropout_p:g}", "0"))
    if problem.derivative not in ("forward", "backward"):
        found.append(Reason("derivative", problem.derivative, "forward or backward", 'backend="reference" has it'))
    if not problem.needs_grad:
        return found
    if problem.deterministic:
        found.append(Reason("deterministic", "True with a gradient", "False: dq is summed in any order"))
    return found


class Hopper:
    """Warp-specialised TMA and wgmma kernels for sm_90a."""

    name = "hopper"
    auto_devices = frozenset({"cuda"})

    def __init__(self) -> None:
        self._plans: dict[object, Any] = {}

    def supports(self, problem: Problem, facts: DeviceFacts) -> tuple[Reason, ...]:
        """Every reason against it."""
        reasons = (*_machine_reasons(problem, facts), *_shape_reasons(problem), *_feature_reasons(problem))
        return (*reasons, *forward_only(problem))

    def cost(self, problem: Problem, facts: DeviceFacts) -> float:
        """Seconds at the rates of ``tiles.RATES``; the packed form's lengths are upper bounds."""
        pairs = kept_pairs(band(problem), problem.seqlen_q, problem.seqlen_k) * problem.batch * problem.nheads
        flops = 2.0 * pairs * (problem.headdim + problem.headdim_v)
        if problem.derivative == "backward":
            return OVERHEAD + 2.5 * flops / rate(problem)
        return OVERHEAD + flops / rate(problem)

    def tile(self, problem: Problem, facts: DeviceFacts) -> tuple[int, int]:
        """Query rows and keys of a forward tile."""
        tile = fp8_tile(problem) if problem.dtype == FP8 else forward_tile(problem)
        return tile.block_m, tile.block_n

    def copies(self, problem: Problem) -> dict[str, int]:
        """Of v with e4m3 numbers and 256 channels, transposed once where many queries meet a key."""
        if problem.dtype != FP8 or (tile := fp8_tile(problem)).turners:
            return {}
        seen = seen_keys(problem)
        keys = -(-(seen.end - seen.begin) // BLOCK) * BLOCK
        return {"v transposed": problem.batch * problem.nheads_k * keys * tile.block_dv}

    def forward(self, problem: Problem, inputs: Inputs) -> State:
        """(out, lse). Strides that the copy engine cannot walk, or an unaligned address, cost a copy."""
        q, k, v = inputs.q, inputs.k, inputs.v
        index = q.get_device()
        if _elsewhere(index):
            with torch.cuda.device(index):
                return self.forward(problem, inputs)
        key = (problem, q.stride(), k.stride(), v.stride(), _segment_types(inputs), index)
        plan = self._plans.get(key)
        if plan is None:
            if problem.is_empty or _nothing_seen(problem):
                return _empty_forward(problem, inputs)
            plan = self._remember(key, _forward_plan(problem, inputs))
        if not plan.loadable or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            q, k, v = (t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))
            return self.forward(problem, inputs.replace(q=q, k=k, v=v))
        state: State = plan.run(inputs)
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
        """The gradients named in ``problem.needs_grad``."""
        q, k, v = inputs.q, inputs.k, inputs.v
        index = q.get_device()
        if _elsewhere(index):
            with torch.cuda.device(index):
                return self.backward(problem, inputs, out, lse, dout, dlse)
        lse = lse.contiguous()
        dlse = None if dlse is None else dlse.float().contiguous()
        strides = (q.stride(), k.stride(), v.stride(), out.stride(), dout.stride())
        key = (problem, strides, dlse is None, _segment_types(inputs), index)
        plan = self._plans.get(key)
        if plan is None:
            if problem.is_empty or _nothing_seen(problem):
                return _empty_backward(problem, inputs, lse, dlse)
            from tilewise.backends.hopper.backward_plan import BackwardPlan

            plan = self._remember(key, BackwardPlan(problem, inputs, out, dout, dlse is not None))
        if not plan.loadable or (q.data_ptr() | k.data_ptr() | v.data_ptr() | dout.data_ptr()) & 15:
            q, k, v, dout = (t.clone(memory_format=torch.contiguous_format) for t in (q, k, v, dout))
            return self.backward(problem, inputs.replace(q=q, k=k, v=v), out, lse, dout, dlse)
        grads: Gradients = plan.run(inputs, out, lse, dout, dlse)
        return grads

    def _remember(self, key: object, plan: Any) -> Any:
        if len(self._plans) >= PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan


def _forward_plan(problem: Problem, inputs: Inputs) -> Any:
    if problem.dtype == FP8:
        from tilewise.backends.hopper.plans_fp8 import Fp8ForwardPlan

        return Fp8ForwardPlan(problem, inputs)
    from tilewise.backends.hopper.plans import ForwardPlan

    return ForwardPlan(problem, inputs)


def _segment_types(inputs: Inputs) -> tuple[torch.dtype, torch.dtype] | None:
    """What the kernels before a pass are compiled for beside the problem."""
    q, k = inputs.segments_q, inputs.segments_k
    return None if q is None or k is None else (q.dtype, k.dtype)


def _elsewhere(index: int) -> bool:
    """Whether a device other than the current one holds the tensors; kernels are launched on the current one."""
    return index >= 0 and index != torch.cuda.current_device()


def _nothing_seen(problem: Problem) -> bool:
    """Whether the band alone hides every key from every query."""
    if problem.varlen:
        return False
    seen = seen_keys(problem)
    return seen.begin + seen.unseen >= seen.end


def _empty_forward(problem: Problem, inputs: Inputs) -> State:
    """Every row is empty: out 0, lse -inf, or the sink's where there are rows."""
    q = inputs.q
    out = q.new_zeros((*q.shape[:-1], problem.headdim_v), dtype=problem.out_dtype)
    if problem.varlen:
        return out, q.new_full((problem.nheads, problem.total_q), -torch.inf, dtype=torch.float32)
    shape = (problem.batch, problem.nheads, problem.seqlen_q)
    if inputs.sink is not None:
        return out, inputs.sink.float()[..., None].expand(shape).contiguous()
    return out, q.new_full(shape, -torch.inf, dtype=torch.float32)


def _empty_backward(problem: Problem, inputs: Inputs, lse: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
    """Zeros, but for a sink, which is then all of lse."""
    grads = {
        name: torch.zeros_like(getattr(inputs, name), memory_format=torch.contiguous_format)
        for name in problem.needs_grad
    }
    if "sink" in grads and dlse is not None and lse.numel():
        grads["sink"] = dlse.float().masked_fill(lse == -torch.inf, 0.0).sum(-1)
    return grads


BACKEND = Hopper()
