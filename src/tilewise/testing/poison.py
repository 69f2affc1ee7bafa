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


def poison_unseen(
    k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, value: float = float("nan")
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of k and v in which every key that no query may see holds ``value``.

    ``keep`` is boolean (batch, nheads, seqlen_q, seqlen_k), as ``visible_pairs`` gives it; k and v are (batch,
    seqlen_k, nheads_k, dim). The query heads of one key/value head are taken together.
    """
    batch, nheads, _, seqlen_k = keep.shape
    seen = keep.any(dim=2).view(batch, k.shape[2], nheads // k.shape[2], seqlen_k).any(dim=2)
    unseen = ~seen.transpose(1, 2)[..., None]
    return k.detach().masked_fill(unseen, value), v.detach().masked_fill(unseen, value)
