"""The feature table: what each backend's ``supports`` says of one problem a feature, as Markdown.

python -m scripts.features
"""

from __future__ import annotations

import torch

from tilewise.device import DeviceFacts
from tilewise.dispatch import registry
from tilewise.dispatch.backend import Backend
from tilewise.problem import Problem

QKV = ("q", "k", "v")
BASE = Problem(
    batch=2, seqlen_q=1024, seqlen_k=1024, nheads=8, nheads_k=8, headdim=64, headdim_v=64, softmax_scale=0.125
)
FULL = (2, 8, 1024, 1024)
# A made-up device of each type, so that the table is the same wherever it is written.
DEVICES = {
    "cpu": DeviceFacts(type="cpu", name="cpu", arch="AVX2", threads=2, torch="2.13.0"),
    "cuda": DeviceFacts(
        type="cuda",
        name="NVIDIA H200",
        arch="sm_90",
        multiprocessors=132,
        shared_memory=232448,
        total_memory=141 << 30,
        torch="2.13.0",
        triton="3.6.0",
    ),
}

# Feature -> the fields of its problem and, if not q, k and v, what a gradient is asked for.
FEATURES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "fp32": ({"dtype": torch.float32}, QKV),
    "bf16": ({"dtype": torch.bfloat16}, QKV),
    "fp16": ({"dtype": torch.float16}, QKV),
    "fp64": ({"dtype": torch.float64}, QKV),
    "fp8 (e4m3) with descales": ({"dtype": torch.float8_e4m3fn, "descales": QKV}, QKV),
    "GQA, MQA": ({"nheads_k": 2}, QKV),
    "headdim 1": ({"headdim": 1, "headdim_v": 1}, QKV),
    "headdim 80": ({"headdim": 80, "headdim_v": 80}, QKV),
    "headdim 128": ({"headdim": 128, "headdim_v": 128}, QKV),
    "headdim 256": ({"headdim": 256, "headdim_v": 256}, QKV),
    "headdim 512": ({"headdim": 512, "headdim_v": 512}, QKV),
    "headdim_v differs (192, 128)": ({"headdim": 192, "headdim_v": 128}, QKV),
    "no keys (seqlen_k 0)": ({"seqlen_k": 0}, QKV),
    "any strides": ({"inner_contiguous": False}, QKV),
    "packed sequences (varlen)": ({"varlen": True, "total_q": 2048, "total_k": 2048}, QKV),
    "causal": ({"causal": "bottom_right"}, QKV),
    "causal, bottom-right, unequal lengths": ({"causal": "bottom_right", "seqlen_q": 512}, QKV),
    "causal, top-left, unequal lengths": ({"causal": "top_left", "seqlen_q": 512}, QKV),
    "window": ({"causal": "bottom_right", "window_left": 127, "window_right": 0}, QKV),
    "segments (packed documents)": ({"segments": True}, QKV),
    "boolean mask": ({"mask_shape": FULL}, QKV),
    "bias": ({"bias_shape": FULL, "bias_dtype": torch.float32}, QKV),
    "bias with its gradient": ({"bias_shape": FULL, "bias_dtype": torch.float32}, (*QKV, "bias")),
    "softcap": ({"softcap": 30.0}, QKV),
    "ALiBi": ({"alibi": True}, QKV),
    "ALiBi with its slopes' gradient": ({"alibi": True}, (*QKV, "alibi_slopes")),
    "sinks": ({"sink": True}, QKV),
    "sinks with their gradient": ({"sink": True}, (*QKV, "sink")),
    "dropout": ({"dropout_p": 0.1}, QKV),
    "deterministic": ({"deterministic": True}, QKV),
    "forward mode (jvp)": ({"derivative": "jvp"}, QKV),
    "double backward": ({"derivative": "second"}, QKV),
}
HALF = {"dtype": torch.bfloat16}


def device_type(backend: Backend) -> str:
    """The kind of device that a backend is for."""
    return "cuda" if "cuda" in backend.auto_devices and "cpu" not in backend.auto_devices else "cpu"


def runs(backend: Backend, fields: dict[str, object], grads: tuple[str, ...]) -> bool:
    """Whether the backend runs the problem, in fp32 or, where the feature is not a dtype, in bf16."""
    kind = device_type(backend)
    choices = [fields] if "dtype" in fields else [fields, {**HALF, **fields}]
    problems = [BASE.replace(device_type=kind, needs_grad=grads, **choice) for choice in choices]
    return any(not backend.supports(problem, DEVICES[kind]) for problem in problems)


def cell(backend: Backend, feature: str) -> str:
    """ "yes", "forward" where only that runs, or "no"."""
    fields, grads = FEATURES[feature]
    if "derivative" in fields:
        return "yes" if runs(backend, fields, grads) else "no"
    if all(runs(backend, {"derivative": name, **fields}, grads) for name in ("forward", "backward")):
        return "yes"
    return "forward" if runs(backend, fields, ()) else "no"


def table() -> str:
    """The Markdown table: a row for each feature, a column for each backend."""
    backends = [registry.load(name) for name in registry.names()]
    rows = [["feature", *(f"`{backend.name}`" for backend in backends)], ["---"] * (len(backends) + 1)]
    rows += [[feature, *(cell(backend, feature) for backend in backends)] for feature in FEATURES]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
