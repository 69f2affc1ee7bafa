"""The launches of a backward: lse in two parts, delta, query and key gradients, the gradient of a shared bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewise import masks
from tilewise.backends.triton import facts as host
from tilewise.backends.triton import tiles
from tilewise.backends.triton.arguments import Config, Grads, Tile
from tilewise.backends.triton.backward_parts import delta_kernel
from tilewise.backends.triton.bias_gradient import bias_gradient_kernel
from tilewise.backends.triton.facts import INTERPRETED
from tilewise.backends.triton.key_gradients import key_gradients_kernel
from tilewise.backends.triton.launch import Launch
from tilewise.backends.triton.lse_parts import lse_parts_kernel
from tilewise.backends.triton.plans import (
    NO_EXTRAS,
    ListPlan,
    Strides,
    blocks,
    clear_rows,
    cuts_off_keys,
    programs,
    seen_keys,
    types_of,
)
from tilewise.backends.triton.query_gradients import query_gradients_kernel
from tilewise.device import DeviceFacts, device_facts
from tilewise.dispatch.backend import Gradients
from tilewise.inputs import Inputs
from tilewise.problem import Problem

DELTA_ROWS = 64


KEYS_EACH = 256  # of all heads, for each multiprocessor, from which dq comes last: two rounds of two blocks of 64 keys
FILLING = {64: 4000, tiles.PART: 1000}  # by channels: and the keys of a query


def overlaps(problem: Problem, facts: DeviceFacts) -> bool:
    """Whether a launch may begin beside the one before it: on Hopper, where no launch of another kind comes between."""
    return facts.arch == "sm_90" and tiles.is_bare(problem) and not problem.varlen and not INTERPRETED


def queries_last(problem: Problem, facts: DeviceFacts) -> bool:
    """Whether dq pays for a launch for delta by filling up the end of dk and dv (docs/triton.md)."""
    least = next((keys for dim, keys in FILLING.items() if max(problem.headdim, problem.headdim_v) <= dim), None)
    if least is None or problem.banded or tiles.keys_of_a_query(problem) < least:
        return False
    return problem.seqlen_k * problem.nheads_k * problem.batch >= KEYS_EACH * facts.multiprocessors


class KeyLaunch(NamedTuple):
    """A launch of the key gradients' kernel: which of them, over which block lists."""

    launch: Launch
    grads: Grads
    lists: ListPlan | None


