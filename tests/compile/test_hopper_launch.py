"""What a launch keeps from call to call, without a device."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tilewise.backends.hopper import maps
from tilewise.backends.hopper.launch import with_computed
from tilewise.backends.hopper.maps import KNOWN_ADDRESSES, Box, Encoded, Map


class Ring(NamedTuple):
    stages: int
    width: int

    @property
    def size(self) -> int:
        return self.stages * self.width


MAP = Map(Box(torch.bfloat16, (64, 64)), (300, 64), (64, 1))


def test_a_map_is_encoded_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def encode(there: Map, meta: object) -> list[object]:
        encoded.append(there.base.data_ptr())
        return [meta, *there.shape, *there.strides]

    monkeypatch.setattr(maps, "make_tensordesc_arg", encode)
    known = Encoded(MAP, "meta")
    for address in (4096, 4096, 8192, 4096):
        assert (known.get(address) or known.encode(address)) == ["meta", 300, 64, 64, 1]
    assert encoded == [4096, 8192]


def test_the_maps_that_are_kept_are_bounded() -> None:
    known = Encoded(MAP, None)
    for address in range(16, 16 * 2 * KNOWN_ADDRESSES, 16):
        (there,) = known.encode(address)
        assert there.data_ptr() == address
        assert len(known) <= KNOWN_ADDRESSES


def test_a_compile_time_tuple_brings_what_it_computes_as_fields() -> None:
    """Triton 3.7 and newer rebuild a compile-time tuple from its fields, so that a kernel found no property."""
    tile = with_computed(Ring(stages=2, width=128))
    assert tile._fields == ("stages", "width", "size")
    assert tile.size == 256
    assert with_computed((1, 2)) == (1, 2)
    assert with_computed(3) == 3
