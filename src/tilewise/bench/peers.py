"""The other attention kernels of a CUDA machine, each used where it can be imported and takes the problem."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench.cases import Case

Call = Callable[[], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


def _sdpa(kernel: SDPBackend, case: Case, tensors: Tensors) -> Call | None:
    if case.window is not None:
        return None
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    grouped = case.nheads_k is not None

    def call() -> torch.Tensor:
        with sdpa_kernel(kernel):
            out: torch.Tensor = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def _flex(case: Case, tensors: Tensors) -> Call | None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    mask = None
    if case.causal or case.window is not None:
        width = case.seqlen if case.window is None else case.window

        def keep(_b: Any, _h: Any, i: Any, j: Any) -> Any:
            return (j <= i) & (i - j < width)

        mask = create_block_mask(keep, None, None, case.seqlen, case.seqlen, device=str(q.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    grouped = case.nheads_k is not None
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped).transpose(1, 2)


def _flash_attention(module: str, case: Case, tensors: Tensors) -> Call | None:
    function: Any = importlib.import_module(module).flash_attn_func
    options: dict[str, Any] = {"causal": case.causal or case.window is not None}
    if case.window is not None:
        options["window_size"] = case.window_size

    def call() -> torch.Tensor:
        result = function(*tensors, **options)
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return call


PEERS: dict[str, Callable[[Case, Tensors], Call | None]] = {
    "fa2-sdpa": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn-sdpa": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex": _flex,
    "fa3": functools.partial(_flash_attention, "flash_attn_interface"),
    "fa4-cute": functools.partial(_flash_attention, "flash_attn.cute"),
}


def calls(case: Case, tensors: Tensors, names: tuple[str, ...]) -> tuple[dict[str, Call], dict[str, str]]:
    """The peers that ran the problem once, and why the others did not."""
    able: dict[str, Call] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            call = PEERS[name](case, tensors)
            if call is None:
                refused[name] = "has no such feature"
                continue
            with torch.no_grad():
                call()
        except Exception as error:  # whatever keeps a peer from running is its answer, and is shown
            refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        able[name] = call
    return able, refused


def has_backward(call: Call, tensors: Tensors, dout: torch.Tensor) -> bool:
    """Whether gradients come through."""
    try:
        torch.autograd.grad(call(), tensors, dout)
    except Exception:  # a peer without a backward says so in its own way
        return False
    return True
