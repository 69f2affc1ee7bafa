"""torch.func transforms inside each other give the derivatives of plain PyTorch attention."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vmap

import tilewise
from tilewise.testing import attention_oracle


def plain(x):
    s = torch.einsum("bihd,bjhd->bhij", x, x) * x.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), x)


def energy(attend):
    return lambda x: attend(x).pow(3).sum()


TRANSFORMS = {
    "grad": lambda attend, x, t: grad(energy(attend))(x),
    "jvp": lambda attend, x, t: jvp(attend, (x,), (t,))[1],
    "jvp of grad": lambda attend, x, t: jvp(grad(energy(attend)), (x,), (t,))[1],
    "grad of grad": lambda attend, x, t: grad(lambda y: grad(energy(attend))(y).square().sum())(x),
    "grad of jvp": lambda attend, x, t: grad(lambda y: jvp(attend, (y,), (t,))[1].square().sum())(x),
    "hessian": lambda attend, x, t: hessian(energy(attend))(x),
    "vmap of grad of grad": lambda attend, x, t: vmap(
        grad(lambda y: grad(energy(attend))(y[None]).square().sum()), randomness="error"
    )(torch.cat([x, t])),
    "jacrev of grad": lambda attend, x, t: jacrev(grad(energy(attend)))(x),
}


@pytest.mark.parametrize("by", ["reference", "cpu"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_nested_transforms_equal_plain_attention(name, by):
    generator = torch.Generator().manual_seed(0)
    x, t = torch.randn(2, 1, 5, 2, 3, dtype=torch.float64, generator=generator)
    expected = TRANSFORMS[name](plain, x, t)
    actual = TRANSFORMS[name](lambda y: tilewise.attention(y, y, y, backend=by), x, t)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("by", ["auto", "reference", "cpu"])
def test_forward_mode_over_an_ordinary_backward(by):
    tensors = [torch.randn(2, 20, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    tangent = torch.randn_like(tensors[0])

    def moved(attend):
        with forward_ad.dual_level():
            out = attend(forward_ad.make_dual(tensors[0], tangent), *tensors[1:])
            (found,) = torch.autograd.grad(out.square().sum(), tensors[0])
            return forward_ad.unpack_dual(found)

    expected = moved(lambda *t: attention_oracle(*t)[0])
    actual = moved(lambda *t: tilewise.attention(*t, backend=by))
    torch.testing.assert_close(actual.primal, expected.primal)
    torch.testing.assert_close(actual.tangent, expected.tangent)


def test_an_outer_transform_sees_a_call_whose_inner_level_holds_it_constant():
    x, t = torch.randn(2, 1, 5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def product(attend):
        return grad(lambda y: jvp(lambda z: attend(y) * z, (t,), (t,))[1].sum())(x)

    torch.testing.assert_close(product(lambda y: tilewise.attention(y, y, y)), product(plain))
