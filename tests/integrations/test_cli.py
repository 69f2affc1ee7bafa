"""``python -m tilewise``: info and explain in text and JSON, and what is refused by name."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import tilewise
from tilewise.cli import COMMANDS, main


def _json(capsys, *arguments: str) -> dict:
    assert main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def test_the_module_runs():
    done = subprocess.run([sys.executable, "-m", "tilewise", "--help"], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert name in done.stdout


def test_info_as_text(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"torch         {torch.__version__}" in text
    assert "device cpu" in text
    for backend in ("reference", "cpu", "sdpa"):
        assert f"\n  {backend:<10} runs" in text


def test_info_as_json_says_what_runs_and_why_not(capsys):
    data = _json(capsys, "info", "--json")
    assert data["versions"]["tilewise"] == tilewise.__version__
    device = data["devices"]["cpu"]
    assert device["facts"]["type"] == "cpu"
    assert set(device["backends"]["cpu"]["runs"]) == {"float32", "bfloat16"}
    chosen = [name for entry in device["backends"].values() for name in entry["chosen"]]
    assert sorted(chosen) == ["bfloat16", "float32"]
    for entry in device["backends"].values():
        assert set(entry["runs"]) | set(entry["reasons"]) == {"float32", "bfloat16"}
        assert all(entry["reasons"].values())


SHAPE = [
    "--batch",
    "2",
    "--seqlen-q",
    "100",
    "--seqlen-k",
    "300",
    "--nheads",
    "6",
    "--nheads-k",
    "3",
    "--headdim",
    "32",
]


def test_explain_takes_shapes_as_options(capsys):
    data = _json(capsys, "explain", *SHAPE, "--headdim-v", "16", "--dtype", "bf16", "--causal", "--json")
    problem = data["problem"]
    names = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "headdim", "headdim_v", "causal")
    assert [problem[name] for name in names] == [2, 100, 300, 6, 3, 32, 16, "bottom_right"]
    assert problem["dtype"] == "torch.bfloat16"
    kept = 2 * 6 * sum(200 + i + 1 for i in range(100))
    assert data["pairs"] == {"all": 2 * 6 * 100 * 300, "kept": kept}
    assert data["flops"]["forward"] == 2 * kept * (32 + 16)


def test_explain_says_the_same_as_the_function(capsys):
    q = torch.empty(1, 512, 8, 64, device="meta", requires_grad=True)
    expected = tilewise.explain(q, q, q, causal="top_left", window_size=(31, None))
    options = ["--seqlen-q", "512", "--causal", "top_left", "--window-size", "31", "none", "--grad", "q,k,v"]
    assert main(["explain", *options]) == 0
    assert capsys.readouterr().out.strip() == str(expected).strip()


def test_explain_takes_json_a_file_and_standard_input(capsys, tmp_path, monkeypatch):
    text = json.dumps({"seqlen_q": 64, "causal": True, "window_size": [7, None], "grad": ["q"]})
    (tmp_path / "problem.json").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    results = [
        _json(capsys, "explain", "--json", "--problem", how) for how in (text, str(tmp_path / "problem.json"), "-")
    ]
    assert results[0] == results[1] == results[2]
    assert results[0]["problem"]["window_left"] == 7
    assert results[0]["problem"]["needs_grad"] == ["q"]


def test_options_go_before_the_json(capsys):
    data = _json(capsys, "explain", "--json", "--problem", '{"seqlen_q": 64, "headdim": 16}', "--headdim", "32")
    assert (data["problem"]["seqlen_q"], data["problem"]["headdim"]) == (64, 32)


def test_explain_every_feature(capsys):
    options = ["--seqlen-q", "64", "--mask", "1,1,64,64", "--bias", "8,64,64", "--alibi-slopes", "--sink", "--segments"]
    numbers = ["--softcap", "30", "--dropout-p", "0.1", "--softmax-scale", "0.5", "--deterministic"]
    problem = _json(capsys, "explain", *options, *numbers, "--backend", "cpu", "--json")["problem"]
    assert problem["mask_shape"] == [1, 1, 64, 64]
    assert problem["bias_shape"] == [1, 8, 64, 64]
    assert all(problem[name] for name in ("alibi", "sink", "segments", "deterministic"))
    assert [problem[name] for name in ("softcap", "dropout_p", "softmax_scale")] == [30.0, 0.1, 0.5]


def test_explain_packed_sequences(capsys):
    data = _json(capsys, "explain", "--cu-seqlens-q", "0,5,5,12", "--nheads", "2", "--causal", "--json")
    assert data["problem"]["varlen"] is True
    assert data["pairs"]["kept"] == 2 * (5 * 6 // 2 + 7 * 8 // 2)


def test_packed_sequences_longer_than_memory_are_explained(capsys):
    offsets, grad = ["--cu-seqlens-q", "0,2000000000", "--causal"], ["--grad", "q,k,v"]
    data = _json(capsys, "explain", *offsets, *grad, "--window-size", "0", "0", "--json")
    assert data["pairs"]["kept"] == 8 * 2_000_000_000
    assert data["problem"]["inner_contiguous"] is True


@pytest.mark.parametrize(
    ("gpu", "dtype", "name"),
    [
        ("h200", "bf16", "hopper"),
        ("H100", "fp8", "hopper"),
        ("rtx4090", "fp16", "triton"),
        ("mi300x", "bf16", "triton"),
    ],
)
def test_explain_for_a_gpu_that_is_not_here(capsys, gpu, dtype, name):
    data = _json(capsys, "explain", "--device", gpu, "--dtype", dtype, "--headdim", "128", "--json")
    assert data["backend"] == name
    assert data["device"]["name"] == gpu.lower()


def test_explain_as_text_tells_of_what_will_run_and_of_nothing_else(capsys):
    shape = ["--device", "h200", "--seqlen-q", "4096", "--headdim", "128", "--dtype"]
    assert main(["explain", *shape, "fp8"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert re.fullmatch(r"on    hopper: estimated [0-9.e-]+ ms", lines["runs"])
    assert "backward" not in lines["work"]
    assert "saved" not in lines
    assert lines["made"].startswith("beside out: lse, 128 KiB")
    assert main(["explain", *shape, "bf16", "--grad", "q,k,v", "--backend", "triton"]) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"^runs on    triton, which was asked for: estimated [0-9.e-]+ ms forward and backward$", text, re.MULTILINE
    )
    assert re.search(r"^could run  hopper: estimated ", text, re.MULTILINE)
    assert "TFLOP, backward" in text or "GFLOP, backward" in text
    assert "saved      for backward: lse, 128 KiB" in text


def test_info_says_a_reason_once_for_all_its_dtypes():
    from tilewise.cli.info import _text

    reasons = {"float32": ["device: has cpu", "dtype: has fp32"], "bfloat16": ["device: has cpu"]}
    entry = {"runs": [], "chosen": [], "reasons": reasons}
    text = _text({"versions": {}, "devices": {"cpu": {"facts": {}, "backends": {"hopper": entry}}}})
    assert text.count("has cpu") == 1
    assert "not float32, bfloat16: device: has cpu" in text
    assert "not float32: dtype: has fp32" in text


def test_explain_offsets_past_32_bits(capsys):
    data = _json(capsys, "explain", "--cu-seqlens-q", f"0,5,{2**33}", "--json")
    assert data["problem"]["total_q"] == 2**33


def test_explain_when_nothing_runs_it(capsys):
    status = main(["explain", "--backend", "sdpa", "--softcap", "5", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert status == 1
    assert data["backend"] is None
    assert any(reason["what"] == "softcap" for reason in data["refused"]["sdpa"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--problem", '{"seqlenq": 3}'], "seqlenq: no such field; the fields are batch, seqlen_q"),
        (["--problem", '{"seqlen_q": "3"}'], "seqlen_q: is '3', must be an integer of 0 or more"),
        (["--problem", '{"seqlen_q": true}'], "seqlen_q: is True, must be"),
        (["--problem", '{"causal": "left"}'], "causal: is 'left', must be true, false, bottom_right or top_left"),
        (["--problem", '{"window_size": [3]}'], "window_size: is [3], must be [left, right]"),
        (["--problem", '{"dtype": "int8"}'], "dtype: is 'int8', must be one of fp64"),
        (["--problem", '{"dtype": ["fp32"]}'], "dtype: is ['fp32'], must be one of fp64"),
        (["--problem", '{"sink": 1}'], "sink: is 1, must be true or false"),
        (["--problem", '{"grad": ["x"]}'], "grad: is ['x'], must be a list of names among q, k, v"),
        (["--problem", '{"grad": [["q"]]}'], "grad: is [['q']], must be a list of names among q, k, v"),
        (["--problem", '{"mask": [1, -1]}'], "mask: is [1, -1], must be a list of integers"),
        (["--problem", '{"softcap": "a"}'], "softcap: is 'a', must be a number"),
        (["--problem", "[1]"], "neither JSON nor a file"),
        (["--problem", '{"a":'], "is not JSON"),
        (["--problem", "no/such/file"], "neither JSON nor a file"),
        (["--nheads", "6", "--nheads-k", "4"], "nheads"),
        (["--backend", "fastest"], "backend: is 'fastest', must be one of 'auto'"),
        (["--softcap", "-1"], "softcap"),
        (["--grad", "q,z"], "grad: is ['q', 'z']"),
        (["--grad", "q,bias"], "grad: has bias, must name only what is there"),
        (["--cu-seqlens-q", "0,5", "--batch", "4"], "batch: is 4, must be absent where cu_seqlens_q packs"),
        (["--cu-seqlens-q", "0,5", "--bias", "1,1,5,5"], "bias: is [1, 1, 5, 5], must be absent"),
        (["--cu-seqlens-k", "0,5"], "cu_seqlens_k: is given, must be absent without cu_seqlens_q"),
        (["--seqlen-q", str(2**63)], "seqlen_q: is 9223372036854775808, must be an integer of 0 or more, below 2**63"),
        (["--seqlen-q", str(2**62)], "q: has shape (1, 4611686018427387904, 8, 64), must take fewer than 2**63 bytes"),
        (["--cu-seqlens-q", f"0,{2**63}"], "cu_seqlens_q: is [0, 9223372036854775808], must be a list of integers"),
        (["--device", "toaster"], "--device: is 'toaster', must be one of torch's, such as cpu or cuda:1, or a100"),
        (["--device", "cuda:99"], "--device: is 'cuda:99', but there are"),
    ],
)
def test_a_wrong_request_is_refused_by_name(capsys, arguments, words):
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tilewise explain: ")
    assert words in captured.err


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["explain", "--unknown"], ["demo", "--parts", "five"]])
def test_argparse_refuses_the_rest(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_reader_that_stops_early_gets_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "tilewise", "explain", "--seqlen-q", "8"]
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == ""
