"""A remembered call answers as its first did, and only for the same call: everything else takes the long way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

import tilewise
from tilewise import recall
from tilewise.testing import attention_oracle

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    recall.CALLS.clear()


def _kept() -> int:
    return sum(map(len, recall.CALLS.values()))


def _tensors(dtype: torch.dtype = torch.float64) -> Tensors:
    q, k, v = (torch.randn(2, 9, heads, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    return q, k, v


def _twice(tensors: Tensors, **options: Any) -> torch.Tensor:
    """The second of two calls, which is a remembered one."""
    tilewise.attention(*tensors, **options)
    assert _kept() == 1
    out = tilewise.attention(*tensors, **options)
    assert _kept() == 1
    return out


@pytest.mark.parametrize("name", ["auto", "cpu", "sdpa", "reference"])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_a_remembered_call_gives_out_and_gradients(name: str, causal: bool | str) -> None:
    tensors = _tensors()
    out = _twice(tensors, causal=causal, backend=name, softmax_scale=0.3)
    expected = attention_oracle(*tensors, causal=causal, softmax_scale=0.3)[0]
    dout = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    pairs = zip(
        torch.autograd.grad(out, tensors, dout, retain_graph=True),
        torch.autograd.grad(expected, tensors, dout, retain_graph=True),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)
    (one,), (other,) = (torch.autograd.grad(o, tensors[1], dout) for o in (out, expected))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
def test_a_remembered_call_has_second_derivatives(name: str) -> None:
    tensors = _tensors()
    ones = [
        torch.autograd.grad(torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)[0].sum(), tensors)
        for out in (_twice(tensors, backend=name), attention_oracle(*tensors)[0])
    ]
    for one, other in zip(*ones, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "wrong", [{"causal": 1}, {"causal": 0}, {"softcap": False}, {"dropout_p": False}, {"deterministic": 0}], ids=str
)
def test_what_only_equals_a_right_option_is_still_refused(wrong: dict[str, Any]) -> None:
    tensors = _tensors()
    _twice(tensors)
    _ = tilewise.attention(*tensors, causal=True)
    with pytest.raises(tilewise.InvalidInput):
        tilewise.attention(*tensors, **wrong)


def test_use_backend_and_its_refusal_are_seen_by_a_remembered_call() -> None:
    q, k, v = _tensors()
    narrow = v[..., :8]
    _twice((q, k, narrow))
    with tilewise.use_backend("sdpa"), pytest.raises(tilewise.UnsupportedProblem):
        tilewise.attention(q, k, narrow)


def test_gradients_and_their_absence_are_different_calls() -> None:
    tensors = _tensors()
    _twice(tensors)
    with torch.no_grad():
        assert not tilewise.attention(*tensors).requires_grad
    assert not tilewise.attention(*(t.detach() for t in tensors)).requires_grad
    assert tilewise.attention(*tensors).requires_grad
    assert _kept() == 3


def test_an_open_window_is_none() -> None:
    _twice(_tensors(), window_size=(None, None))


def test_another_layout_is_another_call() -> None:
    tensors = _tensors()
    _twice(tensors)
    turned = [t.detach().mT.contiguous().mT for t in tensors]
    torch.testing.assert_close(tilewise.attention(*turned), tilewise.attention(*tensors))
    assert _kept() == 2


def test_dropout_and_meta_tensors_are_not_remembered() -> None:
    q, k, v = _tensors()
    first, second = (tilewise.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    tilewise.attention(*(t.to("meta") for t in (q, k, v)))
    assert _kept() == 0


def test_transforms_around_a_remembered_call_take_the_long_way() -> None:
    tensors = tuple(t.detach() for t in _tensors())
    expected = _twice(tensors)
    torch.testing.assert_close(torch.func.vmap(tilewise.attention)(*(t[None] for t in tensors))[0], expected)
    out, tangent = torch.func.jvp(tilewise.attention, tensors, tensors)
    right, right_tangent = torch.func.jvp(lambda *t: attention_oracle(*t)[0], tensors, tensors)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(tangent, right_tangent)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, t) for t in tensors]
        torch.testing.assert_close(forward_ad.unpack_dual(tilewise.attention(*duals)).tangent, right_tangent)


def test_autocast_around_a_remembered_call_casts() -> None:
    tensors = _tensors(torch.float32)
    _twice(tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tilewise.attention(*tensors).dtype == torch.bfloat16


def test_wrong_tensors_are_refused_with_the_message_of_a_first_call() -> None:
    q, k, v = _tensors()
    _twice((q, k, v))
    for wrong in (k[:, :-1], k.float(), k.to_sparse(), None):
        messages = []
        for _ in range(2):
            with pytest.raises((tilewise.InvalidInput, tilewise.InvalidType)) as caught:
                tilewise.attention(q, wrong, v)  # type: ignore[arg-type]
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_forward_mode_over_the_backward_of_a_remembered_call(name: str) -> None:
    tensors = _tensors()
    dout, moved = torch.randn(2, 2, 9, 4, 16, dtype=torch.float64)
    tangents = []
    for out in (_twice(tensors, backend=name), attention_oracle(*tensors)[0]):
        with forward_ad.dual_level():
            grads = torch.autograd.grad(out, tensors, forward_ad.make_dual(dout, moved))
            tangents.append([forward_ad.unpack_dual(grad).tangent for grad in grads])
    for one, other in zip(*tangents, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_saved_tensors_that_come_back_in_another_layout_give_the_same_gradients(name: str) -> None:
    tensors = _tensors()
    dout = torch.randn(2, 9, 4, 16, dtype=torch.float64)

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mT.contiguous().mT if tensor.ndim == 4 else tensor

    with saved_tensors_hooks(turned, lambda tensor: tensor):
        out = _twice(tensors, backend=name)
        got = torch.autograd.grad(out, tensors, dout)
    expected = torch.autograd.grad(attention_oracle(*tensors)[0], tensors, dout)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
