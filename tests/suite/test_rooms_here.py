"""Which rooms the one suite runs on this machine: those that need a device say here that they were left out."""

from __future__ import annotations

import pytest

from tests.rooms import ON_CUDA, ROOMS, absence


@pytest.mark.parametrize("name", list(ON_CUDA))
def test_the_suite_runs_on(name: str) -> None:
    if reason := absence(name):
        pytest.skip(f"{reason}: tests/suite, tests/cases and tests/calculus run without {name}")
    assert name in ROOMS
