"""The Hopper kernels on the device against fp64: features, odd sizes, gradients, repeats, NaN where nobody looks."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch

from tilewise.backends.hopper import BACKEND
from tilewise.device import device_facts
from tilewise.inputs import Arguments, Inputs, describe
from tilewise.problem import Problem
from tilewise.testing.budget import within_budget
from tilewise.testing.oracle import attention_oracle, varlen_oracle

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.hopper, pytest.mark.skipif(not HERE, reason="needs an sm_90 device")]
BF16, FP16 = torch.bfloat16, torch.float16


class Case(NamedTuple):
    """Sizes of a call; ``lengths`` (of queries, of keys) makes it packed; ``options`` are Arguments' fields."""

    name: str
    batch: int
    nheads: int
    nheads_k: int
    seqlen_q: int
    seqlen_k: int
    headdim: int
    headdim_v: int
    options: dict[str, Any]
    dtype: torch.dtype = BF16
    lengths: tuple[list[int], list[int]] | None = None
    segments: str = ""  # how their numbers lie: see _segments
    interleaved: bool = False  # q, k, v are views of one tensor, dout is transposed


BR, TL = {"causal": "bottom_right"}, {"causal": "top_left"}
CAPPED = {"softcap": 6.0, "alibi_slopes": True}
ALL = BR | {"window_left": 200, "window_right": 0, "softcap": 8.0, "alibi_slopes": True, "sink": True}
CASES = [
    Case("full", 2, 4, 4, 256, 256, 128, 128, {}),
    Case("gqa ragged", 1, 8, 2, 391, 517, 128, 128, BR),
    Case("mqa top left", 1, 4, 1, 1000, 700, 64, 64, TL),
    Case("unseen keys", 1, 4, 2, 300, 700, 128, 128, TL),
    Case("window", 1, 4, 2, 777, 1500, 128, 128, {"window_left": 100, "window_right": 20}),
    Case("causal window", 2, 2, 2, 130, 2000, 64, 64, BR | {"window_left": 128, "window_right": 0}),
    Case("causal 256", 1, 4, 4, 513, 513, 256, 256, BR),
    Case("gqa 256", 1, 4, 2, 300, 900, 256, 256, {}),
    Case("window 256", 1, 4, 2, 300, 400, 256, 256, {"window_left": 150, "window_right": 30}, FP16),
    Case("softcap", 1, 4, 2, 600, 600, 128, 128, BR | {"softcap": 5.0}),
    Case("softcap 64", 1, 4, 2, 333, 444, 64, 64, {"softcap": 3.0}),
    Case("softcap window 256", 1, 2, 2, 333, 444, 256, 256, BR | {"softcap": 20.0, "window_left": 90}, FP16),
    Case("alibi", 2, 4, 2, 600, 700, 128, 128, BR | {"alibi_slopes": True}),
    Case("alibi full 64", 1, 4, 4, 333, 444, 64, 64, {"alibi_slopes": True}),
    Case("sink", 1, 4, 2, 600, 600, 128, 128, BR | {"sink": True}),
    Case("everything", 1, 4, 2, 700, 650, 128, 128, ALL),
    Case("96 fp16", 1, 4, 4, 500, 500, 96, 96, BR, FP16),
    Case("40 ragged", 1, 2, 2, 129, 65, 40, 40, {}),
    Case("192 and 128", 1, 4, 4, 700, 700, 192, 128, BR),
    Case("192 window", 1, 4, 2, 300, 500, 192, 192, {"window_left": 150}),
    Case("96 and 64", 2, 4, 2, 200, 333, 96, 64, {}),
    Case("160 and 128", 1, 2, 2, 300, 300, 160, 128, BR),
    Case("64 and 128", 1, 4, 4, 300, 300, 64, 128, BR),
    Case("one query", 2, 8, 2, 1, 900, 128, 128, BR),
    Case("one key", 2, 4, 4, 200, 1, 128, 128, {}),
    Case("empty rows", 1, 4, 4, 500, 200, 128, 128, BR),
    Case("empty rows with a sink", 1, 4, 4, 500, 200, 128, 128, BR | {"sink": True}),
    Case("interleaved", 2, 4, 4, 640, 640, 128, 128, BR, interleaved=True),
    Case("three warpgroups", 1, 4, 2, 1100, 2100, 64, 64, BR),
    Case("three warpgroups, full", 2, 2, 2, 1000, 1031, 64, 64, {}, FP16),
    Case("three warpgroups, empty rows", 1, 2, 2, 2500, 2300, 64, 64, BR),
    Case("three warpgroups, window", 1, 4, 2, 1300, 1500, 64, 64, BR | {"window_left": 900}),
    Case("three warpgroups, both bounds", 1, 2, 1, 1150, 1900, 64, 64, {"window_left": 700, "window_right": 130}),
    Case("three warpgroups, slopes and a sink", 1, 2, 2, 1500, 2000, 64, 64, BR | {"alibi_slopes": True, "sink": True}),
    Case("negative scale", 1, 2, 2, 300, 300, 128, 128, {"softmax_scale": -0.1}),
    Case("scale 0", 1, 2, 2, 300, 300, 128, 128, BR | {"softmax_scale": 0.0}),
    Case("more tiles than CTAs", 3, 8, 4, 1500, 1500, 128, 128, BR),
    Case("ranges of keys", 1, 2, 1, 100, 9000, 128, 128, {}),
    Case("ranges of keys, causal with a sink", 1, 2, 2, 200, 5000, 64, 64, BR | {"sink": True, "alibi_slopes": True}),
    Case("ranges of keys, empty rows", 1, 2, 2, 3000, 2500, 256, 256, BR | {"window_left": 1800}),
    Case("packed", 0, 4, 2, 0, 0, 128, 128, BR, lengths=([0, 5, 128, 300, 1, 777], [3, 5, 128, 400, 1, 600])),
    Case("packed sink", 0, 4, 2, 0, 0, 128, 128, BR | {"sink": True}, lengths=([0, 5, 300, 77], [3, 5, 400, 1])),
    Case("packed full", 0, 4, 2, 0, 0, 64, 64, {}, lengths=([40, 5, 128, 0, 300], [700, 5, 0, 7, 9])),
    Case("packed same lengths", 0, 4, 2, 0, 0, 128, 128, BR, lengths=([40, 0, 1300, 64], [40, 0, 1300, 64])),
    Case("96, three warpgroups", 1, 4, 2, 1111, 2100, 96, 96, BR),
    Case("96, three warpgroups, full", 1, 2, 2, 1000, 1531, 96, 88, {}, FP16),
    Case("96, three warpgroups, empty rows", 1, 2, 2, 3300, 3250, 96, 96, BR | {"sink": True}),
    Case("96, three warpgroups, window", 1, 2, 1, 1300, 2000, 96, 96, {"window_left": 1600, "window_right": 130}),
    Case("80", 2, 4, 2, 300, 333, 80, 80, BR),
    Case("72, three warpgroups", 1, 2, 2, 1111, 2100, 72, 72, BR | {"alibi_slopes": True}),
    Case("160", 1, 4, 2, 300, 517, 160, 160, BR),
    Case("192 full", 1, 4, 2, 300, 517, 192, 192, {}),
    Case("128, three warpgroups", 1, 10, 5, 1700, 3900, 128, 128, BR),
    Case("128, three warpgroups, full", 2, 5, 5, 1700, 1555, 128, 128, {}, FP16),
    Case("136 full", 2, 2, 2, 200, 333, 136, 136, {}),
    Case("wide window", 1, 4, 2, 1500, 1600, 128, 128, BR | {"window_left": 600}),
    Case("window and a sink", 2, 8, 1, 777, 777, 64, 64, BR | {"window_left": 127, "sink": True}, FP16),
    Case("packed, 96", 0, 2, 1, 0, 0, 96, 96, BR, lengths=([40, 2500, 0, 4000], [1600, 2900, 700, 7500])),
    Case("packed, three warpgroups", 0, 2, 1, 0, 0, 64, 64, TL, lengths=([40, 1500, 0, 2000], [1600, 1400, 700, 2500])),
    Case("packed 192", 0, 4, 2, 0, 0, 192, 128, BR, lengths=([5, 128, 300, 1], [70, 128, 9, 400])),
    Case("packed window", 0, 4, 2, 0, 0, 64, 64, TL | {"window_left": 50}, lengths=([40, 5, 128, 300], [700, 5, 0, 9])),
    Case("packed, no keys", 0, 4, 1, 0, 0, 128, 128, BR | {"max_seqlen_k": 9}, lengths=([3, 0, 70], [0, 0, 0])),
    Case("packed, no queries", 0, 4, 1, 0, 0, 64, 64, {"max_seqlen_q": 9}, lengths=([0, 0, 0], [5, 0, 200])),
    Case("packed slopes", 0, 4, 2, 0, 0, 128, 128, BR | {"alibi_slopes": True}, lengths=([40, 5, 128], [70, 5, 300])),
    *(
        Case(f"{order} {dim}", 2, 4, 2, 700, 900, dim, dim_v, options, segments=order)
        for order in ("documents", "any order")
        for dim, dim_v, options in (
            (64, 64, BR), (96, 96, BR), (128, 128, {}), (192, 128, TL), (256, 256, BR),
            (64, 64, ALL), (128, 128, ALL), (256, 256, ALL), (160, 160, ALL | {"softcap": 0.0}),
        )
    ),
    Case("capped slopes 256", 1, 4, 2, 600, 700, 256, 256, BR | CAPPED),
    Case("capped slopes 256 full", 2, 2, 2, 333, 444, 256, 256, CAPPED, FP16),
    Case("capped slopes 192 and 128", 1, 4, 2, 700, 650, 192, 128, CAPPED | {"window_left": 100, "window_right": 20}),
    Case("capped slopes 64 and 256", 1, 4, 1, 300, 517, 64, 256, TL | CAPPED),
    Case("capped slopes 136", 1, 2, 2, 500, 200, 136, 136, BR | CAPPED),
    Case("capped slopes of one query", 2, 4, 4, 1, 300, 192, 192, BR | CAPPED),
    Case("capped slopes, more tiles than CTAs", 3, 8, 4, 900, 900, 160, 160, BR | CAPPED),
    Case("packed capped slopes", 0, 4, 2, 0, 0, 256, 256, BR | CAPPED, lengths=([0, 5, 300, 777], [3, 5, 400, 600])),
    Case("packed capped slopes 192", 0, 4, 2, 0, 0, 192, 128, TL | CAPPED | {"window_left": 50},
         lengths=([40, 5, 128, 300], [700, 5, 0, 9])),
    Case("long documents", 1, 2, 1, 3000, 3000, 128, 128, BR, segments="documents"),
    Case("long documents in fp16", 1, 2, 1, 3000, 3000, 64, 64, {}, dtype=FP16, segments="documents"),
]


