"""The Triton backend on a GPU: every feature at sizes that fill several tiles, layouts, lengths, dropout, graphs."""

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
from tilewise.backends.triton import backward_plan
from tilewise.backends.triton.backend import BACKEND
from tilewise.testing import Spec, make
from tilewise.testing.judge import assert_exact

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Every feature in bf16. fp16 is the same code with another type of element, and fp32 with other exponentials and
# products: combinations that hold each feature once show what they could break, at a third of the compile time.
FEATURES = [
    *[(features, BF16) for features in SINGLE + COMBINED],
    *[(features, FP16) for features in ((), ("causal",), COMBINED[-1])],
    *[(features, FP32) for features in ((), ("causal",), *COMBINED)],
]
PACKED_FEATURES = [
    *[(features, BF16) for features in PACKED],
    (PACKED[-1], FP16),
    (PACKED[1], FP32),
    (PACKED[-1], FP32),
]
HEADDIMS = [(1, 1), (16, 16), (40, 40), (64, 64), (72, 72), (80, 96), (96, 96), (128, 128), (192, 128), (160, 160),
            (256, 256), (24, 200), (576, 512), (300, 64)]  # fmt: skip
TYPICAL = [(40, 40), (64, 64), (128, 128), (192, 128), (576, 512)]
HEADDIM_CASES = [
    *[(dims, ("causal",), BF16) for dims in HEADDIMS],
    *[(dims, features, BF16) for dims in TYPICAL for features in ((), ("window_left", "sink"))],
    # what a bias and a mask add to the tiles of the backward has to fit beside those of 256 channels
    *[((256, 256), features, BF16) for features in (("bias",), ("mask",), *COMBINED[1:4:2], ("bias_rows", "dropout"))],
    *[(dims, ("causal",), FP32) for dims in (*TYPICAL, (1, 1), (256, 256), (24, 200))],
]
# each row of the forward's table
RISING = [(64, ("causal",)), *[(128, f) for f in ((), ("causal",), ("window_left", "sink"), ("softcap", "causal"))],
          (256, ()), (256, ("bias",))]  # fmt: skip


def name(value: object) -> str | None:
    """A readable test id."""
    return ids(value) or str(value)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(("features", "dtype"), FEATURES, ids=name)
