"""torch.func and forward_ad: grad, vjp, jvp, vmap, hessian, alone and composed."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.autograd import forward_ad, functional
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import tilewise
from tests.rooms import ROOMS
from tilewise.testing import Spec, attention_oracle, make

pytestmark = pytest.mark.rooms(*(name for name, room in ROOMS.items() if room.calculus), "auto")
FP64 = torch.float64
FEATURES = [(), ("causal",), ("mask",), ("bias", "sink", "alibi"), ("softcap", "window"), ("dropout",)]


def pair(features: tuple[str, ...], backend: str, **sizes: object):
    """A call and the oracle's, as functions of q, k, v, and the tensors."""
    sample = make(
        Spec(dtype=FP64, features=features, **{"seqlen_q": 5, "seqlen_k": 7, "headdim": 4, "headdim_v": 6, **sizes})
    )

    def mine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v, **sample.options, backend=backend)

    def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_oracle(q, k, v, **sample.oracle_options())[0]

    return mine, right, (sample.q, sample.k, sample.v)


@pytest.mark.parametrize("features", FEATURES, ids="+".join)
def test_grad_and_vjp_are_autograds(features: tuple[str, ...], backend: str) -> None:
    mine, right, tensors = pair(features, backend)
    for argnums in (0, 1, 2, (0, 1, 2)):
        got, want = (grad(lambda *t, f=f: f(*t).square().sum(), argnums=argnums)(*tensors) for f in (mine, right))
        torch.testing.assert_close(got, want)
    out, pull = vjp(mine, *tensors)
    expected, pull_right = vjp(right, *tensors)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    torch.testing.assert_close(pull(dout), pull_right(dout))


