"""Documents of different lengths in one call, without padding and without seeing each other.

    python examples/packed_documents.py

Prints that the packed call equals a call for each document, and that a second way, segment ids, gives the same.
"""

import itertools

import torch

import tilewise

LENGTHS = [7, 0, 130, 41]
NHEADS, NHEADS_K, HEADDIM = 8, 2, 32


def main() -> None:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    q = torch.randn(total, NHEADS, HEADDIM)
    k, v = torch.randn(2, total, NHEADS_K, HEADDIM)
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])

    packed = tilewise.attention_varlen(q, k, v, cu_seqlens_q=offsets, causal=True)

    alone = [
        tilewise.attention(q[None, a:b], k[None, a:b], v[None, a:b], causal=True)[0]
        for a, b in itertools.pairwise(offsets.tolist())
    ]
    print(f"packed against one call a document: largest difference {(packed - torch.cat(alone)).abs().max():.1e}")

    ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    by_segments = tilewise.attention(q[None], k[None], v[None], causal=True, segments=ids)[0]
    print(f"packed against segment ids:         largest difference {(packed - by_segments).abs().max():.1e}")


if __name__ == "__main__":
    main()
