"""What the Hopper backend hands to its kernels: maps, addresses, sizes; on CPU tensors, with launches recorded."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton")
from tilewise.backends.hopper import backward_plan, launch, plans, plans_fp8, plans_segments, tiles
from tilewise.backends.hopper.backend import Hopper
from tilewise.backends.hopper.maps import Map
from tilewise.descale import FP8
from tilewise.inputs import Arguments, Inputs, describe
from tilewise.problem import Problem


def shape(value: Any) -> Any:
    """What the launcher's argument format depends on: nesting, and where there is nothing."""
    return tuple(map(shape, value)) if isinstance(value, tuple) else value is None


class Recorded:
    """Stands for a compiled kernel."""

    calls: ClassVar[list[tuple[str, int, tuple[Any, ...]]]] = []

    def __init__(
        self, kernel: Any, grid: int, arguments: tuple[Any, ...], num_warps: int = 4, early: bool = False
    ) -> None:
        self.name, self.grid, self.arguments, self.early = kernel.__name__, grid, arguments, early
        self.named = dict(zip((parameter.name for parameter in kernel.params), arguments, strict=True))
        pairs = zip(arguments, kernel.params, strict=True)
        self.expected = [shape(value) for value, parameter in pairs if not parameter.is_constexpr]
        launch.source(kernel, arguments)  # every argument has a type that Triton knows

    def __call__(self, stream: int, *arguments: Any) -> None:
        assert [shape(value) for value in arguments] == self.expected
        maps = [value for value in self.arguments if isinstance(value, Map)]
        there = [kind.at(address) for kind, address in zip(maps, arguments, strict=False)]
        Recorded.calls.append((self.name, self.grid, (*there, *arguments[len(maps) :])))


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, tuple[Any, ...]]]:
    for module in (plans, plans_fp8, plans_segments, backward_plan):
        monkeypatch.setattr(module, "Launch", Recorded)
    for module in (plans, plans_fp8, backward_plan):
        monkeypatch.setattr(module, "multiprocessors", lambda index: 132)
        monkeypatch.setattr(module, "current_stream", lambda index: 0)
        monkeypatch.setattr(module, "ticket", lambda stream, index: 7)
    Recorded.calls.clear()
    return Recorded.calls


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[Problem, Inputs]:
    plain = dict.fromkeys(Arguments._fields) | {"causal": "none", "softcap": 0.0, "dropout_p": 0.0}
    plain |= {"deterministic": False, "needs_grad": ("q", "k", "v"), "backend": "hopper"}
    return describe(Arguments(**(plain | {"q": q, "k": k, "v": v} | options)))


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_forward_addresses_and_grid(calls: list[Any]) -> None:
    q, k, v = half(2, 300, 4, 128), half(2, 500, 2, 128), half(2, 500, 2, 128)
    out, lse = Hopper().forward(*call(q, k, v))
    ((name, grid, arguments),) = calls
    assert (name, grid) == ("forward_kernel", 24)  # 3 blocks of 128 rows, 8 heads
    assert [m.data_ptr() for m in arguments[:4]] == [t.data_ptr() for t in (q, k, v, out)]
    assert arguments[0].shape == (2, 4, 300, 128)
    assert arguments[0].strides == (300 * 512, 128, 512, 1)
    assert arguments[4][:5] == (7, lse.data_ptr(), None, None, None)
    assert out.shape == (2, 300, 4, 128)
    assert lse.shape == (2, 4, 300)


def test_unseen_keys_are_cut_off(calls: list[Any]) -> None:
    q, k = half(1, 64, 2, 64), half(1, 400, 2, 64)
    problem, inputs = call(q, k, k, causal="bottom_right", window_left=20)
    backend = Hopper()
    out, lse = backend.forward(problem, inputs)
    sizes = calls[0][2][5]
    assert calls[0][2][1].data_ptr() == k.data_ptr() + 316 * k.stride(1) * 2
    assert (sizes.seqlen_k, sizes.lower, sizes.upper, sizes.shift) == (84, 0, 20, 20)
    grads = backend.backward(problem.replace(derivative="backward"), inputs, out, lse, out, lse)
    assert [name for name, _, _ in calls[1:]] == ["before_kernel", "backward_kernel", "after_kernel"]
    assert not grads["k"].any()  # allocated as zeros, since no tile writes all of it


def test_few_tiles_with_many_keys_are_split(calls: list[Any]) -> None:
    q, k = half(1, 128, 2, 128), half(1, 5000, 2, 128)
    out, lse = Hopper().forward(*call(q, k, k))
    (forward, grid, arguments), (merge, merged, states) = calls
    assert (forward, merge) == ("forward_kernel", "combine_kernel")
    sizes = arguments[5]
    assert grid == sizes.tiles == 2 * sizes.splits <= 132
    assert (sizes.splits - 1) * sizes.split_keys < 5000 <= sizes.splits * sizes.split_keys
    assert sizes.split_keys % 128 == 0
    lses, outs = arguments[4][1:3]
    assert lses - outs == sizes.splits * 2 * 128 * 128 * 4
    assert states[:6] == (outs, lses, out.data_ptr(), lse.data_ptr(), sizes.splits, 256)
    assert merged == 64


