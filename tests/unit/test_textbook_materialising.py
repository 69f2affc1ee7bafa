"""Handbook row 1: three passes, their counted bytes, and S and P of (1, 32, 8192, 8192) bf16."""

from __future__ import annotations

import re

import pytest
import torch

from tilewise.textbook import materialising


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_attention(seqlen_q, seqlen_k, causal):
    torch.manual_seed(0)
    q = torch.randn(2, seqlen_q, 3, 4, dtype=torch.float64)
    k, v = (torch.randn(2, seqlen_k, 3, 4, dtype=torch.float64) for _ in range(2))
    corner = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q) if causal else None
    mask = corner
    heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)
    torch.testing.assert_close(materialising.attention(q, k, v, causal=causal), expected.nan_to_num(0.0))


def test_the_counted_bytes_are_the_closed_form():
    q = torch.randn(2, 6, 3, 4)
    k = v = torch.randn(2, 10, 3, 4)
    memory = materialising.SlowMemory()
    materialising.attention(q, k, v, memory=memory)
    assert memory.passes == materialising.expected_passes(2, 3, 6, 10, 4, torch.float32)


def test_every_printed_number(capsys):
    materialising.main()
    text = capsys.readouterr().out
    passes = materialising.expected_passes(1, 4, 256, 256, 32, torch.float32)
    rows = {line[:16].strip(): line for line in text.splitlines()}
    for name, counts in passes.items():
        assert [int(word.replace(",", "")) for word in rows[name][16:].split()] == counts
    together = [sum(counts) for counts in zip(*passes.values(), strict=True)]
    assert [int(word.replace(",", "")) for word in rows["together"][16:].split()] == together
    one = 256 * 4 * 32 * 4
    assert [int(word.replace(",", "")) for word in rows["q, k, v, out"][16:].split()] == [3 * one, one]
    sizes = re.findall(r"\(1, 32, (\d+), (\d+)\) +([\d,]+) +([\d,]+)", text)
    assert [row[0] for row in sizes] == ["2048", "8192", "32768"]
    for seqlen_q, seqlen_k, s_bytes, p_bytes in sizes:
        assert int(s_bytes.replace(",", "")) == 32 * int(seqlen_q) * int(seqlen_k) * 2
        assert p_bytes == s_bytes
    assert ("8192", "8192", "4,294,967,296", "4,294,967,296") in sizes
