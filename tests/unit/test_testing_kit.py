"""The judge is judged: a wrong result is over budget, a right one is not, and poison is found."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tilewise.testing import (
    FEATURES,
    LAYOUTS,
    Spec,
    assert_exact,
    assert_within_budget,
    attention_oracle,
    compatible,
    judge,
    lay_out,
    make,
    poison,
    poison_unseen,
    poisoned_memory,
    sample_of,
    varlen_oracle,
    visible_pairs,
    within_budget,
)

NAN, INF = float("nan"), float("inf")


def case(dtype: torch.dtype = torch.float32, features: tuple[str, ...] = ()):
    sample = make(Spec(dtype=dtype, features=features, seqlen_q=40, seqlen_k=40))
    exact, _ = attention_oracle(sample.q, sample.k, sample.v, **sample.oracle_options())
    plain, _ = attention_oracle(
        sample.q, sample.k, sample.v, **sample.oracle_options(), dtype=sample.spec.yardstick_dtype
    )
    return exact, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_one_rounding_is_within_and_four_are_over(dtype: torch.dtype) -> None:
    exact, plain = case(dtype)
    assert within_budget(exact.to(dtype), exact, plain).ok
    epsilon = torch.finfo(dtype).eps
    wrong = (exact + 8 * epsilon * exact.abs().max() * torch.randn_like(exact).sign()).to(dtype)
    verdict = within_budget(wrong, exact, plain)
    assert not verdict.ok
    assert verdict.error > verdict.budget
    with pytest.raises(AssertionError, match=r"over budget; max error .* \(budget"):
        assert_within_budget(wrong, exact, plain)


def test_one_wrong_row_and_a_loss_everywhere_are_both_found() -> None:
    exact, plain = case()
    row = exact.clone()
    row[1, 3, 2] += 1e-4
    verdict = within_budget(row.float(), exact, plain)
    assert not verdict.ok
    assert verdict.worst[:3] == (1, 3, 2)
    everywhere = (exact * (1 + 1e-6)).float()
    verdict = within_budget(everywhere, exact, plain)
    assert verdict.rms_error > verdict.rms_budget


def test_nan_and_infinities_must_stand_where_fp64_has_them() -> None:
    exact = torch.tensor([0.0, -INF, NAN, 1.0], dtype=torch.float64)
    assert within_budget(exact.float(), exact, exact.float()).ok
    for index in range(4):
        wrong = exact.float()
        wrong[index] = 7.0 if index in (1, 2) else NAN
        verdict = within_budget(wrong, exact, exact.float())
        assert not verdict.ok
        assert verdict.worst == (index,)
    assert not within_budget(torch.tensor([INF]), torch.tensor([-INF], dtype=torch.float64), None).ok


def test_where_plain_torch_loses_the_row_fp64_alone_judges() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    lost = torch.tensor([NAN, 2.0])
    assert within_budget(torch.tensor([1.0 + 2e-7, 2.0]), exact, lost).ok
    assert not within_budget(torch.tensor([1.0 + 2e-6, 2.0]), exact, lost).ok
    assert within_budget(torch.tensor([1.0, 2.0]), exact, None).ok


def test_shapes_and_the_oracles_dtype_are_checked() -> None:
    zeros = torch.zeros(2, dtype=torch.float64)
    assert "shape" in within_budget(torch.zeros(3), zeros, None).reason
    assert "fp64" in within_budget(torch.zeros(2), zeros.float(), None).reason
    assert within_budget(torch.zeros(0), torch.zeros(0, dtype=torch.float64), None).ok


def test_a_floor_forgives_cancellation_and_nothing_else() -> None:
    zeros = torch.zeros(3, dtype=torch.float64)
    assert not within_budget(torch.full((3,), 1e-7), zeros, torch.zeros(3)).ok
    assert within_budget(torch.full((3,), 1e-7), zeros, torch.zeros(3), floor=2e-7).ok
    assert not within_budget(torch.full((3,), 3e-7), zeros, torch.zeros(3), floor=2e-7).ok


@pytest.mark.parametrize("features", [(), ("causal",), ("bias",), ("mask",)], ids="+".join)
def test_the_oracle_is_torchs_attention(features: tuple[str, ...]) -> None:
    sample = make(Spec(features=features, dtype=torch.float64))
    keep = visible_pairs(sample.q, sample.k, **{n: v for n, v in sample.options.items() if n in ("causal", "mask")})
    bias = sample.options.get("bias", torch.zeros(1, dtype=torch.float64)).detach()
    added = bias.expand(keep.shape).masked_fill(~keep, -INF)
    heads_second = (t.transpose(1, 2) for t in (sample.q, sample.k, sample.v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_second, attn_mask=added, enable_gqa=True)
    out, lse = attention_oracle(sample.q, sample.k, sample.v, **sample.options)
    torch.testing.assert_close(out, expected.nan_to_num(0.0).transpose(1, 2))
    assert torch.equal(lse == -INF, ~keep.any(-1))


def test_the_oracle_wants_a_keep_mask_for_dropout() -> None:
    q = torch.randn(1, 2, 1, 4)
    with pytest.raises(ValueError, match="dropout_keep"):
        attention_oracle(q, q, q, dropout_p=0.5)


def test_the_packed_oracle_is_the_dense_one_sequence_by_sequence() -> None:
    sample = make(Spec(lengths_q=(3, 0, 5), lengths_k=(4, 2, 6), spare=2, features=("alibi_batch", "sink", "dropout")))
    out, lse = varlen_oracle(sample.q, sample.k, sample.v, **sample.oracle_options())
    assert out.shape == (10, 4, 16)
    assert not out[8:].any()
    assert bool((lse[:, 8:] == -INF).all())
    keep = sample.oracle_options()["dropout_keep"][2]
    alone, _ = attention_oracle(
        sample.q[None, 3:8], sample.k[None, 6:12], sample.v[None, 6:12], dropout_keep=keep, dropout_p=0.3,
        alibi_slopes=sample.options["alibi_slopes"][2], sink=sample.options["sink"],
    )  # fmt: skip
    torch.testing.assert_close(out[3:8], alone[0])


def test_fresh_memory_is_poisoned_inside_and_only_inside() -> None:
    with poisoned_memory():
        assert bool(torch.empty(3).isnan().all())
        assert bool(torch.empty_like(torch.zeros(2, 2)).isnan().all())
        assert bool(torch.zeros(2).new_empty(4).isnan().all())
        assert int(torch.empty(1, dtype=torch.int64)) > 10**9
        assert not torch.zeros(3).isnan().any()
    assert not torch.are_deterministic_algorithms_enabled()


def test_only_keys_that_nobody_sees_are_poisoned() -> None:
    sample = make(Spec(features=("padding",), seqlen_k=9))
    keep = visible_pairs(sample.q, sample.k, mask=sample.options["mask"])
    count = poison_unseen(sample.k, sample.v, keep)
    unseen = ~sample.options["mask"][:, 0, 0]
    assert count == int(unseen.sum()) * 2
    assert torch.equal(sample.k.isnan().any((-1, -2)), unseen)
    assert torch.equal(sample.v.isnan().all(-1).all(-1), unseen)
    packed = make(Spec(lengths_q=(2, 0), lengths_k=(3, 2), spare=1))
    assert poison(packed) == 2 * 2
    assert bool(packed.k[3:].isnan().all())
    assert bool(packed.q[2:].isnan().all())
    assert not packed.k[:3].isnan().any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_keeps_the_numbers_and_changes_the_strides(layout: str) -> None:
    tensor = torch.randn(2, 5, 3, 4)
    laid = lay_out(tensor, layout)
    expected = tensor[:, :, :1].expand(tensor.shape) if layout == "expanded" else tensor
    assert torch.equal(laid, expected)
    assert (laid.stride() == tensor.stride()) == (layout == "contiguous")
    with pytest.raises(ValueError, match="layout"):
        lay_out(tensor, "random")


def test_the_same_seed_makes_the_same_call_in_every_layout_and_dtype() -> None:
    spec = Spec(features=("bias", "sink"))
    one, other = make(spec, 3), make(Spec(features=("bias", "sink"), layout="sliced", dtype=torch.float64), 3)
    assert torch.equal(one.q, other.q.float())
    assert torch.equal(one.options["bias"], other.options["bias"].float())
    assert not torch.equal(one.q, make(spec, 4).q)


def test_contradictory_and_unknown_features_are_refused() -> None:
    assert not compatible(("causal", "top_left"))
    for features in (("causal", "top_left"), ("flash",)):
        with pytest.raises(ValueError, match="features"):
            make(Spec(features=features))
    with pytest.raises(ValueError, match="packed"):
        make(Spec(features=("mask",), lengths_q=(2,)))


@pytest.mark.parametrize("feature", sorted(FEATURES))
def test_every_feature_changes_the_result(feature: str) -> None:
    with_it, without = (make(Spec(features=f, headdim=8, headdim_v=8), 1) for f in ((feature,), ()))
    results = [
        attention_oracle(s.q, s.k, s.v, **s.oracle_options())[1 if feature == "bias_rows" else 0]
        for s in (with_it, without)
    ]
    assert float((results[0] - results[1]).nan_to_num(1.0).abs().max()) > 1e-3


def test_a_wrong_backend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole judge against mutants: each forgets or bends one thing."""
    from tilewise.backends.reference import BACKEND

    forward, backward = BACKEND.forward, BACKEND.backward
    spec = Spec(features=("causal", "sink"), requires_grad="all", seqlen_q=9, seqlen_k=9)

    def mutant(name: str) -> None:
        def bent_forward(problem, inputs):
            if name == "forgets causal":
                return forward(problem.replace(causal=None), inputs)
            out, lse = forward(problem, inputs)
            if name == "base 2":
                return out, lse * 1.4427
            if name == "one row":
                out[0, 4, 1] *= 1.00001
            return out, lse

        def bent_backward(problem, inputs, out, lse, dout, dlse):
            grads = backward(problem, inputs, out, lse, dout, None if name == "forgets dlse" else dlse)
            if name == "forgets sink":
                grads["sink"] = torch.zeros_like(grads["sink"])
            if name == "bends dk":
                grads["k"][0, 0] *= 1.0001
            return grads

        monkeypatch.setattr(BACKEND, "forward", bent_forward)
        monkeypatch.setattr(BACKEND, "backward", bent_backward)

    mutant("right")
    assert_exact(make(spec), "reference")
    for name in ("forgets causal", "base 2", "one row", "forgets dlse", "forgets sink", "bends dk"):
        mutant(name)
        assert not all(verdict.ok for verdict in judge(make(spec), "reference")), name
        with pytest.raises(AssertionError, match="reference"):
            assert_exact(make(spec), "reference")


