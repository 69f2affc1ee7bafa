"""Timing in turns, records that can be read back, memory in a fresh process, and the command."""

import json

import pytest
import torch

from tilewise.bench import cases, cpu, gate, memory, record, report, timing
from tilewise.cli import main
from tilewise.cli.bench import chosen


@pytest.fixture(autouse=True)
def _no_longer_than_the_rounds(monkeypatch):
    monkeypatch.setattr(cpu, "_SECONDS", 0.0)


def test_short_calls_are_compared_for_as_long_as_asked():
    samples = timing.interleaved({"a": lambda: None, "b": lambda: None}, rounds=1, least_seconds=0.0, seconds=0.05)
    assert sum(len(sample.seconds) for sample in samples.values()) > 20
    assert len(samples["a"].seconds) == len(samples["b"].seconds)


def test_contenders_take_turns_in_alternating_order():
    calls = []
    works = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    samples = timing.interleaved(works, rounds=4, least_seconds=0.0)
    assert "".join(calls[4:]) == "abbaabba"
    assert all(len(sample.seconds) == 4 for sample in samples.values())


def test_the_ratio_is_taken_round_by_round():
    slow, fast = timing.Samples((2.0, 20.0, 6.0)), timing.Samples((1.0, 10.0, 2.0))
    assert timing.speed_ratio(fast, slow) == 2.0
    assert timing.speed_ratio(slow, fast) == 0.5


def test_spread_is_within_the_samples():
    samples = timing.Samples(tuple(float(number) for number in range(1, 21)))
    assert samples.median == 10.5
    low, high = samples.spread
    assert 1.0 < low < 10.5 < high < 20.0


def test_records_carry_the_machine_and_can_be_read_back(tmp_path):
    path = tmp_path / "results" / "cpu.jsonl"
    record.write(path, [{"figure": "host", "us": 1.5}], record.machine(torch.device("cpu"), "abc"))
    (row,) = record.read(path)
    assert row["us"] == 1.5
    assert row["commit"] == "abc"
    assert row["torch"] == torch.__version__
    assert row["threads"] == torch.get_num_threads()


def test_peak_memory_of_a_fresh_process_counts_what_is_held():
    reference = memory.in_fresh_process("reference", 1024, 4, 16)
    tiled = memory.in_fresh_process("cpu", 1024, 4, 16)
    matrix = 4 * 1024 * 1024 * 4
    assert reference["returned"] == tiled["returned"] == 4 * (1024 * 4 * 16 * 4)
    assert reference["peak"] > 2 * matrix
    assert tiled["peak"] < reference["peak"]


def test_a_wrong_result_is_not_timed(monkeypatch):
    case = cases.Case(1, 40, 2, 8, causal=True)
    right = cpu.attention
    monkeypatch.setattr(cpu, "attention", lambda *args, **options: 1.1 * right(*args, **options))
    with pytest.raises(gate.GateFailed, match=r"tilewise-cpu on fp32 \(1, 40, 2, 8\) causal: out is off by"):
        cpu.compare(case, ("cpu",), rounds=1)


@pytest.mark.parametrize(
    "case", [cases.Case(1, 40, 4, 8, nheads_k=2), cases.Case(1, 64, 2, 8, window=5)], ids=lambda case: case.name
)
def test_a_comparison_has_a_row_for_each_contender_and_pass(case):
    rows = cpu.compare(case, ("auto", "cpu"), rounds=2)
    assert [(row["contender"], row["pass"]) for row in rows] == [
        (name, what) for what in ("forward", cpu.BOTH) for name in ("torch-sdpa", "tilewise-auto", "tilewise-cpu")
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[0]["ratio_to_torch"] == 1.0
    assert "tilewise-auto" in report.table(rows)


def test_the_command_measures_prints_and_writes(tmp_path, capsys):
    path = tmp_path / "cpu.jsonl"
    assert main(["bench", "cpu", "--rounds", "1", "--only", "host", "--out", str(path)]) == 0
    assert "us" in capsys.readouterr().out
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert row["figure"] == "host"
    assert main(["bench", "cpu", "--rounds", "0"]) == 2


def test_a_pattern_that_names_no_step_lists_them(capsys):
    assert main(["bench", "cpu", "--only", "no such thing"]) == 2
    said = capsys.readouterr().out
    assert "fp32 (1, 4096, 8, 64) causal" in said
    assert "host cost of a warm call" in said
    steps = [("fp32 (1, 8, 2, 4)", None), ("host", None)]
    for pattern in ("(1, 8", "^fp32", "2, 4\\)$"):
        assert chosen(steps, pattern) == steps[:1]


def test_flops_of_a_case_count_its_kept_pairs():
    assert cases.Case(1, 4, 2, 8).flops("forward") == 2 * 16 * 4 * 8
    assert cases.Case(1, 4, 2, 8, causal=True).flops("forward") == 2 * 10 * 4 * 8
    assert cases.Case(1, 4, 2, 8, window=2).flops("backward") == 2 * 7 * 10 * 8
    both = cases.Case(1, 4, 2, 8).flops("forward+backward")
    assert both == cases.Case(1, 4, 2, 8).flops("forward") * 7 // 2


def test_rates_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from tilewise.bench import plot

    row = {"figure": "time", "case": "c", "pass": "forward", "contender": "a", "tflops": 1.0}
    plot.rates([row, {**row, "contender": "b"}], tmp_path / "new" / "rates.svg")
    assert "TFLOP/s" in (tmp_path / "new" / "rates.svg").read_text() or (tmp_path / "new" / "rates.svg").stat().st_size


def test_bench_gpu_says_so_without_a_device(capsys):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    assert main(["bench", "gpu"]) == 2
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--resume"], ["--seconds", "1"], ["--warm", "2"], ["--skip", "triton", "x"]])
def test_options_of_the_other_device_are_refused(options, capsys):
    assert main(["bench", "cpu", *options]) == 2
    assert "`bench gpu`" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_known_before_measuring(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "cpu", "--out", str(tmp_path / "file" / "x.jsonl")]) == 2
    assert "--out" in capsys.readouterr().out