def test_v_is_transposed_before_a_forward_of_many_queries(calls: list[Any]) -> None:
    """Keys that no query sees are left out, and a block of keys is whole."""
    q, k, v = (torch.randn(2, *sizes, 256).to(FP8) for sizes in ((4000, 4), (5000, 2), (5000, 2)))
    Hopper().forward(*call(q, k, v, causal="top_left", needs_grad=()))
    (turn, turn_grid, (raw, turned, heads, blocks)), (name, grid, arguments) = calls
    assert (turn, turn_grid, heads, blocks) == ("turn_kernel", 2 * 2 * 32 * 4, 2, 32)
    assert (raw.data_ptr(), raw.shape) == (v.data_ptr(), (2, 2, 4000, 256))
    assert turned.shape == (2, 2, 256, 32 * 128)
    assert turned.strides == (2 * 256 * 4096, 256 * 4096, 4096, 1)
    assert (name, grid) == ("forward_fp8_turned_kernel", 132)
    assert [m.data_ptr() for m in arguments[:3]] == [q.data_ptr(), k.data_ptr(), turned.data_ptr()]
    assert arguments[2].box.shape == (1, 1, 256, 128)


def test_one_plan_for_repeated_calls_and_a_copy_for_odd_strides(calls: list[Any]) -> None:
    backend = Hopper()
    q = half(1, 64, 2, 64)
    for _ in range(2):
        backend.forward(*call(q, q, q))
    assert len(backend._plans) == 1
    expanded = half(1, 1, 2, 64).expand(1, 64, 2, 64)
    backend.forward(*call(q, expanded, q))
    assert calls[-1][2][1].data_ptr() != expanded.data_ptr()
    shifted = half(64 * 2 * 64 + 1)[1:].view(1, 64, 2, 64)
    problem, inputs = call(q, shifted, q)
    out, lse = backend.forward(problem, inputs)
    assert calls[-1][2][1].data_ptr() % 16 == 0
    dout = torch.ones((), dtype=torch.bfloat16).expand(1, 64, 2, 64)
    grads = backend.backward(problem.replace(derivative="backward"), inputs, out, lse, dout, None)
    assert grads["q"].shape == q.shape


def test_packed_form(calls: list[Any]) -> None:
    q, k = half(300, 4, 256), half(310, 2, 256)
    offsets = torch.tensor([0, 100, 290], dtype=torch.int64)
    problem, inputs = call(q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets, alibi_slopes=torch.ones(4))
    backend = Hopper()
    out, lse = backend.forward(problem, inputs)
    assert [name for name, _, _ in calls] == ["schedule_kernel", "forward_kernel"]
    assert calls[-1][2][0].shape == (0x7FFF0000, 0x7FFF0000, 4, 1 << 30, 256)
    assert lse.shape == (4, 300)
    backend.backward(problem.replace(derivative="backward"), inputs, out, lse, out, None)
    names = [name for name, _, _ in calls[2:]]
    assert names == ["schedule_kernel", "before_kernel", "backward_wide_kernel", "after_kernel"]
    sizes = calls[-2][2][10]
    assert sizes.row_blocks == 300 // 64 + 2


def test_packed_key_gradients_are_cleared_only_where_no_tile_writes(calls: list[Any]) -> None:
    q = half(300, 4, 64)
    offsets, others = torch.tensor([0, 100, 290], dtype=torch.int32), torch.tensor([0, 90, 290], dtype=torch.int32)
    backend = Hopper()

    for causal in ("none", "bottom_right", "top_left"):
        for other in (offsets, others):
            problem, inputs = call(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=other, causal=causal)
            out, lse = backend.forward(problem, inputs)
            calls.clear()
            grads = backend.backward(problem.replace(derivative="backward"), inputs, out, lse, out, None)
            names = [name for name, _, _ in calls]
            assert names == ["schedule_kernel", "before_kernel", "backward_kernel", "after_kernel"]
            (_, programs, arguments), *_ = calls
            assert arguments[2:5] == (grads["k"].data_ptr(), grads["v"].data_ptr(), None)
            if other is offsets:
                assert programs == 2 + 10  # a sequence each, and 32 of 300 tokens
            else:
                assert programs == 2
                assert not grads["k"].any()
                assert not grads["v"].any()


@pytest.mark.parametrize("packed", [False, True])
def test_what_begins_early_has_one_before_it_that_lets_it_and_waits_for_that_one(packed: bool) -> None:
    """Dense statistics come after whatever there is, be it the zeros of dk and dv, and wait for its end."""
    q = half(300, 4, 64) if packed else half(1, 300, 4, 64)
    offsets = torch.tensor([0, 100, 290], dtype=torch.int32)
    problem, inputs = call(q, q, q, **({"cu_seqlens_q": offsets, "cu_seqlens_k": offsets} if packed else {}))
    plan: Any = backward_plan.BackwardPlan(problem, inputs, q, q, False)
    assert (plan.before.early, plan.before.named["STARTED_EARLY"], plan.before.named["EARLY"]) == (packed, packed, True)
    assert plan.main.early
    assert plan.after.early
    assert plan.after.named["EARLY"]
    if packed:
        for scheduling in (plan.schedule.listing, plan.schedule.clearing):
            assert (scheduling.early, scheduling.named["EARLY"]) == (False, True)
        forward: Any = plans.ForwardPlan(problem, inputs)
        assert not forward.schedule.clearing.named["EARLY"]
        assert not forward.launch.early