def test_feature_and_its_gradients(features, dtype):
    check(Spec(seqlen_q=301, seqlen_k=417, nheads=4, nheads_k=2, headdim=64, headdim_v=64, dtype=dtype, device="cuda",
               features=features, requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize(("headdims", "features", "dtype"), HEADDIM_CASES, ids=name)
def test_head_dimensions(headdims, features, dtype):
    check(Spec(batch=1, seqlen_q=200, seqlen_k=333, nheads=2, nheads_k=1, headdim=headdims[0], headdim_v=headdims[1],
               dtype=dtype, device="cuda", features=features, requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize(("features", "dtype"), PACKED_FEATURES, ids=name)
def test_packed_sequences_and_spare_tokens(features, dtype):
    check(Spec(nheads=4, nheads_k=2, headdim=64, headdim_v=64, lengths_q=(200, 0, 351, 70), lengths_k=(240, 50, 0, 400),
               spare=9, dtype=dtype, device="cuda", features=features, requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("headdim", [64, 256])
@pytest.mark.parametrize("features", PACKED[:3], ids=ids)
def test_packed_sequences_of_one_set_of_offsets(features, headdim):
    shape = {"nheads": 4, "nheads_k": 2, "headdim": headdim, "headdim_v": headdim, "dtype": BF16, "device": "cuda"}
    lengths = (200, 150, 0, 351, 64, 70)
    check_paired(Spec(lengths_q=lengths, spare=9, features=features, requires_grad="all", **shape))
    check_neighbours(Spec(lengths_q=lengths, features=features, requires_grad=("q", "k", "v"), **shape))


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("features", [("causal",), ("top_left",), ("window",), ("window_left",)], ids=ids)
def test_packed_sequences_whose_first_seeing_query_lies_anywhere(features, headdim):
    """The copy engine brings lse and delta by fours, so that they are stored where that query is a multiple of four."""
    shape = {"nheads": 4, "nheads_k": 2, "headdim": headdim, "headdim_v": headdim, "dtype": BF16, "device": "cuda"}
    lengths_q, lengths_k = (200, 131, 77, 70, 351, 64, 400), (150, 129, 76, 67, 353, 61, 90)
    check(Spec(lengths_q=lengths_q, lengths_k=lengths_k, spare=9, features=features, requires_grad="all", **shape))
    check_neighbours(Spec(lengths_q=lengths_q, features=features, requires_grad=("q", "k", "v"), **shape), apart=True)


def test_many_packed_sequences():
    """More than one step of the search for a program's sequence."""
    lengths = tuple(1 + 7 * i % 13 for i in range(300))
    check(Spec(nheads=2, nheads_k=1, headdim=64, headdim_v=64, lengths_q=lengths, lengths_k=lengths[::-1], dtype=BF16,
               device="cuda", features=("causal",), requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("layout", ["heads_first", "last_dim", "sliced", "expanded"])
@pytest.mark.parametrize("features", [("causal",), ("bias",)], ids=ids)
def test_layouts_are_taken_as_they_are(layout, features):
    check(Spec(seqlen_q=200, seqlen_k=333, headdim=64, headdim_v=64, dtype=torch.bfloat16, device="cuda", layout=layout,
               features=features, requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("seqlens", [(1, 1), (1, 4096), (127, 129), (704, 704), (513, 64), (64, 513)], ids=str)
@pytest.mark.parametrize("features", [(), ("causal",), ("top_left", "window_left"), ("mask", "causal")], ids=ids)
def test_lengths(seqlens, features):
    check(Spec(batch=1, seqlen_q=seqlens[0], seqlen_k=seqlens[1], headdim=128, headdim_v=128, dtype=torch.bfloat16,
               device="cuda", features=features, requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("heads", [(3, 1), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("features", [(), ("causal",), ("window_left", "causal")], ids=ids)
def test_heads_that_do_not_fill_the_rounds_of_a_cube(features, headdim, heads):
    check(Spec(batch=3, seqlen_q=1100, seqlen_k=1500, nheads=heads[0], nheads_k=heads[1], headdim=headdim,
               headdim_v=headdim, dtype=BF16, device="cuda", features=features))  # fmt: skip


BANDS = [("causal",), ("top_left",), ("window_left",), ("top_left", "window_left")]


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("seqlens", [(332, 200), (333, 200), (200, 333)], ids=str)
@pytest.mark.parametrize("features", BANDS, ids=ids)
def test_bands_that_leave_out_keys_or_queries(headdim, seqlens, features):
    """A piece of lse that began at a number no multiple of four was an illegal instruction."""
    check(Spec(batch=2, seqlen_q=seqlens[0], seqlen_k=seqlens[1], headdim=headdim, headdim_v=headdim, dtype=BF16,
               device="cuda", features=features, requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("rule", ["mask", "segments"])
def test_whole_tiles_of_a_list_beside_queries_that_see_nothing(rule, headdim):
    """Lists count tiles from the first query of all, not from the first that sees a key, here no multiple of four."""
    q, k, v = (torch.randn(1, n, 2, headdim, device="cuda", dtype=BF16, requires_grad=True) for n in (515, 385, 385))
    whole = {"mask": torch.ones(1, 1, 1, 385, dtype=torch.bool, device="cuda"),
             "segments": tuple(torch.zeros(1, n, dtype=torch.int32, device="cuda") for n in (515, 385))}  # fmt: skip
    dout = torch.randn_like(q)
    plain, listed = (
        torch.autograd.grad(tilewise.attention(q, k, v, causal=True, backend="triton", **options), (q, k, v), dout)
        for options in ({}, {rule: whole[rule]})
    )
    for name, one, other in zip("qkv", plain, listed, strict=True):
        torch.testing.assert_close(other, one, atol=2e-2, rtol=2e-2, msg=lambda text, name=name: f"d{name}: {text}")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("headdim", [32, 64, 128])
@pytest.mark.parametrize("band", ["causal", "window", "top_left"])
@pytest.mark.parametrize("scores", ["bias", "alibi", "softcap", "dropout", "scale"])
@pytest.mark.parametrize("seqlens", [(336, 336), (332, 200), (200, 333)], ids=str)
def test_scores_that_change_inside_a_band(seqlens, scores, band, headdim, dtype):
    """With 64 channels ptxas 12.8 lost q where a tile had 64 keys, with 32 where it had 32."""
    shape = {"seqlen_q": seqlens[0], "seqlen_k": seqlens[1], "headdim": headdim, "headdim_v": headdim}
    check(Spec(batch=2, nheads=4, nheads_k=2, dtype=dtype, device="cuda", features=(scores, band), requires_grad="all",
               **shape))  # fmt: skip


@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_a_band_that_excludes_all_pairs_reads_no_values(headdim):
    q, k, v = (torch.full((2, n, h, headdim), float("nan"), device="cuda", dtype=BF16, requires_grad=True)
               for n, h in ((200, 4), (333, 2), (333, 2)))  # fmt: skip
    out, lse = tilewise.attention_with_lse(q, k, v, causal="top_left", window_size=(70, None), backend="triton")
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    for gradient in torch.autograd.grad(out, (q, k, v), torch.full_like(out, float("nan"))):
        assert (gradient == 0).all()


@pytest.mark.parametrize("spread", [3e3, 1e4, 1e5])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_gradients_of_huge_scores(spread, dtype):
    check(Spec(seqlen_q=300, seqlen_k=300, headdim=24, headdim_v=24, dtype=dtype, device="cuda", spread=spread,
               features=("causal",), requires_grad="all"))  # fmt: skip


@pytest.mark.parametrize("bias", [torch.finfo(torch.float32).min, -1e30, -1e6])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_gradients_of_a_row_of_one_large_bias(bias, headdim):
    sample = make(Spec(batch=1, seqlen_q=70, seqlen_k=150, nheads=2, nheads_k=2, headdim=headdim, headdim_v=headdim,
                       dtype=BF16, device="cuda", features=("bias",), requires_grad="all"), 0)  # fmt: skip
    sample.options["bias"].detach()[..., 3, :] = bias
    assert_exact(sample, "triton")


@pytest.mark.parametrize("step", [0.01, 0.06, 0.5, -0.5])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("headdim", "features"), RISING, ids=name)
def test_a_maximum_that_follows_late(headdim, features, dtype, step):
    check_rising(Spec(batch=1, seqlen_q=300, seqlen_k=1000, nheads=2, nheads_k=1, headdim=headdim, headdim_v=headdim,
                      dtype=dtype, device="cuda", features=features, requires_grad="all"), step)  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("headdim", "features"), RISING[:-1], ids=name)
def test_keys_far_below_those_that_count(headdim, features, dtype):
    """Most scores are so low that their exponent has no bits left, in some rows until a late tile."""
    sample = make(Spec(batch=1, seqlen_q=300, seqlen_k=1000, nheads=2, nheads_k=1, headdim=headdim, headdim_v=headdim,
                       dtype=dtype, device="cuda", features=features), 6)  # fmt: skip
    with torch.no_grad():
        sample.q.abs_()
        low = torch.arange(1000, device="cuda") % 64 < 33
        low[:200] = True
        sample.k[:, low] = -3e4
        sample.q[:, ::2] *= 1e3
    assert_exact(sample, "triton")


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("window", [(0, 0), (30, 0), (63, 5), (700, 0), (1023, 0), (1000, 70), (None, 33), (40, None)],
                         ids=str)
def test_windows_whose_edges_cut_tiles_anywhere(headdim, window):
    sample = make(Spec(batch=1, seqlen_q=1100, seqlen_k=1330, nheads=2, nheads_k=1, headdim=headdim, headdim_v=headdim,
                       dtype=BF16, device="cuda", features=("window",)), 5)  # fmt: skip
    sample.options["window_size"] = window
    assert_exact(sample, "triton")


def test_huge_inputs_with_one_key():
    q = torch.full((1, 1, 1, 64), 133120.0, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(tilewise.attention(q, q, q, backend="triton"), q)
    q = torch.full((1, 1, 32, 128), 64.0, device="cuda", dtype=torch.bfloat16)
    out, lse = tilewise.attention_with_lse(q, -q, torch.ones_like(q), backend="triton")
    assert torch.equal(out, torch.ones_like(out))
    assert torch.allclose(lse, torch.full_like(lse, -524288 / 128**0.5))


def test_dropout_mask_is_the_cpus():
    seed = torch.tensor(2**62 + 12345)
    q = torch.zeros(2, 70, 3, 16)
    v = torch.eye(16).repeat(5, 1)[:70].expand(2, 3, 70, 16).transpose(1, 2).contiguous()
    here = tilewise.attention(q, q, v, dropout_p=0.37, dropout_seed=seed, backend="reference")
    there = tilewise.attention(q.cuda(), q.cuda(), v.cuda(), dropout_p=0.37, dropout_seed=seed.cuda(), backend="triton")
    assert torch.allclose(here, there.cpu(), atol=1e-6)


@pytest.mark.parametrize(
    "features", [("causal", "dropout", "sink"), ("bias_shared", "alibi"), ("mask", "bias")], ids=ids
)
def test_repeated_runs_are_bitwise_equal(features):
    sample = make(Spec(seqlen_q=700, seqlen_k=700, nheads=8, nheads_k=2, headdim=128, headdim_v=128,
                            features=features, dtype=torch.bfloat16, device="cuda", requires_grad="all"))  # fmt: skip
    first = gradients(sample, run(sample, deterministic=True))
    for _ in range(10):
        again = gradients(sample, run(sample, deterministic=True))
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("seqlen", "heads", "headdim"), [(4100, 20, 64), (1100, 70, 128), (2085, 40, 96), (300, 3, 256), (300, 3, 200)]
)
def test_launches_that_begin_early_end_in_order(seqlen, heads, headdim, monkeypatch):
    """Of a backward; what is launched after it finds all gradients written."""
    tensors = [bf16(1, seqlen, heads, headdim).requires_grad_() for _ in range(3)]
    out = tilewise.attention(*tensors, backend="triton")
    dout = bf16(*out.shape)
    with monkeypatch.context() as patch:
        patch.setattr(backward_plan, "overlaps", lambda problem, facts: False)
        patch.setattr(BACKEND, "_plans", {})
        expected = torch.autograd.grad(out, tensors, dout, retain_graph=True)
    busy = torch.empty(1 << 28, device="cuda", dtype=torch.int8)
    for _ in range(30):
        busy.fill_(0)  # meanwhile all launches are queued
        found = [grad.clone() for grad in torch.autograd.grad(out, tensors, dout, retain_graph=True)]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_empty_problems():
    for shape_q, shape_k in (
        ((2, 128, 8, 64), (2, 0, 8, 64)),
        ((2, 0, 8, 64), (2, 9, 8, 64)),
        ((0, 3, 8, 64), (0, 3, 8, 64)),
    ):
        q, k = bf16(*shape_q).requires_grad_(), bf16(*shape_k).requires_grad_()
        out, lse = tilewise.attention_with_lse(q, k, k, causal=True, backend="triton")
        assert (out == 0).all()
        assert (lse == float("-inf")).all()
        grad_q, grad_k = torch.autograd.grad(out, (q, k), torch.ones_like(out))
        assert (grad_q == 0).all()
        assert (grad_k == 0).all()


def test_case_99_a_cuda_graph_draws_new_dropout_from_its_seed():
    q, k, v = (bf16(1, 256, 4, 64).requires_grad_() for _ in range(3))
    seed = torch.zeros((), dtype=torch.int64, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        out = tilewise.attention(q, k, v, causal=True, dropout_p=0.2, dropout_seed=seed, backend="triton")
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for value in (3, 4):
        seed.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_growing_lengths_compile_nothing():
    from tilewise.backends.triton import launch

    def call(length: int) -> None:
        q, k, v = (bf16(1, length, 2, 64).requires_grad_() for _ in range(3))
        out = tilewise.attention(q, k, v, causal=True, backend="triton")
        torch.autograd.grad(out, (q, k, v), out.detach())

    call(100)
    count = len(launch._COMPILED)
    for length in (1, 16, 17, 128, 1000, 4096):
        call(length)
    assert len(launch._COMPILED) == count
