"""From a kernel and its arguments to a launch that costs a few microseconds.

Triton's own launcher looks at every argument of every call to find out which specialisation it needs. Here the backend
knows: no size is specialised on, and alignment is what the tensor maps demand anyway. So a kernel is compiled once for
its types and compile-time values, and a ``Launch`` holds everything of a call but the addresses.
"""

from __future__ import annotations

import functools
import sys
from collections import namedtuple
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction

from tilewise.backends.hopper.maps import TYPES, Encoded, Map

TARGET = GPUTarget("cuda", 90, 32)
KNOWN_TRITON = ("3.6.",)


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


@functools.cache
def _computed(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if isinstance(getattr(kind, name), property))


def with_computed(value: Any) -> Any:
    """A named tuple with its properties as fields, which is all that triton keeps of a compile-time one from 3.7 on."""
    kind: Any = type(value)
    names = _computed(kind)
    if not isinstance(value, tuple) or not names:
        return value
    whole: Any = namedtuple(kind.__name__, (*kind._fields, *names))  # type: ignore[misc]
    return whole(*value, *(getattr(value, name) for name in names))


def source(kernel: Any, arguments: tuple[Any, ...]) -> ASTSource:
    """What Triton compiles: types of the run-time arguments, values of the compile-time ones."""
    types: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    for index, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
            constants[(index,)] = with_computed(value)
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
    options = make_backend(TARGET).parse_options({"num_warps": num_warps, "enable_fp_fusion": True})
    compiled: CompiledKernel = triton.compile(source(kernel, arguments), TARGET, options.__dict__)
    return compiled


_COMPILED: dict[object, CompiledKernel] = {}


def _direct(compiled: CompiledKernel, maps: int) -> tuple[Any, list[Any]] | None:
    """CUDA's compiled launcher and what it must know of each tensor map, or None where Triton's inside is not known.

    ``compiled.run`` would encode every map at every call.
    """
    run = compiled.run
    known = triton.__version__.startswith(KNOWN_TRITON) and hasattr(run, "launch_pdl")
    if not known or run.global_scratch_size or run.profile_scratch_size:
        return None
    metas = list(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    if not maps:
        return run.launch, []
    cells = dict(zip(run.launch.__code__.co_freevars, run.launch.__closure__ or (), strict=True))
    return (cells["launcher"].cell_contents, metas) if "launcher" in cells and len(metas) == maps else None


class Launch:
    """A kernel bound to everything of its call but the addresses. Its tensor maps come before its other arguments."""

    __slots__ = ("constants", "fixed", "grid", "maps", "run")

    def __init__(
        self, kernel: Any, grid: int, arguments: tuple[Any, ...], num_warps: int = 4, early: bool = False
    ) -> None:
        """``early``: it may start beside the launch before it, and waits itself for what that one writes."""
        self.grid = grid
        self.constants = tuple(v for v, p in zip(arguments, kernel.params, strict=True) if p.is_constexpr)
        types = tuple(None if p.is_constexpr else _type_of(v) for v, p in zip(arguments, kernel.params, strict=True))
        key = (kernel.__name__, types, self.constants, num_warps, torch.cuda.current_device())
        compiled = _COMPILED.get(key)
        if compiled is None:
            compiled = _COMPILED[key] = compile_kernel(kernel, arguments, num_warps)
        maps = [value for value in arguments if isinstance(value, Map)]
        direct = _direct(compiled, len(maps))
        if direct is None:
            self.run, metas = compiled.run, [None] * len(maps)
            self.fixed: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
        else:
            self.run, metas = direct
            # cooperative grid, programmatic launch, two scratch buffers; then metadata and hooks
            self.fixed = (compiled.function, False, early, None, None, compiled.packed_metadata, None, None, None)
        self.maps = tuple(map(Encoded, maps, metas))

    def __call__(self, stream: int, *arguments: Any) -> None:
        """Run on a stream; the run-time arguments in the kernel's order, addresses as integers, also those of maps."""
        encoded: list[Any] = []
        for known, address in zip(self.maps, arguments, strict=False):
            encoded += known.get(address) or known.encode(address)
        self.run(self.grid, 1, 1, stream, *self.fixed, *encoded, *arguments[len(self.maps) :], *self.constants)


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
