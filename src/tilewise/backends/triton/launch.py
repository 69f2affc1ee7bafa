"""From a kernel and its arguments to a launch that costs a few microseconds.

Triton's own launcher looks at every argument of every call to find out which specialisation it needs. Here the backend
knows: sizes are never specialised on, strides and addresses only through ``Mode.align``. So a kernel is compiled once
for its types and compile-time values, and a ``Launch`` holds everything of a call but the addresses. Under Triton's
interpreter (TRITON_INTERPRET=1) the same ``Launch`` runs the kernel on CPU tensors.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.jit import JITFunction

from tilewise.backends.triton.arguments import Box, Config, PairStride, Stride
from tilewise.backends.triton.facts import INTERPRETED
from tilewise.device import bind_thread

KNOWN_LIMIT = 256  # addresses for which a launch keeps a descriptor
SIDE_BY_SIDE = 8  # kernels that compile at the same time
KNOWN_TRITON = ("3.6.",)
SHARED = ("tilewise.backends.triton.bands", "tilewise.backends.triton.primitives")  # kernels reach them by an alias
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


_FRONT_END = threading.Lock()


class Source(ASTSource):  # type: ignore[misc]
    """A kernel before it is compiled: one at a time becomes Triton's IR, the rest goes side by side.

    That part holds Python's lock most of the time anyway, and parsing on two threads at once can raise SystemError
    ("AST constructor recursion depth mismatch", CPython's issue 106905).
    """

    def make_ir(self, *arguments: Any) -> Any:
        """Triton's IR."""
        with _FRONT_END:
            return super().make_ir(*arguments)


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
    return Source(kernel, dict(zip(kernel.arg_names, types, strict=True)), constexprs, attributes)


@functools.cache
def fix_keys(module: str) -> None:
    """Ask the functions of a module for their cache keys in one order, those of the modules they use first.

    Triton's key of a function depends on which of the functions it calls were asked before it. Without this a process
    would not find in the disk cache what another one has compiled.
    """
    known = vars(sys.modules[module])
    used = [value for value in known.values() if isinstance(value, JITFunction)]
    for name in (*SHARED, *sorted({function.fn.__module__ for function in used})):
        if name != module and module not in SHARED:
            fix_keys(name)
    for function in used:
        hash(function.cache_key)


def compile_kernel(kernel: Any, arguments: tuple[Any, ...], config: Config, target: GPUTarget) -> CompiledKernel:
    """The kernel for ``target``, from Triton's disk cache when it has been compiled before."""
    fix_keys(kernel.fn.__module__)
    wanted: dict[str, Any] = {"num_warps": config.warps, "num_stages": 2, "enable_fp_fusion": config.fuses}
    if config.registers is not None:
        wanted["maxnreg"] = config.registers
    options = make_backend(target).parse_options(wanted)
    compiled: CompiledKernel = triton.compile(source(kernel, arguments, config.aligned), target, options.__dict__)
    return compiled


_COMPILED: dict[object, CompiledKernel] = {}
_WAITING: ContextVar[list[tuple[Launch, Wanted]] | None] = ContextVar("launches without a kernel yet", default=None)


class Wanted(NamedTuple):
    """A kernel to compile, with arguments or what stands for them."""

    kernel: Any
    arguments: tuple[Any, ...]
    config: Config
    device: torch.device

    def key(self) -> object:
        """All that its machine code depends on, and the device that it is loaded on."""
        pairs = list(zip(self.arguments, self.kernel.params, strict=True))
        constants = tuple(value for value, parameter in pairs if parameter.is_constexpr)
        types = tuple(None if parameter.is_constexpr else _type_of(value) for value, parameter in pairs)
        return self.kernel.__name__, types, constants, self.config, self.device.index


def _compiled(wanted: Wanted) -> CompiledKernel:
    key = wanted.key()
    compiled = _COMPILED.get(key)
    if compiled is None:
        target = triton.runtime.driver.active.get_current_target()
        compiled = _COMPILED[key] = compile_kernel(wanted.kernel, wanted.arguments, wanted.config, target)
    return compiled


def _load(wanted: Wanted) -> None:
    """Compile on a thread, which starts on the first device, and have Triton build the launcher and load the code."""
    with torch.cuda.device(wanted.device):
        _ = _compiled(wanted).run


@contextmanager
def side_by_side() -> Iterator[None]:
    """Launches made inside get their kernels at the end, compiled at the same time.

    Most of a compilation is Triton's passes, LLVM, the assembler and a C compiler, which all run outside of Python's
    lock. No thread outlives it, and what a compilation raises is raised here.
    """
    waiting: list[tuple[Launch, Wanted]] = []
    token = _WAITING.set(waiting)
    try:
        yield
    finally:
        _WAITING.reset(token)
    missing = {wanted.key(): wanted for _, wanted in waiting if wanted.key() not in _COMPILED}
    if len(missing) > 1:
        for wanted in missing.values():  # in one order, which threads would not keep
            fix_keys(wanted.kernel.fn.__module__)
        own, *others = missing.values()
        with ThreadPoolExecutor(min(len(others), SIDE_BY_SIDE)) as pool:
            loaded = pool.map(_load, others)
            _load(own)
            list(loaded)
    for launch, wanted in waiting:
        launch.bind(_compiled(wanted), wanted.arguments)


class Descriptor:
    """A TMA descriptor of tensors that differ in their address only: what the launcher is given for it.

    Encoding one costs several microseconds, and the allocator hands out the same addresses again and again, so that
    those seen are kept.
    """

    __slots__ = ("box", "encode", "known")

    def __init__(self, box: Box, encode: Callable[[Box], list[Any]]) -> None:
        self.box, self.encode = box, encode
        self.known: dict[int, list[Any]] = {}

    def at(self, address: int) -> list[Any]:
        """The launcher's arguments for the descriptor of a tensor at ``address``."""
        arguments = self.known.get(address)
        if arguments is None:
            if len(self.known) >= KNOWN_LIMIT:
                self.known.clear()
            bind_thread()
            arguments = self.known[address] = self.encode(self.box._replace(base=Address(address)))
        return arguments


class Address(NamedTuple):
    """Stands for a tensor where only its address is asked for."""

    address: int

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def _direct(compiled: CompiledKernel) -> tuple[Any, list[Any]] | None:
    """CUDA's compiled launcher and its descriptors' metadata, or None where Triton is not one whose inside is known.

    ``compiled.run`` would encode every descriptor at every call.
    """
    if not triton.__version__.startswith(KNOWN_TRITON):
        return None
    run = compiled.run
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if scratch or not hasattr(run, "launch_pdl"):
        return None
    metas = list(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    if not metas:
        return run.launch, []
    inner = run.launch
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True))
    return (cells["launcher"].cell_contents, metas) if "launcher" in cells and all(metas) else None


