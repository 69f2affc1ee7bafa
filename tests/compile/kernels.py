"""Every kernel that a call would launch, compiled for a device that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget

from tilewise.backends.triton import backward_plan, launch, plans
from tilewise.device import DeviceFacts
from tilewise.inputs import Arguments, describe
from tilewise.problem import GRAD_NAMES

KIB = 1024
# arch: (compiler target, shared memory that one block may have)
TARGETS: dict[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * KIB),
    "sm_86": (GPUTarget("cuda", 86, 32), 99 * KIB),
    "sm_89": (GPUTarget("cuda", 89, 32), 99 * KIB),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * KIB),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * KIB),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 * KIB),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * KIB),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160 * KIB),
}


class Wanted(NamedTuple):
    """A kernel that a plan would launch."""

    kernel: Any
    arguments: tuple[Any, ...]
    config: launch.Config


@contextmanager
def recorded(facts: DeviceFacts) -> Iterator[list[Wanted]]:
    """Inside, plans are made for ``facts`` and their launches recorded instead of compiled."""
    wanted: list[Wanted] = []

    class Record:
        def __init__(self, kernel: Any, grid: int, pointers: Any, tail: Any, config: Any, *_: Any) -> None:
            wanted.append(Wanted(kernel, (*pointers, *tail), config))

    saved = [
        (module, name, getattr(module, name))
        for module in (plans, backward_plan)
        for name in ("Launch", "device_facts")
    ]
    for module in (plans, backward_plan):
        module.Launch, module.device_facts = Record, lambda device: facts
    try:
        yield wanted
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def launches(
    arch: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    backward: bool,
    names: tuple[str, ...] = GRAD_NAMES,
    has_dlse: bool = True,
    **options: Any,
) -> list[Wanted]:
    """What one call on CPU tensors would launch on ``arch``, every gradient asked for, or those of ``names``."""
    plain = dict.fromkeys(Arguments._fields) | {
        "causal": "none", "softcap": 0.0, "dropout_p": 0.0, "deterministic": False, "needs_grad": [], "backend": "auto",
    }  # fmt: skip
    needs = [n for n in names if n in ("q", "k", "v") or n in options] if backward else []
    problem, inputs = describe(Arguments(**{**plain, "q": q, "k": k, "v": v, "needs_grad": needs, **options}))
    problem = problem.replace(device_type="cuda")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    facts = DeviceFacts(type="cuda", arch=arch, multiprocessors=132, shared_memory=TARGETS[arch][1], triton="3.6.0")
    with recorded(facts) as wanted:
        if backward:
            backward_plan.BackwardPlan(problem, inputs, (q, k, v, out, out), has_dlse)
        else:
            plans.ForwardPlan(problem, inputs, (q, k, v))
    return wanted


def build(wanted: Wanted, arch: str) -> Any:
    """The compiled kernel."""
    return launch.compile_kernel(wanted.kernel, wanted.arguments, wanted.config, TARGETS[arch][0])
