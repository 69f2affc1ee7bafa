"""What the assembler made of a kernel: spills in its main loops, and products that it runs one after the other."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.nvidia.compiler import get_ptxas

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PTXAS = get_ptxas(90).path  # of the two that triton ships, the one that it uses for sm_90
# The tiles were chosen with this Triton; another one and its assembler give out registers in their own way.
MEASURED = triton.__version__.startswith("3.6.")
LABEL = re.compile(r"^(\.L_x_\d+):")
BRANCH = re.compile(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)")


class Loop(NamedTuple):
    """A loop without another in it: matrix products, and moves of registers to and from local memory."""

    products: int
    spills: int


def loops(compiled: Any) -> list[Loop]:
    """The innermost loops of an sm_90 kernel that hold matrix products."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "nvdisasm"), "-c", file.name]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    labels = {found[1]: number for number, line in enumerate(lines) if (found := LABEL.match(line.strip()))}
    jumps = ((number, BRANCH.search(line)) for number, line in enumerate(lines))
    ranges = [(labels[found[1]], number) for number, found in jumps if found and labels[found[1]] < number]
    with_products = [span for span in ranges if _products(lines, span)]
    inner = [a for a in with_products if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in with_products)]
    return [Loop(_products(lines, span), _count(lines, span, r"\b(STL|LDL)\b")) for span in inner]


def _count(lines: list[str], span: tuple[int, int], pattern: str) -> int:
    return sum(1 for line in lines[span[0] : span[1]] if re.search(pattern, line))


def _products(lines: list[str], span: tuple[int, int]) -> int:
    return _count(lines, span, r"\b(HGMMA|HMMA)\b")


def serialised(compiled: Any) -> list[str]:
    """The assembler's warnings that it waits after every wgmma, which costs a third of the speed and more."""
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        command = [PTXAS, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return [line for line in log.splitlines() if "serialized" in line]
