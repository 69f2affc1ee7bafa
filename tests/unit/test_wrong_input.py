"""Wrong input of every kind is refused by name: what it was, and what it must be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise import InvalidInput, InvalidType, UnsupportedProblem
from tilewise.testing import attention_oracle

Q, K, V = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
PACKED = {"q": Q.flatten(0, 1), "k": K.flatten(0, 1), "v": V.flatten(0, 1)}
CU_Q, CU_K = torch.tensor([0, 5, 10]), torch.tensor([0, 7, 14])
NAN, INF = float("nan"), float("inf")

# Changed arguments of a right call, and words that the message must hold: the name first.
DENSE = [
    ({"q": 3}, ["q", "torch.Tensor", "int"]),
    ({"k": None}, ["k", "torch.Tensor", "NoneType"]),
    ({"v": V.numpy()}, ["v", "torch.Tensor", "ndarray"]),
    ({"q": Q[0]}, ["q", "(5, 4, 8)", "(batch, seqlen_q, nheads, headdim)"]),
    ({"k": K[..., :4]}, ["k", "headdim 8", "(2, 7, 2, 4)", "(2, 5, 4, 8)"]),
    ({"k": K[:1]}, ["k", "batch 2", "(1, 7, 2, 8)"]),
    ({"v": V[:, :6]}, ["v", "seqlen_k 7", "(2, 6, 2, 6)"]),
    ({"v": V[:, :, :1]}, ["v", "nheads_k 2"]),
    ({"q": Q[:, :, :3]}, ["nheads", "3", "multiple of nheads_k", "2", "(batch, seqlen_q, nheads, headdim)"]),
    ({"k": K[:, :, :0], "v": V[:, :, :0]}, ["nheads", "multiple"]),
    ({"q": Q[..., :0], "k": K[..., :0]}, ["headdim", "0", "at least 1"]),
    ({"v": V[..., :0]}, ["headdim_v", "0", "at least 1"]),
    ({"q": Q.int(), "k": K.int(), "v": V.int()}, ["q", "int32", "float32"]),
    ({"q": Q.to(torch.complex64)}, ["q", "complex64"]),
    ({"q": Q.bool()}, ["q", "bool"]),
    ({"q": Q.to_sparse()}, ["q", "sparse_coo", "strided"]),
    ({"v": torch.nested.nested_tensor([V[0], V[1, :3]])}, ["v", "nested", "strided", "attention_varlen"]),
    ({"v": torch.nested.nested_tensor([V[0], V[1, :3]], layout=torch.jagged)}, ["v", "nested", "attention_varlen"]),
    ({"bias": torch.ones(5, 7).to_sparse()}, ["bias", "sparse_coo", "strided"]),
    ({"v": V.double()}, ["q, k, v", "float32", "float64", "one dtype"]),
    ({"k": K.to("meta")}, ["k", "meta", "q's device", "cpu"]),
    ({"mask": torch.ones(5, 7)}, ["mask", "float32", "bool", "bias="]),
    ({"mask": torch.ones(5, 7, dtype=torch.int64)}, ["mask", "int64", "bool"]),
    ({"mask": torch.ones(5, 6, dtype=torch.bool)}, ["mask", "(5, 6)", "seqlen_k 7"]),
    ({"mask": torch.ones(2, 7, dtype=torch.bool)}, ["mask", "(2, 7)", "mask[:, None, None, :]"]),
    ({"bias": torch.ones(2, 7)}, ["bias", "(2, 7)", "bias[:, None, None, :]"]),
    ({"mask": torch.ones(1, 1, 1, 5, 7, dtype=torch.bool)}, ["mask", "(1, 1, 1, 5, 7)"]),
    ({"mask": [[True]]}, ["mask", "list"]),
    ({"bias": torch.ones(5, 7, dtype=torch.bool)}, ["bias", "bool", "mask="]),
    ({"bias": torch.ones(3, 1, 5, 7)}, ["bias", "(3, 1, 5, 7)", "batch 2"]),
    ({"bias": torch.ones(2, 2, 5, 7)}, ["bias", "nheads 4"]),
    ({"alibi_slopes": torch.ones(3)}, ["alibi_slopes", "(3,)", "(nheads,)", "nheads 4"]),
    ({"alibi_slopes": torch.ones(3, 4)}, ["alibi_slopes", "(3, 4)", "batch 2"]),
    ({"alibi_slopes": torch.ones(4).int()}, ["alibi_slopes", "int32"]),
    ({"alibi_slopes": 0.5}, ["alibi_slopes", "float"]),
    ({"sink": torch.ones(2)}, ["sink", "(2,)", "nheads 4"]),
    ({"sink": torch.ones(4).long()}, ["sink", "int64"]),
    ({"segments": torch.zeros(2, 5, dtype=torch.int64)}, ["segments_k", "(2, 5)", "seqlen_k 7"]),
    ({"segments": torch.zeros(2, 5)}, ["segments_q", "float32"]),
    ({"segments": (torch.zeros(2, 5).long(), torch.zeros(2, 6).long())}, ["segments_k", "(2, 6)"]),
    ({"segments": (torch.zeros(2, 5).long(),)}, ["segments", "1 values", "pair"]),
    ({"segments": (torch.zeros(2, 5).long(), None)}, ["segments_k", "None"]),
    ({"segments": 3}, ["segments_q", "int"]),
    ({"causal": "left"}, ["causal", "'left'", "top_left"]),
    ({"causal": 1.5}, ["causal", "1.5"]),
    ({"window_size": 3}, ["window_size", "3", "pair"]),
    ({"window_size": (1, 2, 3)}, ["window_size", "(1, 2, 3)"]),
    ({"window_size": (-1, 0)}, ["window_size", "(-1, 0)", "at least 0", "None"]),
    ({"window_size": (1.5, 0)}, ["window_size", "int"]),
    ({"window_size": (True, 0)}, ["window_size", "int"]),
    ({"softcap": -1.0}, ["softcap", "-1.0", "at least 0"]),
    ({"softcap": INF}, ["softcap", "inf", "finite"]),
    ({"softcap": 1e300}, ["softcap", "1e+300", "between 1e-12 and 1e+12", "0"]),
    ({"softcap": 1.1e12}, ["softcap", "1100000000000.0", "between 1e-12 and 1e+12", "0"]),
    ({"softcap": 1e-39}, ["softcap", "1e-39", "between 1e-12 and 1e+12", "0"]),
    ({"softcap": "3"}, ["softcap", "'3'", "number"]),
    ({"softmax_scale": NAN}, ["softmax_scale", "nan", "finite"]),
    ({"softmax_scale": 10**400}, ["softmax_scale", "1329 bits", "float"]),
    ({"softmax_scale": torch.tensor(1.0)}, ["softmax_scale", "number"]),
    ({"dropout_p": -0.1}, ["dropout_p", "-0.1", "between 0 and 1"]),
    ({"dropout_p": 1.1}, ["dropout_p", "1.1"]),
    ({"dropout_p": NAN}, ["dropout_p", "nan"]),
    ({"dropout_p": 0.5, "dropout_seed": 1.5}, ["dropout_seed", "1.5", "int"]),
    ({"dropout_p": 0.5, "dropout_seed": 2**64}, ["dropout_seed", "64 bits"]),
    ({"dropout_p": 0.5, "dropout_seed": torch.zeros(2, dtype=torch.int64)}, ["dropout_seed", "(2,)"]),
    ({"dropout_p": 0.5, "dropout_seed": torch.zeros(1)}, ["dropout_seed", "float32"]),
    ({"deterministic": "yes"}, ["deterministic", "'yes'"]),
    ({"backend": "flash"}, ["backend", "'flash'", "'auto'"]),
    ({"backend": 3}, ["backend", "3"]),
]


@pytest.mark.parametrize(
    ("changes", "words"), DENSE, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
@pytest.mark.parametrize("function", [tilewise.attention, tilewise.attention_with_lse, tilewise.explain])
def test_each_wrong_argument_is_named_with_what_it_was(function: Callable, changes: dict, words: list[str]) -> None:
    given_ = {"q": Q, "k": K, "v": V} | changes
    with pytest.raises((InvalidInput, InvalidType)) as caught:
        function(given_.pop("q"), given_.pop("k"), given_.pop("v"), **given_)
    message = str(caught.value)
    assert message.startswith(words[0]), message
    for word in words[1:]:
        assert word in message, message
    assert isinstance(caught.value, ValueError)


def test_a_nested_tensor_after_a_call_that_is_remembered() -> None:
    """torch's guard on the remembered tensors asked it for strides, which ended the process."""
    q, k, v = (tensor.to(torch.float8_e4m3fn) for tensor in (Q, K, V.clone()))
    tilewise.attention(q, k, v)
    nested = torch.nested.nested_tensor([Q[0], Q[1, :3]])
    for tensors in ((nested, K, V), (Q, nested, V), (Q, K, nested)):
        with pytest.raises(InvalidType, match="nested"):
            tilewise.attention(*tensors)


