"""A learned bias on every pair, as structure prediction and T5 use it, with its gradient and no saved N x N matrix.

    python examples/pair_bias_gradient.py

Prints the gradient of a relative-position table, held against plain PyTorch attention.
"""

import torch

import tilewise

SEQLEN, NHEADS, HEADDIM = 96, 4, 16


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * HEADDIM**-0.5 + bias
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, SEQLEN, NHEADS, HEADDIM)
    table = torch.randn(NHEADS, 2 * SEQLEN - 1, requires_grad=True)
    position = torch.arange(SEQLEN)
    bias = table[:, position[:, None] - position + SEQLEN - 1]

    gradients = []
    for attend in (plain, lambda q, k, v, bias: tilewise.attention(q, k, v, bias=bias)):
        loss = attend(q, k, v, bias).square().sum()
        gradients += torch.autograd.grad(loss, table, retain_graph=True)
    difference = (gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()
    print(f"gradient of the table {tuple(table.shape)}: relative difference to plain PyTorch {difference:.1e}")


if __name__ == "__main__":
    main()