class BackwardPlan:
    """The launches of one backward and how their parts make the gradients asked for."""

    def __init__(self, problem: Problem, inputs: Inputs, tensors: tuple[torch.Tensor, ...], has_dlse: bool) -> None:
        self.problem, self.has_dlse = problem, has_dlse
        self.kind = host.bias_kind(problem)
        needs = problem.needs_grad
        marks = host.marks_of(problem, inputs, tensors)
        self.has_extras = host.has_extras(problem)
        self.mode, self.marks = host.mode_of(problem, marks), marks
        q, k, v, out, dout = tensors
        grads = [host.contiguous_stride(tensor.shape, marks.align) for tensor in (q, k, v)]
        self.strides = Strides(*(host.stride_of(tensor, marks.align) for tensor in (q, k, v, out, dout)), *grads)
        self.device, self.index = q.device, q.device.index
        self.rows = host.statistics_rows(problem, self.mode)
        self.fits_boxes = host.fits_boxes(tensors) and self.rows < 2**31
        self.wants_keys = "k" in needs or "v" in needs or self.kind == "col"
        self.wants_queries = "q" in needs or "alibi_slopes" in needs or self.kind in ("row", "tile")
        facts = device_facts(self.device)
        self.overlaps = overlaps(problem, facts)
        self.queries_last = self.overlaps and self.wants_queries and self.wants_keys and queries_last(problem, facts)
        # with channels in parts no program has a whole row of dout, so that delta needs a launch of its own
        self.fuses_delta = self.wants_queries and not self.queries_last and self._shape("queries").tile.num_dv == 1
        if self.mode.two_parts:
            self._plan_lse_parts(inputs)
        if not self.fuses_delta:
            self._plan_delta(inputs)
        if self.wants_keys:
            self._plan_keys(inputs, q, dout)
        if self.wants_queries:
            self._plan_queries(inputs)
        if self.kind == "shared":
            self._plan_bias(inputs)
        self._plan_tails(inputs, (q, k, v))

    def _tail(self, inputs: Inputs, tile: Tile, lists: ListPlan | None, *more: Any) -> tuple[Any, ...]:
        problem = self.problem
        return (
            self.strides,
            host.extra_strides_of(inputs, self.marks, lists.stride if lists else host.NO_PAIRS),
            host.sizes_of(problem, inputs),
            host.scalars_of(problem),
            *more[:-1],
            self.mode,
            tile,
            *more[-1:],
        )

    def _shape(self, kernel: str) -> tiles.Shape:
        facts, marks = device_facts(self.device), self.marks
        shape = tiles.choose_shape(kernel, self.problem, facts, marks.align, self.mode.unseen, marks.bias)
        return tiles.Shape(
            shape.tile._replace(boxes=shape.tile.boxes and self.fits_boxes),
            # a score less the largest of its row is exactly 0 only if every kernel rounds it alike
            shape.config._replace(fuses=not self.mode.two_parts),
        )

    def _plan_lse_parts(self, inputs: Inputs) -> None:
        problem, dtype, fp32 = self.problem, self.problem.dtype, torch.float32
        tile, config = self._shape("bias")
        strides, extra_strides, sizes, scalars, mode, tile = self._tail(inputs, tile, None)
        rows = blocks(problem.seqlen_q, host.STATISTICS) * host.STATISTICS
        grid = blocks(rows, tile.block_m) * problem.nheads * problem.batch
        pointers = (dtype, dtype, fp32, fp32, fp32, types_of(inputs, lists=False))
        tail = (strides, extra_strides, sizes, scalars, mode, tile)
        self.lse_parts = Launch(lse_parts_kernel, grid, pointers, tail, config, self.device)

    def _plan_delta(self, inputs: Inputs) -> None:
        problem = self.problem
        tile = self._shape("bias").tile._replace(block_m=DELTA_ROWS)
        self.row_blocks = blocks(problem.seqlen_q, DELTA_ROWS)
        fp32 = torch.float32
        lse, dlse, dsink = self._statistics_types()
        statistics = (fp32, self._log_sum_type, fp32)
        pointers = (problem.dtype, problem.dtype, lse, dlse, *statistics, dsink, types_of(inputs, lists=False))
        strides, extra_strides, sizes, _, mode, tile = self._tail(inputs, tile, None)[:6]
        grid = self.row_blocks * problem.nheads * problem.batch
        tail = (strides, extra_strides, sizes, mode, tile)
        self.delta = Launch(delta_kernel, grid, pointers, tail, Config(4, self.marks.align > 1), self.device)

    def _statistics_types(self) -> tuple[Any, Any, Any]:
        """Of lse, dlse and dsink for the kernel that computes the row statistics."""
        fp32 = torch.float32
        return fp32, fp32 if self.has_dlse else None, fp32 if "sink" in self.problem.needs_grad else None

    @property
    def _log_sum_type(self) -> torch.dtype | None:
        return torch.float32 if self.mode.two_parts else None

    def _pointers(self, inputs: Inputs, lists: bool, *outputs: Any) -> tuple[Any, ...]:
        dtype, fp32 = self.problem.dtype, torch.float32
        return (dtype, dtype, dtype, dtype, fp32, self._log_sum_type, fp32, *outputs, types_of(inputs, lists))

    def _plan_keys(self, inputs: Inputs, q: torch.Tensor, dout: torch.Tensor) -> None:
        """One launch for dk and dv; two, each with the registers for itself, where the head dimension asks for it."""
        needs, column_sums = self.problem.needs_grad, self.kind == "col"
        together = "k" in needs and "v" in needs and not tiles.splits_keys(self.problem, device_facts(self.device))
        wanted = [Grads(False, "k" in needs, "v" in needs, "col" if column_sums else "", False)]
        if not together:
            wanted = [
                Grads(False, "k" in needs, False, "col" if column_sums else "", False),
                Grads(False, False, "v" in needs, "", False),
            ]
        wanted = [grads for grads in wanted if grads.k or grads.v or grads.bias]
        if self.overlaps:
            followed = len(wanted) if self.queries_last else len(wanted) - 1
            wanted = [grads._replace(leads=n < followed, early=n > 0) for n, grads in enumerate(wanted)]
        self.keys = [self._plan_key_launch(inputs, q, dout, grads) for grads in wanted]

    def _plan_key_launch(self, inputs: Inputs, q: torch.Tensor, dout: torch.Tensor, grads: Grads) -> KeyLaunch:
        problem, dtype = self.problem, self.problem.dtype
        tile, config = self._shape("keys" if grads.k and grads.v else "keys_k" if grads.k or grads.bias else "keys_v")
        tile = tile._replace(held=tile.held and tile.boxes and self._has_registers_for_k(tile))
        clipped = tile.boxes and self.mode.unseen and not self.mode.lists
        tile = tile._replace(clipped=clipped, joint=tile.joint or (clipped and tile.block_d == tiles.PART))
        boxes: tuple[Any, ...] = (None,) * 6
        if tile.boxes:
            line = host.line_of(self.rows, tile.block_m)
            _, end = masks.query_range(masks.band(problem), 0, problem.seqlen_k, problem.seqlen_q)
            q, dout = (host.until(tensor, end) if tile.clipped else tensor for tensor in (q, dout))
            q_box, dout_box = host.box_of(q, tile.block_m, tile.block_d), host.box_of(dout, tile.block_m, tile.block_dv)
            k_box = host.box_of(inputs.k, tile.block_n, tile.block_d) if tile.held else None
            boxes = (q_box, dout_box, line, line if self.mode.two_parts else None, line, k_box)
        lists = ListPlan(problem, inputs, self.marks, tile, "keys") if self.mode.lists else None
        outputs = (dtype if grads.k else None, dtype if grads.v else None, torch.float32 if grads.bias else None)
        pointers = self._pointers(inputs, self.mode.lists, *outputs, *boxes)
        grid = programs(problem, tile.block_n, queries=False) * max(tile.num_d, tile.num_dv) * problem.nheads_k
        tail = (*self._tail(inputs, tile, lists), grads)
        launch = Launch(key_gradients_kernel, grid, pointers, tail, config, self.device, grads.early)
        return KeyLaunch(launch, grads, lists)

    def _has_registers_for_k(self, tile: Tile) -> bool:
        """Whether a large k may stay in registers: only beside products and at most an upper bound, or much spills."""
        mode = self.mode
        return tile.block_d > tiles.PART and not (self.has_extras or mode.scale_first or mode.lower or mode.unseen)

    def _plan_queries(self, inputs: Inputs) -> None:
        problem, needs = self.problem, self.problem.needs_grad
        tile, config = self._shape("queries")
        tile = tile._replace(clipped=tile.boxes and cuts_off_keys(self.mode))
        boxes: tuple[Any, Any] = (None, None)
        if tile.boxes:
            k, v = seen_keys(problem, inputs.k, inputs.v) if tile.clipped else (inputs.k, inputs.v)
            boxes = (host.box_of(k, tile.block_n, tile.block_d), host.box_of(v, tile.block_n, tile.block_dv))
        self.query_lists = ListPlan(problem, inputs, self.marks, tile, "queries") if self.mode.lists else None
        grads = Grads("q" in needs, False, False, self.kind if self.kind in ("row", "tile") else "",
                      "alibi_slopes" in needs, self.fuses_delta, early=self.queries_last)  # fmt: skip
        bias_type = {"row": torch.float32, "tile": problem.bias_dtype}.get(grads.bias)
        statistics = (problem.dtype, *self._statistics_types()) if self.fuses_delta else (None,) * 4
        pointers = self._pointers(
            inputs,
            self.mode.lists,
            *statistics,
            problem.dtype if grads.q else None,
            bias_type,
            torch.float32 if grads.alibi else None,
            *boxes,
        )
        self.query_blocks = blocks(problem.seqlen_q, tile.block_m)
        grid = programs(problem, tile.block_m, queries=True) * tile.num_d * problem.nheads
        tail = (*self._tail(inputs, tile, self.query_lists), grads)
        self.queries = Launch(query_gradients_kernel, grid, pointers, tail, config, self.device, grads.early)

    def _plan_bias(self, inputs: Inputs) -> None:
        problem = self.problem
        batch, heads, _, _ = host.four(problem.bias_shape or ())
        tile, config = self._shape("bias")
        grid = blocks(problem.seqlen_q, tile.block_m) * blocks(problem.seqlen_k, tile.block_n) * heads * batch
        strides, extra_strides, sizes, scalars, mode, tile = self._tail(inputs, tile, None)
        tail = (strides, extra_strides, sizes, scalars, batch, heads, mode, tile)
        pointers = self._pointers(inputs, False, problem.bias_dtype)
        self.bias = Launch(bias_gradient_kernel, grid, pointers, tail, config, self.device)

    def _plan_tails(self, inputs: Inputs, tensors: tuple[torch.Tensor, ...]) -> None:
        self.tails: dict[str, Launch] = {}
        sides = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.cu_seqlens_k)
        for name, tensor, offsets in zip("qkv", tensors, sides, strict=True):
            if offsets is not None and name in self.problem.needs_grad:
                self.tails[name] = clear_rows(tuple(tensor.shape), tensor.dtype, offsets)

    def run(self, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dlse: Any) -> Gradients:
        """The gradients, by name."""
        problem = self.problem
        grads: Gradients = {}
        for name in ("q", "k", "v"):
            if name in problem.needs_grad:
                like = getattr(inputs, name)
                grads[name] = torch.empty_like(like) if like.is_contiguous() else like.new_empty(like.shape)
        extras = host.extras_of(inputs) if self.has_extras else NO_EXTRAS
        statistics = inputs.q.new_empty((3 if self.mode.two_parts else 2) * self.rows, dtype=torch.float32)
        row_lse, delta, log_sum = self._parted(statistics)
        dsink = None
        if "sink" in problem.needs_grad:
            dsink = self._parts(self.query_blocks if self.fuses_delta else self.row_blocks)
        if self.mode.two_parts:
            self.lse_parts((inputs.q, inputs.k, lse, row_lse, log_sum, extras))
        if not self.fuses_delta:
            self.delta((out, dout, lse, dlse, row_lse, log_sum, delta, dsink, extras))
        shared = (inputs.q, inputs.k, inputs.v, dout, row_lse, log_sum, delta)
        if self.queries_last:
            self._run_keys(inputs, shared, extras, grads)
        if self.wants_queries:
            more = (out, lse, dlse, dsink) if self.fuses_delta else (None,) * 4
            self._run_queries(inputs, (*shared, *more), extras, grads)
        if dsink is not None:
            grads["sink"] = dsink.sum(-1)
        if self.wants_keys and not self.queries_last:
            self._run_keys(inputs, shared, extras, grads)
        if self.kind == "shared":
            grads["bias"] = torch.empty(
                host.four(problem.bias_shape or ()), dtype=problem.bias_dtype, device=self.device
            )
            self.bias((*shared, grads["bias"], extras))
        for name, launch in self.tails.items():
            launch((grads[name], extras.cu_seqlens_q if name == "q" else extras.cu_seqlens_k))
        return grads

    def _parted(self, statistics: torch.Tensor) -> tuple[Any, Any, Any]:
        """lse, delta and the second part of lse in a row: on a device as addresses, which cost less than views."""
        two_parts = self.mode.two_parts
        if INTERPRETED:
            row_lse, delta, *more = statistics.split(self.rows) if self.rows else (statistics,) * (2 + two_parts)
            return row_lse, delta, more[0] if two_parts else None
        address, size = statistics.data_ptr(), self.rows * statistics.element_size()
        return address, address + size, address + 2 * size if two_parts else None

    def _run_keys(self, inputs: Inputs, shared: tuple[Any, ...], extras: Any, grads: Gradients) -> None:
        dbias = self._side_sums(self.problem.seqlen_k) if self.kind == "col" else None
        boxed = (inputs.q, *shared[3:], inputs.k)
        for launch, asked, lists in self.keys:
            listed = extras._replace(lists=lists.run(inputs)) if lists else extras
            outputs = (
                grads["k"] if asked.k else None,
                grads["v"] if asked.v else None,
                dbias if asked.bias else None,
            )
            launch((*shared, *outputs, *boxed, listed))
        if dbias is not None:
            grads["bias"] = self._reduced(dbias[:, :, None, :])

    def _run_queries(self, inputs: Inputs, shared: tuple[Any, ...], extras: Any, grads: Gradients) -> None:
        problem = self.problem
        dbias = None
        if self.kind == "row":
            dbias = self._side_sums(problem.seqlen_q)
        elif self.kind == "tile":
            # tiles that the masks exclude are not visited
            make = torch.zeros if problem.banded or self.mode.lists else torch.empty
            shape = (problem.batch, problem.nheads, problem.seqlen_q, problem.seqlen_k)
            grads["bias"] = dbias = make(shape, dtype=problem.bias_dtype, device=self.device)
        dslopes = self._parts(self.query_blocks) if "alibi_slopes" in problem.needs_grad else None
        listed = extras._replace(lists=self.query_lists.run(inputs)) if self.query_lists else extras
        self.queries((*shared, grads.get("q"), dbias, dslopes, inputs.k, inputs.v, listed))
        if self.kind == "row" and dbias is not None:
            grads["bias"] = self._reduced(dbias[:, :, :, None])
        if dslopes is not None:
            grads["alibi_slopes"] = dslopes.sum(-1)

    def _parts(self, number: int) -> torch.Tensor:
        """One fp32 number for each block of each head; summed afterwards in a fixed order.

        Of packed sequences the blocks past the end are never visited.
        """
        shape = (self.problem.batch, self.problem.nheads, number)
        make = torch.zeros if self.problem.varlen else torch.empty
        return make(shape, dtype=torch.float32, device=self.device)

    def _side_sums(self, length: int) -> torch.Tensor:
        return self._parts(length)

    def _reduced(self, sums: torch.Tensor) -> torch.Tensor:
        """fp32 sums of ds over one side, summed over whatever else the bias was broadcast on."""
        shape = host.four(self.problem.bias_shape or ())
        dims = [d for d, (has, is_one) in enumerate(zip(sums.shape, shape, strict=True)) if is_one == 1 and has != 1]
        total = sums.sum(dims, keepdim=True) if dims else sums
        return total.to(self.problem.bias_dtype or torch.float32)
