"""The copy engine's tensor maps: of which boxes, over which strides, and how they reach a launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon.language import NVMMASharedLayout

from tilewise.device import bind_thread

KNOWN_ADDRESSES = 256  # for which a launch keeps a map's arguments
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
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
    """A tensor map to be: what Triton reads of a descriptor, without the checks of its class."""

    __slots__ = ("address", "box", "shape", "strides")
    padding = "zero"
    round_f32_to_tf32 = False  # read from triton 3.7 on

    def __init__(self, box: Box, shape: tuple[int, ...], strides: tuple[int, ...], address: int = 0) -> None:
        self.box, self.shape, self.strides, self.address = box, shape, strides, address

    @property
    def base(self) -> Map:
        """What is asked for the address."""
        return self

    def data_ptr(self) -> int:
        """The address."""
        return self.address

    def at(self, address: int) -> Map:
        """The same map elsewhere."""
        return Map(self.box, self.shape, self.strides, address)


class Encoded(dict[int, list[Any]]):
    """A map's arguments of the launcher by its address. Encoding takes microseconds, and the allocator's addresses
    come again and again.
    """

    def __init__(self, map_: Map, meta: Any) -> None:
        super().__init__()
        self.map, self.meta = map_, meta

    def encode(self, address: int) -> list[Any]:
        """Those of an address that is not known yet."""
        if len(self) >= KNOWN_ADDRESSES:
            self.clear()
        bind_thread()
        there = self.map.at(address)
        arguments = self[address] = [there] if self.meta is None else make_tensordesc_arg(there, self.meta)
        return arguments


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
