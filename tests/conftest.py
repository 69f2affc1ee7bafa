"""What all tests share: one hypothesis profile, and `backend` parametrised over every room that runs here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.rooms import ROOMS

settings.register_profile(
    "tilewise",
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("tilewise")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``backend`` in a test's signature runs it on every room; a marker ``rooms(*names)`` limits them."""
    if "backend" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("rooms")
        names = marker.args if marker else tuple(ROOMS)
        metafunc.parametrize("backend", names)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 2 queries by 3 keys in the cpu room, so that small problems cross many of them."""
    from tilewise.backends.cpu.tiles import Tiling

    monkeypatch.setattr(Tiling, "of", staticmethod(lambda problem: Tiling(2, 3, 2)))
