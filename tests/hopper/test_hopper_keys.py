"""What one process has compiled, another finds in the disk cache, whichever kernel it asks for first."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton")
SCRIPT = """
import sys
from tilewise.backends.hopper import backward, backward_wide, forward, launch, preprocess
kernels = [forward.forward_kernel, backward.backward_kernel]
kernels += [backward_wide.backward_wide_kernel, preprocess.after_kernel]
for kernel in kernels[:: int(sys.argv[1])]:
    launch.settle(kernel)
print(*sorted(kernel.cache_key for kernel in kernels))
"""


def test_keys_do_not_depend_on_the_order() -> None:
    keys = [subprocess.check_output([sys.executable, "-c", SCRIPT, step]) for step in ("1", "-1")]
    assert keys[0] == keys[1]
