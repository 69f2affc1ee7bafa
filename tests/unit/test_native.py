"""Calls that torch's own node records: which ones they are, that every derivative is right, that nothing leaks."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import native, recall
from tilewise.backends.sdpa import kernel
from tilewise.testing import attention_oracle

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NODE = "ScaledDotProductFlashAttentionForCpuBackward0"


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    recall.CALLS.clear()


def _tensors(seqlen: int = 20, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensors:
    q, k, v = (scale * torch.randn(2, seqlen, heads, 16, dtype=dtype) for heads in (4, 2, 2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _is_native(out: torch.Tensor) -> bool:
    """Whether torch's node of attention stands right behind ``out``."""
    last = out.grad_fn
    return last is not None and NODE in {type(node).__name__ for node, _ in last.next_functions}


def _compare(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_first_derivatives_are_torchs_and_right(causal: bool) -> None:
    tensors = _tensors()
    out, expected = tilewise.attention(*tensors, causal=causal), attention_oracle(*tensors, causal=causal)[0]
    assert _is_native(out)
    assert out.is_contiguous()
    dout = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    _compare(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(expected, tensors, dout))
    alone = tilewise.attention(tensors[0].detach(), tensors[1], tensors[2].detach(), causal=causal)
    assert _is_native(alone)
    again = attention_oracle(tensors[0].detach(), tensors[1], tensors[2].detach(), causal=causal)[0]
    _compare(torch.autograd.grad(alone, tensors[1], dout), torch.autograd.grad(again, tensors[1], dout))


@pytest.mark.parametrize("dout", [torch.tensor(2.0).expand(2, 20, 4, 16), torch.randn(2, 16, 4, 20).transpose(1, 3)])
def test_a_cotangent_of_any_strides(dout: torch.Tensor) -> None:
    tensors = _tensors()
    grads = [
        torch.autograd.grad(out, tensors, dout.double())
        for out in (tilewise.attention(*tensors), attention_oracle(*tensors)[0])
    ]
    _compare(*grads)


@pytest.mark.parametrize("wanted", [(0,), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives(wanted: tuple[int, ...], causal: bool) -> None:
    tensors = _tensors()
    chosen = [tensors[index] for index in wanted]
    dout = torch.randn(2, 20, 4, 16, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (tilewise.attention, lambda *t, **options: attention_oracle(*t, **options)[0]):
        out = function(*tensors, causal=causal)
        assert _is_native(out) == (function is tilewise.attention)
        grads = torch.autograd.grad(out, chosen, dout, create_graph=True)
        found.append((*grads, *torch.autograd.grad(sum(grad.square().sum() for grad in grads), (*tensors, dout))))
    _compare(*found)


def test_gradgradcheck() -> None:
    tensors = tuple(torch.randn(1, 16, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert _is_native(tilewise.attention(*tensors))
    assert torch.autograd.gradcheck(tilewise.attention, tensors)
    assert torch.autograd.gradgradcheck(tilewise.attention, tensors)


def test_cotangents_in_a_batch() -> None:
    tensors = _tensors()
    douts = torch.randn(3, 2, 20, 4, 16, dtype=torch.float64)
    got = torch.autograd.grad(tilewise.attention(*tensors), tensors, douts, is_grads_batched=True)
    for index, dout in enumerate(douts):
        expected = torch.autograd.grad(attention_oracle(*tensors)[0], tensors, dout)
        _compare([grad[index] for grad in got], expected)


@pytest.mark.parametrize("wanted", [(0,), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("kept", [False, True])
def test_forward_mode_through_the_backward_of_a_call_made_before(wanted: tuple[int, ...], kept: bool) -> None:
    tensors = _tensors()
    chosen = [tensors[index] for index in wanted]
    dout, tangent = (torch.randn(2, 20, 4, 16, dtype=torch.float64) for _ in range(2))
    found = []
    for out in (tilewise.attention(*tensors), attention_oracle(*tensors)[0]):

        def pull(cotangent: torch.Tensor, out: torch.Tensor = out) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(out, chosen, cotangent, create_graph=kept, retain_graph=True)

        grads, tangents = torch.func.jvp(pull, (dout,), (tangent,))
        found.append((*grads, *tangents))
        with forward_ad.dual_level():
            duals = pull(forward_ad.make_dual(dout, tangent))
            found[-1] += tuple(forward_ad.unpack_dual(dual).tangent for dual in duals)
        found[-1] += pull(dout)
    _compare(*found)


def test_cotangents_mapped_over_without_a_warning() -> None:
    tensors = _tensors()
    out = tilewise.attention(*tensors)
    douts = torch.randn(3, 2, 20, 4, 16, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.vmap(lambda dout: torch.autograd.grad(out, tensors, dout, retain_graph=True))(douts)
    for index, dout in enumerate(douts):
        expected = torch.autograd.grad(attention_oracle(*tensors)[0], tensors, dout)
        _compare([grad[index] for grad in got], expected)


def test_an_lse_too_large_for_torchs_gradients_takes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel_call = kernel.call
    monkeypatch.setattr(kernel, "call", lambda *args, **options: calls.append(1) or kernel_call(*args, **options))
    tensors = _tensors(scale=6.0)
    out = tilewise.attention(*tensors)
    assert not _is_native(out)
    assert len(calls) == 1
    dout = torch.randn_like(out)
    _compare(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(attention_oracle(*tensors)[0], tensors, dout))


def test_below_autograd_nothing_is_recorded() -> None:
    tensors = _tensors()
    with torch._C._AutoDispatchBelowAutograd():
        out = tilewise.attention(*tensors)
    torch.testing.assert_close(out, attention_oracle(*tensors)[0].detach())


def test_a_warm_call_is_traced_like_a_cold_one() -> None:
    tensors = _tensors()

    def grads(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(tilewise.attention(*tensors).sum(), tensors)

    cold = make_fx(grads)(*tensors)
    expected = grads(*tensors)
    warm = make_fx(grads)(*tensors)
    targets = [[str(node.target) for node in graph.graph.nodes] for graph in (cold, warm)]
    assert targets[0] == targets[1]
    _compare(warm(*tensors), expected)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert tilewise.attention(*tensors).shape == (2, 20, 4, 16)


def test_out_without_gradients_may_be_changed_in_place() -> None:
    tensors = _tensors()
    with torch.no_grad():
        out = tilewise.attention(*tensors)
    out += 2 * tensors[0]
    assert out.requires_grad
    assert not tilewise.attention(*(t.detach() for t in tensors)).detach_().requires_grad


def test_the_same_tensor_twice_pushes_nothing_out() -> None:
    q, k, v = _tensors()
    for _ in range(2):
        tilewise.attention(q, k, v)
        _compare([tilewise.attention(q, k, k)], [attention_oracle(q, k, k)[0]])
    assert sum(map(len, recall.CALLS.values())) == 1


def test_hooks_on_saved_tensors_take_the_other_way() -> None:
    tensors = _tensors()
    dout = torch.randn(2, 20, 4, 16, dtype=torch.float64)
    expected = torch.autograd.grad(attention_oracle(*tensors)[0], tensors, dout)
    with save_on_cpu():
        out = tilewise.attention(*tensors)
    assert not _is_native(out)
    _compare(torch.autograd.grad(out, tensors, dout), expected)
    for reentrant in (False, True):
        out = checkpoint(tilewise.attention, *tensors, use_reentrant=reentrant)
        _compare(_gradients(out, tensors, dout), expected)


def _gradients(out: torch.Tensor, tensors: Tensors, dout: torch.Tensor) -> list[torch.Tensor]:
    """By ``backward``, which reentrant checkpointing needs."""
    for tensor in tensors:
        tensor.grad = None
    out.backward(dout)
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


@pytest.mark.parametrize("name", ["_node", "_hooks_on_saved"])
def test_a_torch_without_the_private_parts_takes_the_other_way(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(native, name, None)
    assert not _is_native(tilewise.attention(*_tensors()))


@pytest.mark.parametrize("case", ["few keys", "window", "bottom right", "by name"])
def test_what_torchs_kernel_does_not_do_in_one_call_takes_the_other_way(case: str) -> None:
    q, k, v = _tensors(20)
    if case == "few keys":
        out = tilewise.attention(*(t[:, :15] for t in (q, k, v)))
    elif case == "window":
        out = tilewise.attention(q, k, v, window_size=(3, 3))
    elif case == "bottom right":
        out = tilewise.attention(q[:, :17], k, v, causal=True)
    else:
        out = tilewise.attention(q, k, v, backend="cpu")
    assert not _is_native(out)


def test_nothing_keeps_the_graph_alive() -> None:
    tensors = _tensors()
    out = tilewise.attention(*(2 * tensor for tensor in tensors))
    assert _is_native(out)
    grads = torch.autograd.grad(out.sum(), tensors, create_graph=True)
    gone = [weakref.ref(out), *map(weakref.ref, grads)]
    assert all(reference() is not None for reference in gone)
    gc.collect()
    gc.disable()
    try:
        del out, grads
        assert [reference() for reference in gone] == [None] * 4
    finally:
        gc.enable()


def test_inputs_changed_before_the_backward_are_noticed() -> None:
    tensors = _tensors()
    q = 2 * tensors[0]
    out = tilewise.attention(q, *tensors[1:])
    q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
