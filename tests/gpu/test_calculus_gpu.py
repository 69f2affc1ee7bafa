"""torch.compile with inductor, opcheck, autocast, checkpointing and second derivatives where kernels run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import arguments
from tilewise.testing import Spec, assert_within_budget, attention_oracle, make

BF16 = torch.bfloat16
ROOMS = pytest.mark.rooms("triton", "hopper")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def tensors(*shape: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


@ROOMS
def test_vjp_is_autograds(backend: str) -> None:
    """Its function is called when the level that wrapped what was saved is gone."""
    given = tensors(2, 200, 4, 64)
    out, vjp = torch.func.vjp(lambda *t: tilewise.attention(*t, backend=backend), *(t.detach() for t in given))
    want = torch.autograd.grad(tilewise.attention(*given, backend=backend), given, torch.ones_like(out))
    torch.testing.assert_close(vjp(torch.ones_like(out)), want, atol=2e-2, rtol=2e-2)


@ROOMS
def test_inductor_compiles_one_dynamic_graph(backend: str) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q * 2, k.relu(), v, causal=True, backend=backend).sin()

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for batch, seqlen in ((2, 200), (3, 77)):
        given = tensors(batch, seqlen, 4, 64)
        out, expected = compiled(*given), call(*given)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        got, want = (torch.autograd.grad(o.float().square().sum(), given) for o in (out, expected))
        torch.testing.assert_close(got, want, atol=6e-2, rtol=6e-2)


@ROOMS
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_opcheck_passes_in_half_precision(backend: str, name: str) -> None:
    sample = make(Spec(features=("causal", "sink"), dtype=BF16, headdim=64, headdim_v=64, requires_grad="all"))
    flat = tuple(arguments.dense_arguments(sample.q, sample.k, sample.v, **sample.options, backend=backend))
    out, lse = (t.detach() for t in torch.ops.tilewise.forward.default(*flat))
    leading = () if name == "forward" else (torch.randn_like(out), torch.randn_like(lse), out, lse)
    flat = flat if name == "forward" else tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in flat)
    torch.library.opcheck(getattr(torch.ops.tilewise, name).default, (*leading, *flat))


@ROOMS
def test_autocast_gives_each_gradient_its_inputs_dtype(backend: str) -> None:
    q, k, v = tensors(1, 100, 2, 64, dtype=torch.float32)
    v = v.detach().to(BF16).requires_grad_()
    with torch.autocast("cuda", dtype=BF16):
        out = tilewise.attention(q, k, v, causal=True, backend=backend)
    assert out.dtype == BF16
    assert torch.equal(out, tilewise.attention(q.to(BF16), k.to(BF16), v, causal=True, backend=backend))
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32, BF16]


@pytest.mark.rooms("auto-cuda")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_drops_the_same_pairs_again(use_reentrant: bool, backend: str) -> None:
    x = torch.randn(2, 200, 2, 64, dtype=BF16, requires_grad=True)
    dout = torch.randn_like(x)

    def call(x: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(x, x, x, dropout_p=0.5, causal=True, backend=backend)

    torch.manual_seed(3)
    plain = call(x)
    (expected,) = torch.autograd.grad(plain, x, dout)
    torch.manual_seed(3)
    saved = checkpoint(call, x, use_reentrant=use_reentrant)
    torch.manual_seed(99)
    assert torch.equal(saved, plain)
    saved.backward(dout)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.rooms("auto-cuda")
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_double_backward_and_forward_mode_are_within_the_budget(dtype: torch.dtype, backend: str) -> None:
    """Values and gradients by a kernel, their derivatives by tiled operators, together as exact as plain PyTorch."""
    sample = make(Spec(seqlen_q=300, seqlen_k=300, headdim=64, headdim_v=64, dtype=dtype))
    tangents = [torch.randn_like(t) for t in (sample.q, sample.k, sample.v)]

    def derivatives(attend: object, dtype: torch.dtype) -> list[torch.Tensor]:
        given = [t.detach().to(dtype).requires_grad_() for t in (sample.q, sample.k, sample.v)]
        out = attend(*given)  # type: ignore[operator]
        first = torch.autograd.grad(out, given, sample.dout.to(dtype), create_graph=True)
        second = torch.autograd.grad([grad.square().sum() for grad in first], given)
        plain = tuple(t.detach() for t in given)
        along = torch.func.jvp(attend, plain, tuple(t.to(dtype) for t in tangents))[1]
        return [*second, along]

    found = derivatives(lambda *t: tilewise.attention(*t, causal=True, backend=backend), dtype)
    exact, plain = (
        derivatives(lambda *t, d=d: attention_oracle(*t, causal=True, dtype=d)[0], d) for d in (torch.float64, dtype)
    )
    for name, *three in zip(("dq", "dk", "dv", "jvp"), found, exact, plain, strict=True):
        assert_within_budget(*three, name=name)
