"""Peak memory of one piece of work, as the operating system counts it: pages that were really touched."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
_CGROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def _field(path: Path, name: str) -> int | None:
    """A "name:  123 kB" line in bytes, or None."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)


def _peak_since_start() -> int | None:
    if (peak := _field(_STATUS, "VmHWM")) is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _reset_peak() -> None:
    # Linux forgets the peak so far. Elsewhere the peak of the imports stays, and a smaller one cannot be seen under it.
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


class PeakMemory:
    """``with PeakMemory() as peak: work()``, then ``peak.extra``: bytes above those before it, None if unknown."""

    extra: int | None = None

    def __enter__(self) -> PeakMemory:
        _reset_peak()
        self._before = _peak_since_start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after = _peak_since_start()
        if after is not None and self._before is not None:
            self.extra = after - self._before


def available() -> int | None:
    """Bytes that a new process could have: the system's word, and the container's limit if that is less."""
    found = [_field(Path("/proc/meminfo"), "MemAvailable")]
    for path in _CGROUPS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        found.append(int(text) if text.isdigit() else None)
    return min((size for size in found if size is not None), default=None)
