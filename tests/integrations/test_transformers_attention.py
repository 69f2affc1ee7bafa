"""The attention function itself: what each option means, what is refused, and that nothing is ignored."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="the Transformers integration needs transformers")

import transformers

import tilewise.integrations.transformers as adapter
from tests.integrations import hf
from tilewise.errors import InvalidInput, InvalidType
from tilewise.testing.budget import assert_within_budget

BATCH, HEADS, HEADS_K, DIM = 2, 4, 2, 8


class Module(torch.nn.Module):
    """An attention module as far as the interface looks at it."""

    def __init__(self, training=False, **attributes):
        super().__init__()
        self.train(training)
        for name, value in attributes.items():
            setattr(self, name, value)


def qkv(seqlen_q=7, seqlen_k=7, dtype=torch.float32, seed=0):
    g = torch.Generator("cpu").manual_seed(seed)
    shapes = ((HEADS, seqlen_q, DIM), (HEADS_K, seqlen_k, DIM), (HEADS_K, seqlen_k, DIM))
    return [torch.randn(BATCH, *shape, generator=g, dtype=torch.float64, device="cpu").to(dtype) for shape in shapes]


def expected(q, k, v, keep=None, bias=None, **options):
    if bias is not None:
        options["position_bias"] = bias.double()
    if "s_aux" in options:
        options["s_aux"] = options["s_aux"].double()
    out, weights = hf.oracle_attention(None, q.double(), k.double(), v.double(), keep, **options)
    return out, weights


def check(keep_or_none, mask, module=None, seqlen_q=7, seqlen_k=7, oracle=None, **options):
    """tilewise with ``mask`` and ``options`` against the oracle with the pairs ``keep_or_none``."""
    q, k, v = qkv(seqlen_q, seqlen_k)
    out, weights = adapter.attention_forward(module or Module(is_causal=True), q, k, v, mask, **options)
    assert weights is None
    oracle = {name: options[name] for name in ("softcap", "s_aux", "scaling") if name in options} | (oracle or {})
    plain, _ = hf.oracle_attention(None, q, k, v, keep_or_none, **oracle)
    assert out.shape == (BATCH, seqlen_q, HEADS, DIM)
    assert out.is_contiguous()
    assert_within_budget(out, expected(q, k, v, keep_or_none, **oracle)[0], plain)
    return out


def band(seqlen_q, seqlen_k, lower=None, upper=None):
    i = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k)[None, :]
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    keep = keep & (j >= i + lower) if lower is not None else keep
    return (keep & (j <= i + upper) if upper is not None else keep)[None, None]


@pytest.mark.parametrize("seqlen_q", [1, 3, 7])
def test_without_a_mask_the_flags_decide(seqlen_q):
    causal = band(seqlen_q, 7, upper=0)
    check(causal, None, seqlen_q=seqlen_q)
    check(causal, None, Module(), seqlen_q=seqlen_q, is_causal=True)
    check(None, None, Module(is_causal=False), seqlen_q=seqlen_q)
    check(None, None, Module(is_causal=True), seqlen_q=seqlen_q, is_causal=False)
    check(band(seqlen_q, 7, -3, 0), None, seqlen_q=seqlen_q, sliding_window=4)
    check(band(seqlen_q, 7, -3, 3), None, Module(is_causal=False), seqlen_q=seqlen_q, sliding_window=4)


def test_case_39_a_window_counts_the_query():
    q, k, v = (torch.randn(1, 1, 16, 4) for _ in range(3))
    module = Module(is_causal=True)
    before, _ = adapter.attention_forward(module, q, k, v, None, sliding_window=4)
    for key, heard in ((3, False), (4, True), (7, True), (8, False)):
        other = v.clone()
        other[:, :, key] += 1
        after, _ = adapter.attention_forward(module, q, k, other, None, sliding_window=4)
        assert (not torch.equal(before[:, 7], after[:, 7])) == heard


def test_a_mask_is_the_whole_truth():
    """As in eager: flags of the module add nothing to what the mask says."""
    keep = torch.rand(BATCH, 1, 7, 7, generator=torch.Generator().manual_seed(3)) > 0.4
    keep[..., 0] = True
    check(keep, keep)
    check(keep, keep, sliding_window=2, is_causal=True)
    per_head = torch.rand(1, HEADS, 7, 7, generator=torch.Generator().manual_seed(4)) > 0.4
    per_head[..., 0] = True
    check(per_head, per_head)


def test_a_float_mask_is_added():
    bias = torch.randn(BATCH, 1, 7, 7, generator=torch.Generator().manual_seed(5))
    check(None, bias, oracle={"position_bias": bias})
    lowest = torch.finfo(torch.float32).min
    additive = torch.where(band(7, 7, upper=0), 0.0, lowest)
    check(band(7, 7, upper=0), additive)
    rows = additive.clone().expand(BATCH, -1, -1, -1).contiguous()
    rows[0, :, 2] = lowest  # every pair at the lowest number is not an empty row
    out = check(None, rows, oracle={"position_bias": rows})
    assert out.isfinite().all()


def test_position_bias_is_added_and_has_a_gradient():
    bias = torch.randn(1, HEADS, 7, 7, generator=torch.Generator().manual_seed(6))
    mask = adapter.build_mask(batch_size=BATCH, q_length=7, kv_length=7)
    check(band(7, 7, upper=0), mask, position_bias=bias, oracle={"position_bias": bias})
    check(band(7, 7, upper=0), band(7, 7, upper=0), position_bias=bias, oracle={"position_bias": bias})
    check(None, bias * 2, position_bias=bias, oracle={"position_bias": bias * 3})
    check(band(7, 7, upper=0), None, position_bias=bias, oracle={"position_bias": bias})
    leaf = bias.clone().requires_grad_()
    adapter.attention_forward(Module(), *qkv(), mask, position_bias=leaf)[0].square().sum().backward()
    plain = bias.clone().requires_grad_()
    hf.oracle_attention(None, *qkv(), band(7, 7, upper=0), position_bias=plain)[0].square().sum().backward()
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-4, atol=1e-5)


def test_a_bias_over_a_partly_filled_static_cache_is_cut_with_the_keys():
    bias = torch.randn(1, HEADS, 3, 9, generator=torch.Generator().manual_seed(7))
    mask = adapter.build_mask(batch_size=BATCH, q_length=3, kv_length=9, q_offset=torch.tensor(2))
    dense = mask.plan.dense()
    options = {"seqlen_q": 3, "seqlen_k": 9, "oracle": {"position_bias": bias}}
    with hf.counted() as calls:
        check(dense, mask, position_bias=bias, **options)
    assert calls.arguments[0]["k"].shape[1] == 5


def test_softcap_sinks_and_scaling():
    check(band(7, 7, upper=0), None, softcap=1.5)
    check(band(7, 7, upper=0), None, s_aux=torch.randn(HEADS))
    for scaling in (0.3, 0.0, -1.0):
        check(band(7, 7, upper=0), None, scaling=scaling)


def test_a_learned_scaling_keeps_its_gradient():
    scaling = torch.tensor(0.3, requires_grad=True)
    adapter.attention_forward(Module(is_causal=True), *qkv(), None, scaling=scaling)[0].sum().backward()
    plain = torch.tensor(0.3, requires_grad=True)
    hf.oracle_attention(None, *qkv(), band(7, 7, upper=0), scaling=plain)[0].sum().backward()
    torch.testing.assert_close(scaling.grad, plain.grad, rtol=1e-4, atol=1e-5)


def test_learned_queries_of_batch_one_serve_every_item():
    q, k, v = qkv()
    out, _ = adapter.attention_forward(Module(is_causal=False), q[:1], k, v, None)
    for item in range(BATCH):
        alone, _ = adapter.attention_forward(Module(is_causal=False), q[:1], k[item, None], v[item, None], None)
        torch.testing.assert_close(out[item], alone[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    q, k, v = qkv(dtype=dtype)
    out, _ = adapter.attention_forward(Module(is_causal=True), q, k, v, None)
    plain, _ = hf.oracle_attention(None, q, k, v, band(7, 7, upper=0))
    assert_within_budget(out, expected(q, k, v, band(7, 7, upper=0))[0], plain)


def test_dropout_is_for_training():
    q, k, v = qkv()
    without, _ = adapter.attention_forward(Module(is_causal=True), q, k, v, None)
    evaluating, _ = adapter.attention_forward(Module(is_causal=True), q, k, v, None, dropout=0.5)
    training, _ = adapter.attention_forward(Module(training=True, is_causal=True), q, k, v, None, dropout=0.5)
    all_gone, _ = adapter.attention_forward(Module(training=True, is_causal=True), q, k, v, None, dropout=1.0)
    assert torch.equal(without, evaluating)
    assert not torch.allclose(without, training)
    assert not all_gone.any()


@pytest.mark.parametrize("training", [False, True])
def test_case_141_weights_are_the_causal_ones(training):
    """output_attentions gives the same output and lower-triangular weights, also where there is no mask."""
    q, k, v = qkv()
    for mask in (None, adapter.build_mask(batch_size=BATCH, q_length=7, kv_length=7)):
        module = Module(training=training, is_causal=True)
        torch.manual_seed(3)
        out, weights = adapter.attention_forward(module, q, k, v, mask, dropout=0.4, output_attentions=True)
        torch.manual_seed(3)
        again, none = adapter.attention_forward(module, q, k, v, mask, dropout=0.4, output_attentions=False)
        assert none is None
        assert weights.shape == (BATCH, HEADS, 7, 7)
        assert not weights.triu(1).any()
        values = v.repeat_interleave(HEADS // HEADS_K, dim=1)
        torch.testing.assert_close((weights @ values).transpose(1, 2), out, rtol=1e-5, atol=1e-6)
        if training:
            assert (weights == 0).sum() > BATCH * HEADS * 21
        else:
            torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, HEADS, 7))
            assert_within_budget(weights, expected(q, k, v, band(7, 7, upper=0))[1], None)
            torch.testing.assert_close(out, again)


def test_case_159_an_item_that_is_all_padding_is_zero():
    """Lengths 5, 4, 1, 0 as key padding (True takes part): the empty item is 0, its gradients too."""
    lengths = torch.tensor([5, 4, 1, 0])
    padding = torch.arange(5)[None] < lengths[:, None]
    q, k, v = (torch.randn(4, 2, 5, 8, requires_grad=True) for _ in range(3))
    function = transformers.masking_utils.bidirectional_mask_function
    mask = adapter.build_mask(
        batch_size=4, q_length=5, kv_length=5, mask_function=function, attention_mask=padding.long()
    )
    out, _ = adapter.attention_forward(Module(), q, k, v, mask)
    out.square().sum().backward()
    assert not out[3].any()
    for tensor in (q, k, v):
        assert tensor.grad.isfinite().all()
        assert not tensor.grad[3].any()
    plain, _ = hf.oracle_attention(None, q, k, v, padding[:, None, None, :])
    torch.testing.assert_close(out[:3], plain[:3], rtol=1e-5, atol=1e-6)


def test_packed_lengths_without_a_mask():
    """Offsets of queries and keys may differ; each sequence has its own bottom-right corner."""
    q, k, v = (x[:1] for x in qkv(7, 9))
    offsets = {"cu_seq_lens_q": torch.tensor([0, 3, 7]), "cu_seq_lens_k": torch.tensor([0, 5, 9])}
    for module, options, window in (
        (Module(is_causal=True), {}, None),
        (Module(is_causal=False), {}, None),
        (Module(is_causal=True), {"max_length_q": 4, "max_length_k": 5, "sliding_window": 2}, 2),
    ):
        out, _ = adapter.attention_forward(module, q, k, v, None, **offsets, **options)
        for (a, b), (c, d) in (((0, 3), (0, 5)), ((3, 7), (5, 9))):
            part = q[:, :, a:b], k[:, :, c:d], v[:, :, c:d]
            alone, _ = adapter.attention_forward(module, *part, None, sliding_window=window)
            torch.testing.assert_close(out[:, a:b], alone, rtol=1e-5, atol=1e-6)
    square = band(7, 7, upper=0)
    with pytest.raises(InvalidInput, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        adapter.attention_forward(Module(), q, k[:, :, :7], v[:, :, :7], square, **offsets)
    segmented, _ = adapter.attention_forward(
        Module(is_causal=True), q, k[:, :, :7], v[:, :, :7], None,
        cu_seq_lens_q=offsets["cu_seq_lens_q"], cu_seq_lens_k=offsets["cu_seq_lens_q"],
        position_bias=torch.zeros(1, 1, 7, 7),
    )  # fmt: skip
    packed, _ = adapter.attention_forward(
        Module(is_causal=True), q, k[:, :, :7], v[:, :, :7], None,
        cu_seq_lens_q=offsets["cu_seq_lens_q"], cu_seq_lens_k=offsets["cu_seq_lens_q"],
    )  # fmt: skip
    torch.testing.assert_close(segmented, packed, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"indices": torch.zeros(1)}, TypeError, "does not know the option indices"),
        ({"head_mask": torch.ones(4), "block_table": 1}, TypeError, "block_table, head_mask"),
        ({"attention_mask": torch.ones(2, 7)}, InvalidInput, "attention_mask has shape"),
        ({"attention_mask": torch.ones(2, 1, 7, 7, dtype=torch.long)}, InvalidType, "attention_mask is torch.int64"),
        ({"attention_mask": torch.ones(2, 1, 7, 9, dtype=torch.bool)}, ValueError, "mask"),
        ({"seq_idx": torch.zeros(2, 3)}, InvalidInput, "seq_idx has shape"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"s_aux": torch.zeros(3)}, ValueError, "sink"),
    ],
)
def test_refusals_name_the_option(options, error, words):
    mask = options.pop("attention_mask", None)
    with pytest.raises(error, match=words):
        adapter.attention_forward(Module(is_causal=True), *qkv(), mask, **options)


def test_causality_that_nobody_states_is_refused():
    with pytest.raises(InvalidInput, match="is_causal: Module passes no attention_mask"):
        adapter.attention_forward(Module(), *qkv(), None)
    check(None, None, Module(), seqlen_q=1)


def test_a_mask_for_other_lengths_is_refused():
    mask = adapter.build_mask(batch_size=BATCH, q_length=7, kv_length=9)
    with pytest.raises(InvalidInput, match=r"attention_mask is for .* \(2, 7, 9\), query and key have \(2, 7, 7\)"):
        adapter.attention_forward(Module(), *qkv(), mask)


def test_harmless_options_change_nothing():
    q, k, v = qkv()
    plain, _ = adapter.attention_forward(Module(is_causal=True), q, k, v, None)
    options = {**dict.fromkeys(adapter.HARMLESS, 1), "head_mask": None}
    assert torch.equal(adapter.attention_forward(Module(is_causal=True), q, k, v, None, **options)[0], plain)


def test_layers_share_what_was_made_of_the_mask():
    mask = adapter.build_mask(batch_size=BATCH, q_length=7, kv_length=7, attention_mask=torch.ones(BATCH, 7))
    positions = torch.arange(7)[None]
    for _ in range(3):
        adapter.attention_forward(Module(), *qkv(), mask, position_ids=positions)
    assert len(mask.resolved) == 1
    adapter.attention_forward(Module(), *qkv(), mask, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    assert len(mask.resolved) == 2


def test_register_again_and_too_old(monkeypatch):
    adapter.register()
    assert transformers.AttentionInterface()["tilewise"] is adapter.attention_forward
    old = SimpleNamespace(__version__="4.57.1")
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(ImportError, match=r"5\.0 or newer, found 4\.57\.1"):
        adapter.register()


def test_the_module_imports_without_transformers():
    code = "import sys, tilewise.integrations.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
