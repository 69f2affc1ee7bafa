"""What a launch keeps from call to call, without a device."""

from __future__ import annotations

import torch

from tilewise.backends.triton.arguments import Box
from tilewise.backends.triton.launch import KNOWN_LIMIT, Descriptor


def test_a_descriptor_is_encoded_once_for_an_address():
    encoded = []

    def encode(box: Box) -> list[int]:
        encoded.append(box.base.data_ptr())
        return [box.base.data_ptr(), *box.shape]

    descriptor = Descriptor(Box(torch.bfloat16, (2, 64), (64, 1), (1, 64)), encode)
    assert descriptor.at(4096) == [4096, 2, 64]
    assert descriptor.at(4096) == [4096, 2, 64]
    assert descriptor.at(8192) == [8192, 2, 64]
    assert encoded == [4096, 8192]


def test_the_descriptors_that_are_kept_are_bounded():
    descriptor = Descriptor(Box(torch.bfloat16, (1,), (1,), (1,)), lambda box: [box.base.data_ptr()])
    for address in range(16, 16 * (2 * KNOWN_LIMIT), 16):
        assert descriptor.at(address) == [address]
        assert len(descriptor.known) <= KNOWN_LIMIT
