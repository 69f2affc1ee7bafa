"""What a pass over segments needs beside its kernel: two launches before it, and what they leave for it."""

from __future__ import annotations

import torch

from tilewise.backends.hopper.launch import Launch
from tilewise.backends.hopper.segments import leaders_kernel, meetings_kernel
from tilewise.backends.hopper.tiles import seen_keys
from tilewise.inputs import Inputs
from tilewise.problem import Problem

CHUNK, SHORT, PART = 2048, 256, 32  # queries that are looked at together, from afar and nearby, and compared
BLOCKS = 32  # blocks of the other side that are looked at together
NO_SEGMENTS: tuple[torch.Tensor | None, ...] = (None,) * 4


def _meta(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="meta")


class Segments:
    """Leaders of all rows, and for each query tile, or each key tile ``by_keys``, the blocks that it meets."""

    def __init__(self, problem: Problem, inputs: Inputs, block_m: int, block_n: int, by_keys: bool) -> None:
        if inputs.segments_q is None or inputs.segments_k is None:
            raise RuntimeError("segments need both sides")
        seen = seen_keys(problem)
        self.batch, self.seqlen_q, self.seqlen_k = problem.batch, problem.seqlen_q, seen.end - seen.begin
        self.first_key, self.by_keys = seen.begin, by_keys
        blocks_q, self.blocks_k = -(-self.seqlen_q // block_n), -(-self.seqlen_k // block_n)
        sizes = (self.seqlen_q, self.seqlen_k, problem.seqlen_k, seen.lower, seen.upper, blocks_q, self.blocks_k)
        int32 = _meta(torch.int32)
        ids = (_meta(inputs.segments_q.dtype), _meta(inputs.segments_k.dtype))
        grid = (blocks_q + self.blocks_k) * self.batch
        self.leaders_sizes = sizes
        self.leaders = Launch(leaders_kernel, grid, (*ids, int32, int32, int32, *sizes, block_n, CHUNK, SHORT, PART))
        lengths = (self.seqlen_k, self.seqlen_q) if by_keys else (self.seqlen_q, self.seqlen_k)
        own, other = (block_n, block_m) if by_keys else (block_m, block_n)
        self.owners = -(-lengths[0] // own)
        self.meetings_sizes = (*lengths, self.owners)
        power = 1 << (own - 1).bit_length()
        self.meetings = Launch(
            meetings_kernel,
            self.owners * self.batch,
            (int32, int32, int32, *self.meetings_sizes, own, power, other, BLOCKS),
        )

    def make(self, stream: int, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """leaders of the queries and of the keys, meetings, and which key blocks have keys that no query sees."""
        if inputs.segments_q is None or inputs.segments_k is None:
            raise RuntimeError("segments need both sides")
        ids_q, ids_k = inputs.segments_q.contiguous(), inputs.segments_k.contiguous()
        batch = self.batch
        counts = (batch * self.seqlen_q, batch * self.seqlen_k, 4 * batch * self.owners, batch * self.blocks_k)
        whole = torch.empty(sum(counts), dtype=torch.int32, device=ids_q.device)
        leaders_q, leaders_k, meetings, unseen = whole.split(counts)
        skip = self.first_key * ids_k.element_size()
        places = [tensor.data_ptr() for tensor in (leaders_q, leaders_k, unseen)]
        self.leaders(stream, ids_q.data_ptr(), ids_k.data_ptr() + skip, *places, *self.leaders_sizes)
        owners = (leaders_k, leaders_q) if self.by_keys else (leaders_q, leaders_k)
        places = [tensor.data_ptr() for tensor in (*owners, meetings)]
        self.meetings(stream, *places, *self.meetings_sizes)
        return leaders_q, leaders_k, meetings, unseen