def test_segments_are_looked_at_before_each_pass(calls: list[tuple[str, int, tuple[Any, ...]]]) -> None:
    """And only the keys that the band leaves: their leaders begin where those keys do."""
    q, k, dout = half(2, 300, 4, 64), half(2, 700, 2, 64), half(2, 300, 4, 64)
    numbers = torch.zeros(2, 300, dtype=torch.int64), torch.zeros(2, 700, dtype=torch.int32)
    problem, inputs = call(
        q, k, k, segments_q=numbers[0], segments_k=numbers[1], window_left=50, window_right=0, causal="none"
    )
    seen = tiles.seen_keys(problem)
    assert seen.begin > 0
    out, lse = plans.ForwardPlan(problem, inputs).run(inputs)
    backward_plan.BackwardPlan(problem, inputs, out, dout, False).run(inputs, out, lse, dout, None)
    names = [name for name, _, _ in calls]
    looks = ["leaders_kernel", "meetings_kernel"]
    assert names == [*looks, "forward_kernel", *looks, "before_kernel", "backward_kernel", "after_kernel"]
    for _, _, arguments in (calls[0], calls[3]):
        assert arguments[:2] == (numbers[0].data_ptr(), numbers[1].data_ptr() + 4 * seen.begin)
        assert arguments[5:8] == (300, seen.end - seen.begin, 700)


def test_sink_gradient_has_a_kernel(calls: list[Any]) -> None:
    q = half(1, 70, 2, 64)
    sink = torch.randn(2)
    problem, inputs = call(q, q, q, sink=sink, needs_grad=("q", "sink"))
    backend = Hopper()
    out, lse = backend.forward(problem, inputs)
    grads = backend.backward(problem.replace(derivative="backward"), inputs, out, lse, out, None)
    name, grid, arguments = calls[-1]
    assert (name, grid) == ("sink_kernel", 2)
    assert arguments[3] == grads["sink"].data_ptr()
    assert grads["sink"].shape == (1, 2)


def test_slopes_gradient_has_a_launch_where_registers_are_short(calls: list[Any]) -> None:
    """Where the main one has it, none; both get the same addresses, among them that of the gradient."""
    backend = Hopper()
    for headdim, softcap, apart in ((128, 30.0, False), (256, 0.0, False), (256, 30.0, True), (136, 30.0, True)):
        q = half(1, 70, 2, headdim)
        options = {"alibi_slopes": torch.ones(2), "softcap": softcap, "needs_grad": ("q", "alibi_slopes")}
        problem, inputs = call(q, q, q, **options)
        out, lse = backend.forward(problem, inputs)
        calls.clear()
        grads = backend.backward(problem.replace(derivative="backward"), inputs, out, lse, out, None)
        names = [name for name, _, _ in calls]
        main = "backward_kernel" if headdim == 128 else "backward_wide_kernel"
        assert names == ["before_kernel", *["slopes_kernel"] * apart, main, "after_kernel"]
        assert {arguments[9][-1] for _, _, arguments in calls[1:-1]} == {grads["alibi_slopes"].data_ptr()}


def test_nothing_to_compute() -> None:
    backend = Hopper()
    q = half(1, 5, 2, 64)
    problem, inputs = call(q, half(1, 0, 2, 64), half(1, 0, 2, 64))
    out, lse = backend.forward(problem, inputs)
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    assert not backend.backward(problem, inputs, out, lse, out, None)["q"].any()
    packed = half(4, 2, 64)
    offsets = torch.zeros(1, dtype=torch.int32)
    problem, inputs = call(packed, packed, packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert backend.forward(problem, inputs)[1].shape == (2, 4)


def test_strides_past_31_bits_are_passed_in_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of (140000, 128, 128) is 2**31 elements and more; the launcher refused its stride as 32 bits."""
    found: dict[str, list[Any]] = {}

    class Typed(Recorded):
        def __init__(self, kernel: Any, grid: int, arguments: tuple[Any, ...], *others: Any, **options: Any) -> None:
            super().__init__(kernel, grid, arguments, *others, **options)
            types = launch.source(kernel, arguments).signature
            found[self.name] = [types[name] for name in ("out_stride", "dout_stride", "dq_stride") if name in types]

    for module in (plans, plans_fp8, backward_plan):
        monkeypatch.setattr(module, "Launch", Typed)
    q, k, v, dout = (torch.empty(2, 140000, 128, 128, dtype=torch.bfloat16, device="meta") for _ in range(4))
    problem, inputs = call(q, k, v, window_left=100)
    backward_plan.BackwardPlan(problem, inputs, dout, dout, dlse=False)
    assert found["before_kernel"] == [("i64", "i32", "i32")] * 2
    assert found["after_kernel"] == [("i64", "i32", "i32")]
