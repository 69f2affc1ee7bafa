"""What the tiled room promises beyond the shared suite: tiles it visits, memory, both ways to weights, extremes."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

import tilewise
from tilewise import masks, options
from tilewise.backends.cpu import BACKEND as CPU
from tilewise.backends.cpu.chunk import bounded_units, exponential
from tilewise.backends.cpu.layout import Span
from tilewise.backends.cpu.tiles import Tiling, Visibility
from tilewise.backends.reference import BACKEND as REFERENCE
from tilewise.device import device_facts
from tilewise.inputs import Inputs
from tilewise.problem import GRAD_NAMES, Problem
from tilewise.testing import Spec, assert_exact, attention_oracle, make


def dense(
    seqlen_q: int, seqlen_k: int, nheads: int = 2, nheads_k: int = 1, **changes: object
) -> tuple[Problem, Inputs]:
    """A problem of fp64 random numbers, headdim 4, headdim_v 3."""
    q, k, v = (
        torch.randn(1, length, heads, dim, dtype=torch.float64)
        for length, heads, dim in ((seqlen_q, nheads, 4), (seqlen_k, nheads_k, 4), (seqlen_k, nheads_k, 3))
    )
    problem = Problem(1, seqlen_q, seqlen_k, nheads, nheads_k, 4, 3, torch.float64, softmax_scale=0.5)
    return problem.replace(**changes), Inputs(q, k, v)


BANDS = [
    {},
    {"causal": "bottom_right"},
    {"causal": "top_left"},
    {"causal": "bottom_right", "window_left": 4},
    {"window_left": 3, "window_right": 2},
    {"window_right": 0},
    {"causal": "top_left", "window_left": 0, "window_right": 0},
]


@pytest.mark.parametrize("rules", BANDS, ids=str)
@pytest.mark.parametrize("lengths", [(7, 7), (5, 12), (13, 4), (1, 9)], ids=str)
def test_tiles_cover_every_visible_pair_once_and_no_tile_is_visited_in_vain(
    rules: dict[str, object], lengths: tuple[int, int]
) -> None:
    problem, inputs = dense(*lengths, **rules)
    tiling = Tiling(2, 3, 1)
    visibility, span = Visibility(problem, inputs, tiling), Span(slice(0, 1), slice(0, 1))
    covered = torch.zeros(lengths, dtype=torch.int64)
    for queries in tiling.query_blocks(problem):
        for tile in visibility.tiles(span, queries):
            kept = torch.ones(1) if tile.keep is None else tile.keep[0, 0, 0].long()
            assert kept.any()
            covered[tile.queries, tile.keys] += kept.long()
    assert torch.equal(
        covered, masks.band_tile(masks.band(problem), 0, lengths[0], 0, lengths[1], covered.device).long()
    )


def visited(problem: Problem, inputs: Inputs) -> int:
    tiling = Tiling(64, 64, 1)
    visibility, span = Visibility(problem, inputs, tiling), Span(slice(0, 1), slice(0, 1))
    return sum(len(list(visibility.tiles(span, queries))) for queries in tiling.query_blocks(problem))


def test_excluded_tiles_are_skipped_and_kept_tiles_carry_no_mask() -> None:
    problem, inputs = dense(1024, 1024)
    assert visited(problem, inputs) == 256
    assert visited(problem.replace(causal="bottom_right"), inputs) == 136
    assert visited(problem.replace(causal="bottom_right", window_left=63), inputs) == 31
    documents = (torch.arange(1024) // 128)[None]
    packed = inputs.replace(segments_q=documents, segments_k=documents)
    assert visited(problem.replace(segments=True), packed) == 8 * 4
    padding = (torch.arange(1024) < 128)[None, None, None]
    padded = inputs.replace(mask=padding)
    assert visited(problem.replace(mask_shape=tuple(padding.shape)), padded) == 16 * 2
    tiles = list(Visibility(problem, padded, Tiling(64, 64, 1)).tiles(Span(slice(0, 1), slice(0, 1)), slice(0, 64)))
    assert all(tile.keep is None for tile in tiles)


def random_problem(rng: random.Random) -> tuple[Problem, Inputs]:
    """Any features together, fp64, a few queries and keys."""
    batch, nheads_k, group = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([1, 2, 3])
    lengths = rng.choice([1, 5, 17]), rng.choice([1, 7, 20])
    nheads = nheads_k * group

    def some(*shape: int) -> torch.Tensor | None:
        return torch.randn(*shape, dtype=torch.float64) if rng.random() < 0.4 else None

    def shape() -> list[int]:
        return [rng.choice([1, size]) for size in (batch, nheads, *lengths)]

    segments = rng.random() < 0.3
    inputs = Inputs(
        torch.randn(batch, lengths[0], nheads, 4, dtype=torch.float64),
        torch.randn(batch, lengths[1], nheads_k, 4, dtype=torch.float64),
        torch.randn(batch, lengths[1], nheads_k, 3, dtype=torch.float64),
        bias=some(*shape()),
        mask=torch.rand(*shape()) > rng.choice([0.2, 0.8]) if rng.random() < 0.4 else None,
        alibi_slopes=some(batch, nheads),
        sink=some(batch, nheads),
        segments_q=torch.randint(0, 3, (batch, lengths[0])).sort(-1).values if segments else None,
        segments_k=torch.randint(0, 3, (batch, lengths[1])).sort(-1).values if segments else None,
        dropout_seed=torch.tensor(rng.randrange(2**40)),
    )
    given = tuple(name for name in GRAD_NAMES if getattr(inputs, name) is not None)
    problem = Problem(
        batch, *lengths, nheads, nheads_k, 4, 3, torch.float64,
        causal=rng.choice([None, None, "bottom_right", "top_left"]),
        window_left=rng.choice([None, None, 3]),
        window_right=rng.choice([None, None, 0, 4]),
        segments=segments,
        mask_shape=None if inputs.mask is None else tuple(inputs.mask.shape),
        bias_shape=None if inputs.bias is None else tuple(inputs.bias.shape),
        alibi=inputs.alibi_slopes is not None,
        sink=inputs.sink is not None,
        softmax_scale=rng.choice([0.5, 0.0, -0.7, 40.0]),
        softcap=rng.choice([0.0, 0.0, 2.0]),
        dropout_p=rng.choice([0.0, 0.0, 0.3, 1.0]),
        needs_grad=given,
    )  # fmt: skip
    return problem, inputs


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    finite = expected[expected.isfinite()]
    size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10 * size, equal_nan=True)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(40))
def test_any_features_together_agree_with_the_formulas_in_all_four_functions(seed: int) -> None:
    torch.manual_seed(seed)
    problem, inputs = random_problem(random.Random(seed))
    state = REFERENCE.forward(problem, inputs)
    for actual, expected in zip(CPU.forward(problem, inputs), state, strict=True):
        same(actual, expected)
    dout, dlse = torch.randn_like(state[0]), torch.randn_like(state[1])
    tangents = {name: torch.randn_like(getattr(inputs, name)) for name in problem.needs_grad if seed % 3 or name != "k"}
    for actual, expected in zip(
        CPU.jvp(problem, inputs, *state, tangents), REFERENCE.jvp(problem, inputs, *state, tangents), strict=True
    ):
        same(actual, expected)
    for arguments, name in (((dout, dlse), "backward"), ((tangents, dout, dlse), "second")):
        actual = getattr(CPU, name)(problem, inputs, *state, *arguments)
        expected = getattr(REFERENCE, name)(problem, inputs, *state, *arguments)
        assert tuple(actual) == problem.needs_grad
        for key, grad in actual.items():
            assert grad.shape == getattr(inputs, key).shape
            same(grad, expected[key])


@pytest.mark.parametrize("spread", [0.5, 40.0], ids=["bounded", "running maximum"])
@pytest.mark.parametrize("features", [(), ("causal",), ("window",), ("mask",), ("sink",)], ids=str)
def test_both_ways_to_weights_are_exact(spread: float, features: tuple[str, ...]) -> None:
    spec = Spec(seqlen_q=300, seqlen_k=700, features=features, spread=spread, requires_grad="all")
    assert_exact(make(spec, seed=1), "cpu")


def test_the_bounded_way_is_taken_by_ordinary_numbers_only() -> None:
    problem, inputs = dense(40, 40)
    assert bool(bounded_units(problem, inputs).all())
    for changed in (
        inputs.replace(q=inputs.q * 100),
        inputs.replace(k=inputs.k.index_fill(1, torch.tensor([3]), torch.nan)),
        inputs.replace(v=inputs.v * 1e-30),
        inputs.replace(v=inputs.v * 1e30),
    ):
        assert not bool(bounded_units(problem, changed).any())
    assert not bool(bounded_units(problem, inputs.replace(sink=torch.full((1, 2), -100.0))).any())
    assert not bool(bounded_units(problem.replace(alibi=True), inputs).any())
    capped = problem.replace(softcap=5.0)
    assert bool(bounded_units(capped, inputs.replace(q=inputs.q * 1e6)).all())


def test_exponential_is_exp_from_one_end_to_the_other() -> None:
    x = torch.cat([torch.linspace(-110.0, 88.0, 5000), torch.tensor([-torch.inf, 0.0])])
    torch.testing.assert_close(exponential(x.clone()), x.exp(), rtol=2e-5, atol=1e-44)


@pytest.mark.parametrize("height", [-8192.0, 8192.0])
def test_gradients_keep_their_digits_where_lse_has_lost_them(height: float) -> None:
    # with a common score of 2**13, lse is known to 2**-11 only, and P from it would be off by as much
    q, k, v = (torch.randn(1, 70, 1, 8, requires_grad=True) for _ in range(3))
    bias = torch.full((70, 70), height)
    dout = torch.randn(1, 70, 1, 8)
    grads = torch.autograd.grad(tilewise.attention(q, k, v, bias=bias, backend="cpu"), (q, k, v), dout)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(attention_oracle(*exact)[0], exact, dout.double())
    for grad, right in zip(grads, expected, strict=True):
        assert float((grad - right).norm() / right.norm()) < 3e-3  # the bias itself rounds the scores to 2**-11


def test_finite_minimum_bias_is_a_bias_in_the_gradients_too() -> None:
    q, k, v = (torch.randn(1, 3, 1, 4, requires_grad=True) for _ in range(3))
    bias = torch.zeros(3, 3)
    bias[0] = torch.finfo(torch.float32).min
    out = tilewise.attention(q, k, v, bias=bias, backend="cpu")
    torch.testing.assert_close(out[0, 0, 0], v[0, :, 0].mean(0))
    (dv,) = torch.autograd.grad(out[0, 0].sum(), v)
    torch.testing.assert_close(dv, torch.full_like(dv, 1 / 3))


def far_below(terms: tuple[str, ...]) -> dict[str, object]:
    """Options whose scores lie so far from 0 that the order of their additions decides which of them count."""
    given = {
        "bias": torch.full((3, 3), torch.finfo(torch.float32).min),
        "alibi_slopes": torch.ones(1),
        "softcap": 2.0,
        "sink": torch.full((1,), torch.finfo(torch.float32).min),
    }
    return {name: given[name] for name in terms}


@pytest.mark.parametrize("depth", [-1e8, -1e20, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(
    "terms",
    [("bias", "alibi_slopes"), ("bias", "softcap"), ("bias", "sink"), ("bias", "alibi_slopes", "softcap", "sink")],
    ids="+".join,
)
def test_derivatives_add_the_scores_in_the_order_of_the_forward(terms: tuple[str, ...], depth: float) -> None:
    tensors = tuple(torch.randn(1, 3, 1, 4, requires_grad=True) for _ in range(3))
    tangents = tuple(torch.randn(1, 3, 1, 4) for _ in range(3))
    terms_given = {**far_below(terms), "bias": torch.full((3, 3), depth)}
    results = []
    for backend in ("cpu", "reference"):

        def call(*given: torch.Tensor, backend: str = backend) -> torch.Tensor:
            return tilewise.attention(*given, **terms_given, backend=backend)

        grads = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), tensors)
        results.append((call(*tensors), torch.func.jvp(call, tensors, tangents), grads, second))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.rooms("cpu", "reference")
@pytest.mark.parametrize("size", [1e-4, 1.0, 10.0])
@pytest.mark.parametrize("softcap", [options.SOFTCAP_LEAST, options.SOFTCAP_MOST])
def test_caps_at_the_ends_of_their_range_are_right(softcap: float, size: float, backend: str) -> None:
    given = [torch.randn(1, 9, 2, 8) * scale for scale in (size, 1.0, 1.0)]
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = tuple(t.to(dtype).requires_grad_() for t in given)

        def call(*t: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            if dtype == torch.float64:
                return attention_oracle(*t, softcap=softcap)[0]
            return tilewise.attention(*t, softcap=softcap, backend=backend)

        out = call(*tensors)
        grads = torch.autograd.grad(out.square().sum(), tensors)
        _, along = torch.func.jvp(call, tensors, tensors)
        results.append([t.double() for t in (out, *grads, along)])
    for actual, expected in zip(*results, strict=True):
        error = (actual - expected).norm()

        assert float(error) <= 1e-5 * float(expected.norm())


def test_nan_queries_give_nan_rows_and_leave_the_others_alone() -> None:
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    q[0, 7] = torch.nan
    out = tilewise.attention(q, k, v, causal=True, backend="cpu")
    assert out[0, 7].isnan().all()
    assert int(out.isnan().sum()) == out[0, 7].numel()


def test_nan_in_rows_that_see_nothing_stays_out_of_every_gradient() -> None:
    q, k, v = (torch.randn(1, 6, 1, 4) for _ in range(3))
    q[0, 2] = torch.nan
    for tensor in (q, k, v):
        tensor.requires_grad_()
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    out, lse = tilewise.attention_with_lse(q, k, v, mask=mask, backend="cpu")
    assert not out[0, 2].any()
    assert bool(lse[0, 0, 2] == -torch.inf)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert float(grads[0][0, 2].abs().max()) == 0.0


MEASURE = """
import torch
from tilewise.backends.cpu import BACKEND
from tilewise.bench.peak import PeakMemory
from tilewise.inputs import Inputs
from tilewise.problem import Problem

