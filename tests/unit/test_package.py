"""The wheel that users install: pure Python, needing only torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    (path,) = (folder / "out").glob("*.whl")
    return path


def test_it_is_universal(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")


def test_it_holds_only_python(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    code = [name for name in names if ".dist-info/" not in name]
    assert {name for name in code if not name.endswith(".py")} == {"tilewise/py.typed"}
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "tilewise").rglob("*.py")}
    assert {name for name in code if name.endswith(".py")} == sources


def test_it_needs_only_torch(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    needs = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert needs == ["Requires-Dist: torch>=2.11"]
    assert "License-Expression: MIT" in lines
