"""The sizes that keep the code readable, and the walk that finds what is larger. Raise one only with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 60
KERNEL_LINES = 150
KERNEL_PARAMETERS = 30
PUBLIC_PARAMETERS = 19  # attention's options, and the descales of q, k and v
KERNEL_DECORATORS = ("triton.jit", "gluon.jit", "jit", "gluon_core.builtin")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def is_kernel(function: Function) -> bool:
    """Decorated with a jit of triton's, with or without arguments."""
    heads = [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]
    return any(ast.unparse(head) in KERNEL_DECORATORS for head in heads)


def lines(function: Function) -> int:
    """Lines from ``def`` to the last statement; the docstring is free."""
    first = function.body[0]
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if ast.get_docstring(function) else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def parameters(function: Function) -> list[str]:
    """Names of all parameters, ``*args`` and ``**kwargs`` too."""
    args = function.args
    extra = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, *extra)]


def file_complaints(path: Path) -> list[str]:
    """What in one file is over its budget."""
    text = path.read_text(encoding="utf-8")
    found = []
    if (count := len(text.splitlines())) > FILE_LINES:
        found.append(f"{path}: {count} lines, budget {FILE_LINES}")
    for function in functions(ast.parse(text)):
        kernel = is_kernel(function)
        budget = KERNEL_LINES if kernel else FUNCTION_LINES
        if (count := lines(function)) > budget:
            kind = "kernel" if kernel else "function"
            found.append(f"{path}:{function.lineno} {function.name}: {count} lines, budget of a {kind} {budget}")
        if kernel and (count := len(parameters(function))) > KERNEL_PARAMETERS:
            found.append(f"{path}:{function.lineno} {function.name}: {count} parameters, budget {KERNEL_PARAMETERS}")
    return found


def public_complaints(path: Path) -> list[str]:
    """Top-level public functions: at most 16 parameters, keyword-only after q, k, v."""
    found = []
    for function in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(function, Function) or function.name.startswith("_"):
            continue
        where = f"{path}:{function.lineno} {function.name}"
        if (count := len(parameters(function))) > PUBLIC_PARAMETERS:
            found.append(f"{where}: {count} parameters, budget {PUBLIC_PARAMETERS}")
        positional = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
        if positional[:3] == ["q", "k", "v"] and len(positional) > 3:
            found.append(f"{where}: {', '.join(positional[3:])} must be keyword-only")
    return found


def assert_complaints(path: Path) -> list[str]:
    """``assert`` vanishes under -O, so it cannot refuse input: none in the package."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [f"{path}:{node.lineno} assert: raise instead" for node in nodes if isinstance(node, ast.Assert)]


def annotation_complaints(path: Path) -> list[str]:
    """Host functions with a parameter or a result that has no type: mypy is told to bear them beside kernels."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kernels = [function for function in functions(tree) if is_kernel(function)]
    inside = {inner for kernel in kernels for inner in functions(kernel)}
    found = []
    for function in functions(tree):
        args = function.args
        all_args = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
        bare = [arg.arg for arg in all_args if arg and not arg.annotation and arg.arg not in ("self", "cls")]
        if function not in inside and (bare or function.returns is None):
            found.append(f"{path}:{function.lineno} {function.name}: without types: {', '.join(bare) or 'its result'}")
    return found


def docstring_complaints(path: Path) -> list[str]:
    """Modules, and their public top-level functions and classes, without a docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [] if ast.get_docstring(tree) else [f"{path}: module without a docstring"]
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            found.append(f"{path}:{node.lineno} {node.name} without a docstring")
    return found
