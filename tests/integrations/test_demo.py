"""The main job, small: every part runs, its claims hold, and the page stands alone."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from tilewise.bench import peak
from tilewise.cli import main
from tilewise.demo import gpt, lengths, minilm, part_lengths, part_minilm, run, settings, svg, units, worker
from tilewise.demo.progress import Progress


@pytest.fixture
def here(monkeypatch):
    """Measure in this process: starting one for each measurement is what makes the demo slow."""

    def call(task, arguments, on_step=None):
        plain = json.loads(json.dumps(arguments))
        return json.loads(json.dumps(worker.TASKS[task](plain, on_step or (lambda step, steps: None))))

    monkeypatch.setattr(worker, "call", call)


class _Page(html.parser.HTMLParser):
    """Collects tags and the texts of table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_every_part_runs_and_the_page_stands_alone(here, tmp_path, capsys):
    assert main(["demo", "--fast", "--out", str(tmp_path / "demo")]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "demo" / "index.html"
    assert str(path) in printed
    assert "\r" not in printed
    assert "\x1b" not in printed
    for title in ("1. One row, block by block", "3. Training a GPT", "4. Longer and longer"):
        assert title in printed
    assert "1.55300179" in printed
    assert "2.13533528  0.78554595" in printed
    assert "1.37497284  0.50582424" in printed
    assert "NOT" not in printed

    text = path.read_text()
    page = _Page(text)
    viewport = [attributes for tag, attributes in page.tags if tag == "meta" and attributes.get("name") == "viewport"]
    assert viewport[0]["content"] == "width=device-width, initial-scale=1"
    assert "prefers-color-scheme: dark" in text
    assert not [tag for tag, attributes in page.tags if tag in ("link", "script", "img") or "src" in attributes]
    assert not re.search(r"https?:|url\(|@import", text)
    drawings = re.findall(r"<svg.*?</svg>", text)
    assert len([drawing for drawing in drawings if 'role="img"' in drawing]) == 3
    for drawing in drawings:
        ElementTree.fromstring(drawing)


@pytest.mark.usefixtures("here")
def test_materialising_attention_stops_at_its_limit():
    small = dataclasses.replace(settings.fast(), memory_limit=0)
    section, exact = part_lengths.run(small)
    assert exact
    assert [row[0] for row in section.rows if row[2] == "not run"] == ["64", "128", "256"]
    assert {row[1] for row in section.rows if row[2] == "not run"} == {"materialising"}
    assert "nothing was compared" in section.verdict


def test_the_memory_rule():
    small = dataclasses.replace(settings.fast(), nheads=2)
    assert part_lengths.predicted(100, {}, small) == 2 * 2 * 100 * 100 * 4
    assert part_lengths.predicted(400, {100: {"bytes": 7}, 200: {"bytes": 1000}}, small) == 4000
    assert part_lengths.limit(small) <= small.memory_limit


def test_missing_weights_skip_the_part_with_a_line(monkeypatch):
    monkeypatch.setattr(minilm, "WEIGHTS", "no_such_package")
    section, exact = part_minilm.run(settings.fast())
    assert exact
    assert section.words[0].startswith("Skipped: not installed: no-such-package")


def test_a_result_that_is_not_exact_is_said_and_fails(here, monkeypatch, tmp_path, capsys):
    measure = lengths.measure

    def wrong(attention, **arguments):
        result = measure(attention, **arguments)
        return result if attention == "materialising" else {**result, "sums": [2 * x for x in result["sums"]]}

    monkeypatch.setattr(lengths, "measure", wrong)
    assert main(["demo", "--fast", "--parts", "lengths", "--out", str(tmp_path), "--memory-gib", "1"]) == 1
    assert "NOT the same" in capsys.readouterr().out


def test_training_reads_the_standard_library_and_learns():
    shape = gpt.Shape(layers=1, nheads=2, headdim=8, seqlen=32, batch=4, steps=12, corpus_bytes=50_000)
    steps = []
    found = gpt.train("tilewise", shape, lambda step, of: steps.append((step, of)))
    assert steps == [(step, 12) for step in range(1, 13)]
    assert found["losses"][0] == pytest.approx(math.log(256), abs=0.5)
    assert found["losses"][-1] < found["losses"][0] - 0.3
    assert found["corpus_bytes"] == 50_000
    assert found["corpus_files"] >= 1


def test_the_worker_speaks_json_and_says_why_it_failed():
    steps = []
    arguments = {"attention": "tilewise", "shape": dataclasses.asdict(settings.fast().gpt)}
    found = worker.call("gpt", arguments, lambda step, of: steps.append((step, of)))
    assert steps[-1] == (4, 4)
    assert len(found["losses"]) == 4
    with pytest.raises(worker.WorkerFailed, match=r"KeyError.*no such attention"):
        worker.call("lengths", {"attention": "no such attention", "seqlen": 8, "nheads": 1, "headdim": 4, "repeats": 1})


def test_the_workers_lines(capsys):
    arguments = {"attention": "materialising", "seqlen": 8, "nheads": 1, "headdim": 4, "repeats": 2}
    worker.main("lengths", json.dumps(arguments))
    result = json.loads(capsys.readouterr().out)["result"]
    assert len(result["sums"]) == 4
    assert result["seconds"] > 0


PEAKS = """
import torch
from tilewise.bench.peak import PeakMemory
torch.ones(1).sum()
for size in (16 << 20, 1):
    with PeakMemory() as peak:
        torch.ones(size).sum()
    print(peak.extra)
"""


def test_peak_memory_sees_what_is_freed_again():
    if peak.available() is None:
        pytest.skip("this system does not say how much memory it has")
    # A fresh process, as the demo has it: one that has freed much before may hand the same pages out again.
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    large, small = map(int, done.stdout.split())
    assert large == pytest.approx(64 << 20, rel=0.2)
    assert small < 4 << 20


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_pipe_is_one_plain_line():
    pipe = io.StringIO()
    with Progress("work", 2, pipe) as progress:
        progress.step("a")
        progress.step("b")
    assert re.fullmatch(r"  work: 2/2 in \d+\.\d s\n", pipe.getvalue())


def test_progress_on_a_terminal_moves():
    terminal = _Terminal()

    def stopped() -> None:
        with Progress("work", 2, terminal) as progress:
            progress.step("first")
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        stopped()
    text = terminal.getvalue()
    assert "[############............] 1/2 first" in text
    assert text.endswith("stopped\n")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not measured"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (200 << 20, "200 MiB"),
        (3 << 40, "3072 GiB"),
    ],
)
def test_sizes(value, text):
    assert units.size(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.0123, "12.3 ms"), (1.456, "1.46 s"), (123.4, "123 s")])
def test_durations(value, text):
    assert units.duration(value) == text


def test_a_chart_scales_dashes_and_escapes():
    axis = svg.Axis("length <n>", log=True)
    line = svg.Series("a & b", [(256.0, 1.0), (512.0, 4.0)], dashed=[(1024.0, 16.0)])
    drawing = svg.chart("Memory", [line], axis, svg.Axis("bytes", log=True))
    assert "a &amp; b" in drawing
    assert "length &lt;n&gt;" in drawing
    assert "s0 dashed" in drawing
    assert svg.chart("nothing", [svg.Series("empty", [])], axis, axis) == ""
    assert svg.ticks(svg.Axis("x"), 0.0, 10.0) == [0.0, 2.5, 5.0, 7.5, 10.0]
    flat = svg.chart("flat", [svg.Series("one", [(1.0, 5.0)])], svg.Axis("x"), svg.Axis("y"))
    assert "nan" not in flat


def test_the_machine_is_named():
    assert torch.__version__ in run.machine()