VARLEN = [
    ({"cu_seqlens_q": torch.tensor([1, 5, 10])}, ["cu_seqlens_q", "start with 0"]),
    ({"cu_seqlens_q": torch.tensor([0, 7, 5])}, ["cu_seqlens_q", "not decrease"]),
    ({"cu_seqlens_k": torch.tensor([0, 7, 15])}, ["cu_seqlens_k", "15", "14"]),
    ({"cu_seqlens_k": torch.tensor([0, 14])}, ["cu_seqlens_k", "(2,)"]),
    ({"cu_seqlens_q": torch.tensor([0.0, 5.0, 10.0])}, ["cu_seqlens_q", "float32", "int32"]),
    ({"cu_seqlens_q": torch.tensor([[0, 5, 10]])}, ["cu_seqlens_q", "(1, 3)"]),
    ({"cu_seqlens_q": [0, 5, 10]}, ["cu_seqlens_q", "list"]),
    (
        {"cu_seqlens_q": torch.zeros(0, dtype=torch.int64), "cu_seqlens_k": torch.zeros(0, dtype=torch.int64)},
        ["cu_seqlens_q"],
    ),
    ({"max_seqlen": 4}, ["max_seqlen_q", "4", "5"]),
    ({"max_seqlen": (5, 6)}, ["max_seqlen_k", "6", "7"]),
    ({"max_seqlen": (5, 7, 9)}, ["max_seqlen", "3 values", "pair"]),
    ({"sink": 1.0}, ["sink", "float"]),
    ({"max_seqlen": -1}, ["max_seqlen", "-1"]),
    ({"max_seqlen": 7.0}, ["max_seqlen", "7.0"]),
    ({"max_seqlen": 2**63}, ["max_seqlen", str(2**63), "64 bits"]),
    ({"max_seqlen": torch.tensor(7.0)}, ["max_seqlen", "float32", "one integer"]),
    ({"max_seqlen": torch.tensor([7, 7])}, ["max_seqlen", "(2,)", "one integer"]),
    ({"q": Q}, ["q", "(2, 5, 4, 8)", "(total_q, nheads, headdim)"]),
    ({"v": PACKED["v"][:13]}, ["v", "total_k 14"]),
    ({"sink": torch.ones(3, 4)}, ["sink", "(3, 4)", "batch 2"]),
]


