"""The GPU bench without a GPU: its cases, peers' refusals, rows, means and tables; and one step of it where one is."""

from __future__ import annotations

import json
import math
import shlex
import sys
from types import ModuleType

import pytest
import torch

import tilewise
from tilewise.bench import contenders, gpu, gpu_cases, peers, report, summary, timing, warm
from tilewise.bench.cases import Case
from tilewise.cli import bench as command
from tilewise.cli import main, parser
from tilewise.descale import FP8

BF16 = torch.bfloat16
SETTINGS = gpu.Settings(("hopper", "triton"), ("fa2-sdpa", "flex"), 1.0, (("triton", "causal"), ("flex", "window")))


def row(**changes):
    plain = {"figure": "time", "table": "square", "case": "c", "pass": "forward", "contender": "tilewise-a"}
    return {**plain, "tflops": 1.0, "of_matmul": 0.5, "ratios": {}, **changes}


def test_the_square_problems_are_twenty_with_both_passes():
    assert len(gpu_cases.SQUARE) == len(set(gpu_cases.SQUARE)) == 20
    assert all(gpu_cases.CASES[case] == ("forward", "backward") for case in gpu_cases.SQUARE)
    assert len({case.name for case in gpu_cases.CASES}) == len(gpu_cases.CASES)
    assert set(gpu_cases.CASES) >= gpu_cases.COMPILED_PER_SHAPE


def test_every_case_is_a_step_and_what_is_worth_most_comes_first():
    names = [name for name, _ in gpu.steps(SETTINGS)]
    assert len(set(names)) == len(names)
    assert names[1:21] == [case.name for case in gpu_cases.SQUARE]
    assert {case.name for case in gpu_cases.CASES} <= set(names)
    assert names[-1] == "first call of triton"


def test_packed_lengths_and_their_twin():
    for case in gpu_cases.PACKED:
        assert len(case.lengths) == 21
        assert sum(case.lengths) == case.seqlen == 32768
        twin = gpu_cases.dense_twin(case)
        assert twin.flops("forward") == pytest.approx(case.flops("forward"), rel=0.1)
        assert twin.batch * twin.seqlen == pytest.approx(32768, rel=0.1)


def test_flops_of_chunks_packed_sequences_and_unequal_head_dimensions():
    chunk = Case(1, 2, 1, 8, seqlen_k=5, causal=True)
    assert chunk.flops("forward") == 2 * (4 + 5) * 16
    assert Case(1, 5, 2, 8, lengths=(2, 3)).flops("forward") == 2 * 2 * (4 + 9) * 16
    assert Case(1, 4, 1, 8, headdim_v=2).flops("backward") == 2 * 16 * (3 * 8 + 2 * 2)


def test_contenders_can_be_left_out_of_cases():
    causal, window = Case(1, 8, 1, 8, causal=True), Case(1, 8, 1, 8, window=4)
    assert SETTINGS.taking_part(causal) == ["tilewise-hopper", "fa2-sdpa", "flex"]
    assert SETTINGS.taking_part(window) == ["tilewise-hopper", "tilewise-triton", "fa2-sdpa"]


def test_each_kernel_is_compiled_ahead_once():
    every = {case.name for case in gpu_cases.CASES}
    tasks = warm.tasks(gpu.Settings(("hopper",), ("fa2-sdpa", "flex", "fa4-cute"), 1.0), every)
    assert len(set(tasks)) == len(tasks)
    names = [name for _, name in tasks]
    assert names.count("flex") == len(gpu_cases.COMPILED_PER_SHAPE)
    assert names.count("tilewise-hopper") == names.count("fa4-cute") < len(gpu_cases.CASES)
    assert "fa2-sdpa" not in names


@pytest.mark.parametrize(
    ("name", "case", "words"),
    [
        ("fa2-sdpa", Case(1, 16, 2, 16, window=4), "has no window"),
        ("cudnn-sdpa", Case(1, 16, 2, 16, lengths=(16,)), "has no packed form"),
        ("fa2-sdpa", Case(1, 8, 2, 16, seqlen_k=16, causal=True), "top left"),
        ("flex", Case(1, 16, 2, 16), "compiled per shape"),
        ("fa3", Case(1, 16, 2, 16, bias=True), "has no bias"),
    ],
)
def test_peers_say_what_they_lack(name, case, words):
    with pytest.raises(peers.Refusal, match=words):
        peers.PEERS[name](case, case.tensors(), case.options())


def test_a_peer_that_is_not_installed_is_told_as_python_tells_it():
    case = Case(1, 16, 2, 16)
    with pytest.raises(ImportError, match="flash_attn_interface") as error:
        peers.PEERS["fa3"](case, case.tensors(), {})
    assert peers.told(error.value).startswith("ModuleNotFoundError: No module named")
    assert peers.importable() == ("fa2-sdpa", "cudnn-sdpa", "flex")


