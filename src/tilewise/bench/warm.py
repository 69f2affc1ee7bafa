"""Compile what a run will need in several processes at once, into the disk caches that the run then reads.

Only processes that start afterwards read the caches whole, so this is done before the run's own first call.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence

from tilewise.bench import gpu_cases
from tilewise.bench.cases import Case
from tilewise.bench.gpu import Settings

# FlashAttention-4 keeps what it has compiled on disk only if this is set when it is imported
CACHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
COMPILED_AHEAD = ("fa2-sdpa", "cudnn-sdpa", "fa3")  # their kernels come compiled
Task = tuple[int, str]


def _kernel(case: Case, name: str) -> tuple[object, ...]:
    """Cases of a contender with equal keys need the same kernels; flex compiles every shape anew."""
    if name == "flex":
        return (case, name)
    features = (case.causal, case.window is not None, case.lengths is not None, case.bias)
    return (case.dtype, case.headdim, case.values, case.nheads_k is not None, case.keys != case.seqlen, features, name)


def tasks(settings: Settings, steps: Collection[str]) -> list[Task]:
    """(index of the case, contender), one for each kernel of the named steps; those that compile longest first."""
    found: dict[tuple[object, ...], Task] = {}
    for index, case in enumerate(gpu_cases.CASES):
        for name in settings.taking_part(case) if case.name in steps else ():
            if name == "flex" and case not in gpu_cases.COMPILED_PER_SHAPE:
                continue
            if name not in COMPILED_AHEAD:
                found.setdefault(_kernel(case, name), (index, name))
    slowest_first = ["flex", "fa4-cute"]
    return sorted(found.values(), key=lambda task: slowest_first.index(task[1]) if task[1] in slowest_first else 2)


def use_caches() -> None:
    """Read, in this process, what others compile; before a peer is imported."""
    os.environ.update(CACHES)


def compile_ahead(settings: Settings, steps: Collection[str], processes: int, limit: float) -> str:
    """Run the tasks of some steps in so many processes for at most ``limit`` seconds; says how it went."""
    start, all_tasks = time.perf_counter(), tasks(settings, steps)
    environment = os.environ | CACHES | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = []
    for index in range(processes):
        mine = [f"{case}:{name}" for case, name in all_tasks[index::processes]]
        if mine:
            command = [sys.executable, "-m", "tilewise.bench.warm", *mine]
            running.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
    cut = 0
    for process in running:
        try:
            process.wait(max(0.1, limit - (time.perf_counter() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            cut += 1
    text = f"compiled {len(all_tasks)} kernels ahead in {time.perf_counter() - start:.0f} s"
    return f"{text}; {cut} of {len(running)} processes were cut off" if cut else text


def _run(arguments: Sequence[str]) -> None:
    import torch

    from tilewise.bench import contenders, gate

    cases = list(gpu_cases.CASES.items())
    for text in arguments:
        index, _, name = text.partition(":")
        case, passes = cases[int(index)]
        setting = contenders.Setting(case, "backward" in passes)
        with contextlib.suppress(Exception):  # the run itself will tell
            call = setting.call(name)
            with torch.no_grad():
                call()
            if setting.backward:
                gate.run(call, setting.leaves, setting.dout)
            torch.cuda.synchronize()


if __name__ == "__main__":
    _run(sys.argv[1:])
