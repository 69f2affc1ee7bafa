"""Small Transformers models with random weights, and what the tests of the integration do with them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
import transformers.masking_utils
from torch import Tensor

import tilewise.integrations.transformers as adapter
from tilewise import functional
from tilewise.testing.budget import assert_within_budget

VOCABULARY = 67
WINDOW = 5
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GQA = {**COMMON, "num_key_value_heads": 2, "head_dim": 8, "attention_dropout": 0.0}
MIXED = {**GQA, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GQA)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GQA, sliding_window=WINDOW)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**GQA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**GQA, sliding_window=WINDOW, attn_logit_softcapping=2.0)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**MIXED)),
    # Every expert takes every token: how tokens are routed would change the rounding of others.
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**MIXED, num_local_experts=4, num_experts_per_tok=4, experts_implementation="eager")
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_implementation="eager",
            bos_token_id=1,
            eos_token_id=None,
        )
    ),
    "llama4": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **GQA, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=40, num_experts_per_tok=1
        )
    ),
}


def oracle_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> Any:
    """Materialising attention in the dtype it is given: eager's, whose softmax stays fp32 even in an fp64 model."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scaling = options.get("scaling")
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if options.get("softcap") is not None:
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    if options.get("position_bias") is not None:
        scores = scores + options["position_bias"]
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    sinks = options.get("s_aux")
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


def oracle_mask(**options: Any) -> Tensor:
    """Transformers' own dense boolean mask, always."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return transformers.masking_utils.sdpa_mask(**{**options, **skips})


def make(build: Callable[[], Any], seed: int = 0) -> Any:
    """A model from ``build`` with seeded weights, large enough that attention is far from uniform."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(std=1.0 if "embed" in name or "wte" in name else 0.2)
    return model


def cache_name(model: Any) -> str:
    """What this version of Transformers calls the cache argument."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def tokens(batch: int = 2, seqlen: int = 13, seed: int = 1) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return placed(torch.randint(3, VOCABULARY, (batch, seqlen), generator=generator, device="cpu"))


def placed(value: Any) -> Any:
    """A tensor, or the tensors of a dict, on the device that models are made on."""
    if isinstance(value, dict):
        return {name: placed(item) for name, item in value.items()}
    return value.to(torch.get_default_device()) if isinstance(value, Tensor) else value


def padded(side: str, like: Tensor, count: int = 4) -> Tensor:
    """An attention mask that pads ``count`` tokens of the first item on ``side`` ("none": nowhere)."""
    mask = torch.ones_like(like)
    if side == "left":
        mask[0, :count] = 0
    elif side == "right":
        mask[0, -count:] = 0
    return mask


def gradients(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def use(model: Any, implementation: str) -> None:
    """Set a model's attention and that of its encoder and decoder, which Transformers 5.17 leaves as it was."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(implementation)


def in_three_ways(model: Any, run: Callable[[Any], dict[str, Tensor]]) -> tuple[dict[str, Tensor], ...]:
    """What ``run`` gives for tilewise, for the oracle in fp64 and for eager in the model's own dtype."""
    found = {}
    for name, implementation, dtype in (
        ("tilewise", "tilewise", None),
        ("fp64", "oracle", torch.float64),
        ("plain", "eager", None),
    ):
        use(model, implementation)
        before = model.dtype
        if dtype is not None:
            model.to(dtype)
        model.zero_grad(set_to_none=True)
        with counted() as calls:
            found[name] = run(model)
        assert (calls.attention > 0) == (implementation == "tilewise")
        model.to(before)
    return found["tilewise"], found["fp64"], found["plain"]


def assert_like_eager(model: Any, run: Callable[[Any], dict[str, Tensor]]) -> None:
    """Every tensor that ``run`` gives is within the error budget: twice eager's own error, and one rounding."""
    actual, expected, plain = in_three_ways(model, run)
    for name, tensor in actual.items():
        assert_within_budget(tensor, expected[name].double(), plain[name], name=name)


class Calls:
    """Calls of ``functional.attention`` and the largest mask it was given."""

    def __init__(self) -> None:
        self.attention = 0
        self.arguments: list[dict[str, Any]] = []

    @property
    def largest_mask(self) -> int:
        """Stored elements of the largest mask, over all batch items."""
        sizes = [call["mask"].numel() for call in self.arguments if call.get("mask") is not None]
        return max(sizes, default=0)


@contextlib.contextmanager
def counted() -> Iterator[Calls]:
    """Watch what the adapter asks of the core."""
    calls, original = Calls(), functional.attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        calls.attention += 1
        calls.arguments.append({"q": args[0], "k": args[1], "v": args[2], **kwargs})
        return original(*args, **kwargs)

    functional.attention = attention
    try:
        yield calls
    finally:
        functional.attention = original


adapter.register()
transformers.AttentionInterface.register("oracle", oracle_attention)
transformers.AttentionMaskInterface.register("oracle", oracle_mask)
