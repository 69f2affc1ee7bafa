"""The devices that models are tested on: the CPU, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Models and tokens of the tests that use it are made there."""
    torch.set_default_device(request.param)
    try:
        yield request.param
    finally:
        torch.set_default_device(None)