@pytest.mark.parametrize(
    ("changes", "words"), VARLEN, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
@pytest.mark.parametrize("function", [tilewise.attention_varlen, tilewise.attention_varlen_with_lse])
def test_each_wrong_packed_argument_is_named(function: Callable, changes: dict, words: list[str]) -> None:
    given_ = PACKED | {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K} | changes
    with pytest.raises((InvalidInput, InvalidType)) as caught:
        function(given_.pop("q"), given_.pop("k"), given_.pop("v"), **given_)
    message = str(caught.value)
    assert message.startswith(words[0]), message
    for word in words[1:]:
        assert word in message, message


def test_a_wrong_call_is_refused_again_after_a_right_one() -> None:
    """Checked facts are remembered; what was not part of the memory's key would slip through."""
    tilewise.attention_varlen(**PACKED, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)
    tilewise.attention(Q, K, V, mask=torch.ones(5, 7, dtype=torch.bool))
    with pytest.raises(InvalidInput, match="cu_seqlens_k"):
        tilewise.attention_varlen(**PACKED, cu_seqlens_q=CU_Q, cu_seqlens_k=torch.tensor([0, 9, 8]))
    with pytest.raises(InvalidType, match="mask"):
        tilewise.attention(Q, K, V, mask=torch.ones(5, 7))
    with pytest.raises(InvalidInput, match="v:"):
        tilewise.attention(Q, K, V[:, :6], mask=torch.ones(5, 7, dtype=torch.bool))


@pytest.mark.parametrize("keyword", ["is_causal", "scale", "window", "attn_mask", "cu_seqlens_q"])
def test_unknown_keywords_are_errors(keyword: str) -> None:
    for function in (tilewise.attention, tilewise.attention_with_lse, tilewise.explain):
        with pytest.raises(TypeError, match=keyword):
            function(Q, K, V, **{keyword: None})


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        tilewise.attention(Q, K, V, True)  # type: ignore[misc]


SIZE = st.integers(0, 4)
DTYPE = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(-3, 5), st.floats(allow_nan=True), st.text(max_size=3))


@st.composite
def tensors(draw: st.DrawFn, dims: int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    shape = draw(st.lists(SIZE, min_size=dims or 0, max_size=dims or 5))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))) * 3
    return values.to(dtype or draw(DTYPE))


