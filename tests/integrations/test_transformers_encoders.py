"""Encoders and encoder-decoders: bidirectional masks, cross-attention, position bias, weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the Transformers integration needs transformers")

import transformers

from tests.integrations import hf

pytestmark = pytest.mark.usefixtures("device")
BERT = {**hf.COMMON, **hf.NO_DROPOUT}
SEQ2SEQ = {
    "vocab_size": hf.VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "dropout": 0.0,
    "attn_implementation": "eager",
}
ENCODERS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **{**hf.COMMON, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
            local_attention=6,
            global_attn_every_n_layers=2,
        )
    ),
}
BOTH = {
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=hf.VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            attn_implementation="eager",
            decoder_start_token_id=0,
        )
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**SEQ2SEQ, max_position_embeddings=64, forced_eos_token_id=None)
    ),
}


@pytest.fixture(scope="module", params=list(ENCODERS))
def encoder(request, device):
    return hf.make(ENCODERS[request.param])


@pytest.fixture(scope="module", params=list(BOTH))
def both(request, device):
    return hf.make(BOTH[request.param])


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_encoder_states_and_gradients(encoder, side):
    ids = hf.tokens()
    mask = hf.padded(side, ids)
    encoder.train()

    def run(model):
        states = model(ids, attention_mask=None if side == "none" else mask).last_hidden_state[mask.bool()]
        states.square().mean().backward()
        return {"states": states, "gradients": hf.gradients(model)}

    hf.assert_like_eager(encoder, run)


def test_no_mask_grows_with_the_square_of_the_length(encoder):
    ids = hf.tokens(seqlen=24)
    encoder.set_attn_implementation("tilewise")
    with hf.counted() as calls, torch.no_grad():
        encoder(ids, attention_mask=hf.padded("right", ids))
    assert calls.attention == 2
    assert calls.largest_mask <= ids.numel()


def test_cross_attention_and_position_bias(both):
    ids = hf.tokens()
    mask = hf.padded("right", ids)
    target = hf.tokens(seqlen=6, seed=2)
    both.train()

    def run(model):
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=target).logits
        logits.square().mean().backward()
        return {"logits": logits, "gradients": hf.gradients(model)}

    hf.assert_like_eager(both, run)


@pytest.mark.parametrize("cache", [None, "static"])
def test_encoder_decoders_generate_the_same_tokens(both, cache):
    ids = hf.tokens()
    both.eval()
    found = {}
    for implementation in ("eager", "tilewise"):
        hf.use(both, implementation)
        found[implementation] = both.generate(
            ids,
            attention_mask=hf.padded("right", ids),
            max_new_tokens=7,
            do_sample=False,
            eos_token_id=None,
            cache_implementation=cache,
        )
    assert torch.equal(found["tilewise"], found["eager"])


def test_a_bert_decoder_with_cross_attention():
    config = transformers.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    model = hf.make(lambda: transformers.BertLMHeadModel(config))
    ids = hf.tokens()
    mask = hf.padded("right", ids)
    states = torch.randn(2, 7, 32)
    seen = torch.ones(2, 7, dtype=torch.long)
    seen[1, 5:] = 0

    def run(model):
        logits = model(
            ids,
            attention_mask=mask,
            encoder_hidden_states=states.to(model.dtype),
            encoder_attention_mask=seen,
            use_cache=False,
        ).logits[mask.bool()]
        return {"logits": logits}

    hf.assert_like_eager(model, run)


def test_case_141_output_attentions_of_models_that_keep_the_option_to_themselves(both):
    """Transformers records what the attention returns: with tilewise it is eager's weights, not an empty tuple."""
    ids = hf.tokens()
    both.eval()
    found = {}
    for implementation in ("eager", "tilewise"):
        hf.use(both, implementation)
        with torch.no_grad():
            found[implementation] = both(input_ids=ids, decoder_input_ids=ids[:, :6], output_attentions=True)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(found["tilewise"][name]) == len(found["eager"][name]) == 2
        for ours, theirs in zip(found["tilewise"][name], found["eager"][name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["seq_idx", "cu_seq_lens"])
def test_packed_sequences_of_an_encoder_are_told_apart_by_name(how):
    """Positions say nothing under a bidirectional mask; explicit sequences do."""
    model = hf.make(ENCODERS["bert"]).eval()
    model.set_attn_implementation("tilewise")
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    options = {"seq_idx": torch.tensor([[0] * 5 + [1] * 7])}
    if how == "cu_seq_lens":
        options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    ids = hf.tokens(batch=1, seqlen=12)
    other = torch.cat([hf.tokens(batch=1, seqlen=5, seed=9), ids[:, 5:]], dim=1)
    positions = torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        first, second = (model(x, position_ids=positions, **options).last_hidden_state for x in (ids, other))
        alone = model(ids[:, 5:]).last_hidden_state
    assert not torch.equal(first[:, :5], second[:, :5])
    assert torch.equal(first[:, 5:], second[:, 5:])
    torch.testing.assert_close(first[:, 5:], alone, rtol=1e-3, atol=1e-4)


def test_weights_only_when_asked_for():
    model = hf.make(ENCODERS["bert"]).eval()
    model.set_attn_implementation("tilewise")
    with hf.counted() as calls, torch.no_grad():
        assert model(hf.tokens()).attentions is None
    assert calls.attention == 2
