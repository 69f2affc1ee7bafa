"""What the assembler made of a kernel: spills in its main loops, and products that it runs one after the other."""

from __future__ import annotations

import re
import subprocess
import tempfile
from bisect import bisect_left
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.nvidia.compiler import get_ptxas

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PTXAS = get_ptxas(90).path  # of the two that triton ships, the one that it uses for sm_90
# The tiles were chosen with this Triton; another one and its assembler give out registers in their own way.
MEASURED = triton.__version__.startswith("3.6.")
# a product from zero whose left operand is in registers, of which the first is the group
FROM_REGISTERS = re.compile(r"\b[HQ]GMMA\S* R\d+, R(\d+), gdesc\S* RZ\b")
WRITES = re.compile(r"\*/\s+(?:@!?U?P\d+ +)?(?!ST|RED|HGMMA|QGMMA)([A-Z0-9_.]+) +(?:U?P\d+, *)*R(\d+)\b")
FORMS = {4: re.compile(r"^LDSM|\.128"), 2: re.compile(r"\.64|\.WIDE")}  # of instructions that write several registers
LABEL = re.compile(r"^(\.L_x_\d+):")
BRANCH = re.compile(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)")
ELSEWHERE = re.compile(r"\.L_x_\d+")  # in an instruction: places where a thread may go on
LEAVES = re.compile(r"\*/\s+(EXIT|RET|BRX|BRA `)")  # for certain: no thread comes to the instruction behind


class Loop(NamedTuple):
    """A loop without another in it: matrix products, and moves of registers to and from local memory."""

    products: int
    spills: int


def loops(compiled: Any) -> list[Loop]:
    """The innermost loops of an sm_90 kernel that hold matrix products."""
    lines = disassembled(compiled.asm["cubin"])
    with_products = [span for span in loop_spans(lines) if _products(lines, span)]
    inner = [a for a in with_products if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in with_products)]
    return [Loop(_products(lines, span), _count(lines, span, r"\b(STL|LDL)\b")) for span in inner]


def disassembled(cubin: bytes) -> list[str]:
    """The machine code of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "nvdisasm"), "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def lost_operands(lines: list[str]) -> list[str]:
    """Products of a loop with an operand from before it, in registers to which the loop writes something else.

    ptxas 12.8 does that where both products of a turn have as many such registers, and a branch is between them.
    """
    return [line for span in loop_spans(lines) for line in _lost(lines[span[0] : span[1] + 1])]


def _lost(loop: list[str]) -> list[str]:
    first: dict[int, int] = {}
    for number, line in enumerate(loop):
        if found := WRITES.search(line):
            count = next((words for words, form in FORMS.items() if form.search(found[1])), 1)
            for register in range(int(found[2]), int(found[2]) + count):
                first.setdefault(register, number)
    operands = ((number, FROM_REGISTERS.search(line)) for number, line in enumerate(loop))
    return [loop[n] for n, found in operands if found and any(first.get(int(found[1]) + i, n) > n for i in range(4))]


def loop_spans(lines: list[str]) -> list[tuple[int, int]]:
    """First and last lines of loops: of jumps back that the lines between come to.

    The assembler puts code behind the kernel, waits above all, that jumps back to where it came from; what lies between
    is no loop.
    """
    labels = {found[1]: number for number, line in enumerate(lines) if (found := LABEL.match(line.strip()))}
    turns = {
        number: [labels[name] for name in ELSEWHERE.findall(line) if name in labels]
        for number, line in enumerate(lines)
        if "*/" in line and (ELSEWHERE.search(line) or LEAVES.search(line))
    }
    order = sorted(turns)

    def comes_to(begin: int, end: int) -> bool:
        """By a way that does not leave the lines from ``begin`` to ``end``."""
        seen, ahead = set(), [begin]
        while ahead:
            number = order[bisect_left(order, ahead.pop())]
            if number == end:
                return True
            if number < end and number not in seen:
                seen.add(number)
                ahead += [goal for goal in turns[number] if begin <= goal <= end]
                ahead += [] if LEAVES.search(lines[number]) else [number + 1]
        return False

    jumps = ((number, BRANCH.search(line)) for number, line in enumerate(lines))
    back = [(labels[found[1]], number) for number, found in jumps if found and labels[found[1]] < number]
    return [span for span in back if comes_to(*span)]


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