def test_flash_attention_is_called_with_the_arguments_it_has(monkeypatch):
    calls = []

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        calls.append((causal, window_size))
        return q, None

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=False):
        raise AssertionError

    module = ModuleType("flash_attn_interface")
    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    for case in (Case(1, 16, 2, 16), Case(1, 16, 2, 16, window=4)):
        q, k, v = case.tensors()
        assert peers.PEERS["fa3"](case, (q, k, v), case.options())() is q
    assert calls == [(False, (-1, -1)), (True, (3, 0))]
    packed = Case(1, 16, 2, 16, lengths=(16,))
    with pytest.raises(peers.Refusal, match="does not take max_seqlen_k, max_seqlen_q"):
        peers.PEERS["fa3"](packed, packed.tensors(), packed.options())


def test_only_those_who_compute_the_case_may_be_timed(monkeypatch):
    """One right, one slightly wrong, one that computes another function, one without a backward, one that raises."""

    def right(case, tensors, options):
        return lambda: tilewise.attention(*tensors, **options, backend="cpu")

    def other(case, tensors, options):
        return lambda: tilewise.attention(*tensors, **{**options, "causal": True}, backend="cpu")

    def forward_only(case, tensors, options):
        return lambda: right(case, tensors, options)().detach()

    def broken(case, tensors, options):
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(peers, "PEERS", {"right": right, "other": other, "forward": forward_only, "broken": broken})
    exact = contenders.attention

    def worse(*args, backend, **options):
        return exact(*args, backend="cpu", **options) * (1.1 if backend == "reference" else 1.0)

    monkeypatch.setattr(contenders, "attention", worse)
    setting = contenders.Setting(Case(1, 40, 2, 16, dtype=BF16), True, "cpu")
    names = ["tilewise-cpu", "tilewise-reference", "right", "other", "forward", "broken"]
    found = contenders.assemble(setting, names)
    assert list(found.forward) == ["tilewise-cpu", "right", "forward"]
    assert list(found.backward) == ["tilewise-cpu", "right"]
    assert all(error <= 1 for error in found.errors.values())
    assert "tilewise-reference on bf16 (1, 40, 2, 16): out is off by" in found.wrong[0]
    assert found.refused["other", "forward"].startswith("computes another function: out is off by")
    assert "does not require grad" in found.refused["forward", "backward"]
    assert found.refused["broken", "forward"] == "RuntimeError: no kernel image"
    assert len(found.backward["right"]()) == 3


def test_fp8_is_held_to_one_rounding_of_its_own():
    setting = contenders.Setting(Case(1, 40, 2, 16, dtype=FP8), False, "cpu")
    found = contenders.assemble(setting, ["tilewise-cpu", "tilewise-sdpa"])
    assert list(found.forward) == ["tilewise-cpu"]
    assert found.errors["tilewise-cpu"] < 0.1


def test_a_refusal_by_tilewise_is_told_with_its_reasons():
    setting = contenders.Setting(Case(1, 40, 2, 16, bias=True, dtype=BF16), True, "cpu")
    found = contenders.assemble(setting, ["tilewise-hopper"])
    assert "bias: has one, needs none" in found.refused["tilewise-hopper", "forward"]
    assert not found.wrong


def test_rows_hold_ratios_to_every_peer_and_a_share_of_a_product(monkeypatch):
    monkeypatch.setattr(gpu, "matmul_rate", lambda: 1e12)
    case = Case(1, 64, 2, 16)
    samples = {"tilewise-a": timing.Samples((1.0, 2.0)), "fa3": timing.Samples((2.0, 4.0))}
    ours, peer = gpu._rows(case, "forward", samples, None)
    assert ours["ratios"] == {"fa3": 2.0}
    assert peer["ratios"] == {}
    assert ours["of_matmul"] == case.flops("forward") / 1.5 / 1e12
    assert ours["table"] == "further"
    packed = Case(1, 64, 2, 16, lengths=(64,))
    twin = timing.Samples((0.5, 1.0))
    rows = gpu._rows(packed, "forward", {**samples, "tilewise-a" + gpu.TWIN: twin}, case)
    assert [one["contender"] for one in rows] == ["tilewise-a", "fa3"]
    assert rows[0]["of_one_length"] == 0.5


def test_means_are_over_the_best_peer_of_each_square_row():
    rows = [
        row(case="c1", ratios={"x": 2.0, "y": 1.0}),
        row(case="c2", ratios={"x": 0.25, "y": 3.0}),
        row(case="c3", ratios={"x": 9.0}, table="further"),
        row(case="c1", contender="x"),
    ]
    found = {one["peer"]: one for one in summary.rows(rows)}
    assert found["best peer"]["geometric_mean"] == pytest.approx(0.5)
    assert (found["best peer"]["lowest"], found["best peer"]["lowest_case"]) == (0.25, "c2")
    assert found["y"]["geometric_mean"] == pytest.approx(math.sqrt(3))
    assert found["best peer"]["rows"] == 2


