"""Sizes, signatures, docstrings, and no assert as validation."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import tilewise
from tests.arch import budgets

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "tilewise").rglob("*.py"))
ALL_FILES = SOURCES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "scripts").rglob("*.py"))


def test_files_and_functions_keep_their_budgets():
    assert [text for path in ALL_FILES for text in budgets.file_complaints(path)] == []


def test_public_functions_keep_their_signatures():
    public = [path for path in SOURCES if path.name == "functional.py" or {"kvcache", "distributed"} & set(path.parts)]
    assert [text for path in public for text in budgets.public_complaints(path)] == []


def test_no_assert_in_the_package():
    assert [text for path in SOURCES for text in budgets.assert_complaints(path)] == []


def test_every_function_but_kernels_is_annotated():
    assert [text for path in SOURCES for text in budgets.annotation_complaints(path)] == []


def test_every_public_name_has_a_docstring():
    assert [name for name in tilewise.__all__ if not inspect.getdoc(getattr(tilewise, name))] == []
    assert [text for path in SOURCES for text in budgets.docstring_complaints(path) if "module" in text] == []
    public = [path for path in SOURCES if {"integrations", "kvcache", "distributed", "testing"} & set(path.parts)]
    assert [text for path in public for text in budgets.docstring_complaints(path)] == []


LONG = "\n".join(["    x = 1"] * 60)
BAD = {
    "file": (budgets.file_complaints, "x = 1\n" * 501),
    "function": (budgets.file_complaints, f"def f():\n{LONG}"),
    "method": (budgets.file_complaints, "class A:\n    def f(self):\n" + LONG.replace("    x", "        x")),
    "kernel": (budgets.file_complaints, "@triton.jit\ndef f():\n" + "    x = 1\n" * 150),
    "kernel parameters": (
        budgets.file_complaints,
        "@gluon.jit\ndef f(" + ", ".join(f"a{i}" for i in range(31)) + "):\n    x = 1",
    ),
    "public parameters": (
        budgets.public_complaints,
        "def f(q, k, v, *, " + ", ".join(f"a{i}" for i in range(17)) + "):\n    x = 1",
    ),
    "positional": (budgets.public_complaints, "def f(q, k, v, causal=False):\n    x = 1"),
    "assert": (budgets.assert_complaints, "def f(x):\n    assert x > 0"),
    "annotation": (budgets.annotation_complaints, "def f(x: int, y): ..."),
    "annotation of the result": (budgets.annotation_complaints, "class A:\n    def f(self, x: int): ..."),
    "module docstring": (budgets.docstring_complaints, "x = 1"),
    "function docstring": (budgets.docstring_complaints, '"""A module."""\ndef f():\n    x = 1'),
}
GOOD = {
    "file": (budgets.file_complaints, "x = 1\n" * 500),
    "function": (budgets.file_complaints, f'def f():\n    """One\n    two."""\n{LONG[: -len("    x = 1")]}'),
    "kernel": (budgets.file_complaints, "@triton.jit(noinline=True)\ndef f():\n" + "    x = 1\n" * 149),
    "public": (budgets.public_complaints, "def f(q, k, v, *, causal=False):\n    x = 1\ndef _g(q, k, v, w): ..."),
    "annotations": (budgets.annotation_complaints, "@triton.jit\ndef f(x):\n    x = 1\ndef g(x: int) -> int: ..."),
    "docstrings": (budgets.docstring_complaints, '"""A module."""\ndef f():\n    """Does f."""\ndef _g(): ...'),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_over_is_found(tmp_path, case):
    check, text = BAD[case]
    path = tmp_path / "bad.py"
    path.write_text(text)
    assert len(check(path)) == 1


@pytest.mark.parametrize("case", GOOD)
def test_what_fits_passes(tmp_path, case):
    check, text = GOOD[case]
    path = tmp_path / "good.py"
    path.write_text(text)
    assert check(path) == []
