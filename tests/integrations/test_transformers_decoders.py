"""Decoder models on tilewise: eager's logits and gradients, and eager's tokens from every kind of cache."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="the Transformers integration needs transformers")

from tests.integrations import hf

pytestmark = pytest.mark.usefixtures("device")
WINDOWED = ("mistral", "qwen3", "gemma2", "gemma3", "gpt_oss")


@pytest.fixture(scope="module", params=list(hf.DECODERS))
def model(request, device):
    return hf.make(hf.DECODERS[request.param])


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_logits_and_gradients_in_training(model, side):
    ids = hf.tokens()
    mask = hf.padded(side, ids)
    keep = mask.bool()
    model.train()

    def run(model):
        logits = model(ids, attention_mask=None if side == "none" else mask, use_cache=False).logits[keep]
        torch.nn.functional.cross_entropy(logits, ids[keep]).backward()
        return {"logits": logits, "gradients": hf.gradients(model)}

    hf.assert_like_eager(model, run)


@pytest.mark.parametrize("cache", ["dynamic", "static", "chunked prefill"])
def test_generate_gives_the_same_tokens(model, cache):
    ids = hf.tokens(seqlen=9)
    options = {"static": {"cache_implementation": "static"}, "chunked prefill": {"prefill_chunk_size": 4}}.get(
        cache, {}
    )
    model.eval()

    def generate(implementation):
        model.set_attn_implementation(implementation)
        return model.generate(ids, attention_mask=hf.padded("left", ids), max_new_tokens=8, do_sample=False, **options)

    try:
        expected = generate("eager")
    except TypeError as error:  # chunks beside a static cache in 5.17: its own mask refuses an argument of its own
        pytest.skip(f"transformers {hf.transformers.__version__} cannot do it eagerly: {error}")
    found = generate("tilewise")
    assert found.shape == (2, 17)
    assert torch.equal(found, expected)


def test_no_mask_grows_with_the_square_of_the_length(model):
    ids = hf.tokens(seqlen=24)
    model.set_attn_implementation("tilewise")
    for side in ("none", "left", "right"):
        with hf.counted() as calls, torch.no_grad():
            model(ids, attention_mask=hf.padded(side, ids))
        assert calls.attention == 2
        assert calls.largest_mask <= ids.numel()


def test_padded_rows_are_finite(model):
    """A whole item of padding too: its rows are of no use, but may not spoil the batch."""
    ids = hf.tokens(batch=3)
    mask = hf.padded("left", ids)
    mask[2] = 0
    model.set_attn_implementation("tilewise")
    model.train()
    model.zero_grad(set_to_none=True)
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    logits.square().mean().backward()
    assert logits.isfinite().all()
    assert hf.gradients(model).isfinite().all()


@pytest.mark.parametrize("name", WINDOWED)
def test_case_39_a_window_of_w_sees_w_keys(name):
    """The window counts the query itself: a change of the key W back is not felt, one of the key W - 1 back is."""
    model = hf.make(hf.DECODERS[name]).eval()
    model.set_attn_implementation("tilewise")
    ids = hf.tokens(batch=1)
    last = ids.shape[1] - 1
    heard = {}

    def disturb(module, args, kwargs):
        states = kwargs["hidden_states"].clone()
        states[:, last - back] += 1.0
        return args, {**kwargs, "hidden_states": states}

    layers = getattr(model.config, "layer_types", None) or ["sliding_attention"] * 2
    layer = model.model.layers[layers.index("sliding_attention")].self_attn
    layer.register_forward_hook(lambda module, args, output: heard.update({back: output[0][0, last].detach()}))
    for back in (None, hf.WINDOW, hf.WINDOW - 1):
        hook = layer.register_forward_pre_hook(disturb, with_kwargs=True) if back is not None else None
        with torch.no_grad():
            model(ids)
        if hook is not None:
            hook.remove()
    assert torch.equal(heard[None], heard[hf.WINDOW])
    assert not torch.equal(heard[None], heard[hf.WINDOW - 1])


def test_softcap_and_sinks_change_the_logits():
    """An option that were ignored would change nothing."""
    ids = hf.tokens()
    for name, change in (("gemma2", "softcap"), ("gpt_oss", "sinks")):
        model = hf.make(hf.DECODERS[name]).eval()
        model.set_attn_implementation("tilewise")
        other = copy.deepcopy(model)
        for layer in other.model.layers:
            if change == "softcap":
                layer.self_attn.attn_logit_softcapping = 0.5
            else:
                layer.self_attn.sinks.data += 2.0
        with torch.no_grad():
            assert not torch.allclose(model(ids).logits, other(ids).logits, atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_pairs_again(reentrant):
    model = hf.make(hf.DECODERS["llama"]).train()
    model.set_attn_implementation("tilewise")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = hf.tokens()
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        model(ids, attention_mask=hf.padded("left", ids), use_cache=False).logits.square().mean().backward()
        found.append(hf.gradients(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


def test_dropout_only_in_training():
    model = hf.make(hf.DECODERS["llama"])
    model.set_attn_implementation("tilewise")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = hf.tokens()
    with torch.no_grad():
        first, second = model.eval()(ids).logits, model(ids).logits
        assert torch.equal(first, second)
        torch.manual_seed(0)
        third = model.train()(ids).logits
        torch.manual_seed(0)
        assert torch.equal(third, model(ids).logits)
        assert not torch.equal(third, model(ids).logits)
    assert not torch.allclose(first, third)
