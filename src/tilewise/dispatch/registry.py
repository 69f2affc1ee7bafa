"""The backends by name, in the order explain lists them; each is imported when it is first asked about."""

from __future__ import annotations

import functools
import importlib

from tilewise.dispatch.backend import Backend
from tilewise.errors import InvalidInput, InvalidType

_MODULES = {
    "hopper": "tilewise.backends.hopper",
    "triton": "tilewise.backends.triton",
    "sdpa": "tilewise.backends.sdpa",
    "cpu": "tilewise.backends.cpu",
    "reference": "tilewise.backends.reference",
}


def names() -> tuple[str, ...]:
    """Every backend's name."""
    return tuple(_MODULES)


def check_name(name: str) -> str:
    """``name`` if it is "auto" or a backend; the error lists the valid names."""
    if not isinstance(name, str):
        raise InvalidType(f"backend: is {name!r}, must be a string")
    if name != "auto" and name not in _MODULES:
        raise InvalidInput(f"backend: is {name!r}, must be one of {', '.join(map(repr, ('auto', *_MODULES)))}")
    return name


@functools.cache
def load(name: str) -> Backend:
    """The backend called ``name``, imported on first use."""
    backend: Backend = importlib.import_module(_MODULES[check_name(name)]).BACKEND
    return backend
