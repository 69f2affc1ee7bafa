"""The gate before the clock: it passes right results and stops each kind of wrong one."""

import pytest
import torch

from tilewise.bench import gate
from tilewise.bench.cases import Case
from tilewise.functional import attention, attention_varlen

CASES = [
    Case(2, 70, 4, 16),
    Case(1, 70, 4, 16, nheads_k=2, causal=True),
    Case(1, 70, 2, 16, window=9),
    Case(1, 33, 4, 8, nheads_k=1, causal=True, dtype=torch.bfloat16),
    Case(1, 20, 4, 16, nheads_k=2, seqlen_k=75, causal=True),
    Case(1, 40, 2, 24, headdim_v=16, causal=True),
    Case(1, 60, 2, 16, lengths=(7, 30, 23), causal=True),
    Case(1, 50, 2, 16, bias=True),
]


def run(case):
    """The gate of the case, and what the cpu backend computes."""
    tensors, options = case.tensors(), case.options()
    leaves = dict(zip("qkv", tensors, strict=True))
    if case.bias:
        leaves["bias"] = options["bias"]
    function = attention if case.lengths is None else attention_varlen
    dout = torch.randn(*tensors[0].shape[:-1], case.values).to(case.dtype)
    results = gate.run(lambda: function(*tensors, **options, backend="cpu"), leaves, dout)
    return gate.Samples(case, tensors, dout, options.get("bias")), results


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_results_pass(case):
    samples, results = run(case)
    verdicts = samples.verdicts(results)
    assert list(verdicts) == ["out", "dq", "dk", "dv", *(["dbias"] if case.bias else [])]
    gate.require("cpu", case, verdicts)


@pytest.mark.parametrize("wrong", ["out", "dq", "dk", "dv", "dbias"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_result_off_by_a_tenth_is_stopped(case, wrong):
    samples, results = run(case)
    if wrong not in results:
        assert not case.bias
        return
    verdicts = samples.verdicts(results | {wrong: results[wrong] * 1.1})
    assert [name for name, verdict in verdicts.items() if not verdict.ok] == [wrong]
    with pytest.raises(gate.GateFailed, match=f"cpu on .*: {wrong} is off by"):
        gate.require("cpu", case, verdicts)


def test_nan_is_stopped():
    samples, results = run(CASES[0])
    assert not samples.verdicts({"out": results["out"] * torch.nan})["out"].ok


def test_a_forward_alone_can_be_judged():
    samples, results = run(CASES[0])
    assert list(samples.verdicts({"out": results["out"]})) == ["out"]
