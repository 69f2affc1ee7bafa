"""The kernels a call on Hopper would launch, compiled for sm_90a without a GPU, and what their machine code says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.compile.spills import PTXAS, TOOLS, loop_spans
from tilewise.backends.hopper import backward_plan, launch, plans, plans_fp8, plans_segments
from tilewise.descale import FP8, blocks_of
from tilewise.fp8 import describe_scaled
from tilewise.inputs import Arguments, describe

SHARED_MEMORY = 227 * 1024  # bytes that one block may have


class Wanted(NamedTuple):
    """A kernel that a plan would launch."""

    kernel: Any
    arguments: tuple[Any, ...]
    num_warps: int


class Machine(NamedTuple):
    """What ptxas and the disassembly say; ``hot_spills``: local memory accesses in loops of matrix products."""

    shared: int
    serialized: bool
    spilled: int
    hot_spills: int
    products: int


@contextmanager
def recorded() -> Iterator[list[Wanted]]:
    """Inside, plans record their launches instead of compiling them."""
    wanted: list[Wanted] = []

    def record(kernel: Any, grid: int, arguments: tuple[Any, ...], num_warps: int = 4, early: bool = False) -> None:
        wanted.append(Wanted(kernel, arguments, num_warps))

    with pytest.MonkeyPatch.context() as patch:
        for module in (plans, plans_fp8, plans_segments, backward_plan):
            patch.setattr(module, "Launch", record)
            patch.setattr(module, "multiprocessors", lambda index: 132, raising=False)
        yield wanted


def launches(
    headdim: int,
    headdim_v: int,
    dtype: torch.dtype,
    varlen: bool = False,
    rows: int = 300,
    keys: int = 300,
    by_block: bool = False,
    **options: Any,
) -> list[Wanted]:
    """What forward and backward of one call would launch; fp8 has a forward, here with descales, maybe by block."""
    lead, lead_k = ((rows,), (rows,)) if varlen else ((2, rows), (2, keys))
    q, dout = (torch.empty(*lead, 4, dim, dtype=dtype) for dim in (headdim, headdim_v))
    k, v = (torch.empty(*lead_k, 2, dim, dtype=dtype) for dim in (headdim, headdim_v))
    offsets = torch.tensor([0, rows // 3, rows], dtype=torch.int32) if varlen else None
    plain = dict.fromkeys(Arguments._fields) | {
        "causal": "none",
        "softcap": 0.0,
        "dropout_p": 0.0,
        "deterministic": False,
        "needs_grad": ("q", "k", "v", "sink") if options.get("sink") else ("q", "k", "v"),
        "backend": "hopper",
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
    }
    for name in ("alibi_slopes", "sink"):
        if options.pop(name, False):
            plain[name] = torch.ones(4)
    arguments = Arguments(**(plain | {"q": q, "k": k, "v": v} | options))
    problem, inputs = describe(arguments)
    if dtype == FP8:
        blocks = (blocks_of(rows), blocks_of(keys), blocks_of(keys)) if by_block else ()
        problem, inputs = describe_scaled(
            arguments, [torch.ones(problem.batch, problem.nheads_k, *blocks[i : i + 1]) for i in range(3)]
        )
        with recorded() as wanted:
            plans_fp8.Fp8ForwardPlan(problem, inputs)
        return wanted
    with recorded() as wanted:
        plans.ForwardPlan(problem, inputs)
        backward_plan.BackwardPlan(problem, inputs, torch.empty_like(dout), dout, dlse=True)
    return wanted


def machine(wanted: Wanted, folder: Path) -> Machine:
    """Compile to machine code with warnings and disassemble."""
    compiled = launch.compile_kernel(wanted.kernel, wanted.arguments, wanted.num_warps)
    ptx, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
    ptx.write_text(compiled.asm["ptx"])
    command = [PTXAS, "-v", "--gpu-name=sm_90a", ptx, "-o", cubin]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    return Machine(
        shared=compiled.metadata.shared,
        serialized="serialized" in log,
        spilled=sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", log)),
        hot_spills=_local_accesses_in_loops(sass.splitlines()),
        products=len(re.findall("[HQ]GMMA", sass)),
    )


def _local_accesses_in_loops(lines: list[str]) -> int:
    """Loads and stores of local memory in the innermost loops of matrix products that store nothing of a tile.

    A wait is a loop as well, and lies inside them.
    """
    loops = [(a, b) for a, b in loop_spans(lines) if any("GMMA" in line for line in lines[a:b])]
    inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
    steps = [(a, b) for a, b in inner if not any("STG" in line for line in lines[a:b])]
    return sum("LDL" in line or "STL" in line for a, b in steps for line in lines[a:b])
