"""NaN where nothing should be read: in fresh buffers and in keys that no query may see."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, ``torch.empty`` and its kin return NaN (floats) or the largest number (integers), not lucky zeros.

    It uses torch's deterministic mode, which fills fresh memory; operators without a deterministic form only warn.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(was_on, warn_only=warned)


@torch.no_grad()
def poison_unseen(k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, value: float = float("nan")) -> int:
    """Write ``value`` in place into every key of k and v that no query may see; returns how many keys that were.

    ``keep`` is boolean (batch, nheads, seqlen_q, seqlen_k), as ``visible_pairs`` gives it; k and v are (batch,
    seqlen_k, nheads_k, dim). The query heads of one key/value head are taken together. Tensors whose elements share
    memory (expanded ones) are poisoned where no head and no batch item that shares it may see the key.
    """
    batch, nheads, _, seqlen_k = keep.shape
    nheads_k = k.shape[2]
    seen = keep.any(dim=2).view(batch, nheads_k, nheads // max(1, nheads_k), seqlen_k).any(dim=2).transpose(1, 2)
    for tensor in (k, v):
        unseen = ~seen[..., None]
        for dim in (0, 2):
            if tensor.shape[dim] > 1 and tensor.stride(dim) == 0:
                unseen = unseen.all(dim, keepdim=True)
                tensor = tensor.narrow(dim, 0, 1)
        tensor.masked_fill_(unseen.expand(tensor.shape), value)
    return int((~seen).sum())
