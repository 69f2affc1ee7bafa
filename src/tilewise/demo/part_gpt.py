"""Part 3: a GPT trained twice from the same seed, with tilewise and with materialising attention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tilewise.demo import svg, units, worker
from tilewise.demo.page import Section
from tilewise.demo.progress import Progress
from tilewise.demo.settings import Settings

ATTENTIONS = ("materialising", "tilewise")
# Rounding grows from step to step; a wrong gradient parts the curves by far more than a hundredth of a nat.
AGREE = 0.01


def _train(settings: Settings) -> dict[str, dict[str, Any]]:
    trained = {}
    with Progress("training", len(ATTENTIONS) * settings.gpt.steps) as progress:

        def on_step(step: int, steps: int) -> None:
            progress.step(f"{name}, step {step} of {steps}")

        for name in ATTENTIONS:
            trained[name] = worker.call("gpt", {"attention": name, "shape": asdict(settings.gpt)}, on_step)
    return trained


def run(settings: Settings) -> tuple[Section, bool]:
    """The section, and whether the loss curves agree."""
    trained = _train(settings)
    shape = settings.gpt
    losses = {name: trained[name]["losses"] for name in ATTENTIONS}
    apart = max(abs(a - b) for a, b in zip(losses["materialising"], losses["tilewise"], strict=True))
    exact = apart < AGREE
    facts = trained["tilewise"]
    rows = [
        [
            name,
            f"{losses[name][0]:.4f}",
            f"{losses[name][-1]:.4f}",
            units.duration(trained[name]["seconds"]),
            units.size(trained[name]["bytes"]),
        ]
        for name in ATTENTIONS
    ]
    series = [svg.Series(name, [(float(i), loss) for i, loss in enumerate(losses[name], 1)]) for name in ATTENTIONS]
    section = Section(
        title="Training a GPT on Python's own source",
        words=[
            f"A byte-level GPT ({shape.layers} layers, {shape.nheads} heads of {shape.headdim}, "
            f"{facts['parameters']:,} parameters) reads {facts['corpus_bytes']:,} bytes from {facts['corpus_files']} "
            f"modules of the standard library: {shape.steps} steps of {shape.batch} x {shape.seqlen} bytes, fp32, both "
            "from the same seed. The loss is in nats a byte; time is the median of the steps, memory the peak above "
            "model and text.",
        ],
        head=["attention", "first loss", "last loss", "a step", "peak memory"],
        rows=rows,
        charts=[svg.chart("Loss", series, svg.Axis("step"), svg.Axis("nats a byte"))],
        verdict=f"The curves are at most {apart:.1e} apart over {shape.steps} steps: "
        + ("they agree." if exact else "they do NOT agree."),
    )
    return section, exact
