"""A progress bar for terminals that is plain lines of text when piped."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24


class Progress:
    """Counts ``total`` steps of ``title``; a terminal sees one moving line, a pipe one line when it ends."""

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self.title = title
        self.total = max(1, total)
        self.done = 0
        self.stream = sys.stdout if stream is None else stream
        self.moving = self.stream.isatty()
        self.started = time.perf_counter()

    def __enter__(self) -> Progress:
        self._draw("")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = time.perf_counter() - self.started
        ending = f"{self.done}/{self.total} in {seconds:.1f} s" + ("" if kind is None else ", stopped")
        if self.moving:
            self.stream.write(f"\r\x1b[K  {self.title}: {ending}\n")
        else:
            self.stream.write(f"  {self.title}: {ending}\n")
        self.stream.flush()

    def step(self, note: str = "") -> None:
        """One more step is done; ``note`` stands beside the bar."""
        self.done = min(self.total, self.done + 1)
        self._draw(note)

    def _draw(self, note: str) -> None:
        if not self.moving:
            return
        filled = WIDTH * self.done // self.total
        bar = "#" * filled + "." * (WIDTH - filled)
        self.stream.write(f"\r\x1b[K  {self.title} [{bar}] {self.done}/{self.total} {note}")
        self.stream.flush()
