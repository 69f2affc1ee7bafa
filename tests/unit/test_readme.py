"""The README says what the code says: its tables are generated, its examples run, its demo's numbers come again."""

from __future__ import annotations

import re

import pytest

from scripts import features, gpu_speed, readme
from tilewise.demo import part_row, units

TEXT = readme.README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_feature_table_is_what_supports_says():
    assert readme.block(TEXT, "features") == features.table()


def test_the_explanation_is_what_its_example_prints():
    pytest.importorskip("triton")
    assert readme.block(TEXT, "explain") == readme.explained(TEXT)


def test_the_speed_is_what_was_recorded():
    if not readme.SPEED.exists():
        assert readme.block(TEXT, "speed") == ""
        return
    assert readme.block(TEXT, "speed") == readme.speed(readme.record.read(readme.SPEED))


def test_the_gpu_speed_is_what_was_recorded():
    if not gpu_speed.RECORD.exists():
        assert readme.block(TEXT, "gpu") == ""
        return
    rows = readme.record.read(gpu_speed.RECORD)
    assert readme.block(TEXT, "gpu") == gpu_speed.short(rows).strip("\n")
    assert gpu_speed.PAGE.read_text(encoding="utf-8") == gpu_speed.page(rows, gpu_speed.recorded_profile())


def test_a_recorded_gpu_run_becomes_a_page():
    facts = {"device": "a GPU", "torch": "2.11", "triton": "3.6", "driver": "1", "commit": "abc", "date": "2026-01-01"}
    facts |= {"peers": {"fa3": "3.0"}, "command": "python -m tilewise bench gpu --seconds 1"}
    shared = {"figure": "time", "table": "square", "case": "c", "pass": "forward", "of_matmul": 0.5, **facts}
    rows = [
        {**shared, "contender": "tilewise-hopper", "tflops": 650.0, "ratios": {"fa3": 1.05}, "of_one_length": 0.9},
        {**shared, "contender": "fa3", "tflops": 620.0, "ratios": {}},
        {"figure": "host", "pass": "with grad", "contender": "fa3", "us": 83.2},
        {"figure": "layer", "case": "l", "pass": "eager", "contender": "tilewise-hopper", "ms": 3.0,
         "ratios": {"cudnn-sdpa": 1.1}},
        {"figure": "first call", "pass": "warm", "contender": "tilewise-hopper", "seconds": {"forward": 1.25}},
    ]  # fmt: skip
    text = gpu_speed.page(rows)
    assert "| forward | c | fa3 620 | 650 | 1.05 | 0.50 |" in text
    assert "| forward | `hopper` | best peer | 1 | 1.05 | 1.05 | c |" in text
    assert "commit abc, 2026-01-01: `python -m tilewise bench gpu --seconds 1`" in text
    for words in ("fa3 83", "3.00 ms, 1.10 x cudnn-sdpa", "forward 1.25 s", "0.90 of its rate"):
        assert words in text
    assert "| fa3 620 |" not in gpu_speed.short(rows)


def test_the_worked_row_prints_the_same_numbers():
    section, exact = part_row.run()
    assert exact
    for line in units.table(section.head, section.rows):
        assert line.rstrip() in readme.block(TEXT, "demo")


def test_the_demo_and_the_tests_found_nothing_wrong():
    assert "NOT" not in readme.block(TEXT, "demo")
    assert "Skipped" not in readme.block(TEXT, "demo")
    assert "failed" not in readme.block(TEXT, "test")


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_every_example_runs(index):
    if "transformers" in EXAMPLES[index]:
        pytest.importorskip("transformers")
    exec(compile(EXAMPLES[index], f"README.md example {index}", "exec"), {})


def test_the_feature_table_can_say_no():
    class Refuses:
        name = "refuses"
        auto_devices = frozenset({"cuda"})

        def supports(self, problem, facts):
            if facts.type != "cuda" or problem.dtype.itemsize != 2:
                return ("not here",)
            return ("gradients",) if problem.derivative != "forward" or problem.needs_grad else ()

    backend = Refuses()
    assert features.device_type(backend) == "cuda"
    cells = {name: features.cell(backend, name) for name in ("bf16", "fp32", "causal", "double backward")}
    assert cells == {"bf16": "forward", "fp32": "no", "causal": "forward", "double backward": "no"}


def test_blocks_need_their_markers():
    assert (
        readme.replaced("<!-- begin:a -->\nold\n<!-- end:a -->", "a", "new") == "<!-- begin:a -->\nnew\n<!-- end:a -->"
    )
    with pytest.raises(KeyError, match="begin:b"):
        readme.replaced("nothing", "b", "new")


def test_logs_lose_what_is_not_theirs():
    log = (
        "setup: x\ntilewise 0.1.0, torch\n  line \n\nThe page with the plots: /home/me/tilewise-demo/index.html (3 s)\n"
    )
    assert readme.demo_block(log).splitlines() == [
        "```text",
        "tilewise 0.1.0, torch",
        "  line",
        "",
        "The page with the plots: tilewise-demo/index.html (3 s)",
        "```",
    ]
    log = "x\nAll checks passed!\nTOTAL  1 2 3 95.0%\n===== 12 passed, 1 skipped in 3.00s =====\n"
    assert readme.test_block(log).splitlines()[1:-1] == [
        "All checks passed!",
        "TOTAL  1 2 3 95.0%",
        "12 passed, 1 skipped in 3.00s",
    ]


def test_recorded_rows_become_a_table():
    facts = {"device": "a CPU", "threads": 2, "torch": "2.13.0", "date": "2026-01-01"}
    facts |= {"commit": "abc", "command": "python -m tilewise bench cpu"}
    shared = {"case": "fp32 (1, 8, 1, 4)", "pass": "forward", **facts}
    rows = [
        {"figure": "time", "contender": "torch-sdpa", "ms": 1.0, "ratio_to_torch": 1.0, **shared},
        {"figure": "time", "contender": "tilewise-cpu", "ms": 2.0, "ratio_to_torch": 0.5, **shared},
        {"figure": "host", "contender": "tilewise-auto", "us": 20.4, "us_over_torch": 12.3, **shared},
        {"figure": "memory", "contender": "tilewise-cpu", "extra_mib": 10.0, "returned_mib": 32.0, **shared},
    ]
    text = readme.speed(rows)
    assert "| fp32 (1, 8, 1, 4) | forward | `cpu` | 2 | 0.50 |" in text
    assert "torch-sdpa" not in text
    assert "20 us, +12 us over torch's" in text
    assert "`cpu`: 10 MiB above the 32 MiB that it returns" in text
    assert "a CPU, 2 threads, torch 2.13.0, commit abc, 2026-01-01: `python -m tilewise bench cpu`" in text