def _tensors(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(case.dtype)

    heads, heads_k = case.nheads, case.nheads_k
    if case.interleaved:
        q, k, v = randn(case.batch, case.seqlen_q, 3, heads, case.headdim).unbind(2)
        return {"q": q, "k": k, "v": v}, randn(case.batch, heads, case.seqlen_q, case.headdim_v).transpose(1, 2)
    lead_q: tuple[int, ...] = (case.batch, case.seqlen_q)
    lead_k: tuple[int, ...] = (case.batch, case.seqlen_k)
    if case.lengths is not None:  # a few tokens beyond the last offset
        lead_q, lead_k = (sum(case.lengths[0]) + 3,), (sum(case.lengths[1]) + 5,)
    tensors = {
        "q": randn(*lead_q, heads, case.headdim),
        "k": randn(*lead_k, heads_k, case.headdim),
        "v": randn(*lead_k, heads_k, case.headdim_v),
    }
    return tensors, randn(*lead_q, heads, case.headdim_v)


def _segments(order: str, batch: int, seqlen: int) -> torch.Tensor:
    """Documents, one after the other, of int64, and the last of 64 rows; or numbers of int32 in any order."""
    if order == "any order":
        return torch.randint(-2, 2, (batch, seqlen), dtype=torch.int32, device="cuda")
    at = torch.arange(seqlen, device="cuda").expand(batch, seqlen)
    return torch.where(at >= seqlen - 64, 1 << 40, at * 7 // seqlen + 3 * torch.arange(batch, device="cuda")[:, None])


def _arguments(case: Case) -> tuple[Arguments, torch.Tensor]:
    tensors, dout = _tensors(case)
    options = dict(case.options)
    for name in ("alibi_slopes", "sink"):
        if options.pop(name, False):
            tensors[name] = torch.rand(case.nheads, device="cuda") * 0.1
    if case.lengths is not None:
        for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_k"), case.lengths, strict=True):
            tensors[name] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
        if case.lengths[0] == case.lengths[1]:  # one tensor for both says so without being read
            tensors["cu_seqlens_k"] = tensors["cu_seqlens_q"]
        options = {"max_seqlen_q": max(case.lengths[0]), "max_seqlen_k": max(case.lengths[1])} | options
    if case.segments:
        options["segments_q"] = _segments(case.segments, case.batch, case.seqlen_q)
        options["segments_k"] = _segments(case.segments, case.batch, case.seqlen_k)
    plain = dict.fromkeys(Arguments._fields) | {"causal": "none", "softcap": 0.0, "dropout_p": 0.0}
    names = ["q", "k", "v", *(name for name in ("alibi_slopes", "sink") if name in tensors)]
    plain |= {"deterministic": False, "needs_grad": names, "backend": "hopper"}
    return Arguments(**(plain | options | tensors)), dout


def _expected(
    case: Case, arguments: Arguments, dout: torch.Tensor, dlse: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """out, lse and gradients in ``dtype``, on the CPU."""
    cpu = {name: t.cpu() for name, t in arguments._asdict().items() if isinstance(t, torch.Tensor)}
    leaves = {name: cpu[name].to(dtype).requires_grad_() for name in arguments.needs_grad}
    keywords: dict[str, Any] = {
        "causal": False if arguments.causal == "none" else arguments.causal,
        "window_size": (arguments.window_left, arguments.window_right),
        "softcap": arguments.softcap,
        "softmax_scale": arguments.softmax_scale,
        "alibi_slopes": leaves.get("alibi_slopes"),
        "sink": leaves.get("sink"),
        "dtype": dtype,
    }
    if case.segments:
        keywords["segments"] = cpu["segments_q"], cpu["segments_k"]
    if case.lengths is None:
        out, lse = attention_oracle(leaves["q"], leaves["k"], leaves["v"], **keywords)
    else:
        offsets = {name: cpu[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        out, lse = varlen_oracle(leaves["q"], leaves["k"], leaves["v"], **offsets, **keywords)
    finite = torch.where(lse.isinf(), torch.zeros_like(lse), lse)
    ((out * dout.cpu().to(out.dtype)).sum() + (finite * dlse.cpu().to(lse.dtype)).sum()).backward()
    grads = {f"d{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"out": out.detach(), "lse": lse.detach()} | grads


def _run(problem: Problem, inputs: Inputs, dout: torch.Tensor, dlse: torch.Tensor | None) -> dict[str, torch.Tensor]:
    out, lse = BACKEND.forward(problem, inputs)
    grads = BACKEND.backward(problem.replace(derivative="backward"), inputs, out, lse, dout, dlse)
    return {"out": out, "lse": lse} | {f"d{name}": grad for name, grad in grads.items()}


def _check(case: Case, arguments: Arguments, dout: torch.Tensor) -> None:
    """out, lse and every gradient against fp64."""
    problem, inputs = describe(arguments)
    assert BACKEND.supports(problem, device_facts(arguments.q.device)) == ()
    out, lse = BACKEND.forward(problem, inputs)
    dlse = torch.randn_like(lse)
    actual = _run(problem, inputs, dout, dlse)
    assert torch.equal(actual["out"], out)
    assert torch.equal(actual["lse"], lse)
    for name in {"dsink", "dalibi_slopes"} & set(actual):
        actual[name] = actual[name].sum(0)
    exact = _expected(case, arguments, dout, dlse, torch.float64)
    plain = _expected(case, arguments, dout, dlse, case.dtype)
    for name, tensor in actual.items():
        verdict = within_budget(tensor.cpu(), exact[name], plain[name], name=name)
        assert verdict.ok, verdict


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_within_budget(case: Case) -> None:
    _check(case, *_arguments(case))


@pytest.mark.parametrize(
    ("dim", "options"),
    [(dim, options) for dim in (64, 128, 256) for options in ({}, BR | {"softcap": 8.0})],
)
def test_slopes_that_favour_what_is_far(dim: int, options: dict[str, Any]) -> None:
    """Rows past a sequence's end have scores as large as its last ones, but no lse of their own to hold them down."""
    for lengths in (None, ([130, 7, 300], [130, 200, 300])):
        sizes = (1, 4, 2, 130, 300) if lengths is None else (0, 4, 2, 0, 0)
        case = Case("", *sizes, dim, dim, options | {"alibi_slopes": True}, lengths=lengths)
        arguments, dout = _arguments(case)
        assert arguments.alibi_slopes is not None
        arguments.alibi_slopes.fill_(-1.0)
        _check(case, arguments, dout)


@pytest.mark.parametrize(
    ("options", "seqlen_q", "seqlen_k", "unseen"),
    [(TL, 100, 300, slice(100, 300)), (BR | {"window_left": 20}, 64, 400, slice(0, 316))],
)
def test_nan_in_keys_that_no_query_sees(options: dict[str, Any], seqlen_q: int, seqlen_k: int, unseen: slice) -> None:
    arguments, dout = _arguments(Case("", 1, 2, 2, seqlen_q, seqlen_k, 128, 128, options))
    arguments.k[:, unseen] = torch.nan
    arguments.v[:, unseen] = torch.nan
    for name, tensor in _run(*describe(arguments), dout, None).items():
        assert not tensor.isnan().any(), name


@pytest.mark.parametrize("options", [{}, BR, BR | {"softcap": 8.0}])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_nan_in_keys_of_segments_without_queries(options: dict[str, Any], dim: int) -> None:
    """Among keys that are seen, and keys whose segment's queries all come before them: they get no gradient."""
    arguments, dout = _arguments(Case("", 1, 2, 2, 500, 500, dim, dim, options, segments="documents"))
    assert arguments.segments_q is not None
    assert arguments.segments_k is not None
    at = torch.arange(500, device="cuda")
    unseen = (at % 5 == 0) | (at >= 436 if options else False)
    arguments.segments_k[:, at % 5 == 0] = -7
    arguments.segments_q[:, 436:] = 3
    arguments.segments_q[:, :20] = 1 << 40
    expected = _run(*describe(arguments), dout, None)
    for tensor in (arguments.k, arguments.v):
        tensor[:, unseen] = torch.nan
    actual = _run(*describe(arguments), dout, None)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]) or name == "dq", name
    torch.testing.assert_close(actual["dq"], expected["dq"], rtol=1e-2, atol=1e-2)
    for name in ("dk", "dv"):
        assert not actual[name][:, unseen].any(), name


@pytest.mark.parametrize("options", [{}, BR])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_nan_in_a_packed_sequence_without_queries(options: dict[str, Any], dim: int) -> None:
    """Nobody sees its keys: their gradients are zeros, like those of the tokens beyond the last offset."""
    arguments, dout = _arguments(Case("", 0, 2, 2, 0, 0, dim, dim, options, lengths=([0, 0, 9], [0, 3, 12])))
    for tensor, unseen in ((arguments.k, 3), (arguments.v, 3), (arguments.q, 0), (dout, 0)):
        tensor[:unseen] = torch.nan
        tensor[9 if unseen == 0 else 15 :] = torch.nan
    actual = _run(*describe(arguments), dout, None)
    for name, tensor in actual.items():
        assert not tensor.isnan().any(), name
    for name in ("dk", "dv"):
        assert not actual[name][:3].any()
        assert not actual[name][15:].any()
    assert not actual["dq"][9:].any()


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("rising", [False, True])
def test_scores_that_rise_or_fall_along_the_keys(headdim: int, rising: bool) -> None:
    """The running maximum moves at every block, or only at the first; rows of one warp differ in it."""
    arguments, dout = _arguments(Case("", 1, 2, 2, 200, 1500, headdim, headdim, {}))
    scores = torch.linspace(-60, 60, 1500, device="cuda") * (1 if rising else -1) * headdim**0.5
    arguments.q[..., 0] = 1 + torch.arange(200, device="cuda")[None, :, None] % 2
    arguments.k[..., 0] = scores[None, :, None]
    problem, inputs = describe(arguments)
    out, lse = BACKEND.forward(problem, inputs)
    dlse = torch.zeros_like(lse)
    exact = _expected(Case("", 1, 2, 2, 200, 1500, headdim, headdim, {}), arguments, dout, dlse, torch.float64)
    plain = _expected(Case("", 1, 2, 2, 200, 1500, headdim, headdim, {}), arguments, dout, dlse, BF16)
    for name, tensor in (("out", out), ("lse", lse)):
        verdict = within_budget(tensor.cpu(), exact[name], plain[name], name=name)
        assert verdict.ok, verdict


def test_repeats_are_bitwise_equal_under_load() -> None:
    """out, lse, dk and dv; dq is summed in any order."""
    arguments, dout = _arguments(Case("", 2, 8, 4, 1111, 1313, 128, 128, BR))
    problem, inputs = describe(arguments)
    first = _run(problem, inputs, dout, None)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        again = _run(problem, inputs, dout, None)
        for name in ("out", "lse", "dk", "dv"):
            different += (again[name] != first[name]).any()
    assert int(different) == 0
