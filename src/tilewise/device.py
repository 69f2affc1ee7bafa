"""What is known of the device a call runs on; a test may make up any device."""

from __future__ import annotations

import functools
import importlib.metadata
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


@functools.cache
def triton_version() -> str | None:
    """The installed Triton's version without importing it, or None."""
    for distribution in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


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
