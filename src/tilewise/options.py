"""The plain-value options of the public functions: checked, and brought to the operator's form."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch

from tilewise.descale import FP8
from tilewise.dispatch import registry
from tilewise.errors import InvalidInput, InvalidType
from tilewise.problem import GRAD_NAMES

_CAUSAL: dict[Any, str] = {"bottom_right": "bottom_right", "top_left": "top_left"}
_UNCAST = (torch.float64, FP8)
_LARGEST = int(sys.float_info.max)
# A fp32 score divided by the cap, and a gradient multiplied by it, keep within fp32; beyond, one of them need not.
SOFTCAP_LEAST, SOFTCAP_MOST = 1e-12, 1e12
_NUMBER = (int, float, torch.SymInt, torch.SymFloat)


class _Default(threading.local):
    """What "auto" means in this thread; a thread-local, which torch.compile can trace and guard on."""

    def __init__(self) -> None:
        self.backend = "auto"  # of the instance: torch.compile does not guard on a default that its class holds


default = _Default()


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """The values for queries and keys: a pair as it is, one value for both."""
    if not isinstance(value, (tuple, list)):
        return value, value
    if len(value) != 2:
        raise InvalidInput(f"{name}: has {len(value)} values, must be one for both sides or a pair (q, k)")
    return value[0], value[1]


def segments(value: Any) -> tuple[Any, Any]:
    """Ids of queries and of keys: one tensor for both sides, a pair of tensors, or None."""
    segments_q, segments_k = pair("segments", value)
    if (segments_q is None) != (segments_k is None):
        name = "segments_q" if segments_q is None else "segments_k"
        raise InvalidType(f"{name}: is None though the other side has ids, must be a torch.Tensor")
    return segments_q, segments_k


def autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Under autocast q, k, v are cast to its dtype, as torch's own attention casts them; fp64 and fp8 stay."""
    device_type = q.device.type if isinstance(q, torch.Tensor) else "meta"
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        is_half = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dtype not in _UNCAST
        return tensor.to(dtype) if is_half else tensor

    return cast(q), cast(k), cast(v)


def causal(value: Any) -> str:
    """False, True or a corner, as "none", "bottom_right" or "top_left"."""
    if value is False or value is None:
        return "none"
    if value is True:
        return "bottom_right"
    if isinstance(value, str) and value in _CAUSAL:
        return value
    raise InvalidInput(f'causal: is {value!r}, must be False, True, "bottom_right" or "top_left"')


def window(value: Any) -> tuple[int | None, int | None]:
    """(left, right), each an int >= 0 or None."""
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidInput(f"window_size: is {value!r}, must be a pair (left, right) of counts, None for open")
    for side in value:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise InvalidType(f"window_size: is {tuple(value)!r}, each side must be an int or None")
        if type(side) is int and side >= 2**63:
            raise InvalidInput(f"window_size: is {tuple(value)!r}, each side must fit in 64 bits, or be None for open")
        if side < 0:
            needs = "each side must be at least 0, or None for open (-1 in other libraries)"
            raise InvalidInput(f"window_size: is {tuple(value)!r}, {needs}")
    return value[0], value[1]


def scale(value: Any) -> float | None:
    """A finite number, or None for headdim ** -0.5."""
    return None if value is None else _finite("softmax_scale", value)


def softcap(value: Any) -> float:
    """0 or a number that fp32 can divide scores by; None is 0, off."""
    number = 0.0 if value is None else _finite("softcap", value)
    if number < 0:
        raise InvalidInput(f"softcap: is {value}, must be at least 0; 0 is off")
    if number != 0 and (number < SOFTCAP_LEAST or number > SOFTCAP_MOST):
        allowed = f"between {SOFTCAP_LEAST:g} and {SOFTCAP_MOST:g}, or 0, which is off"
        raise InvalidInput(f"softcap: is {value}, must be {allowed}")
    return number


def dropout(value: Any) -> float:
    """A probability."""
    number = _finite("dropout_p", value)
    if not 0 <= number <= 1:
        raise InvalidInput(f"dropout_p: is {value}, must be between 0 and 1")
    return number


def seed(value: Any, dropout_p: float, q: torch.Tensor) -> torch.Tensor | None:
    """The seed as a 0-dim int64 tensor beside q; drawn from torch's generator if none is given; None without dropout.

    q may be anything: its check comes later, and says more.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, torch.Tensor))):
        raise InvalidType(f"dropout_seed: is {value!r}, must be an int, a one-element int64 tensor or None")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidInput(f"dropout_seed: is {value}, must fit in 64 bits")
    if dropout_p == 0:
        return None
    device = getattr(q, "device", None)
    if value is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(value, torch.Tensor):
        # a seed on the CPU goes where q is; one that lies elsewhere is refused with the other tensors
        return value if device is None or value.device == device or value.device.type != "cpu" else value.to(device)
    return torch.full((), value - 2**64 if value >= 2**63 else value, dtype=torch.int64, device=device)


def longest(value: Any) -> Any:
    """max_seqlen of one side. A tensor is taken and not read: it would wait for its device, and is only a bound."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool:
            is_now = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
            raise InvalidType(f"max_seqlen: is a tensor, {is_now}, must be one integer")
        return None
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise InvalidType(f"max_seqlen: is {value!r}, must be an int, a pair (q, k) or None")
    if value < 0:
        raise InvalidInput(f"max_seqlen: is {value}, must be at least 0")
    if type(value) is int and value >= 2**63:
        raise InvalidInput(f"max_seqlen: is {value}, must fit in 64 bits, or be None")
    return value


def flag(name: str, value: Any) -> bool:
    """A bool and nothing else."""
    if not isinstance(value, bool):
        raise InvalidType(f"{name}: is {value!r}, must be True or False")
    return value


Plain = tuple[str, float | None, float, float, bool, str]


def _plain(causal_: Any, scale_: Any, softcap_: Any, dropout_p: Any, deterministic: Any, backend: Any) -> Plain:
    return (
        causal(causal_),
        scale(scale_),
        softcap(softcap_),
        dropout(dropout_p),
        flag("deterministic", deterministic),
        registry.check_name(backend),
    )


# by type as well as by value, since 1 is no flag and True no number
remembered = functools.lru_cache(maxsize=1024, typed=True)(_plain)


def plain(*values: Any) -> Plain:
    """causal, softmax_scale, softcap, dropout_p, deterministic and backend, checked, each in its plain form.

    "auto" becomes what ``use_backend`` set.
    """
    if torch.compiler.is_compiling():
        checked = _plain(*values)
    else:
        try:
            checked = remembered(*values)
        except TypeError:  # some value cannot be remembered: a list, say, which has an error of its own
            checked = _plain(*values)
    return checked if checked[5] != "auto" else (*checked[:5], default.backend)


def needs_grad(*tensors: torch.Tensor | None) -> tuple[str, ...]:
    """Names, among q, k, v, bias, alibi_slopes, sink, of the tensors that require grad."""
    names = []
    for name, tensor in zip(GRAD_NAMES, tensors, strict=True):
        if tensor is not None and getattr(tensor, "requires_grad", False):
            names.append(name)
    return tuple(names)


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, _NUMBER):
        raise InvalidType(f"{name}: is {value!r}, must be a number")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise InvalidInput(f"{name}: is an integer of {value.bit_length()} bits, must fit in a float")
    # false for NaN and infinities, and a comparison that torch.compile can trace
    if not value - value == 0:  # type: ignore[operator]
        raise InvalidInput(f"{name}: is {value}, must be finite")
    return float(value)
