"""What is known of the device a call runs on; a test may make up any device."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import threading
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts a backend may decide on.

    ``arch`` is "sm_90", "gfx942" or the CPU's vector level; ``shared_memory`` is bytes a block can have;
    ``threads`` is torch's intra-op thread count (CPU); ``triton`` is the installed version or None.
    """

    type: str
    name: str = ""
    arch: str = ""
    multiprocessors: int = 0
    shared_memory: int = 0
    total_memory: int = 0
    threads: int = 1
    torch: str = torch.__version__
    triton: str | None = None


_THREAD = threading.local()


def bind_thread() -> None:
    """Give this thread its device's CUDA context, for driver calls that need one and do not ask for it.

    A thread gets it with its first call of the CUDA runtime, which it need not have made: its tensors may come from
    another thread and its memory from torch's cache, as autograd's own may.
    """
    if not getattr(_THREAD, "bound", False) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.mem_get_info()
        _THREAD.bound = True


@functools.cache
def triton_version() -> str | None:
    """The installed Triton's version without importing it, or None."""
    for distribution in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def at_least(version: str | None, wanted: tuple[int, int]) -> bool:
    """Whether a version such as "3.6.0+git" is that new; None is no version."""
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= wanted


@functools.cache
def _cuda_facts(index: int) -> DeviceFacts:
    properties = torch.cuda.get_device_properties(index)
    hip = torch.version.hip is not None
    arch = properties.gcnArchName.split(":")[0] if hip else f"sm_{properties.major}{properties.minor}"
    return DeviceFacts(
        type="cuda",
        name=properties.name,
        arch=arch,
        multiprocessors=properties.multi_processor_count,
        shared_memory=getattr(properties, "shared_memory_per_block_optin", 65536),
        total_memory=properties.total_memory,
        triton=triton_version(),
    )


@functools.cache
def _plain_facts(device_type: str, threads: int) -> DeviceFacts:
    arch = torch.backends.cpu.get_cpu_capability() if device_type == "cpu" else ""
    return DeviceFacts(type=device_type, name=device_type, arch=arch, threads=threads, triton=triton_version())


def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of ``device``, probed once."""
    if device.type == "cuda":
        return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)
    return _plain_facts(device.type, torch.get_num_threads())


_KIB, _GIB = 2**10, 2**30
# arch, multiprocessors, shared memory of a block, memory: the vendors' data sheets
_GPUS = {
    "a100": ("sm_80", 108, 163 * _KIB, 80 * _GIB),
    "a10": ("sm_86", 72, 99 * _KIB, 24 * _GIB),
    "rtx3090": ("sm_86", 82, 99 * _KIB, 24 * _GIB),
    "l4": ("sm_89", 58, 99 * _KIB, 24 * _GIB),
    "l40s": ("sm_89", 142, 99 * _KIB, 48 * _GIB),
    "rtx4090": ("sm_89", 128, 99 * _KIB, 24 * _GIB),
    "h100": ("sm_90", 132, 227 * _KIB, 80 * _GIB),
    "h200": ("sm_90", 132, 227 * _KIB, 141 * _GIB),
    "b200": ("sm_100", 148, 227 * _KIB, 180 * _GIB),
    "rtx5090": ("sm_120", 170, 99 * _KIB, 32 * _GIB),
    "mi300x": ("gfx942", 304, 64 * _KIB, 192 * _GIB),
    "mi355x": ("gfx950", 256, 160 * _KIB, 288 * _GIB),
}
GPU_NAMES = tuple(_GPUS)
_TRITON = "3.6.0"  # stands for the one over there where none is installed here


def known_gpu(name: str) -> DeviceFacts | None:
    """Facts of a GPU by its name, one of ``GPU_NAMES``, which need not be in this machine; None for another name."""
    if name.lower() not in _GPUS:
        return None
    arch, multiprocessors, shared_memory, total_memory = _GPUS[name.lower()]
    return DeviceFacts(
        type="cuda",
        name=name.lower(),
        arch=arch,
        multiprocessors=multiprocessors,
        shared_memory=shared_memory,
        total_memory=total_memory,
        triton=triton_version() or _TRITON,
    )
