"""How large the demo is: ``Settings()`` takes a few minutes on two cores, ``fast()`` seconds (for tests)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tilewise.demo.gpt import Shape

GIB = 1 << 30


@dataclass(frozen=True)
class Settings:
    """Sizes of the parts; ``memory_limit`` in bytes is the most that materialising attention is given."""

    texts: int = 6
    tokens: int = 512
    repeats: int = 3
    gpt: Shape = field(default_factory=Shape)
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    nheads: int = 4
    headdim: int = 64
    memory_limit: int = 8 * GIB
    seconds_per_length: float = 1.0

    def length_repeats(self, last_seconds: float) -> int:
        """How often to run a length whose half took ``last_seconds``: once where that is long."""
        return self.repeats if 4 * last_seconds < self.seconds_per_length else 1


def fast() -> Settings:
    """Every part, small; materialising attention meets its limit at the last length."""
    shape = Shape(layers=1, nheads=2, headdim=8, seqlen=64, batch=2, steps=4, corpus_bytes=20_000)
    return Settings(
        texts=2, tokens=24, repeats=1, gpt=shape, lengths=(64, 128, 256), nheads=2, headdim=8, memory_limit=1 << 18
    )
