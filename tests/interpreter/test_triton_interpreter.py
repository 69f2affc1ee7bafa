"""Every feature of the Triton backend, forward and backward, under Triton's interpreter against the fp64 oracle."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tests.triton_checks import (
    COMBINED,
    PACKED,
    SINGLE,
    check,
    check_neighbours,
    check_paired,
    check_rising,
    gradients,
    ids,
    run,
)
from tilewise.backends.triton import facts, plans, tiles
from tilewise.dispatch import registry
from tilewise.testing import Spec, make
from tilewise.testing.judge import assert_exact


@pytest.mark.parametrize("features", SINGLE + COMBINED, ids=ids)
def test_feature_and_its_gradients(features):
    check(Spec(seqlen_q=37, seqlen_k=45, nheads=2, nheads_k=1, headdim=16, headdim_v=8, features=features,
               requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("features", PACKED, ids=ids)
def test_packed_sequences_and_spare_tokens(features):
    check(Spec(nheads=2, nheads_k=1, lengths_q=(20, 0, 35, 7), lengths_k=(24, 5, 0, 40), spare=3, features=features,
               requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("features", PACKED[:3], ids=ids)
def test_packed_sequences_of_one_set_of_offsets(features):
    lengths = (20, 15, 0, 35, 16, 7)
    shape = {"nheads": 2, "nheads_k": 1, "headdim": 16, "headdim_v": 16, "lengths_q": lengths, "features": features}
    check_paired(Spec(spare=3, requires_grad="all", **shape))
    check_neighbours(Spec(requires_grad=("q", "k", "v"), **shape))


def test_many_packed_sequences():
    """More than one step of the search for a program's sequence."""
    lengths = tuple(1 + 7 * i % 13 for i in range(150))
    check(Spec(nheads=1, nheads_k=1, headdim=16, headdim_v=16, lengths_q=lengths, lengths_k=lengths[::-1]))


