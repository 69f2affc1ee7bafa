"""The four parts in order: their lines on the terminal, and the page."""

from __future__ import annotations

import platform
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tilewise
from tilewise.demo import page, part_gpt, part_lengths, part_minilm, part_row, units
from tilewise.demo.page import Section
from tilewise.demo.settings import Settings

Part = Callable[[Settings], tuple[Section, bool]]
PARTS: dict[str, Part] = {
    "row": lambda _: part_row.run(),
    "minilm": part_minilm.run,
    "gpt": part_gpt.run,
    "lengths": part_lengths.run,
}
TITLE = "tilewise on this machine"
INTRODUCTION = (
    "Exact attention without the score matrix: four small experiments, just now, on this machine's CPU. "
    "Every number on this page was measured or computed by the run that wrote it."
)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine() -> str:
    """What the numbers were measured on."""
    return (
        f"tilewise {tilewise.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()}, {_processor()}, {torch.get_num_threads()} threads"
    )


def _say(number: int, section: Section) -> None:
    print(f"\n{number}. {section.title}")
    for words in section.words:
        print(textwrap.fill(words, 100, initial_indent="  ", subsequent_indent="  "))
    if section.rows:
        print("\n".join(units.table(section.head, section.rows, section.text_columns)))
    if section.verdict:
        print(textwrap.fill("-> " + section.verdict, 100, initial_indent="  ", subsequent_indent="     "))


def run(settings: Settings, out: Path, parts: tuple[str, ...] = tuple(PARTS)) -> bool:
    """Run ``parts``, write ``out``/index.html, and say where; True when every part found tilewise exact."""
    started = time.perf_counter()
    print(machine(), flush=True)
    sections, exact = [], True
    for number, name in enumerate(parts, start=1):
        section, same = PARTS[name](settings)
        _say(number, section)
        sections.append(section)
        exact = exact and same
    seconds = time.perf_counter() - started
    footer = f"{machine()}. {time.strftime('%Y-%m-%d %H:%M')}. The run took {seconds:.0f} s."
    out.mkdir(parents=True, exist_ok=True)
    path = out / "index.html"
    path.write_text(page.render(TITLE, INTRODUCTION, sections, footer), encoding="utf-8")
    print(f"\nThe page with the plots: {path.resolve()} ({seconds:.0f} s)")
    return exact