def test_the_order_in_which_plain_torch_adds_is_no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few pairs decide the largest error, plain attention with its channels in another order is over budget."""
    from tilewise import functional

    module = sys.modules[judge.__module__]
    over_once = over_often = 0
    for seed in range(25):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, 96, 4, 32, generator=generator) for _ in range(3))
        k[..., 7] *= 60
        q[:, ::13] *= 20
        order = torch.randperm(32, generator=generator)

        def reordered(q, k, v, causal, backend, order=order):
            return attention_oracle(q[..., order], k[..., order], v, causal=causal, dtype=torch.float32)

        monkeypatch.setattr(functional, "attention_with_lse", reordered)
        with monkeypatch.context() as patch:
            patch.setattr(module, "ORDERS", 0)
            once = all(verdict.ok for verdict in judge(sample_of(q, k, v, causal=True), "reference"))
        if not once:
            over_once += 1
            over_often += not all(verdict.ok for verdict in judge(sample_of(q, k, v, causal=True), "reference"))
    if not over_once:
        pytest.skip("here no order of the sums is as bad as that")
    assert over_often < over_once


def test_a_converted_sample_keeps_the_numbers_of_every_dtype() -> None:
    sample = make(Spec(dtype=torch.bfloat16, features=("bias", "sink"), requires_grad="all"))
    dtypes = {name: tensor.dtype for name, tensor in sample.float_tensors().items()}
    back = sample.converted(torch.float64).converted(torch.bfloat16, dtypes)
    for name, tensor in sample.float_tensors().items():
        assert back.float_tensors()[name].dtype == tensor.dtype
        assert torch.equal(back.float_tensors()[name], tensor)
    assert torch.equal(back.dout, sample.dout)


def test_given_tensors_become_a_sample() -> None:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8).transpose(0, 0)
    sample = sample_of(q, k, k, bias=torch.randn(3, 5), requires_grad=("bias",))
    assert list(sample.differentiable()) == ["bias"]
    assert sample.dout.shape == q.shape
    packed = sample_of(q[0], k[0], k[0], cu_seqlens_q=torch.tensor([0, 3]), cu_seqlens_k=torch.tensor([0, 5]))
    assert packed.spec.lengths_q == (3,)
    assert packed.dlse.shape == (4, 3)


def test_the_kit_needs_no_test_framework() -> None:
    code = "import sys, tilewise.testing; assert not {'pytest', 'hypothesis'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