OPTIONS: dict[str, st.SearchStrategy] = {
    "causal": st.sampled_from([True, False, "top_left", "bottom_right"]) | ANYTHING,
    "window_size": st.tuples(st.none() | st.integers(-1, 4), st.none() | st.integers(-1, 4)) | ANYTHING,
    "segments": tensors(dims=2, dtype=torch.int64) | tensors() | ANYTHING,
    "mask": tensors(dtype=torch.bool) | tensors() | ANYTHING,
    "bias": tensors(dtype=torch.float32) | tensors() | ANYTHING,
    "softcap": st.floats(0, 5) | ANYTHING,
    "alibi_slopes": tensors(dims=1, dtype=torch.float32) | tensors() | ANYTHING,
    "sink": tensors(dims=1, dtype=torch.float32) | tensors() | ANYTHING,
    "dropout_p": st.just(0.0) | st.just(1.0) | ANYTHING,
    "softmax_scale": st.floats(-2, 2) | ANYTHING,
    "deterministic": ANYTHING,
    "backend": st.sampled_from(["auto", "cpu", "sdpa", "reference", "flash"]) | ANYTHING,
}
REFUSALS = (InvalidInput, UnsupportedProblem)


@settings(max_examples=300)
@given(st.data())
def test_random_arguments_give_the_right_answer_or_a_refusal(data: st.DataObject) -> None:
    if data.draw(st.booleans()):  # tensors that belong together, so that calls often run
        batch, seqlen_q, seqlen_k, heads, group, dim, dim_v = (data.draw(SIZE) for _ in range(7))
        dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
        shapes = ((batch, seqlen_q, heads * group, dim), (batch, seqlen_k, heads, dim), (batch, seqlen_k, heads, dim_v))
        q, k, v = (torch.randn(shape, dtype=dtype) for shape in shapes)
    else:
        q, k, v = (data.draw(tensors(dims=4) | tensors() | ANYTHING) for _ in range(3))
    chosen = data.draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=3, unique=True))
    options = {name: data.draw(OPTIONS[name], label=name) for name in chosen}
    try:
        out, lse = tilewise.attention_with_lse(q, k, v, **options)
    except REFUSALS:
        return
    asked = {name: value for name, value in options.items() if name not in ("backend", "deterministic")}
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked.get("dropout_p") == 1.0:
        asked["dropout_keep"] = torch.zeros(1, dtype=torch.bool)
    expected, expected_lse = attention_oracle(q, k, v, **asked)
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4, equal_nan=True)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4, equal_nan=True)


@settings(max_examples=100)
@given(st.data())
def test_random_offsets_give_an_answer_or_a_refusal(data: st.DataObject) -> None:
    total = data.draw(st.integers(0, 8))
    q, k = torch.randn(total, 2, 4), torch.randn(data.draw(st.integers(0, 8)), 1, 4)
    offset = st.lists(st.integers(-2, 9), max_size=5)
    cu_q, cu_k = (
        torch.tensor(sorted(values) if data.draw(st.booleans()) else values, dtype=torch.int32)
        for values in (data.draw(offset), data.draw(offset))
    )
    longest = data.draw(st.none() | st.integers(-1, 9))
    backend = data.draw(st.sampled_from(["auto", "cpu", "reference", "sdpa"]))
    try:
        out = tilewise.attention_varlen(
            q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen=longest, backend=backend
        )
    except InvalidInput:
        return
    assert cu_q[0] == cu_k[0] == 0
    assert bool((cu_q.diff() >= 0).all() and (cu_k.diff() >= 0).all())
    assert int(cu_q[-1]) <= q.shape[0]
    assert int(cu_k[-1]) <= k.shape[0]
    assert longest is None or longest >= max(int(cu_q.diff().max()), int(cu_k.diff().max()), 0) or len(cu_q) == 1
    assert not out[int(cu_q[-1]) :].any()
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", [[], None, 3, b"cpu"])
def test_use_backend_takes_only_a_name(name: object) -> None:
    with pytest.raises(tilewise.InvalidType, match="backend"), tilewise.use_backend(name):  # type: ignore[arg-type]
        pass


def test_a_dropout_seed_that_lies_nowhere_is_refused():
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(InvalidInput, match="dropout_seed: is on meta"):
        tilewise.attention(q, q, q, dropout_p=0.5, dropout_seed=torch.tensor(5, device="meta"))
    with pytest.raises(InvalidType, match="dropout_seed: layout"):
        tilewise.attention(q, q, q, dropout_p=0.5, dropout_seed=torch.tensor([5]).to_sparse())


def test_a_window_that_no_integer_holds_is_refused():
    q = torch.randn(1, 8, 2, 16)
    for backend in ("auto", "cpu", "reference"):
        with pytest.raises(InvalidInput, match="window_size"):
            tilewise.attention(q, q, q, window_size=(2**70, 0), backend=backend)


def test_the_default_device_is_not_followed():
    q, slopes = torch.randn(1, 8, 2, 16), torch.rand(2)
    expected = tilewise.attention(q, q, q, alibi_slopes=slopes, backend="cpu")
    torch.set_default_device("meta")
    try:
        actual = tilewise.attention(q, q, q, alibi_slopes=slopes, backend="cpu")
    finally:
        torch.set_default_device(None)
    assert torch.equal(actual, expected)
