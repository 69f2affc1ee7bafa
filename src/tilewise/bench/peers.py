"""The other attention kernels of a CUDA machine, each used where it can be imported and takes the problem.

An adapter gives the call, or raises ``Refusal`` with what the peer lacks; whatever else keeps it from running is shown
as it is raised, since not every version of a peer has the same arguments.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench import gpu_cases
from tilewise.bench.cases import Case
from tilewise.errors import UnsupportedProblem

Call = Callable[[], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]
Options = dict[str, Any]


# peer -> the module that it is imported from
_MODULES = {"fa3": "flash_attn_interface", "fa4-cute": "flash_attn.cute"}


class Refusal(RuntimeError):
    """What a peer lacks for a problem."""


def _sdpa(kernel: SDPBackend, case: Case, tensors: Tensors, options: Options) -> Call:
    for lacking, asked in (("window", case.window), ("packed form", case.lengths), ("bias gradient", case.bias)):
        if asked:
            raise Refusal(f"has no {lacking}")
    if case.causal and case.keys != case.seqlen:
        raise Refusal("its causal corner is the top left one")
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    grouped = case.nheads_k is not None

    def call() -> torch.Tensor:
        with sdpa_kernel(kernel):
            out: torch.Tensor = scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def _flex(case: Case, tensors: Tensors, options: Options) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case not in gpu_cases.COMPILED_PER_SHAPE:
        raise Refusal("compiled per shape, so on some rows only")
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors)
    mask, change, bias = None, None, options.get("bias")
    if case.causal or case.window is not None:
        width = case.keys if case.window is None else case.window

        def keep(_b: Any, _h: Any, i: Any, j: Any) -> Any:
            return (j <= i) & (i - j < width)

        mask = create_block_mask(keep, None, None, case.seqlen, case.keys, device=str(q.device))
    if bias is not None:

        def change(score: Any, _b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + bias[h, i, j]

    torch._dynamo.reset()  # every shape counts against one limit of recompilations, past which it would run uncompiled
    torch._functorch.config.donated_buffer = False  # its backward is called again and again
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    grouped = case.nheads_k is not None

    def call() -> torch.Tensor:
        with torch.enable_grad():  # one graph for both passes: compiling it takes longer than all that is timed
            out: torch.Tensor = compiled(q, k, v, score_mod=change, block_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2)

    return call


def _flash_attention(module: str, open_side: int | None, case: Case, tensors: Tensors, options: Options) -> Call:
    """``flash_attn_func`` or ``flash_attn_varlen_func`` of ``module``, whose open window side is ``open_side``."""
    if case.bias:
        raise Refusal("has no bias")
    package = importlib.import_module(module)
    packed = case.lengths is not None
    function: Any = package.flash_attn_varlen_func if packed else package.flash_attn_func
    given: dict[str, Any] = {"causal": case.causal or case.window is not None}
    if case.window is not None:
        given["window_size"] = tuple(open_side if side is None else side for side in case.window_size)
    if packed:
        offsets, longest = options["cu_seqlens_q"], options["max_seqlen"]
        given |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
    unknown = set(given) - set(inspect.signature(function).parameters)
    if unknown:
        raise Refusal(f"{function.__name__} does not take {', '.join(sorted(unknown))}")

    def call() -> torch.Tensor:
        result = function(*tensors, **given)
        out: torch.Tensor = result[0] if isinstance(result, tuple | list) else result
        return out

    return call


PEERS: dict[str, Callable[[Case, Tensors, Options], Call]] = {
    "fa2-sdpa": functools.partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn-sdpa": functools.partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex": _flex,
    "fa3": functools.partial(_flash_attention, _MODULES["fa3"], -1),
    "fa4-cute": functools.partial(_flash_attention, _MODULES["fa4-cute"], None),
}
# peer -> the distribution that carries it
DISTRIBUTIONS = {"fa3": "tokenspeed-fa3", "fa4-cute": "flash-attn-4", "cutlass-dsl": "nvidia-cutlass-dsl"}


def told(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, UnsupportedProblem):
        return "; ".join(str(reason) for row in error.trace for reason in row.reasons)
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line if isinstance(error, Refusal) else f"{type(error).__name__}: {line}"[:300]


def versions() -> dict[str, str]:
    """What of the peers is installed."""
    cudnn: Any = torch.backends.cudnn
    found = {"cudnn": str(cudnn.version())} if cudnn.is_available() else {}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def importable() -> tuple[str, ...]:
    """The peers whose module can be imported; torch's own always."""
    found = []
    for name in PEERS:
        try:
            importlib.import_module(_MODULES.get(name, "torch"))
        except Exception:  # a broken installation is none
            continue
        found.append(name)
    return tuple(found)
