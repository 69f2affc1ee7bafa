"""Part 2: MiniLM's real weights on real text: eager, SDPA and tilewise side by side."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tilewise.demo import minilm, units, worker
from tilewise.demo.page import Section
from tilewise.demo.progress import Progress
from tilewise.demo.settings import Settings

IMPLEMENTATIONS = ("eager", "sdpa", "tilewise")
TITLE = "A real model: MiniLM"


def _measure(settings: Settings, folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """Measurements and hidden states by implementation, "fp64" (eager) among the states."""
    runs = [("fp64", "eager", "float64", 1), *((name, name, "float32", settings.repeats) for name in IMPLEMENTATIONS)]
    measured, states = {}, {}
    with Progress("MiniLM", len(runs)) as progress:
        for name, implementation, dtype, repeats in runs:
            path = folder / f"{name}.pt"
            measured[name] = worker.call(
                "minilm",
                {
                    "implementation": implementation,
                    "dtype": dtype,
                    "texts": settings.texts,
                    "tokens": settings.tokens,
                    "repeats": repeats,
                    "save": str(path),
                },
            )
            states[name] = torch.load(path).double()
            progress.step(name)
    return measured, states


def run(settings: Settings) -> tuple[Section, bool]:
    """The section, and whether tilewise is within twice eager's own error."""
    if (reason := minilm.missing()) is not None:
        return Section(title=TITLE, words=[f"Skipped: {reason}."]), True
    with tempfile.TemporaryDirectory() as folder:
        measured, states = _measure(settings, Path(folder))
    errors = {name: float((states[name] - states["fp64"]).abs().max()) for name in IMPLEMENTATIONS}
    apart = {name: float((states[name] - states["eager"]).abs().max()) for name in IMPLEMENTATIONS}
    # The yardstick of the whole project: twice what plain PyTorch loses in the same dtype, and one rounding.
    budget = 2 * errors["eager"] + torch.finfo(torch.float32).eps * float(states["fp64"].abs().max())
    exact = errors["tilewise"] <= budget
    facts = measured["tilewise"]
    rows = [
        [
            name,
            f"{errors[name]:.1e}",
            f"{apart[name]:.1e}",
            units.duration(measured[name]["seconds"]),
            units.size(measured[name]["bytes"]),
        ]
        for name in IMPLEMENTATIONS
    ]
    section = Section(
        title=TITLE,
        words=[
            f"The weights of all-MiniLM-L6-v2 ({facts['layers']} layers, {facts['nheads']} heads of "
            f"{facts['headdim']}), fp32, on {facts['texts']} chapters of Python's own language reference: "
            f"{facts['tokens']:,} tokens, padded to {facts['padded_to']} each. Errors are the largest over all hidden "
            "states of real tokens. Memory is the peak above model and input, time the median of the runs, each "
            "implementation in a process of its own.",
        ],
        head=["attention", "error to fp64", "from eager", "time", "peak memory"],
        rows=rows,
        verdict=f"tilewise's worst error is {errors['tilewise']:.1e}; the budget, twice eager's own and one rounding, "
        f"is {budget:.1e}: " + ("kept." if exact else "NOT kept."),
    )
    return section, exact
