"""Counter-based random numbers (Philox4x32-10), the same on every backend, tile size, chunk and rank.

The key is the 64-bit seed; the counter is (j // 4, i, head, batch); output word ``j % 4`` belongs to pair (i, j). In
the packed form i and j count within their sequence and ``batch`` is the sequence's index.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, seed: torch.Tensor) -> Words:
    """Four 32-bit words, held in int64, for each counter (four int64 tensors below 2**32) and the int64 ``seed``."""
    c0, c1, c2, c3 = counter
    key_a, key_b = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        # int64 products wrap, but their low 64 bits are exact, so both halves can be read off
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c2 = ((product_b >> 32) & _LOW) ^ c1 ^ key_a, ((product_a >> 32) & _LOW) ^ c3 ^ key_b
        c1, c3 = product_b & _LOW, product_a & _LOW
        key_a, key_b = (key_a + _WEYL_A) & _LOW, (key_b + _WEYL_B) & _LOW
    return c0, c1, c2, c3


def threshold(dropout_p: float) -> int:
    """A pair is kept iff its word is at least this number: probability dropout_p of being dropped."""
    return round(dropout_p * 2**32)


def keep_scale(dropout_p: float) -> float:
    """What a kept probability is multiplied by; 0 when everything is dropped."""
    return 0.0 if dropout_p >= 1.0 else 1.0 / (1.0 - dropout_p)


def dropout_keep(
    seed: torch.Tensor,
    dropout_p: float,
    batch: torch.Tensor,
    heads: torch.Tensor,
    queries: tuple[int, int],
    keys: tuple[int, int],
) -> torch.Tensor:
    """Boolean (len(batch), len(heads), queries, keys): True where the pair is kept.

    ``batch`` and ``heads`` are 1-D int64 index tensors, ``queries`` and ``keys`` half-open index ranges.
    """
    device = batch.device
    seed = seed.to(device).reshape(())
    i = torch.arange(*queries, device=device)[:, None]
    first_word, last_word = keys[0] // 4, -(-keys[1] // 4)
    words = philox(
        (
            torch.arange(first_word, last_word, device=device),
            i,
            heads[:, None, None],
            batch[:, None, None, None],
        ),
        seed,
    )
    shape = (len(batch), len(heads), queries[1] - queries[0], last_word - first_word)
    numbers = torch.stack([word.expand(shape) for word in words], dim=-1).flatten(-2)
    offset = keys[0] - 4 * first_word
    return numbers[..., offset : offset + keys[1] - keys[0]] >= threshold(dropout_p)
