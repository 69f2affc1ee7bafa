"""scripts/sanitize.sh with a stand-in for compute-sanitizer: what makes it fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize.sh"
STAND_IN = '#!/bin/sh\necho "ran $*"\ncase "$*" in *racecheck*hopper*) exit 1;; esac\n'


def sanitize(folder: Path, *tools: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = folder / "compute-sanitizer"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    given = {"COMPUTE_SANITIZER": str(program), "PYTHON": "true", **environment}
    command = ["sh", str(SCRIPT), *tools]
    return subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("tools", "status"), [((), 1), (("memcheck",), 0), (("racecheck",), 1)])
def test_any_report_makes_it_fail(tmp_path: Path, tools: tuple[str, ...], status: int) -> None:
    done = sanitize(tmp_path, *tools)
    assert done.returncode == status, done.stderr
    assert ("racecheck-hopper failed" in done.stdout) == bool(status)
    for tool in tools or ("memcheck", "racecheck"):
        for backend in ("triton", "hopper"):
            assert (
                f"--tool {tool} --error-exitcode 1 --print-limit 100 true tests/gpu/sanitized.py {backend}"
                in done.stdout
            )


def test_only_some_backends(tmp_path: Path) -> None:
    done = sanitize(tmp_path, BACKENDS="triton")
    assert done.returncode == 0
    assert "hopper" not in done.stdout


def test_a_run_that_fails_without_the_tool_is_not_clean(tmp_path: Path) -> None:
    assert sanitize(tmp_path, PYTHON="false").returncode == 1


def test_without_the_program_it_says_so(tmp_path: Path) -> None:
    done = sanitize(tmp_path, COMPUTE_SANITIZER="", PATH=f"{tmp_path / 'nothing'}:/usr/bin:/bin")
    if "no compute-sanitizer" not in done.stderr:
        pytest.skip("this machine has one")
    assert done.returncode == 2
