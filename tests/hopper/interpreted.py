"""Run under TRITON_INTERPRET=1 by test_hopper_interpreted: the plain Triton kernels around the Gluon ones."""

from __future__ import annotations

import itertools
import math

import torch

from tilewise.backends.hopper.combine import combine_kernel
from tilewise.backends.hopper.preprocess import after_kernel, before_kernel, sink_kernel
from tilewise.backends.hopper.schedule import schedule_kernel
from tilewise.backends.hopper.segments import leaders_kernel, meetings_kernel
from tilewise.states import merge_states

LENGTHS = [0, 5, 128, 300, 1, 129, 300]
OFFSETS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
BATCH = len(LENGTHS)


def table() -> None:
    """Every block of every sequence once, longer sequences first."""
    for last_first in (True, False):
        found = torch.full((42,), -7, dtype=torch.int32)
        tail = (BATCH, 0, 0, 0, 0, 128, last_first, 4, 32, 128, False)
        schedule_kernel[(BATCH,)](OFFSETS, found, None, None, None, *tail)
        step = -1 if last_first else 1
        order = sorted(range(BATCH), key=lambda b: -LENGTHS[b])
        expected = [[b, block] for b in order for block in list(range(-(-LENGTHS[b] // 128)))[::step]]
        assert found[0] == len(expected)
        assert found[2 : 2 + 2 * len(expected)].view(-1, 2).tolist() == expected


def no_tiles() -> None:
    """Slot 0 is there all the same."""
    found = torch.full((42,), -7, dtype=torch.int32)
    schedule_kernel[(2,)](torch.zeros(3, dtype=torch.int32), found, None, None, None, 2, 0, 0, 0, 0, 128, False, 4, 32,
                          128, False)  # fmt: skip
    assert found[:5].tolist() == [0, 0, 0, 0, -7]


def clear() -> None:
    """Only tokens beyond the last offset are written."""
    end = int(OFFSETS[-1])
    total = end + 70
    out, lse = torch.full((total, 3, 72), torch.nan).half(), torch.full((3, total), torch.nan)
    dk, dv = torch.full((total, 2, 200), torch.nan).half(), torch.full((total, 1, 7), torch.nan)
    found = torch.empty(42, dtype=torch.int32)
    for first, second, rows in ((None, out, lse), (dk, dv, None)):
        tail = (BATCH, total, 3, 2 * 200, second[0].numel(), 128, True, 4, 32, 128, False)
        schedule_kernel[(BATCH - (-total // 32),)](OFFSETS, found, first, second, rows, *tail)
    for cleared in (out, dk, dv):
        assert cleared[:end].isnan().all()
        assert (cleared[end:] == 0).all()
    assert lse[:, :end].isnan().all()
    assert (lse[:, end:] == -torch.inf).all()


def combine() -> None:
    """As merging one state after the other; some are empty, and one row is empty in all."""
    splits, batch, seqlen, nheads, headdim_v = 3, 2, 5, 3, 40
    rows = batch * nheads * seqlen
    outs, lses = torch.randn(splits, rows, 64), torch.randn(splits, rows) * 10
    lses[0, 4], lses[1:, 7], lses[:, 9] = -torch.inf, -torch.inf, -torch.inf
    outs[lses == -torch.inf] = 0
    out = torch.full((batch, seqlen, nheads, headdim_v), torch.nan)
    lse = torch.full((batch, nheads, seqlen), torch.nan)
    combine_kernel[(-(-rows // 4),)](outs, lses, out, lse, splits, rows, seqlen, nheads, headdim_v, 4, 64)
    states = [
        (o[:, :headdim_v].view(batch, nheads, seqlen, headdim_v).transpose(1, 2), each.view_as(lse))
        for o, each in zip(outs, lses, strict=True)
    ]
    expected = states[0]
    for state in states[1:]:
        expected = merge_states(*expected, *state)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])


def around(headdim: int, block_m: int, packed: bool) -> None:
    """Statistics and zeros before, rows out of fragment order after, each at its padded place."""
    nheads, batch, seqlen = 3, 2, 150
    lengths = LENGTHS if packed else [seqlen] * batch
    lead = (int(OFFSETS[-1]) + 4,) if packed else (batch, seqlen)
    out, dout = (torch.randn(*lead, nheads, headdim).half() for _ in range(2))
    rows = (nheads, lead[0]) if packed else (batch, nheads, seqlen)
    lse, dlse = torch.randn(rows), torch.randn(rows)
    lse.view(-1)[3] = -torch.inf
    blocks = lead[0] // block_m + BATCH if packed else -(-seqlen // block_m)
    padded = (1 if packed else batch) * nheads * blocks * block_m
    stride = (0 if packed else seqlen * nheads * headdim, nheads * headdim, headdim)
    lse_stride = (0, lead[0]) if packed else (nheads * seqlen, seqlen)
    offsets = OFFSETS if packed else None
    sizes = (len(lengths), nheads, seqlen, blocks)
    found_lse, found_delta = torch.full((padded,), torch.nan), torch.full((padded,), torch.nan)
    acc = torch.full((padded * headdim,), torch.nan)
    tensors = (out, dout, lse, dlse, found_lse, found_delta, acc, offsets)
    strides = (stride, stride, lse_stride)
    before_kernel[(padded // 16,)](*tensors, *strides, *sizes, headdim, block_m, headdim, 16, 4, False, False)
    assert (acc == 0).all()
    assert not found_lse.isnan().any()
    assert not found_delta.isnan().any()
    sink, dsink = torch.randn(len(lengths), nheads), torch.full((len(lengths), nheads), torch.nan)
    sink_tensors = (sink, lse, found_delta, dsink, offsets)
    sink_kernel[(dsink.numel(),)](*sink_tensors, lse_stride, *sizes, block_m, 64)
    acc = torch.randn(padded * headdim)
    if packed:  # what lies behind the last sequence is as before_kernel left it
        behind = (int(OFFSETS[-2]) // block_m + BATCH - 1) * block_m + LENGTHS[-1]
        acc.view(nheads, -1, headdim)[:, behind // 64 * 64 + 64 :] = 0
    dq = torch.full_like(out, torch.nan)
    after_kernel[(padded // 64,)](acc, dq, offsets, stride, *sizes, lead[0], headdim, 1.0, block_m, headdim, 4, False)
    assert not dq.isnan().any()
    delta = -(out.float() * dout.float()).sum(-1).transpose(-1, -2) + dlse
    for b, length in enumerate(lengths):
        for h in range(nheads):
            if packed:
                first = (h * blocks + int(OFFSETS[b]) // block_m + b) * block_m
                at = (h, slice(int(OFFSETS[b]), int(OFFSETS[b]) + length))
                written = dq[at[1], h]
            else:
                first = (b * nheads + h) * blocks * block_m
                at = (b, h)  # type: ignore[assignment]
                written = dq[b, :, h]
            expected = (lse[at] / math.log(2)).masked_fill(lse[at] == -torch.inf, torch.inf)
            torch.testing.assert_close(found_lse[first : first + length], expected)
            torch.testing.assert_close(found_delta[first : first + length], delta[at], atol=1e-3, rtol=1e-3)
            past = slice(first + length, first + -(-length // block_m) * block_m)
            assert (found_lse[past] == torch.inf).all()  # so that every p there is 0
            assert (found_delta[past] == 0).all()
            chunks = acc[first * headdim :][: -(-length // 64) * 64 * headdim]
            chunks = chunks.view(-1, headdim // 64, 8, 4, 4, 2, 4, 2, 2)
            # part, i, warp, row / 2, row % 2, quad, high row, pair -> warp, high row, row; part, i, quad, pair
            plain = chunks.permute(0, 3, 7, 4, 5, 1, 2, 6, 8).reshape(-1, headdim)[:length]
            torch.testing.assert_close(written, plain.half())
            p = (sink[b, h] - lse[at]).exp().masked_fill(lse[at] == -torch.inf, 0)
            torch.testing.assert_close(dsink[b, h], (p * delta[at]).sum(), atol=1e-2, rtol=1e-3)


def segments(numbers: torch.Tensor, first_key: int, lower: int, upper: int, rows: int, others: int) -> None:
    """Leaders name pairs of one segment that the band leaves; meetings leave out no such pair, and call none full."""
    batch, seqlen_q, total_k = 2, 150, 200
    ids_q, ids_k = (numbers[:, :count].contiguous() for count in (seqlen_q, total_k))
    seqlen_k = total_k - first_key
    blocks_q, blocks_k = -(-seqlen_q // 32), -(-seqlen_k // 32)
    leaders_q, leaders_k = (torch.full((batch, count), -9, dtype=torch.int32) for count in (seqlen_q, seqlen_k))
    unseen = torch.full((batch, blocks_k), -9, dtype=torch.int32)
    sizes = (seqlen_q, seqlen_k, total_k, lower, upper, blocks_q, blocks_k)
    written = (leaders_q, leaders_k, unseen)
    grid = ((blocks_q + blocks_k) * batch,)
    leaders_kernel[grid](ids_q, ids_k.view(-1)[first_key:], *written, *sizes, 32, 64, 32, 16)
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None]
    same = ids_q[:, :, None] == ids_k[:, None, first_key:]
    keep = same & (distance >= lower) & (distance <= upper)
    found = leaders_q[:, :, None] == leaders_k[:, None, :]
    seen = keep.any(1)
    assert torch.equal(found, same & seen[:, None])
    assert torch.equal(leaders_k < 0, ~seen)
    dirty = torch.nn.functional.pad(~seen, (0, blocks_k * 32 - seqlen_k)).view(batch, blocks_k, 32).any(-1)
    assert torch.equal(unseen, dirty.int())
    for own, other, pairs in ((leaders_q, leaders_k, found), (leaders_k, leaders_q, found.transpose(1, 2))):
        owners, blocks = -(-own.shape[1] // rows), -(-other.shape[1] // others)
        meetings = torch.full((batch, owners, 4), -9, dtype=torch.int32)
        lengths = (own.shape[1], other.shape[1], owners)
        meetings_kernel[(owners * batch,)](own, other, meetings, *lengths, rows, 64, others, 2)
        for b, owner in itertools.product(range(batch), range(owners)):
            first, last, full_first, full_last = meetings[b, owner].tolist()
            tiles = pairs[b, owner * rows : (owner + 1) * rows].split(others, 1)
            for block, tile in enumerate(tiles):
                assert not tile.any() or first <= block < last
                assert tile.all() or not full_first <= block < full_last
            if bool((own[b].diff() >= 0).all()) and bool((other[b].diff() >= 0).all()):
                full = [block for block, tile in enumerate(tiles) if tile.all()]
                assert not full or full == list(range(full_first, min(full_last, blocks)))


if __name__ == "__main__":
    torch.manual_seed(0)
    table()
    no_tiles()
    clear()
    combine()
    documents = torch.arange(200) * 5 // 200 + torch.tensor([[1], [1 << 40]])
    shuffled = torch.randint(-3, 3, (2, 200), dtype=torch.int32)
    falling = torch.arange(200).expand(2, 200).flip(1)
    for numbers, band in itertools.product((documents, shuffled, falling), ((0, -1000, 1000), (40, -20, 30))):
        segments(numbers, *band, *((64, 32) if band[0] else (48, 16)))
    for packed in (False, True):
        around(128, 64, packed)
        around(64, 128, packed)
        around(256, 64, packed)
