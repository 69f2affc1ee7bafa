"""demo: four small experiments on this machine and one page that shows them."""

from __future__ import annotations

import argparse
from pathlib import Path

PARTS = ("row", "minilm", "gpt", "lengths")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``demo``."""
    parser.add_argument("--out", type=Path, default=Path("tilewise-demo"), help="folder of the page (%(default)s)")
    parser.add_argument("--fast", action="store_true", help="every part, but small: seconds instead of minutes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")
    parser.add_argument("--memory-gib", type=float, help="the most that materialising attention may take")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 1 when a part found a result that is not exact."""
    import dataclasses

    from tilewise.demo import run as demo
    from tilewise.demo import settings

    chosen = settings.fast() if arguments.fast else settings.Settings()
    if arguments.memory_gib is not None:
        chosen = dataclasses.replace(chosen, memory_limit=int(arguments.memory_gib * settings.GIB))
    return 0 if demo.run(chosen, arguments.out, tuple(arguments.parts)) else 1