@pytest.mark.parametrize("layout", ["heads_first", "last_dim", "sliced", "expanded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layouts_are_taken_as_they_are(layout, dtype):
    check(
        Spec(batch=1, seqlen_q=20, seqlen_k=33, dtype=dtype, layout=layout, features=("causal",), requires_grad="all")
    )


@pytest.mark.parametrize(("headdim", "headdim_v"), [(1, 1), (24, 40), (72, 16), (5, 300), (272, 3)])
def test_odd_and_large_head_dimensions(headdim, headdim_v):
    check(Spec(batch=1, seqlen_q=9, seqlen_k=20, nheads=2, nheads_k=2, headdim=headdim, headdim_v=headdim_v,
               features=("causal",), requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize(("headdim", "headdim_v"), [(16, 300), (300, 280)])
@pytest.mark.parametrize("features", [("window_left", "sink"), ("window",)], ids=ids)
def test_keys_that_no_query_sees_may_hold_anything_in_channel_parts(headdim, headdim_v, features):
    check(Spec(batch=1, seqlen_q=20, seqlen_k=53, nheads=2, nheads_k=1, headdim=headdim, headdim_v=headdim_v,
               features=features, requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("features", [(), ("mask", "causal"), ("bias", "window")], ids=ids)
def test_half_precision(features):
    check(Spec(batch=1, seqlen_q=70, seqlen_k=90, nheads=2, nheads_k=1, headdim=32, headdim_v=32, dtype=torch.float16,
               features=features, requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("spread", [3e3, 1e4])
def test_gradients_of_huge_scores(spread):
    """Scores to 1e8: exp(s - lse) with a rounded lse was 2 ** 8 and more."""
    check(Spec(batch=1, seqlen_q=20, seqlen_k=24, nheads=2, nheads_k=2, headdim=24, headdim_v=16, dtype=torch.float16,
               spread=spread, features=("causal",), requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("step", [0.06, 0.3, -0.3])
@pytest.mark.parametrize("features", [("causal",), ("window_left", "sink"), ("bias", "softcap")], ids=ids)
def test_a_maximum_that_follows_late(monkeypatch, features, step):
    choose = tiles.choose_row
    monkeypatch.setattr(tiles, "choose_row", lambda *facts: choose(*facts)._replace(block_m=16, block_n=16, lazy=True))
    check_rising(Spec(batch=1, seqlen_q=40, seqlen_k=90, nheads=2, nheads_k=1, headdim=16, headdim_v=16,
                      dtype=torch.float16, features=features, requires_grad="all"), step)  # fmt: skip


@pytest.mark.parametrize("features", [*COMBINED, ("causal",), ("sink", "window"), ("bias_shared",)], ids=ids)
def test_gradients_of_fp32_where_lse_has_no_bits_to_spare(features):
    """Scores to 3000 and lse with them: p took lse's rounding, and dq was up to five budgets off."""
    check(Spec(seqlen_q=37, seqlen_k=45, nheads=2, nheads_k=1, headdim=16, headdim_v=8, spread=20, features=features,
               requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("features", [("causal",), ("sink_batch", "window")], ids=ids)
def test_gradients_of_packed_fp32_where_lse_has_no_bits_to_spare(features):
    check(Spec(nheads=2, nheads_k=1, lengths_q=(20, 0, 35, 7), lengths_k=(24, 5, 0, 40), spare=3, spread=20,
               features=features, requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("headdims", [(16, 300), (300, 280)])
def test_gradients_in_channel_parts_where_lse_has_no_bits_to_spare(headdims):
    check(Spec(batch=1, seqlen_q=20, seqlen_k=53, nheads=2, nheads_k=1, headdim=headdims[0], headdim_v=headdims[1],
               spread=8, features=("window", "sink"), requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bias", [torch.finfo(torch.float32).min, -1e30, -1e6])
def test_gradients_of_a_row_of_one_large_bias(bias, dtype):
    """That row is softmax over equal scores: lse cannot tell how many there are, and every p came out as 1 or NaN."""
    shape = {"batch": 1, "seqlen_q": 3, "seqlen_k": 5, "nheads": 1, "nheads_k": 1, "headdim": 8, "headdim_v": 8}
    sample = make(Spec(**shape, dtype=dtype, features=("bias",), requires_grad="all"), 0)
    sample.options["bias"].detach()[..., 0, :] = bias
    assert_exact(sample, "triton")


def _three():
    return [torch.randn(2, 5, 4, 8, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("scale", [1e-46, 1e-300])
def test_a_scale_that_fp32_cannot_hold(scale):
    """0 times the -inf of a key past the end would be NaN."""
    q, k, v = (torch.randn(1, 70, 2, 16, dtype=torch.float16, requires_grad=True) for _ in range(3))
    out = tilewise.attention(q, k, v, softmax_scale=scale, backend="triton")
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(v), atol=2e-3, rtol=2e-3)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_saved_lse_that_comes_back_in_another_layout():
    """It was read as if it were contiguous."""
    tensors = _three()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved.transpose(1, 2).contiguous(), lambda kept: kept.transpose(1, 2)
    ):
        out = tilewise.attention(*tensors, backend="triton")
    found = torch.autograd.grad(out.sum(), tensors)
    expected = torch.autograd.grad(tilewise.attention(*tensors, backend="triton").sum(), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_vjp_whose_level_is_left_behind():
    """What it saves is wrapped by a level that is gone when the function is called, and has no storage."""
    tensors = _three()
    out, vjp = torch.func.vjp(lambda *t: tilewise.attention(*t, backend="triton"), *(t.detach() for t in tensors))
    expected = torch.autograd.grad(tilewise.attention(*tensors, backend="triton"), tensors, torch.ones_like(out))
    for one, other in zip(vjp(torch.ones_like(out)), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("seqlens", [(40, 17), (3, 90), (1, 1), (90, 40)])
@pytest.mark.parametrize("features", [("causal",), ("top_left", "window_left")], ids=ids)
def test_lengths_that_differ(seqlens, features):
    check(Spec(batch=1, seqlen_q=seqlens[0], seqlen_k=seqlens[1], features=features, requires_grad="all"))


@pytest.mark.parametrize("limit", [plans.GRID_LIMIT, 1])
@pytest.mark.parametrize("heads", [(3, 1), (6, 2), (5, 5)])
@pytest.mark.parametrize("features", [(), ("causal",), ("window",)], ids=ids)
def test_heads_that_do_not_fill_the_rounds_of_a_cube(monkeypatch, features, heads, limit):
    """The grid of three dimensions, or of one where a side is too long."""
    choose = tiles.choose_row
    monkeypatch.setattr(tiles, "choose_row", lambda *facts: choose(*facts)._replace(cube=True, block_m=16))
    monkeypatch.setattr(registry.load("triton"), "_plans", {})  # another limit, another plan of the same problem
    monkeypatch.setattr(plans, "GRID_LIMIT", limit)
    monkeypatch.setattr(facts, "ROWS_TOGETHER", 4 * 45)
    check(Spec(batch=3, seqlen_q=37, seqlen_k=45, nheads=heads[0], nheads_k=heads[1], headdim=16, headdim_v=8,
               features=features))  # fmt: skip


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("bias",), ("q", "bias")], ids=ids)
def test_only_what_requires_grad_is_computed(names):
    spec = Spec(batch=1, seqlen_q=20, seqlen_k=24, features=("bias", "causal"), requires_grad=names)
    check(spec, through_lse=names != ("v",))


def test_repeated_runs_are_bitwise_equal():
    sample = make(Spec(batch=1, features=("causal", "bias_shared", "dropout"), requires_grad="all"))
    first, second = (gradients(sample, run(sample, deterministic=True)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
