"""What all tests share: one hypothesis profile, and `backend` parametrised over every room that runs here."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.rooms import ON_CUDA, ROOMS

settings.register_profile(
    "tilewise",
    deadline=None,
    derandomize=True,
    max_examples=25,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("tilewise")


def _places(name: str) -> list[Any]:
    """(backend, device) of a room; "auto" chooses on the CPU and, where there is one, on a GPU ("auto-cuda": only)."""
    if name in ON_CUDA and name not in ROOMS:
        return []
    found = []
    if name != "auto-cuda":
        found.append(pytest.param(name, ROOMS[name].device if name in ROOMS else "cpu", id=name))
    if name.startswith("auto") and torch.cuda.is_available():
        found.append(pytest.param("auto", "cuda", id="auto-cuda"))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``backend`` in a test's signature runs it on every room; a marker ``rooms(*names)`` limits them."""
    if "backend" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("rooms")
        names = marker.args if marker else tuple(ROOMS)
        metafunc.parametrize(("backend", "room_device"), [place for name in names for place in _places(name)])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where every parametrisation of the suite compiles kernels, a share of them is run; the others are slow."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        room = ON_CUDA.get(callspec.params.get("backend")) if callspec else None
        if room and item.path.parent.name == "suite" and zlib.crc32(item.nodeid.encode()) % room.share:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def room_device() -> str:
    """Where a test makes its tensors; a room's own device for the tests of rooms."""
    return "cpu"


@pytest.fixture(autouse=True)
def _same_numbers(room_device: str) -> Iterator[None]:
    torch.manual_seed(0)
    if room_device == "cpu":
        yield
        return
    torch.set_default_device(room_device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 2 queries by 3 keys in the cpu room, so that small problems cross many of them."""
    from tilewise.backends.cpu.tiles import Tiling

    monkeypatch.setattr(Tiling, "of", staticmethod(lambda problem: Tiling(2, 3, 2)))
