"""Runs the Triton kernels without a GPU. The variable must be set before Triton is imported: make test does it."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _few_threads():
    """Small tensors, two cores."""
    import torch

    torch.set_num_threads(1)
