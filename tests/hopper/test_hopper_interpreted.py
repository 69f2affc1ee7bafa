"""The plain Triton kernels of the Hopper backend under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.device import triton_version

pytest.importorskip("triton")
numpy = pytest.importorskip("numpy")


@pytest.mark.skipif(
    (triton_version() or "").startswith("3.6.") and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4),
    reason=f"triton 3.6's interpreter cannot take loop bounds known at run time with numpy {numpy.__version__}: "
    "needs numpy < 2.4",
)
def test_kernels_around_the_gluon_ones() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
