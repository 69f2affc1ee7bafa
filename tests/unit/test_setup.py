"""scripts/setup.sh on machines that lack something: it says exactly what to install, or installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="setup.sh is for POSIX shells")

OLD = 'case "$*" in *version_info*) exit 1;; esac; echo Python 3.9.2'
# Stands for a Debian python3 without python3-venv; $FOUND is the package that apt-get brings.
BARE = """case "$*" in
*"import ensurepip"*) [ -e "$FOUND" ] ;;
*print*version_info*) echo 3.11 ;;
*"-m venv"*) echo "venv made" >&2; exit 9 ;;
esac"""


def _setup(folder: Path, commands: dict[str, str], python: str = "fakepython") -> subprocess.CompletedProcess[str]:
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    shutil.copy(ROOT / "constraints.txt", folder)
    tools = folder / "tools"
    tools.mkdir()
    for name, text in commands.items():
        path = tools / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "FOUND": str(folder / "found")}
    command = ["sh", "scripts/setup.sh", "run", python]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_no_python(tmp_path):
    done = _setup(tmp_path, {}, python="no-such-python")
    assert done.returncode == 1
    assert "no 'no-such-python' here; install Python 3.10 or newer" in done.stderr


def test_an_old_python(tmp_path):
    done = _setup(tmp_path, {"fakepython": OLD})
    assert done.returncode == 1
    assert "Python 3.9.2 is too old: Python 3.10 or newer is needed" in done.stderr


def test_no_ensurepip_and_not_root(tmp_path):
    done = _setup(tmp_path, {"fakepython": BARE, "id": "echo 1000"})
    assert done.returncode == 1
    assert "Run: sudo apt-get install python3.11-venv" in done.stderr


def test_no_ensurepip_as_root_installs_it(tmp_path):
    apt = 'case "$*" in *install*python3.11-venv) touch "$FOUND";; esac'
    done = _setup(tmp_path, {"fakepython": BARE, "id": "echo 0", "apt-get": apt})
    assert "installing Debian's python3.11-venv" in done.stdout
    assert "venv made" in done.stderr
    assert (tmp_path / "found").exists()


def test_apt_get_that_fails_is_said(tmp_path):
    done = _setup(tmp_path, {"fakepython": BARE, "id": "echo 0", "apt-get": "exit 100"})
    assert done.returncode == 1
    assert "apt-get could not install python3.11-venv" in done.stderr


def test_no_registry_is_named():
    files = [
        "Makefile",
        "scripts/setup.sh",
        "constraints.txt",
        "constraints-interpreter.txt",
        ".ci/run",
        "pyproject.toml",
    ]
    for name in files:
        assert "://" not in (ROOT / name).read_text(), name


def test_the_packages_own_needs_are_not_pinned():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dependencies = ["torch>=2.11"]' in text
    assert "torch==" not in text
