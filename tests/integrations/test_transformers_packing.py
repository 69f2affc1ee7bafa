"""Several sequences in one row: none may see another, however the caller says where they begin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the Transformers integration needs transformers")

import transformers

from tests.integrations import hf
from tilewise.errors import InvalidInput
from tilewise.integrations.transformers import _restarts

pytestmark = pytest.mark.usefixtures("device")
LENGTHS = (5, 7)
POSITIONS = torch.tensor([[*range(5), *range(7)]])
OFFSETS = torch.tensor([0, 5, 12], dtype=torch.int32)
ONES = torch.ones(1, 12, dtype=torch.long)
CUMULATIVE = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 7, "max_length_k": 7}
TELLING = {
    "position_ids": {"use_cache": False},
    "position_ids, with a cache": {"use_cache": True},
    "case_139 position_ids, all-ones mask": {"attention_mask": ONES, "use_cache": False},
    "position_ids, all-ones mask, with a cache": {"attention_mask": ONES, "use_cache": True},
    "position_ids, padding at the end": {"attention_mask": ONES.index_fill(1, torch.tensor([11]), 0)},
    "cu_seq_lens": {**CUMULATIVE, "use_cache": False},
    "cu_seq_lens, all-ones mask": {**CUMULATIVE, "attention_mask": ONES},
    "seq_idx": {"seq_idx": torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32), "use_cache": False},
}


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3", "gpt_oss", "gpt2"])
def model(request, device):
    model = hf.make(hf.DECODERS[request.param]).eval()
    model.set_attn_implementation("tilewise")
    return model


@pytest.mark.parametrize("how", list(TELLING))
def test_case_139_packed_sequences_do_not_see_each_other(model, how):
    """Other tokens in sequence 1 leave sequence 2 bitwise the same, and it is what it would be alone."""
    ids = hf.tokens(batch=1, seqlen=12)
    other = torch.cat([hf.tokens(batch=1, seqlen=5, seed=9), ids[:, 5:]], dim=1)
    kept = 11 if "padding" in how else 12
    with torch.no_grad():
        telling = {"position_ids": hf.placed(POSITIONS), **hf.placed(TELLING[how])}
        first, second = (model(x, **telling).logits for x in (ids, other))
        alone = model(ids[:, 5:], use_cache=False).logits
    assert not torch.equal(first[:, :5], second[:, :5])
    assert torch.equal(first[:, 5:kept], second[:, 5:kept])
    torch.testing.assert_close(first[:, 5:kept], alone[:, : kept - 5], rtol=1e-3, atol=1e-4)


def test_packed_gradients_are_the_sum_of_the_sequences(model):
    ids = hf.tokens(batch=1, seqlen=12)
    model.zero_grad(set_to_none=True)
    model(ids, position_ids=hf.placed(POSITIONS), use_cache=False).logits.square().sum().backward()
    packed = hf.gradients(model)
    model.zero_grad(set_to_none=True)
    for part in ids.split(LENGTHS, dim=1):
        model(part, use_cache=False).logits.square().sum().backward()
    torch.testing.assert_close(packed, hf.gradients(model), rtol=1e-3, atol=1e-3 * packed.abs().max().item())


def test_an_empty_static_cache_takes_packed_sequences():
    model = hf.make(hf.DECODERS["llama"]).eval()
    model.set_attn_implementation("tilewise")
    ids = hf.tokens(batch=1, seqlen=12)
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    name = hf.cache_name(model)
    with torch.no_grad():
        packed = model(ids, **hf.placed({"position_ids": POSITIONS, "attention_mask": ONES}), **{name: cache}).logits
        alone = model(ids[:, 5:], use_cache=False).logits
    torch.testing.assert_close(packed[:, 5:], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("lab", ["left", "right", "hole", "gap", "positions of padding"])
def test_one_sequence_is_not_taken_for_two(lab):
    """Padding, gaps and the positions that models give to padding are no restart."""
    keep = torch.ones(1, 8, dtype=torch.bool)
    positions = torch.arange(8)[None]
    if lab == "left":
        keep[0, :3] = False
        positions = (keep.long().cumsum(-1) - 1).masked_fill(~keep, 1)
    elif lab == "right":
        keep[0, 5:] = False
        positions = (keep.long().cumsum(-1) - 1).masked_fill(~keep, 0)
    elif lab == "hole":
        keep[0, 3:5] = False
        positions = (keep.long().cumsum(-1) - 1).masked_fill(~keep, 1)
    elif lab == "gap":
        positions = torch.arange(8)[None] * 3
    elif lab == "positions of padding":
        keep[0, 6:] = False
        positions = torch.tensor([[2, 3, 4, 5, 6, 7, 1, 1]])
    assert _restarts(positions, 8, 8, 0, keep) is None


def test_positions_of_several_axes_are_no_sequence_numbers():
    assert _restarts(POSITIONS.expand(3, 1, 12), 12, 12, 0, None) is None


def test_a_restart_after_cached_tokens_is_refused():
    model = hf.make(hf.DECODERS["llama"]).eval()
    model.set_attn_implementation("tilewise")
    ids = hf.tokens(batch=1, seqlen=12)
    cache = transformers.DynamicCache(config=model.config)
    name = hf.cache_name(model)
    with torch.no_grad():
        model(ids[:, :4], **{name: cache})
        with pytest.raises(InvalidInput, match="position_ids start again"):
            model(ids[:, 4:8], position_ids=torch.tensor([[4, 5, 0, 1]]), **{name: cache})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cu_seq_lens_q": OFFSETS}, "must be passed together"),
        ({"cu_seq_lens_k": OFFSETS}, "must be passed together"),
        ({"seq_idx": torch.zeros(1, 5, dtype=torch.int32)}, "seq_idx has shape"),
    ],
)
def test_half_told_sequences_are_refused(options, words):
    model = hf.make(hf.DECODERS["llama"]).eval()
    model.set_attn_implementation("tilewise")
    with pytest.raises(InvalidInput, match=words):
        model(hf.tokens(batch=1, seqlen=12), use_cache=False, **hf.placed(options))


def test_offsets_of_a_batch_are_refused():
    model = hf.make(hf.DECODERS["llama"]).eval()
    model.set_attn_implementation("tilewise")
    with pytest.raises(InvalidInput, match="the batch is 2"):
        model(hf.tokens(batch=2, seqlen=12), use_cache=False, **hf.placed(CUMULATIVE))
