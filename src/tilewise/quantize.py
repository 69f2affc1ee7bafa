"""From bf16 or fp32 tensors to e4m3 with descales: a choice of the caller's, never made for them.

e4m3 has three bits after the point: a number is off by up to 1/16 of itself, whatever its scale, until it is some 2**15
times smaller than the largest of its scale. So scales matter less than for integers. A rotation of q and k by the same
orthogonal matrix leaves every product q k^T as it is, and evens out what the roundings add up to (incoherent
processing: Chee et al. 2023, Shah et al. 2024). It pays where outliers are scattered, and costs where all of them lie
in one channel, whose roundings it spreads over all; ``tests/unit/test_quantize.py`` measures both.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tilewise.descale import BLOCK, FP8, blocks_of, spread
from tilewise.errors import InvalidInput, InvalidType
from tilewise.inputs import check_tensor

LARGEST = 448.0
_SMALLEST = torch.finfo(torch.float32).tiny
SCALES = ("tensor", "head", "block")


class Quantized(NamedTuple):
    """What ``attention`` takes: ``attention(x.q, x.k, x.v, q_descale=x.q_descale, ...)``, or ``**x.keywords()``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor

    def keywords(self) -> dict[str, torch.Tensor]:
        """The descales by the names of ``attention``'s arguments."""
        return {"q_descale": self.q_descale, "k_descale": self.k_descale, "v_descale": self.v_descale}


def quantize_fp8(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scales: str = "head", rotation_seed: int | None = None
) -> Quantized:
    """q, k, v in e4m3, each scaled so that its largest number is stored as 448.

    Args:
        q: (batch, seqlen_q, nheads, headdim), or packed (total_q, nheads, headdim); any float dtype.
        k, v: with nheads_k heads, as ``attention`` takes them.
        scales: "tensor": one number for each of q, k and v; "head": one for each batch item and key head (packed: for
            each key head), q's shared by the query heads of a group; "block": one for each 128 rows of such a head
            (not packed).
        rotation_seed: an int rotates q and k over headdim by ``rotation`` first, which changes no product of theirs
            but by rounding; None does not.

    Returns:
        Quantized, without gradient. A tensor of zeros has descale 1. Inf and NaN are stored as NaN and set no scale.

    Raises:
        InvalidInput, InvalidType: naming the argument.
    """
    if scales not in SCALES:
        raise InvalidInput(f"scales: is {scales!r}, must be one of {', '.join(map(repr, SCALES))}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if not tensor.is_floating_point() or tensor.ndim not in (3, 4):
            raise InvalidType(f"{name}: is {tensor.dtype} with shape {tuple(tensor.shape)}, must be (batch, seqlen, "
                              "nheads, dim) or (total, nheads, dim) of floats")  # fmt: skip
    _check_sizes(q, k, v)
    if scales == "block" and q.ndim == 3:
        raise InvalidInput("scales: is 'block', must be 'tensor' or 'head' for packed tensors")
    q, k, v = q.detach(), k.detach(), v.detach()
    if rotation_seed is not None:
        matrix = rotation(q.shape[-1], rotation_seed, device=q.device)
        q, k = q.float() @ matrix, k.float() @ matrix
    nheads_k = k.shape[-2]
    stored_q, q_descale = _stored(q, nheads_k, scales)
    stored_k, k_descale = _stored(k, nheads_k, scales)
    stored_v, v_descale = _stored(v, nheads_k, scales)
    return Quantized(stored_q, stored_k, stored_v, q_descale, k_descale, v_descale)


def _check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k and v belong together."""
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    grouped = nheads % nheads_k == 0 if nheads_k else nheads == 0
    together = q.ndim == k.ndim and q.shape[:-3] == k.shape[:-3] and k.shape[:-1] == v.shape[:-1]
    if not together or q.shape[-1] != k.shape[-1] or not grouped:
        raise InvalidInput(
            f"q, k, v: shapes are {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}, must be those that attention "
            "takes: k and v alike up to headdim_v, q with k's headdim and a multiple of its heads"
        )


def rotation(headdim: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """An orthogonal (headdim, headdim): random signs, then a Hadamard matrix over the largest power of two in headdim.

    The same seed gives the same matrix on every device.
    """
    if headdim < 1:
        raise InvalidInput(f"headdim: is {headdim}, must be at least 1")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidType(f"rotation_seed: is {seed!r}, must be an int or None")
    if not -(2**63) <= seed < 2**64:
        raise InvalidInput(f"rotation_seed: is {seed}, must fit in 64 bits")
    size = headdim & -headdim
    exactly: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
    hadamard = torch.ones(1, 1, **exactly)
    while hadamard.shape[0] < size:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = torch.randint(0, 2, (headdim,), generator=generator, **exactly) * 2.0 - 1.0
    matrix = torch.kron(torch.eye(headdim // size, **exactly), hadamard / math.sqrt(size))
    return (signs[:, None] * matrix).to(device)


def _stored(tensor: torch.Tensor, nheads_k: int, scales: str) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and descale of one tensor."""
    real = tensor.float()
    finite = real.isfinite()
    sizes = real.abs().masked_fill(~finite, 0.0)  # what padding holds sets no scale
    largest = _largest(sizes, nheads_k, scales)
    descale = torch.where(largest > 0, (largest / LARGEST).clamp(min=_SMALLEST), 1.0)
    stored = (real / spread(descale, real.shape)).clamp(-LARGEST, LARGEST)
    return stored.masked_fill(~finite, torch.nan).to(FP8), descale


def _largest(sizes: torch.Tensor, nheads_k: int, scales: str) -> torch.Tensor:
    """One number, (batch, nheads_k), packed (nheads_k,), or (batch, nheads_k, blocks)."""
    batch, seqlen = sizes.shape[:-3], sizes.shape[-3]
    if scales == "tensor":
        return sizes.amax() if sizes.numel() else sizes.new_zeros(())
    rows, blocks = (BLOCK, blocks_of(seqlen)) if scales == "block" else (seqlen, 1)
    if sizes.numel():
        padded = torch.nn.functional.pad(sizes, (0, 0, 0, 0, 0, blocks * rows - seqlen))
        by_block = padded.reshape(*batch, blocks, rows, nheads_k, -1).amax((-3, -1))
    else:
        by_block = sizes.new_zeros(*batch, blocks, nheads_k)
    return by_block.transpose(-1, -2) if scales == "block" else by_block.squeeze(-2)
