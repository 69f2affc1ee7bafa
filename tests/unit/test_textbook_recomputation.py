"""Handbook row 6: the backward from lse and delta equals autograd, and what it saves."""

from __future__ import annotations

import re

import pytest
import torch

from tilewise.textbook import recomputation


@pytest.mark.parametrize("block", [1, 5, 64])
def test_it_equals_autograd(block):
    torch.manual_seed(1)
    q = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 9, 4, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    out, lse = recomputation.forward(q, k, v)
    torch.testing.assert_close(out, (q @ k.mT / 2).softmax(-1) @ v)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    with torch.no_grad():
        found = recomputation.backward((q, k, v), out, lse, dout, dlse, block)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_saved_bytes_are_those_of_the_tensors():
    out, lse = recomputation.forward(*(torch.randn(3, 10, 4) for _ in range(3)))
    p = torch.empty(3, 10, 10)
    sizes = [tensor.numel() * tensor.element_size() for tensor in (p, out, lse)]
    assert recomputation.saved_bytes(3, 10, 4, torch.float32) == (sizes[0] + sizes[1], sizes[2] + sizes[1])


def test_every_printed_number(capsys):
    recomputation.main()
    text = capsys.readouterr().out
    errors = dict(re.findall(r"  (d[qkv]) (\S+)", text))
    assert errors == {name: f"{error:.1e}" for name, error in recomputation.errors().items()}
    assert max(map(float, errors.values())) < 1e-13
    rows = re.findall(r"^ +(\d+) +([\d,]+) +([\d,]+) +([\d.]+)$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1024, 2048, 4096, 8192, 16384]
    for seqlen, stored, recomputed, ratio in rows:
        n = int(seqlen)
        p, out, lse = 32 * n * n * 2, 32 * n * 128 * 2, 32 * n * 4
        assert [int(stored.replace(",", "")), int(recomputed.replace(",", ""))] == [p + out, lse + out]
        assert ratio == f"{(p + out) / (lse + out):.1f}"