class Launch:
    """A kernel with everything of its call but the pointers: ``launch(pointers)`` runs it on the current stream."""

    __slots__ = ("descriptors", "early", "fixed", "grid", "index", "kernel", "none", "run", "tail")

    def __init__(
        self,
        kernel: Any,
        grid: int | tuple[int, int, int],
        pointers: tuple[Any, ...],
        tail: tuple[Any, ...],
        config: Config,
        device: torch.device,
        early: bool = False,
    ) -> None:
        """``early``: it may begin beside the launch before it, where Triton is one whose launcher is known."""
        self.kernel, self.tail, self.early = kernel, tail, early
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        self.index = device.index
        self.none = tuple(index for index, pointer in enumerate(pointers) if pointer is None)
        self.descriptors: tuple[tuple[int, Descriptor], ...] = ()
        if INTERPRETED or 0 in self.grid:
            return
        wanted = Wanted(kernel, (*pointers, *tail), config, device)
        waiting = _WAITING.get()
        if waiting is None:
            self.bind(_compiled(wanted), wanted.arguments)
        else:
            waiting.append((self, wanted))

    def bind(self, compiled: CompiledKernel, arguments: tuple[Any, ...]) -> None:
        """Keep what a call of the kernel needs beside addresses."""
        boxes = [(index, argument) for index, argument in enumerate(arguments) if isinstance(argument, Box)]
        direct = _direct(compiled)
        if direct is None or len(direct[1]) != len(boxes):
            self.run, metas = compiled.run, [None] * len(boxes)
            self.fixed: tuple[Any, ...] = (compiled.function, compiled.packed_metadata, None, None, None)
        else:
            self.run, metas = direct
            # cooperative grid, programmatic launch, two scratch buffers; then metadata and hooks
            self.fixed = (compiled.function, False, self.early, None, None, compiled.packed_metadata, None, None, None)
        pairs = zip(boxes, metas, strict=True)
        self.descriptors = tuple((index, Descriptor(box, _encoder(meta))) for (index, box), meta in pairs)[::-1]

    def __call__(self, pointers: tuple[Any, ...]) -> None:
        """Pointers in the kernel's order: tensors, also where a descriptor is wanted, None, named tuples of tensors.

        On a device an address may stand for a tensor.
        What the kernel was compiled without may be given and is not used.
        """
        if 0 in self.grid:
            return
        if INTERPRETED:
            given = [None if index in self.none else pointer for index, pointer in enumerate(pointers)]
            self.kernel[self.grid](*given, *self.tail)
            return
        arguments: list[Any] = [p.data_ptr() if isinstance(p, torch.Tensor) else p for p in pointers]
        for index, descriptor in self.descriptors:  # from the last on: each takes several places
            arguments[index : index + 1] = descriptor.known.get(arguments[index]) or descriptor.at(arguments[index])
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        self.run(*self.grid, stream, *self.fixed, *arguments, *self.tail)


def _encoder(meta: Any) -> Callable[[Box], list[Any]]:
    """How a descriptor becomes arguments of the launcher."""
    if meta is None:
        return lambda box: [box]
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return lambda box: make_tensordesc_arg(box, meta)
