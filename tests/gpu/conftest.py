"""GPU tests: skipped without CUDA, touching it only when a test runs. PYTHONPATH=src python3 -m pytest tests/gpu -q"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device")
    torch.backends.cuda.matmul.allow_tf32 = False
