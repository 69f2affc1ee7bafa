"""The gate before the clock: it passes right results and stops each kind of wrong one."""

import pytest
import torch

from tilewise.bench import gate
from tilewise.bench.cases import Case
from tilewise.functional import attention

CASES = [
    Case(2, 70, 4, 16),
    Case(1, 70, 4, 16, nheads_k=2, causal=True),
    Case(1, 70, 2, 16, window=9),
    Case(1, 33, 4, 8, nheads_k=1, causal=True, dtype=torch.bfloat16),
]


def run(case):
    tensors = case.tensors()
    dout = torch.randn_like(tensors[0])
    out = attention(*tensors, causal=case.causal, window_size=case.window_size, backend="cpu")
    return tensors, dout, [out, *torch.autograd.grad(out, tensors, dout)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_results_pass(case):
    tensors, dout, results = run(case)
    for name, (error, budget) in gate.errors(case, tensors, dout, tuple(results)).items():
        assert error <= budget, name


@pytest.mark.parametrize("wrong", range(4), ids=["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_result_off_by_a_tenth_is_stopped(case, wrong):
    tensors, dout, results = run(case)
    results[wrong] = results[wrong] * 1.1
    found = gate.errors(case, tensors, dout, tuple(results))
    passed = [error <= budget for error, budget in found.values()]
    assert passed == [index != wrong for index in range(4)]


def test_nan_is_stopped():
    tensors, dout, results = run(CASES[0])
    results[0] = results[0] * torch.nan
    error, budget = gate.errors(CASES[0], tensors, dout, tuple(results))["out"]
    assert not error <= budget
