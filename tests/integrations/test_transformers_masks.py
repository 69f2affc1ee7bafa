"""The mask function: every structured mask is, written out, the dense mask that Transformers builds."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the Transformers integration needs transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils as masking

from tests.integrations import hf
from tilewise.integrations import transformers_mask
from tilewise.integrations.transformers_mask import MaskPlan, StructuredMask, build_mask, resolve


def _functions(draw, seqlen_q, seqlen_k, batch, square):
    """A mask function, and whether it may be packed."""
    window = draw(st.integers(1, 7))
    kind = draw(st.sampled_from(["causal", "window", "both", "all", "chunk", "packed", "packed window"]))
    if kind == "window":
        return masking.sliding_window_causal_mask_function(window)
    if kind == "both":
        return masking.sliding_window_bidirectional_mask_function(window)
    if kind == "all":
        return masking.bidirectional_mask_function
    if kind == "chunk":
        left = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch)))
        return masking.chunked_causal_mask_function(window, left)
    if kind.startswith("packed") and square and seqlen_q:
        inner = masking.causal_mask_function
        if kind == "packed window":
            inner = masking.sliding_window_causal_mask_function(window)
        starts = torch.tensor(draw(st.lists(st.booleans(), min_size=batch * seqlen_q, max_size=batch * seqlen_q)))
        starts = starts.reshape(batch, seqlen_q)
        index = torch.arange(seqlen_q).expand(batch, -1)
        position = index - torch.where(starts, index, 0).cummax(-1).values
        ids = masking.find_packed_sequence_indices(position)
        if ids is None:
            return inner
        inner = masking.remap_positions_for_packed_sequence(inner, position)
        return masking.and_masks(inner, masking.packed_sequence_mask_function(ids))
    return masking.causal_mask_function


@st.composite
def mask_arguments(draw):
    """Arguments of the mask interface as create_causal_mask and its like give them."""
    batch, seqlen_q = draw(st.integers(1, 2)), draw(st.integers(1, 9))
    square = draw(st.booleans())
    cached = 0 if square else draw(st.integers(0, 6))
    unused = 0 if square else draw(st.integers(0, 4))
    kv_offset = 0 if square else draw(st.integers(0, cached))
    kv_length = cached + seqlen_q + unused - kv_offset
    padding = None
    if draw(st.booleans()):
        length = draw(st.integers(cached + seqlen_q, cached + seqlen_q + unused + 2))
        padding = torch.tensor(draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)))
        padding = padding.reshape(batch, length)
    return {
        "batch_size": batch,
        "q_length": seqlen_q,
        "kv_length": kv_length,
        "q_offset": cached,
        "kv_offset": kv_offset,
        "mask_function": _functions(draw, seqlen_q, kv_length, batch, square),
        "attention_mask": padding,
        "dtype": torch.float32,
        "config": None,
    }


def _kept_by(where: slice, pairs: dict, plan: MaskPlan) -> torch.Tensor:
    """Which pairs the arguments for ``functional.attention`` keep, by SEMANTICS, over all keys of the plan."""
    keys = torch.arange(plan.seqlen_k)[where]
    i = torch.arange(plan.seqlen_q)[:, None] + len(keys) - plan.seqlen_q
    j = torch.arange(len(keys))[None, :]
    keep = torch.ones(plan.batch, 1, plan.seqlen_q, len(keys), dtype=torch.bool)
    left, right = pairs.get("window_size", (None, None))
    if pairs.get("causal"):
        keep = keep & (j <= i)
    if left is not None:
        keep = keep & (j >= i - left)
    if right is not None:
        keep = keep & (j <= i + right)
    if "mask" in pairs:
        keep = keep & pairs["mask"]
    if "segments" in pairs:
        q, k = pairs["segments"]
        keep = keep & (q[:, None, :, None] == k[:, None, None, :])
    whole = torch.zeros(plan.batch, 1, plan.seqlen_q, plan.seqlen_k, dtype=torch.bool)
    whole[..., keys] = keep
    return whole


@settings(max_examples=300, deadline=None)
@given(mask_arguments())
def test_a_structured_mask_is_the_dense_one(arguments):
    dense = hf.oracle_mask(**arguments)
    mask = build_mask(**arguments)
    assert type(mask) is StructuredMask
    assert mask.shape == dense.shape
    assert mask.dtype == torch.bool
    assert torch.equal(mask.plan.dense(), dense)
    assert torch.equal(_kept_by(*resolve(mask.plan), mask.plan), dense)


@settings(max_examples=50, deadline=None)
@given(mask_arguments(), st.integers(0, 12), st.integers(0, 12))
def test_to_anybody_else_it_is_an_ordinary_mask(arguments, first, last):
    dense, mask = hf.oracle_mask(**arguments), build_mask(**arguments)
    assert torch.equal(mask[..., first:last], dense[..., first:last])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(torch.cat([mask, ~mask], dim=-1), torch.cat([dense, ~dense], dim=-1))
    assert torch.equal(mask.float(), dense.float())
    assert bool(mask.all()) == bool(dense.all())


def test_it_keeps_its_plan_where_nothing_changes():
    mask = build_mask(batch_size=1, q_length=3, kv_length=3, attention_mask=torch.ones(1, 3))
    for same in (mask.detach(), mask.contiguous(), mask.to("cpu"), torch.ops.aten.alias(mask)):
        assert type(same) is StructuredMask
    moved = mask.to("meta")
    assert type(moved) is StructuredMask
    assert moved.plan.padding.device.type == "meta"
    assert "StructuredMask((1, 1, 3, 3)" in repr(mask)


def test_unknown_rules_are_dense():
    def odd(batch, head, q, k):
        return (q + k) % 2 == 0

    block = masking.blockwise_overlay(torch.tensor([[0, 0, 1, -1]]))
    for function in (
        odd,
        masking.and_masks(masking.causal_mask_function, odd),
        masking.or_masks(masking.causal_mask_function, block),
        masking.remap_positions_for_packed_sequence(masking.causal_mask_function, torch.tensor([[0, 1, 0, 1]])),
        masking.and_masks(
            masking.remap_positions_for_packed_sequence(masking.causal_mask_function, torch.tensor([[0, 2, 0, 2]])),
            masking.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1]])),
        ),
    ):
        arguments = {"batch_size": 1, "q_length": 4, "kv_length": 4, "mask_function": function}
        mask = build_mask(**arguments)
        assert type(mask) is torch.Tensor
        assert torch.equal(mask, hf.oracle_mask(**arguments))


def test_a_rule_that_changed_its_meaning_is_not_recognised(monkeypatch):
    """Another version of Transformers may count a window otherwise: then its function decides."""

    def wider(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    transformers_mask._known_rules.cache_clear()
    monkeypatch.setattr(masking, "sliding_window_overlay", wider)
    monkeypatch.delattr(masking, "chunked_overlay")
    try:
        names = {name for name, _ in transformers_mask._known_rules().values()}
        assert names == {"causal", "all", "window_both", "padding", "packed", "remap"}
        mask = build_mask(batch_size=1, q_length=6, kv_length=6, mask_function=wider(2))
        assert type(mask) is torch.Tensor
    finally:
        transformers_mask._known_rules.cache_clear()


def test_the_older_form_with_cache_position(monkeypatch):
    expected = hf.oracle_mask(batch_size=1, q_length=3, kv_length=8, q_offset=4)
    mask = build_mask(batch_size=1, cache_position=torch.tensor([4, 5, 6]), kv_length=8)
    assert torch.equal(mask.plan.dense(), expected)
    with pytest.raises(TypeError, match="q_length or cache_position"):
        build_mask(batch_size=1, kv_length=8)


def test_one_step_over_a_static_cache_is_a_plain_tensor():
    """It crosses into a compiled graph."""
    mask = build_mask(
        batch_size=1, q_length=1, kv_length=8, q_offset=torch.tensor(3), allow_is_causal_skip=False, use_vmap=False
    )
    assert type(mask) is torch.Tensor
    assert mask.tolist() == [[[[True] * 4 + [False] * 4]]]
