"""Forward mode, Hessian-vector products and gradient penalties through attention, in memory linear in the length.

    python examples/second_derivatives.py

Prints each against the same derivative of plain PyTorch attention.
"""

from collections.abc import Callable

import torch
from torch.func import grad, jvp

import tilewise

Attend = Callable[[torch.Tensor], torch.Tensor]


def plain(x: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", x, x) * x.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), x)


def main() -> None:
    torch.manual_seed(0)
    x, direction = torch.randn(2, 1, 50, 2, 8, dtype=torch.float64)

    def derivatives(attend: Attend) -> dict[str, torch.Tensor]:
        def energy(y: torch.Tensor) -> torch.Tensor:
            return attend(y).pow(3).sum()

        return {
            "tangent (jvp)": jvp(attend, (x,), (direction,))[1],
            "Hessian-vector product": jvp(grad(energy), (x,), (direction,))[1],
            "gradient penalty": grad(lambda y: grad(energy)(y).square().sum())(x),
        }

    expected = derivatives(plain)
    for name, value in derivatives(lambda y: tilewise.attention(y, y, y)).items():
        difference = (value - expected[name]).abs().max() / expected[name].abs().max()
        print(f"{name:24}relative difference to plain PyTorch {difference:.1e}")


if __name__ == "__main__":
    main()