def test_the_matrix_has_a_line_a_case_and_a_column_a_contender():
    rows = [
        row(contender="b", tflops=2.0),
        row(contender="tilewise-a", tflops=3.0, ratios={"b": 1.5}),
        row(contender="b", tflops=4.0, **{"pass": "backward"}),
    ]
    head, *lines = report.matrix(rows).splitlines()
    assert head.split("  ")[0] == "pass"
    assert [line.split() for line in lines] == [
        ["forward", "c", "2", "3", "1.500", "0.50"], ["backward", "c", "4", "-", "-", "-"]
    ]  # fmt: skip


def test_the_report_shows_refusals_wrong_results_and_every_figure():
    host = {"figure": "host", "case": "h", "pass": "with grad", "contender": "a", "us": 12.0}
    first = {"figure": "first call", "case": "h", "pass": "warm", "contender": "a", "seconds": {"forward": 1.5}}
    times = {"ms": 1.0, "ms_low": 1.0, "ms_high": 1.0}
    layer = {"figure": "layer", "case": "l", "pass": "eager", "contender": "a", "ratios": {"b": 1.25}, **times}
    refused = {"figure": "refused", "case": "c", "pass": "backward", "contender": "fa3", "reason": "RuntimeError: no"}
    wrong = {"figure": "wrong", "case": "c", "pass": "", "contender": "", "reason": "dq is off"}
    packed = row(of_one_length=0.93)
    text = report.gpu([packed, host, first, layer, refused, wrong])
    for words in ("12.0 us", "forward 1.50 s", "1.250 x b", "fa3 backward, c: RuntimeError: no", "WRONG: dq is off"):
        assert words in text
    assert "0.930 of the rate at one length" in text


def steps_of(calls):
    def step(name, result):
        def run():
            calls.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        return name, run

    return step


def test_a_step_that_fails_costs_no_other_and_what_is_recorded_is_not_measured_again(tmp_path, capsys):
    calls, out = [], tmp_path / "gpu.jsonl"
    step = steps_of(calls)
    steps = [step("a", [row(step="a")]), step("b", ValueError("no luck")), step("c", [row(case="d")])]
    arguments = command.argparse.Namespace(limit=None, out=out)
    rows = [row(step="a")]
    assert not command._measure(steps, rows, {"run": 1}, arguments, 0.0)
    assert calls == ["b", "c"]
    said = capsys.readouterr().out
    assert "a: recorded already" in said
    assert ": ValueError: no luck" in said
    assert [json.loads(line)["step"] for line in out.read_text().splitlines()] == ["c"]
    assert rows[-1]["run"] == 1


def test_a_lost_device_ends_the_run(capsys):
    calls = []
    step = steps_of(calls)
    steps = [step("a", contenders.DeviceLost("x broke the CUDA context")), step("b", [])]
    arguments = command.argparse.Namespace(limit=None, out=None)
    assert not command._measure(steps, [], {}, arguments, 0.0)
    assert calls == ["a"]
    assert "broke the CUDA context" in capsys.readouterr().err


def test_unknown_contenders_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["bench", "gpu", "--peers", "fa9"]) == 2
    assert "--peers: is fa9, must be among fa2-sdpa" in capsys.readouterr().out
    assert main(["bench", "gpu", "--backends", "fast"]) == 2
    assert "--backends: is fast" in capsys.readouterr().out


def test_one_step_on_this_gpu(tmp_path, capsys):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    out = tmp_path / "gpu.jsonl"
    options = ["--only", "(16, 1024, 32, 64) causal", "--backends", "triton", "--peers", "fa2-sdpa", "--seconds", "0.2"]
    assert main(["bench", "gpu", *options, "--out", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    timed = [one for one in found if one["figure"] == "time"]
    assert {(one["pass"], one["contender"]) for one in timed} == {
        (what, name) for what in ("forward", "backward") for name in ("tilewise-triton", "fa2-sdpa")
    }
    assert "geometric mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    "asked_for",
    [
        "gpu",
        "cpu --rounds 3 --only 'causal|window'",
        "gpu --warm 28 --seconds 0.5 --limit 262 --peers fa3 flex --skip fa3 '(1, 1024' --skip flex 8192",
    ],
)
def test_a_record_says_what_to_type_for_it(asked_for):
    """Without where it was written, which is another folder on another machine."""
    asked = parser().parse_args(["bench", *shlex.split(asked_for)])
    written = parser().parse_args(["bench", *shlex.split(f"{asked_for} --out folder/h200.jsonl --commit abc")])
    told = command.typed(written)
    assert vars(parser().parse_args(shlex.split(told)[3:])) == vars(asked), told
