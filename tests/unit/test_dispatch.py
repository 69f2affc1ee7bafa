"""The choice is a pure function of facts, returned with its trace; made-up backends, no device."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewise
from tilewise.device import DeviceFacts, at_least, device_facts, triton_version
from tilewise.dispatch import registry
from tilewise.dispatch.backend import Reason
from tilewise.dispatch.choose import choose, choose_among, choose_derivative, refusal, survey
from tilewise.errors import InvalidInput, UnsupportedProblem
from tilewise.problem import Problem

PROBLEM = Problem(2, 64, 64, 4, 2, 16, 16, softmax_scale=0.25)
FACTS = DeviceFacts(type="cpu", arch="AVX2", threads=2)


class MadeUp:
    """A backend of data only."""

    def __init__(
        self, name: str, cost: float = 1.0, reasons: tuple = (), devices: tuple = ("cpu",), backward: float = 0.0
    ) -> None:
        self.name, self.auto_devices = name, frozenset(devices)
        self._cost, self._reasons, self._backward = cost, reasons, backward

    def supports(self, problem: Problem, facts: DeviceFacts) -> tuple:
        return self._reasons

    def cost(self, problem: Problem, facts: DeviceFacts) -> float:
        return self._backward if problem.derivative == "backward" else self._cost


NO = (Reason("softcap", "30", "0", "wait"), Reason("headdim", "96", "64"))


def pick(request: str, *backends: MadeUp, problem: Problem = PROBLEM) -> str | None:
    return choose_among(problem, FACTS, request, backends)[0]


def test_auto_takes_the_cheapest_that_can() -> None:
    assert pick("auto", MadeUp("a", 2.0), MadeUp("b", 1.0), MadeUp("c", 0.5, NO)) == "b"


def test_the_backward_counts_when_one_will_follow() -> None:
    backends = MadeUp("quick forward", 1.0, backward=9.0), MadeUp("quick backward", 2.0, backward=1.0)
    assert pick("auto", *backends) == "quick forward"
    assert pick("auto", *backends, problem=PROBLEM.replace(needs_grad=("q",))) == "quick backward"


def test_auto_never_takes_a_backend_that_did_not_offer_itself() -> None:
    name, trace = choose_among(PROBLEM, FACTS, "auto", (MadeUp("shy", devices=("cuda",)),))
    assert name is None
    assert trace[0].reasons[0].what == "auto"
    assert pick("shy", MadeUp("shy", devices=())) == "shy"


def test_a_name_never_falls_back_and_the_trace_has_every_reason() -> None:
    name, trace = choose_among(PROBLEM, FACTS, "a", (MadeUp("a", reasons=NO), MadeUp("b")))
    assert name is None
    assert trace[0].reasons == NO
    assert trace[0].cost is None
    message = refusal(PROBLEM, FACTS, "a", trace)
    assert "never falls back" in message
    assert "softcap: has 30, needs 0  -> wait" in message
    assert "headdim: has 96, needs 64" in message
    assert "q (2, 64, 4, 16) fp32" in message
    assert "cpu AVX2" in message


def test_a_refusal_by_auto_lists_all_backends() -> None:
    _, trace = choose_among(PROBLEM, FACTS, "auto", (MadeUp("a", reasons=NO), MadeUp("b", reasons=NO[1:])))
    message = refusal(PROBLEM, FACTS, "auto", trace)
    assert message.startswith("no backend runs this problem")
    assert message.count("headdim: has 96") == 2


@given(st.lists(st.tuples(st.floats(0.1, 10), st.booleans()), min_size=1, max_size=6))
def test_the_choice_is_the_least_cost_among_the_able(rows: list[tuple[float, bool]]) -> None:
    backends = tuple(MadeUp(str(i), cost, () if able else NO) for i, (cost, able) in enumerate(rows))
    name, trace = choose_among(PROBLEM, FACTS, "auto", backends)
    able = [cost for cost, can in rows if can]
    assert len(trace) == len(rows)
    assert (name is None) == (not able)
    if name is not None:
        assert rows[int(name)] == (min(able), True)


def test_unknown_names_list_the_valid_ones() -> None:
    for request in ("flash", "", "Auto"):
        with pytest.raises(InvalidInput, match=r"'auto', .*'cpu'"):
            choose(PROBLEM, FACTS, request)
        with pytest.raises(InvalidInput, match=r"'auto', .*'cpu'"):
            registry.check_name(request)


def test_the_registered_backends_answer_with_their_names() -> None:
    for name in registry.names():
        assert registry.load(name).name == name
        assert isinstance(registry.load(name).supports(PROBLEM, FACTS), tuple)
        assert registry.load(name).cost(PROBLEM, FACTS) > 0


def test_reference_is_only_chosen_by_name() -> None:
    assert choose(PROBLEM, FACTS, "auto").name in ("cpu", "sdpa")
    assert choose(PROBLEM, FACTS, "reference").name == "reference"
    name, trace = survey(PROBLEM, FACTS, "auto")
    assert name == choose(PROBLEM, FACTS, "auto").name
    assert {row.name for row in trace} == set(registry.names())


def test_a_derivative_stays_with_the_forwards_backend_while_it_can() -> None:
    assert choose(PROBLEM, FACTS, "auto").name == "sdpa"
    assert choose_derivative(PROBLEM.replace(derivative="backward"), FACTS, "auto") == "sdpa"
    assert choose_derivative(PROBLEM.replace(derivative="jvp"), FACTS, "auto") == "cpu"
    with pytest.raises(UnsupportedProblem, match="sdpa"):
        choose_derivative(PROBLEM.replace(derivative="jvp"), FACTS, "sdpa")


def test_the_error_carries_problem_and_trace() -> None:
    q = torch.randn(1, 20, 2, 8)
    with pytest.raises(UnsupportedProblem) as caught:
        tilewise.attention(q, q, q, softcap=3.0, sink=torch.zeros(2), backend="sdpa")
    assert isinstance(caught.value, NotImplementedError)
    assert caught.value.problem.softcap == 3
    assert {reason.what for reason in caught.value.trace[0].reasons} == {"softcap", "sink"}


def test_the_error_and_the_explanation_may_be_copied_and_pickled() -> None:
    q = torch.randn(1, 20, 2, 8)
    with pytest.raises(UnsupportedProblem) as caught:
        tilewise.attention(q, q, q, softcap=3.0, backend="sdpa")
    error, explanation = caught.value, tilewise.explain(q, q, q)
    for way in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        again = way(error)
        assert (type(again), str(again)) == (UnsupportedProblem, str(error))
        assert (again.problem, again.trace) == (error.problem, error.trace)
        assert way(explanation) == explanation


def test_a_problem_pickled_in_another_process_has_this_ones_hash() -> None:
    lines = "import pickle, sys, tilewise.problem as p; x = p.Problem(2, 64, 64, 4, 2, 16, 16, softmax_scale=0.25)"
    code = f"{lines}; hash(x); sys.stdout.buffer.write(pickle.dumps(x))"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment)
    assert pickle.loads(done.stdout) in {PROBLEM}


def test_use_backend_sets_the_default_of_its_thread_and_gives_it_back() -> None:
    q = torch.randn(1, 20, 2, 8)
    seen = []

    def elsewhere() -> None:
        seen.append(tilewise.explain(q, q, q).backend)

    with tilewise.use_backend("reference"):
        assert tilewise.explain(q, q, q).backend == "reference"
        assert tilewise.explain(q, q, q, backend="cpu").backend == "cpu"
        with tilewise.use_backend("cpu"):
            assert tilewise.explain(q, q, q).backend == "cpu"
        assert tilewise.explain(q, q, q).backend == "reference"
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert tilewise.explain(q, q, q).backend == seen[0] != "reference"
    with pytest.raises(InvalidInput, match="backend"), tilewise.use_backend("nothing"):
        pass


def test_device_facts_are_probed_once_and_may_be_made_up() -> None:
    facts = device_facts(torch.device("cpu"))
    assert facts.type == "cpu"
    assert facts.threads == torch.get_num_threads()
    assert device_facts(torch.device("cpu")) is facts
    assert device_facts(torch.device("meta")).type == "meta"
    assert triton_version() is None or triton_version()[0].isdigit()


def test_a_problem_is_hashable_and_describes_itself() -> None:
    full = PROBLEM.replace(
        causal="top_left", window_left=3, segments=True, mask_shape=(1, 1, 64, 64), bias_shape=(1, 4, 64, 64),
        alibi=True, sink=True, softcap=2.0, dropout_p=0.1, needs_grad=("q", "bias"), derivative="second",
        deterministic=True,
    )  # fmt: skip
    assert len({full, full.replace(), PROBLEM}) == 2
    text = full.describe()
    for word in ("causal top_left", "window (3, None)", "segments", "mask (1, 1, 64, 64)", "bias", "alibi", "sink",
                 "softcap 2", "dropout 0.1", "grad q, bias", "second", "deterministic"):  # fmt: skip
        assert word in text
    packed = PROBLEM.replace(varlen=True, total_q=9, total_k=11)
    assert "2 sequences" in packed.describe()
    assert "q (9, 4, 16)" in packed.describe()
    assert PROBLEM.group == 2
    assert PROBLEM.replace(nheads=0, nheads_k=0).group == 1


H200 = DeviceFacts(type="cuda", arch="sm_90", multiprocessors=132, shared_memory=232448, triton="3.6.0")


@pytest.mark.parametrize("name", registry.names())
def test_every_backend_says_which_tile_it_takes(name: str) -> None:
    q = torch.empty(1, 256, 4, 64, dtype=torch.bfloat16, device="meta")
    found = tilewise.explain(q, q, q, causal=True, backend=name, device=H200 if name in ("triton", "hopper") else None)
    assert found.backend == name
    assert found.tile is not None
    assert min(found.tile) > 0


def test_triton_names_the_tile_that_it_launches() -> None:
    """64 keys by its table, but the assembler would lose q with as many keys as channels."""
    q = torch.empty(1, 256, 4, 64, dtype=torch.bfloat16, device="meta")
    keys = [tilewise.explain(q, q, q, causal=True, backend="triton", device=H200, **more).tile[1]
            for more in ({}, {"softcap": 20.0}, {"softmax_scale": -0.3})]  # fmt: skip
    assert keys == [64, 32, 32]


def test_explain_refuses_a_device_that_is_not_there() -> None:
    q = torch.empty(1, 8, 1, 8, device="meta")
    with pytest.raises(tilewise.InvalidInput, match="device: is 'toaster', must be a device of this machine"):
        tilewise.explain(q, q, q, device="toaster")


@pytest.mark.parametrize("version", [None, "3.5.1", "2.3.0+git"])
@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_an_older_triton_is_refused_with_the_version_it_needs(name: str, version: str | None) -> None:
    q = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16, device="meta")
    found = tilewise.explain(q, q, q, backend=name, device=dataclasses.replace(H200, triton=version))
    assert found.backend is None
    assert f"{name}: triton: has {version or 'none'}, needs >= 3.6" in str(found)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.10.0+git0123abc", "4.0.0rc1"])
def test_a_newer_triton_is_taken(version: str) -> None:
    assert at_least(version, (3, 6))
    q = torch.empty(1, 64, 2, 64, dtype=torch.bfloat16, device="meta")
    assert tilewise.explain(q, q, q, device=dataclasses.replace(H200, triton=version)).backend == "hopper"


def test_a_copy_of_an_input_is_told() -> None:
    """Of e4m3 with 256 channels, where many queries meet a key, the Hopper kernels read v transposed."""
    for seqlen, copied in ((16384, {"v transposed": 16384 * 8 * 256}), (1024, {})):
        q, k, v = (torch.empty(1, seqlen, 8, 256, dtype=torch.float8_e4m3fn, device="meta") for _ in range(3))
        told = tilewise.explain(q, k, v, device="h200")
        assert told.backend == "hopper"
        assert told.as_dict()["copied_bytes"] == copied
        assert ("copied     v transposed, 32 MiB" in str(told)) == bool(copied)
