"""Says what a call would do: which backend and why not the others, how much work, how much memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.device import GPU_NAMES, DeviceFacts, device_facts, known_gpu
from tilewise.dispatch import registry
from tilewise.dispatch.choose import Trace, survey
from tilewise.errors import InvalidInput, InvalidType
from tilewise.fp8 import NONE, Descales, describe_scaled
from tilewise.inputs import Arguments, Inputs, describe, is_wider, narrowed
from tilewise.iomodel import flops, memory, pairs
from tilewise.masks import TileCounts
from tilewise.problem import Problem


@dataclass(frozen=True)
class Explanation:
    """The answer of ``explain``; ``str()`` is for people, ``as_dict()`` for programs.

    ``backend`` is None when nothing runs the problem. ``kept_pairs`` is None where it depends on numbers that lie on
    a device. Counts are over batch and heads, memory is in bytes, ``tile`` is (query rows, key columns).
    """

    problem: Problem
    facts: DeviceFacts
    request: str
    backend: str | None
    trace: Trace
    tile: tuple[int, int] | None
    tiles: TileCounts | None
    all_pairs: int
    kept_pairs: int | None
    flops_forward: int | None
    flops_backward: int | None
    saved: memory.Saved
    copies: dict[str, int]

    @property
    def costs(self) -> dict[str, float]:
        """Estimated seconds of each backend that can run the problem."""
        return {row.name: row.cost for row in self.trace if row.cost is not None}

    def as_dict(self) -> dict[str, Any]:
        """Plain data: numbers, strings, lists and dicts."""
        facts = {
            name: str(value) if isinstance(value, torch.dtype) else value
            for name, value in (
                (f.name, getattr(self.problem, f.name)) for f in dataclasses.fields(self.problem) if f.compare
            )
        }
        return {
            "problem": {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()},
            "device": dataclasses.asdict(self.facts),
            "request": self.request,
            "backend": self.backend,
            "refused": {row.name: [reason._asdict() for reason in row.reasons] for row in self.trace if row.reasons},
            "able": self.costs,
            "tile": None if self.tile is None else list(self.tile),
            "tiles": None if self.tiles is None else self.tiles._asdict(),
            "pairs": {"all": self.all_pairs, "kept": self.kept_pairs},
            "flops": {"forward": self.flops_forward, "backward": self.flops_backward},
            "saved_for_backward_bytes": self.saved._asdict(),
            "copied_bytes": dict(self.copies),
        }

    def __str__(self) -> str:
        return "\n".join([*self._choice_lines(), *self._work_lines(), *self._memory_lines()])

    def _choice_lines(self) -> list[str]:
        where = f"{self.facts.type} {self.facts.arch}".strip()
        lines = [f"{self.problem.describe()} | {where}"]
        passes = " forward and backward" if self.problem.needs_grad else ""
        estimates = {name: f"estimated {1e3 * cost:.3g} ms{passes}" for name, cost in self.costs.items()}
        if self.backend is None:
            lines.append(
                "runs on    nothing: "
                + ("no backend can" if self.request == "auto" else self.request + " was asked for and refuses")
            )
        else:
            asked = "" if self.request == "auto" else ", which was asked for"
            lines.append(f"runs on    {self.backend}{asked}: {estimates[self.backend]}")
        for row in self.trace:
            if row.name in estimates and row.name != self.backend:
                lines.append(f"could run  {row.name}: {estimates[row.name]}")
            lines += [f"refused    {row.name}: {reason}" for reason in row.reasons]
        return lines

    def _work_lines(self) -> list[str]:
        if self.kept_pairs is None:
            lines = [f"pairs      {self.all_pairs:,}; how many are kept depends on numbers on the device"]
        else:
            share = 100 * self.kept_pairs / self.all_pairs if self.all_pairs else 100.0
            lines = [f"pairs      {self.kept_pairs:,} of {self.all_pairs:,} kept ({share:.1f} %)"]
        if self.tile is not None and self.tiles is not None:
            full, partial, skipped = self.tiles
            lines.append(f"tiles      {self.tile[0]} x {self.tile[1]}: {full:,} full, {partial:,} partial, "
                         f"{skipped:,} skipped")  # fmt: skip
        if self.flops_forward is not None and self.flops_backward is not None:
            backward = f", backward {_si(self.flops_backward)}FLOP" if self.problem.needs_grad else ""
            lines.append(f"work       forward {_si(self.flops_forward)}FLOP{backward}")
        return lines

    def _memory_lines(self) -> list[str]:
        lse, probabilities = (f"{_si(size, 1024)}B" for size in (self.saved.lse, self.saved.probabilities))
        if self.problem.needs_grad:
            return [
                f"saved      for backward: lse, {lse}, beside q, k, v and out; materialising attention saves P, "
                f"{probabilities}"
            ]
        return [
            f"made       beside out: lse, {lse}; materialising attention makes P, {probabilities}",
            *(f"copied     {what}, {_si(size, 1024)}B, for as long as the call" for what, size in self.copies.items()),
        ]


def _si(value: float, step: int = 1000) -> str:
    """A number with its prefix: 1.07 T, or with step 1024, 4.00 Gi."""
    prefixes = ["", "k", "M", "G", "T", "P", "E"] if step == 1000 else ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
    for prefix in prefixes[:-1]:
        if value < step:
            return f"{value:.3g} {prefix}" if prefix else f"{value:g} "
        value /= step
    return f"{value:.3g} {prefixes[-1]}"


def _facts(device: str | torch.device | DeviceFacts | None, tensor: torch.Tensor) -> DeviceFacts:
    if isinstance(device, DeviceFacts):
        return device
    if device is None:
        return device_facts(torch.device("cpu") if tensor.is_meta else tensor.device)
    if not isinstance(device, (str, torch.device)):
        raise InvalidType(f"device: is {device!r}, must be a device, its name, DeviceFacts or None")
    known = known_gpu(device) if isinstance(device, str) else None
    if known is not None:
        return known
    try:
        return device_facts(torch.device(device))
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"device: is {str(device)!r}, must be a device of this machine, DeviceFacts or one of "
            f"{', '.join(GPU_NAMES)} ({reason})"
        ) from error


def _bias_copy(problem: Problem, inputs: Inputs) -> dict[str, int]:
    """The copy of an fp64 bias that brings it into the range of the scores, which every backend gets."""
    if inputs.bias is None or not is_wider(problem.bias_dtype, problem.state_dtype):
        return {}
    return {"bias, in the range of fp32": narrowed(inputs.bias).numel() * inputs.bias.element_size()}


def explain_arguments(
    arguments: Arguments, device: str | torch.device | DeviceFacts | None, descales: Descales = NONE
) -> Explanation:
    """The explanation of one call's arguments on ``device``, q's own if None (the CPU for meta tensors)."""
    problem, inputs = describe(arguments) if descales == NONE else describe_scaled(arguments, descales)
    facts = _facts(device, arguments.q)
    problem = problem.replace(device_type=facts.type)
    name, trace = survey(problem, facts, arguments.backend)
    tile = None if name is None else registry.load(name).tile(problem, facts)
    kept = pairs.kept(problem, inputs)
    size = (problem.headdim, problem.headdim_v)
    return Explanation(
        problem=problem,
        facts=facts,
        request=arguments.backend,
        backend=name,
        trace=trace,
        tile=tile,
        tiles=None if tile is None else pairs.tiles(problem, inputs, *tile),
        all_pairs=pairs.every(problem, inputs),
        kept_pairs=kept,
        flops_forward=None if kept is None else flops.forward(kept, *size),
        flops_backward=None if kept is None else flops.backward(kept, *size),
        saved=memory.saved_for_backward(problem),
        copies={} if name is None else {**registry.load(name).copies(problem), **_bias_copy(problem, inputs)},
    )
