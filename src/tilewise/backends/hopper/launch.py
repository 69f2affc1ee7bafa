"""From a kernel and its arguments to a launch that costs a few microseconds.

Triton's own launcher looks at every argument of every call to find out which specialisation it needs. Here the backend
knows: no size is specialised on, and alignment is what the tensor maps demand anyway. So a kernel is compiled once for
its types and compile-time values, and a ``Launch`` holds everything of a call but the addresses.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float32: "fp32",
    torch.int32: "i32",
}
RAGGED = 1 << 30


class Box(NamedTuple):
    """The kind of a tensor map: element type and the box that one copy moves."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    swizzled: bool = True

    def type_name(self) -> str:
        """Triton's name of this argument type."""
        bits = self.dtype.itemsize * 8
        width = min(128, self.shape[-1] * self.dtype.itemsize) if self.swizzled else 0
        layout = NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=len(self.shape))
        return f"tensordesc<{TYPES[self.dtype]}{list(self.shape)},{layout!r}>"


class Map:
    """A tensor map to be: what Triton's launcher reads of a descriptor, without the checks of its class."""

    __slots__ = ("address", "box", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False  # read from triton 3.7 on

    def __init__(self, box: Box, shape: tuple[int, ...], strides: tuple[int, ...], address: int = 0) -> None:
        self.box, self.shape, self.strides, self.address = box, shape, strides, address

    @property
    def base(self) -> Map:
        """What the launcher asks for the address."""
        return self

    def data_ptr(self) -> int:
        """The address."""
        return self.address

    def at(self, address: int) -> Map:
        """The same map elsewhere."""
        return Map(self.box, self.shape, self.strides, address)


def dense_map(tensor: torch.Tensor, rows: int, cols: int) -> Map:
    """Map of (batch, seqlen, nheads, dim) as (batch, nheads, seqlen, dim), one head's rows at a time.

    A box past the end of a sequence reads zeros and writes nothing. A stride of a dimension of size 1 is arbitrary, so
    it is replaced by one the hardware takes.
    """
    dim = tensor.shape[3]
    order = (0, 2, 1)
    sizes = tuple(tensor.shape[i] for i in order)
    steps = tuple(tensor.stride(i) if tensor.shape[i] > 1 else tensor[0].numel() for i in order)
    return Map(Box(tensor.dtype, (1, 1, rows, cols)), (*sizes, dim), (*steps, 1))


def packed_map(tensor: torch.Tensor, rows: int, cols: int) -> Map:
    """Map of (total, nheads, dim) with rows clipped at the end of any sequence, not only of the tensor.

    A row's address is built from three coordinates whose strides cancel modulo 2**64, so that the hardware's bounds
    check on one of them falls where the kernel wants it (the method of triton.tools.ragged_tma).
    """
    _, nheads, dim = tensor.shape
    row, head = tensor.stride(0), tensor.stride(1) if nheads > 1 else dim
    limit = 0x7FFF0000
    box = Box(tensor.dtype, (1, 1, 1, rows, cols))
    return Map(box, (limit, limit, nheads, RAGGED, dim), (2**34 - row, row, head, row, 1))


def _type_of(value: Any) -> Any:
    """Triton's type of an argument; None inside a tuple is a compile-time value."""
    if isinstance(value, tuple):
        types = [_type_of(item) for item in value]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if value is None:
        return "constexpr"
    if isinstance(value, Map):
        return value.box.type_name()
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"  # a stride may be that large


def _constants(value: Any, path: tuple[int, ...]) -> dict[tuple[int, ...], Any]:
    if isinstance(value, tuple):
        found: dict[tuple[int, ...], Any] = {}
        for index, item in enumerate(value):
            found.update(_constants(item, (*path, index)))
        return found
    return {path: None} if value is None else {}


def source(kernel: Any, arguments: tuple[Any, ...]) -> ASTSource:
    """What Triton compiles: types of the run-time arguments, values of the compile-time ones."""
    types: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    for index, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
            constants[(index,)] = value
        else:
            types[parameter.name] = _type_of(value)
            constants.update(_constants(value, (index,)))
    make = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return make(kernel, types, constants)


@functools.cache
def _settle(module: str) -> None:
    """Ask the functions of a module for their keys, in one order: those they call first.

    Triton's key of a function depends on whether the functions it calls were asked before, so that without this a
    process would not find in the disk cache what another has compiled.
    """
    functions = [value for value in vars(sys.modules[module]).values() if isinstance(value, JITFunction)]
    for function in functions:
        if function.fn.__module__ != module:
            _settle(function.fn.__module__)
    for function in functions:
        hash(function.cache_key)


def settle(kernel: Any) -> None:
    """Give a kernel the same key in every process."""
    _settle(kernel.fn.__module__)


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], num_warps: int = 4) -> CompiledKernel:
    """The kernel for sm_90a, from Triton's disk cache when it has been compiled before."""
    settle(kernel)
    options = make_backend(TARGET).parse_options({"num_warps": num_warps})
    compiled: CompiledKernel = triton.compile(source(kernel, arguments), TARGET, options.__dict__)
    return compiled


_COMPILED: dict[object, CompiledKernel] = {}


class Launch:
    """A kernel bound to everything of its call but the addresses."""

    __slots__ = ("constants", "function", "grid", "packed", "run")

    def __init__(self, kernel: Any, grid: int, arguments: tuple[Any, ...], num_warps: int = 4) -> None:
        self.grid = grid
        self.constants = tuple(v for v, p in zip(arguments, kernel.params, strict=True) if p.is_constexpr)
        types = tuple(None if p.is_constexpr else _type_of(v) for v, p in zip(arguments, kernel.params, strict=True))
        key = (kernel.__name__, types, self.constants, num_warps, torch.cuda.current_device())
        compiled = _COMPILED.get(key)
        if compiled is None:
            compiled = _COMPILED[key] = compile_kernel(kernel, arguments, num_warps)
        self.run, self.function, self.packed = compiled.run, compiled.function, compiled.packed_metadata

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Run on a stream; the run-time arguments in the kernel's order, addresses as integers."""
        self.run(self.grid, 1, 1, stream, self.function, self.packed, None, None, None, *arguments, *self.constants)


def current_stream(index: int) -> int:
    """Handle of the current stream of a device."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream


@functools.cache
def multiprocessors(index: int) -> int:
    """Streaming multiprocessors of a device: the most CTAs of these kernels that run at once, one on each."""
    return torch.cuda.get_device_properties(index).multi_processor_count


_TICKETS: dict[tuple[int, int], torch.Tensor] = {}
_CAPTURED: list[torch.Tensor] = []  # a captured graph may be replayed at any time


def ticket(stream: int, index: int) -> int:
    """Address of a counter that is 0 and that no other stream uses; every kernel leaves it 0.

    A graph that is being captured gets one of its own, since it may be replayed beside this stream's kernels.
    """
    if torch.cuda.is_current_stream_capturing():
        counter = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", index))
        _CAPTURED.append(counter)
        return counter.data_ptr()
    known = _TICKETS.get((index, stream))
    if known is None:
        known = _TICKETS[index, stream] = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", index))
    return known.data_ptr()