def run(n):
    q, k, v, dout = (torch.randn(1, n, 4, 64) for _ in range(4))
    problem = Problem(1, n, n, 4, 4, 64, 64, causal="bottom_right", softmax_scale=0.125, needs_grad=("q", "k", "v"))
    with PeakMemory() as peak:
        out, lse = BACKEND.forward(problem, Inputs(q, k, v))
        grads = BACKEND.backward(problem, Inputs(q, k, v), out, lse, dout, None)
    return peak.extra - sum(t.numel() * t.element_size() for t in (out, lse, *grads.values()))

torch.set_num_threads(1)
run(64)
print(run(4096) / 2**20)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_extra_memory_is_linear_measured_in_a_fresh_process() -> None:
    # the scores alone would be 256 MiB
    result = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 64


def test_threads_are_left_as_they_are_and_results_repeat_bitwise() -> None:
    threads = torch.get_num_threads()
    problem, inputs = dense(600, 600, 4, 2, causal="bottom_right", needs_grad=("q", "k", "v"))
    first, again = CPU.forward(problem, inputs), CPU.forward(problem, inputs)
    assert all(map(torch.equal, first, again))
    one, two = (CPU.backward(problem, inputs, *first, first[0], None) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.get_num_threads() == threads


def test_cost_follows_the_kept_pairs() -> None:
    facts = device_facts(torch.device("cpu"))
    full = Problem(1, 8192, 8192, 8, 8, 64, 64)
    causal, window = full.replace(causal="bottom_right"), full.replace(causal="bottom_right", window_left=511)
    assert CPU.cost(window, facts) < CPU.cost(causal, facts) / 4 < CPU.cost(full, facts) / 6
    assert CPU.cost(full.replace(derivative="backward"), facts) > CPU.cost(full, facts)
    assert CPU.supports(full, facts) == ()
