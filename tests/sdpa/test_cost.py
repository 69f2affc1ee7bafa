"""auto takes the cheaper of sdpa and cpu, by their estimates."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.backends.sdpa import BACKEND
from tilewise.device import DeviceFacts
from tilewise.problem import Problem

PROBLEM = Problem(batch=1, seqlen_q=2048, seqlen_k=2048, nheads=8, nheads_k=8, headdim=64, headdim_v=64)
FACTS = DeviceFacts(type="cpu", threads=2)


def chosen(features: dict, shape: tuple[int, ...] = (1, 1024, 8, 64), **keywords: object) -> str:
    q = torch.empty(shape, **keywords)  # type: ignore[call-overload]
    return tilewise.explain(q, q, q, **features).as_dict()["backend"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("features", [{}, {"causal": True}])
def test_auto_takes_torchs_kernel_where_it_means_the_same(
    features: dict, requires_grad: bool, dtype: torch.dtype
) -> None:
    assert chosen(features, dtype=dtype, requires_grad=requires_grad) == "sdpa"


@pytest.mark.parametrize("features", [{"window_size": (64, 0)}, {"softcap": 3.0}, {"sink": torch.zeros(8)}])
def test_auto_takes_the_tiled_loop_where_it_does_not(features: dict) -> None:
    assert chosen(features) == "cpu"


def test_cost_grows_with_the_work_and_falls_with_threads() -> None:
    base = BACKEND.cost(PROBLEM, FACTS)
    assert base > 0
    assert BACKEND.cost(PROBLEM.replace(seqlen_k=4096), FACTS) > 1.9 * base
    assert BACKEND.cost(PROBLEM.replace(derivative="backward"), FACTS) > 1.5 * base
    assert BACKEND.cost(PROBLEM.replace(causal="bottom_right"), FACTS) < 0.8 * base
    assert BACKEND.cost(PROBLEM, DeviceFacts(type="cpu", threads=1)) > 1.5 * base
    assert BACKEND.cost(PROBLEM.replace(mask_shape=(1, 1, 2048, 2048)), FACTS) > base
