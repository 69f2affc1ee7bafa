"""Philox4x32-10 against its authors' vectors and a second implementation in plain integers; dropout's statistics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewise import rng

# Random123's known answers for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORD = st.integers(0, 2**32 - 1)


def plain_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The same in Python's own integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product_a, product_b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product_b >> 32) ^ c1 ^ k0,
            product_b & 0xFFFFFFFF,
            (product_a >> 32) ^ c3 ^ k1,
            product_a & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def signed(seed: int) -> torch.Tensor:
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed)


def tilewise_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    words = tuple(torch.tensor([value]) for value in counter)
    return tuple(int(word) for word in rng.philox(words, signed(key[0] | key[1] << 32)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_authors_vectors(counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]) -> None:
    assert plain_philox(counter, key) == result
    assert tilewise_philox(counter, key) == result


@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
def test_any_counter_and_key(counter: tuple[int, ...], key: tuple[int, int]) -> None:
    assert tilewise_philox(counter, key) == plain_philox(counter, key)


@given(st.integers(0, 2**64 - 1), st.floats(0, 1), st.integers(0, 9), st.integers(0, 9))
def test_the_word_of_a_pair_is_where_the_contract_says(seed: int, dropout_p: float, start: int, head: int) -> None:
    keep = rng.dropout_keep(
        signed(seed), dropout_p, torch.tensor([3]), torch.tensor([head]), (start, start + 3), (start, start + 7)
    )
    for i in range(start, start + 3):
        for j in range(start, start + 7):
            word = plain_philox((j >> 2, i, head, 3), (seed & 0xFFFFFFFF, seed >> 32))[j & 3]
            assert bool(keep[0, 0, i - start, j - start]) == (word >= round(dropout_p * 2**32))


@given(st.integers(0, 11), st.integers(1, 11), st.integers(0, 11), st.integers(1, 11))
def test_a_tile_is_a_cut_of_the_whole(start_q: int, rows: int, start_k: int, columns: int) -> None:
    seed, batch, heads = torch.tensor(77), torch.arange(2), torch.arange(3)
    whole = rng.dropout_keep(seed, 0.4, batch, heads, (0, 24), (0, 24))
    tile = rng.dropout_keep(seed, 0.4, batch, heads, (start_q, start_q + rows), (start_k, start_k + columns))
    assert torch.equal(tile, whole[:, :, start_q : start_q + rows, start_k : start_k + columns])
    one = rng.dropout_keep(seed, 0.4, batch[1:], heads[2:], (0, 24), (0, 24))
    assert torch.equal(one, whole[1:, 2:])


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_kept_is_the_probability(dropout_p: float) -> None:
    keep = rng.dropout_keep(torch.tensor(5), dropout_p, torch.arange(4), torch.arange(4), (0, 100), (0, 100))
    count, share = keep.numel(), float(keep.double().mean())
    deviation = math.sqrt(dropout_p * (1 - dropout_p) / count)
    assert abs(share - (1 - dropout_p)) <= 5 * deviation
    rows = keep.double().mean(-1)
    assert float(rows.std()) <= 1.2 * math.sqrt(dropout_p * (1 - dropout_p) / 100)


def test_neighbours_are_independent() -> None:
    keep = rng.dropout_keep(torch.tensor(9), 0.5, torch.arange(2), torch.arange(2), (0, 200), (0, 200)).double() - 0.5
    for shifted in (
        keep[..., 1:] * keep[..., :-1],
        keep[..., 4:] * keep[..., :-4],
        keep[:, :, 1:] * keep[:, :, :-1],
        keep[:, 1] * keep[:, 0],
    ):
        assert abs(float(shifted.mean())) < 5 * 0.25 / math.sqrt(shifted.numel())
    other = rng.dropout_keep(torch.tensor(10), 0.5, torch.arange(2), torch.arange(2), (0, 200), (0, 200)).double() - 0.5
    assert abs(float((keep * other).mean())) < 5 * 0.25 / math.sqrt(keep.numel())


def test_the_kept_are_scaled_up() -> None:
    assert rng.keep_scale(0.0) == 1
    assert rng.keep_scale(0.75) == 4
    assert rng.keep_scale(1.0) == 0