@pytest.mark.parametrize("features", FEATURES, ids="+".join)
def test_case_117_jvp_is_the_dual_numbers(features: tuple[str, ...], backend: str) -> None:
    mine, right, tensors = pair(features, backend)
    tangents = tuple(torch.randn_like(t) for t in tensors)
    out, along = jvp(mine, tensors, tangents)
    torch.testing.assert_close((out, along), jvp(right, tensors, tangents))
    dout = torch.randn_like(out)
    pulled = vjp(mine, *tensors)[1](dout)
    torch.testing.assert_close((dout * along).sum(), sum((a * b).sum() for a, b in zip(pulled, tangents, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_117_jvp_in_the_dtypes_of_training(dtype: torch.dtype, backend: str) -> None:
    sample = make(Spec(seqlen_q=129, seqlen_k=129, nheads=4, nheads_k=2, headdim=64, headdim_v=64, dtype=dtype))
    exact = sample.converted(FP64)
    tangents = [torch.randn(t.shape).to(dtype) for t in (sample.q, sample.k, sample.v)]
    _, along = jvp(
        lambda *t: tilewise.attention(*t, causal=True, backend=backend), (sample.q, sample.k, sample.v), tuple(tangents)
    )
    _, right = jvp(
        lambda *t: attention_oracle(*t, causal=True)[0],
        (exact.q, exact.k, exact.v),
        tuple(t.double() for t in tangents),
    )
    assert along.dtype == dtype
    error = (along.double() - right).norm() / right.norm()
    assert float(error) < 4 * torch.finfo(dtype).eps


def test_case_117_backward_through_primal_and_tangent(backend: str) -> None:
    mine, right, tensors = pair(("causal",), backend)
    tangents = tuple(torch.randn_like(t) for t in tensors)

    def loss(function, *given: torch.Tensor) -> torch.Tensor:
        out, along = jvp(function, given[:3], given[3:])
        return out.square().sum() + along.sin().sum()

    leaves = tuple(t.clone().requires_grad_() for t in (*tensors, *tangents))
    got, want = (torch.autograd.grad(loss(f, *leaves), leaves) for f in (mine, right))
    torch.testing.assert_close(got, want)


def test_forward_ad_and_backward_through_it(backend: str) -> None:
    mine, right, tensors = pair((), backend)
    tangents = [torch.randn_like(t) for t in tensors]
    results = []
    for function in (mine, right):
        leaves = [t.clone().requires_grad_() for t in tensors]
        with forward_ad.dual_level():
            out = function(*(forward_ad.make_dual(p, t) for p, t in zip(leaves, tangents, strict=True)))
            along = forward_ad.unpack_dual(out).tangent
        results.append((along.detach(), torch.autograd.grad(along.square().sum(), leaves)))
    torch.testing.assert_close(results[0], results[1])


def test_a_tangent_on_one_tensor_only(backend: str) -> None:
    mine, right, (q, k, v) = pair(("causal",), backend)
    for index in range(3):

        def one(function, x, index=index):
            given = [q, k, v]
            given[index] = x
            return function(*given)

        x = (q, k, v)[index]
        tangent = torch.randn_like(x)
        got, want = (jvp(lambda y, f=f: one(f, y), (x,), (tangent,)) for f in (mine, right))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("in_dims", [(1, 0, None), (0, 0, 0), (None, 0, 2), (3, None, None)])
def test_case_113_vmap_with_mixed_dimensions(in_dims: tuple, backend: str) -> None:
    shapes = [(2, 6, 4, 8), (2, 5, 2, 8), (2, 5, 2, 3)]
    tensors = [
        torch.randn(*shape[: dim or 0], 3, *shape[dim or 0 :]) if dim is not None else torch.randn(shape)
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v, causal=True, backend=backend)

    def sample(index: int) -> list[torch.Tensor]:
        return [t if dim is None else t.select(dim, index) for t, dim in zip(tensors, in_dims, strict=True)]

    looped = torch.stack([call(*sample(index)) for index in range(3)])
    torch.testing.assert_close(vmap(call, in_dims)(*tensors), looped)
    mapped = vmap(grad(lambda *t: call(*t).square().sum(), argnums=(0, 1, 2)), in_dims)(*tensors)
    for index in range(3):
        alone = grad(lambda *t: call(*t).square().sum(), argnums=(0, 1, 2))(*sample(index))
        torch.testing.assert_close(tuple(m[index] for m in mapped), alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", ["bias", "mask", "sink", "alibi_slopes"])
def test_vmap_over_an_option(options: str, backend: str) -> None:
    q, k, v = (torch.randn(2, 5, 2, 4, dtype=FP64) for _ in range(3))
    values = {
        "bias": torch.randn(3, 5, 5, dtype=FP64),
        "mask": torch.rand(3, 2, 1, 5, 5) < 0.7,
        "sink": torch.randn(3, 2, dtype=FP64),
        "alibi_slopes": torch.rand(3, 2, 2, dtype=FP64),
    }[options]
    mapped = vmap(lambda x: tilewise.attention(q, k, v, **{options: x}, backend=backend))(values)
    looped = torch.stack([tilewise.attention(q, k, v, **{options: x}, backend=backend) for x in values])
    torch.testing.assert_close(mapped, looped)
    if options != "mask":

        def loss(x: torch.Tensor) -> torch.Tensor:
            return tilewise.attention(q, k, v, **{options: x}, backend=backend).square().sum()

        torch.testing.assert_close(vmap(grad(loss))(values), torch.stack([grad(loss)(x) for x in values]))


def test_vmap_over_packed_sequences_and_dropout_equals_the_loop(backend: str) -> None:
    q = torch.randn(3, 9, 2, 4)
    cu = torch.tensor([0, 4, 9])
    for call in (
        lambda x: tilewise.attention_varlen(x, x, x, cu_seqlens_q=cu, causal=True, backend=backend),
        lambda x: tilewise.attention(x[None], x[None], x[None], dropout_p=0.4, dropout_seed=3, backend=backend),
    ):
        torch.testing.assert_close(vmap(call)(q), torch.stack([call(x) for x in q]))
        assert vmap(call)(q[:0]).shape == (0, *call(q[0]).shape)


def test_hessian_and_both_jacobians_agree(backend: str) -> None:
    mine, right, (q, k, v) = pair(
        ("causal", "bias"), backend, batch=1, seqlen_q=2, seqlen_k=3, nheads=2, nheads_k=1, headdim=2, headdim_v=2
    )

    def by_q(function, x: torch.Tensor) -> torch.Tensor:
        return function(x, k, v)

    def by_k(function, x: torch.Tensor) -> torch.Tensor:
        return function(q, x, v)

    for by, x in ((by_q, q), (by_k, k)):
        got, want = (hessian(lambda y, by=by, f=f: by(f, y).sin().sum())(x) for f in (mine, right))
        torch.testing.assert_close(got, want)
        one = functools.partial(by, mine)
        torch.testing.assert_close(jacfwd(one)(x), jacrev(one)(x))


def test_forward_mode_of_forward_mode_is_refused_by_name(backend: str) -> None:
    x = torch.randn(1, 3, 1, 2, dtype=FP64)

    def first(y: torch.Tensor) -> torch.Tensor:
        return jvp(lambda z: tilewise.attention(z, z, z, backend=backend), (y,), (torch.ones_like(y),))[1]

    with pytest.raises(NotImplementedError, match="forward mode of forward mode"):
        jvp(first, (x,), (torch.ones_like(x),))


def test_vmap_over_no_samples_has_gradients_of_their_shapes(backend: str) -> None:
    shapes = [(2, 4, 2, 8), (2, 5, 2, 8), (2, 5, 2, 3)]
    q, k, v = (torch.randn(0, *shape) for shape in shapes)

    def call(*given: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(*given, backend=backend)

    for in_dims, tensors in (
        ((0, 0, 0), (q, k, v)),
        ((0, None, None), (q, torch.randn(shapes[1]), torch.randn(shapes[2]))),
    ):
        for argnums in (0, 1, 2):
            mapped = vmap(grad(lambda *t: call(*t).sum(), argnums=argnums), in_dims)(*tensors)
            assert mapped.shape == (0, *shapes[argnums])
    bias = torch.randn(0, 1, 4, 5)
    tensors = [torch.randn(shape) for shape in shapes]
    by_bias = vmap(grad(lambda b: tilewise.attention(*tensors, bias=b, backend=backend).sum()))(bias)
    assert by_bias.shape == bias.shape


TINY = {"batch": 1, "seqlen_q": 2, "seqlen_k": 3, "nheads": 2, "nheads_k": 1, "headdim": 2, "headdim_v": 2}


@pytest.mark.parametrize("features", FEATURES, ids="+".join)
def test_vectorised_jacobians_and_hessians_are_those_of_the_loop(features: tuple[str, ...], backend: str) -> None:
    mine, _, tensors = pair(features, backend, **TINY)

    def loss(*given: torch.Tensor) -> torch.Tensor:
        return mine(*given).sin().sum()

    looped = functional.jacobian(mine, tensors)
    for strategy in ("reverse-mode", "forward-mode"):
        torch.testing.assert_close(functional.jacobian(mine, tensors, vectorize=True, strategy=strategy), looped)
    looped = functional.hessian(loss, tensors)
    for strategy in ("reverse-mode", "forward-mode"):
        mapped = functional.hessian(loss, tensors, vectorize=True, outer_jacobian_strategy=strategy)
        torch.testing.assert_close(mapped, looped)


def test_batched_cotangents_give_the_gradients_of_each(backend: str) -> None:
    sample = make(Spec(dtype=FP64, features=("bias", "sink", "alibi"), requires_grad="all", **TINY))
    leaves = tuple(sample.differentiable().values())
    out = tilewise.attention_with_lse(sample.q, sample.k, sample.v, **sample.options, backend=backend)
    cotangents = [torch.randn(3, *t.shape, dtype=t.dtype) for t in out]
    mapped = torch.autograd.grad(out, leaves, cotangents, retain_graph=True, is_grads_batched=True)
    looped = [torch.autograd.grad(out, leaves, [c[index] for c in cotangents], retain_graph=True) for index in range(3)]
    torch.testing.assert_close(mapped, tuple(torch.stack(grads) for grads in zip(*looped, strict=True)))
    packed = torch.randn(5, 2, 4, dtype=FP64, requires_grad=True)
    out = tilewise.attention_varlen(packed, packed, packed, cu_seqlens_q=torch.tensor([0, 2, 5]), backend=backend)
    cotangents = torch.randn(3, *out.shape, dtype=FP64)
    (mapped,) = torch.autograd.grad(out, packed, cotangents, retain_graph=True, is_grads_batched=True)
    looped = [torch.autograd.grad(out, packed, c, retain_graph=True)[0] for c in cotangents]
    torch.testing.assert_close(mapped, torch.stack(looped))
