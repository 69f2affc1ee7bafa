"""Graphs: torch.compile without graph breaks, a compiled step over a static cache, torch.export."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the Transformers integration needs transformers")

import transformers

from tests.integrations import hf
from tests.integrations.test_transformers_packing import ONES, POSITIONS

pytestmark = pytest.mark.usefixtures("device")


def model_of(name):
    model = hf.make(hf.DECODERS[name]).eval()
    model.set_attn_implementation("tilewise")
    return model


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_whole_forward_is_one_graph():
    model = model_of("gemma3")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = hf.tokens(batch=1, seqlen=12)
    padding = hf.padded("left", ids)
    for options in ({}, {"attention_mask": padding}, {"position_ids": hf.placed(POSITIONS)}):
        with torch.no_grad():
            ours = compiled(ids, use_cache=False, **options).logits
            expected = model(ids, use_cache=False, **options).logits
        keep = options.get("attention_mask", hf.placed(ONES)).bool()
        torch.testing.assert_close(ours[keep], expected[keep], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_compiled_step_over_a_static_cache(chunk):
    model = model_of("llama")
    ids = hf.tokens(batch=2, seqlen=12)
    options = {"attention_mask": hf.padded("left", ids), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    config = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    found = model.generate(
        ids, **options, cache_implementation="static", compile_config=config, prefill_chunk_size=chunk
    )
    assert torch.equal(found, expected)


def test_packed_positions_inside_a_graph_without_a_mask():
    """A module that makes no mask: sequences are told apart without reading a value."""
    from tests.integrations.test_transformers_attention import Module, qkv
    from tilewise.integrations.transformers import attention_forward

    q, k, v = (hf.placed(x) for x in qkv())
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)
    module = Module(is_causal=True)

    def call(positions):
        return attention_forward(module, q, k, v, None, position_ids=positions)[0]

    expected = call(positions)
    assert not torch.allclose(expected, call(torch.arange(7)[None].expand(2, -1)))
    found = torch.compile(call, backend="eager", fullgraph=True)(positions)
    torch.testing.assert_close(found, expected)


def test_export():
    model = model_of("llama")
    ids = hf.tokens()
    options = {"attention_mask": hf.padded("left", ids), "use_cache": False}
    exported = torch.export.export(model, (ids,), options).module()
    with torch.no_grad():
        torch.testing.assert_close(exported(ids, **options).logits, model(ids, **options).logits, rtol=1e-3, atol=1e-4)
