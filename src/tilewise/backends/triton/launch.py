"""From a kernel and its arguments to a launch that costs a few microseconds.

Triton's own launcher looks at every argument of every call to find out which specialisation it needs. Here the backend
knows: sizes are never specialised on, strides and addresses only through ``Mode.align``. So a kernel is compiled once
for its types and compile-time values, and a ``Launch`` holds everything of a call but the addresses. Under Triton's
interpreter (TRITON_INTERPRET=1) the same ``Launch`` runs the kernel on CPU tensors.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction

from tilewise.backends.triton.arguments import Box, PairStride, Stride
from tilewise.backends.triton.facts import INTERPRETED

PRIMITIVES = "tilewise.backends.triton.primitives"
POINTER_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


class Config(NamedTuple):
    """How a kernel is compiled, beside its compile-time arguments; the pipeline's depth is in its Tile."""

    warps: int
    aligned: bool = False  # every pointer is a multiple of 16 bytes


def _type_of(value: Any, integer: str = "i32") -> Any:
    """Triton's type of an argument; strides are 64-bit, so that an address never wraps."""
    if isinstance(value, Box):
        return f"tensordesc<{POINTER_TYPES[value.base][1:]}{list(value.block)}>"
    if isinstance(value, tuple):
        inner = "i64" if isinstance(value, (Stride, PairStride)) else "i32"
        types = [_type_of(item, inner) for item in value]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return POINTER_TYPES[value.dtype]
    if isinstance(value, torch.dtype):  # stands for a tensor where none exists yet
        return POINTER_TYPES[value]
    return "fp32" if isinstance(value, float) else integer


def _paths(types: Any, wanted: str, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Where in nested argument types a kind of argument stands: "constexpr", or "*" for pointers."""
    if isinstance(types, tuple):
        return [found for index, item in enumerate(types) for found in _paths(item, wanted, (*path, index))]
    return [path] if types.startswith(wanted) else []


def source(kernel: Any, arguments: tuple[Any, ...], aligned: bool) -> ASTSource:
    """What Triton compiles: types of all arguments, values of the compile-time ones, alignment of the pointers."""
    constants = {index for index, parameter in enumerate(kernel.params) if parameter.is_constexpr}
    types = tuple("constexpr" if i in constants else _type_of(value) for i, value in enumerate(arguments))
    constexprs = {}
    for path in _paths(types, "constexpr"):
        value: Any = arguments
        for index in path:
            value = value[index]
        constexprs[path] = value
    attributes = {path: [["tt.divisibility", 16]] for path in _paths(types, "*")} if aligned else {}
    return ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), constexprs, attributes)


@functools.cache
def fix_keys(module: str) -> None:
    """Ask the functions of a module for their cache keys in one order, those of the modules they use first.

    Triton's key of a function depends on which of the functions it calls were asked before it. Without this a process
    would not find in the disk cache what another one has compiled.
    """
    functions = [value for value in vars(sys.modules[module]).values() if isinstance(value, JITFunction)]
    if module != PRIMITIVES:
        fix_keys(PRIMITIVES)
    for function in functions:
        hash(function.cache_key)


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], config: Config, target: GPUTarget) -> CompiledKernel:
    """The kernel for ``target``, from Triton's disk cache when it has been compiled before."""
    fix_keys(kernel.fn.__module__)
    options = make_backend(target).parse_options({"num_warps": config.warps, "num_stages": 2})
    compiled: CompiledKernel = triton.compile(source(kernel, arguments, config.aligned), target, options.__dict__)
    return compiled


_COMPILED: dict[object, CompiledKernel] = {}


def _compiled(kernel: Any, arguments: tuple[Any, ...], config: Config, device: torch.device) -> CompiledKernel:
    constants = tuple(
        value for value, parameter in zip(arguments, kernel.params, strict=True) if parameter.is_constexpr
    )
    types = tuple(None if p.is_constexpr else _type_of(v) for v, p in zip(arguments, kernel.params, strict=True))
    key = (kernel.__name__, types, constants, config, device.index)
    compiled = _COMPILED.get(key)
    if compiled is None:
        target = triton.runtime.driver.active.get_current_target()
        compiled = _COMPILED[key] = compile_kernel(kernel, arguments, config, target)
    return compiled


@functools.cache
def _current_stream() -> Any:
    return torch._C._cuda_getCurrentRawStream


class Launch:
    """A kernel with everything of its call but the pointers: ``launch(pointers)`` runs it on the current stream."""

    __slots__ = ("function", "grid", "index", "kernel", "packed", "run", "tail")

    def __init__(
        self,
        kernel: Any,
        grid: int,
        pointers: tuple[Any, ...],
        tail: tuple[Any, ...],
        config: Config,
        device: torch.device,
    ) -> None:
        self.kernel, self.grid, self.tail = kernel, grid, tail
        self.index = device.index
        if not INTERPRETED and grid:
            compiled = _compiled(kernel, (*pointers, *tail), config, device)
            self.run, self.function, self.packed = compiled.run, compiled.function, compiled.packed_metadata

    def __call__(self, pointers: tuple[Any, ...]) -> None:
        """Pointers in the kernel's order: tensors, None, descriptors (Box), and named tuples of tensors."""
        if not self.grid:
            return
        if INTERPRETED:
            self.kernel[(self.grid,)](*pointers, *self.tail)
            return
        stream = _current_stream()(self.index)
        addresses = [p.data_ptr() if isinstance(p, torch.Tensor) else p for p in pointers]
        self.run(self.grid, 1, 1, stream, self.function, self.packed, None, None, None, *addresses, *self.tail)
