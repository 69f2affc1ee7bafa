"""Random attention calls from a seed: sizes, dtype, memory layout and any combination of features.

spec = Spec(seqlen_q=33, seqlen_k=40, nheads=4, nheads_k=2, features=("causal", "bias", "sink"))
sample = make(spec, seed=0)
out = tilewise.attention(sample.q, sample.k, sample.v, **sample.options)
expected, lse = attention_oracle(*sample.in_fp64()[:3], **sample.oracle_options())
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise import rng

LAYOUTS = ("contiguous", "heads_first", "last_dim", "sliced", "expanded")
Options = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """What to make. ``lengths_q`` and ``lengths_k`` switch to the packed form; ``spare`` tokens follow its last offset.

    ``device`` is torch's default device if not given; the same seed gives the same numbers on every device.
    ``requires_grad`` names tensors among q, k, v, bias, alibi_slopes, sink; "all" is every float tensor there is.
    """

    batch: int = 2
    seqlen_q: int = 17
    seqlen_k: int = 23
    nheads: int = 4
    nheads_k: int = 2
    headdim: int = 16
    headdim_v: int = 16
    dtype: torch.dtype = torch.float32
    device: str = field(default_factory=lambda: torch.get_default_device().type)
    features: tuple[str, ...] = ()
    layout: str = "contiguous"
    requires_grad: tuple[str, ...] | str = ()
    spread: float = 1.0
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    spare: int = 0

    @property
    def varlen(self) -> bool:
        return self.lengths_q is not None

    @property
    def yardstick_dtype(self) -> torch.dtype:
        """What plain PyTorch computes in to measure the budget; fp64 cannot measure itself."""
        return torch.float32 if self.dtype == torch.float64 else self.dtype


@dataclass
class Sample:
    """The tensors of one call, its options for ``tilewise.attention``, and gradients to send back."""

    spec: Spec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    options: Options = field(default_factory=dict)

    def float_tensors(self) -> dict[str, torch.Tensor]:
        """q, k, v and the float options there are, by name."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        given = (name for name in ("bias", "alibi_slopes", "sink") if self.options.get(name) is not None)
        return named | {name: self.options[name] for name in given}

    def differentiable(self) -> dict[str, torch.Tensor]:
        """The tensors that require grad, by name."""
        return {name: tensor for name, tensor in self.float_tensors().items() if tensor.requires_grad}

    def converted(self, dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None) -> Sample:
        """The same numbers in another dtype, contiguous, as new leaves with the same requires_grad.

        ``dtypes`` names those that get one of their own.
        """
        own = dtypes or {}

        def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(own.get(name, dtype)).contiguous().requires_grad_(tensor.requires_grad)

        floats = {name: convert(name, tensor) for name, tensor in self.float_tensors().items()}
        options = self.options | {name: floats[name] for name in floats if name in self.options}
        return dataclasses.replace(
            self, q=floats["q"], k=floats["k"], v=floats["v"], options=options, dout=self.dout.to(dtype)
        )

    def oracle_options(self) -> Options:
        """The options as the oracle takes them: the dropout seed becomes the keep mask."""
        options = dict(self.options)
        seed = options.pop("dropout_seed", None)
        if options.get("dropout_p"):
            options["dropout_keep"] = self._dropout_keep(
                torch.as_tensor(seed, dtype=torch.int64, device=self.spec.device)
            )
        return options

    def _dropout_keep(self, seed: torch.Tensor) -> torch.Tensor | list[torch.Tensor]:
        spec, dropout_p, device = self.spec, self.options["dropout_p"], self.spec.device
        heads = torch.arange(spec.nheads, device=device)
        if spec.lengths_q is None:
            batch = torch.arange(spec.batch, device=device)
            return rng.dropout_keep(seed, dropout_p, batch, heads, (0, spec.seqlen_q), (0, spec.seqlen_k))
        lengths = zip(spec.lengths_q, spec.lengths_k or spec.lengths_q, strict=True)
        return [
            rng.dropout_keep(seed, dropout_p, torch.tensor([index], device=device), heads, (0, length_q), (0, length_k))
            for index, (length_q, length_k) in enumerate(lengths)
        ]


class _Maker:
    """Draws every tensor of a spec from one generator."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self.spec = spec
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=self.generator, dtype=torch.float64, device="cpu") * scale
        return numbers.to(dtype or self.spec.dtype).to(self.spec.device)

    def chance(self, *shape: int, kept: float) -> torch.Tensor:
        return (torch.rand(*shape, generator=self.generator, device="cpu") < kept).to(self.spec.device)

    def segments(self, seqlen: int) -> torch.Tensor:
        drawn = torch.randint(0, 3, (self.spec.batch, seqlen), generator=self.generator, device="cpu")
        return drawn.sort(-1).values.to(self.spec.device)

    def mask_with_empty_rows(self) -> torch.Tensor:
        spec = self.spec
        mask = self.chance(spec.batch, 1, spec.seqlen_q, spec.seqlen_k, kept=0.7)
        mask[:, :, :: max(1, spec.seqlen_q // 3)] = False
        mask[..., -3:] = False
        return mask

    def padding(self) -> torch.Tensor:
        spec = self.spec
        lengths = torch.linspace(spec.seqlen_k, 1, spec.batch, device="cpu").long().to(spec.device)
        return (torch.arange(spec.seqlen_k, device=spec.device) < lengths[:, None])[:, None, None, :]


FEATURES: dict[str, Callable[[_Maker], Options]] = {
    "causal": lambda m: {"causal": True},
    "top_left": lambda m: {"causal": "top_left"},
    "window": lambda m: {"window_size": (3, 2)},
    "window_left": lambda m: {"window_size": (4, None)},
    "window_right": lambda m: {"window_size": (None, 1)},
    "segments": lambda m: {"segments": (m.segments(m.spec.seqlen_q), m.segments(m.spec.seqlen_k))},
    "mask": lambda m: {"mask": m.mask_with_empty_rows()},
    "padding": lambda m: {"mask": m.padding()},
    "bias": lambda m: {"bias": m.normal(m.spec.batch, m.spec.nheads, m.spec.seqlen_q, m.spec.seqlen_k)},
    "bias_shared": lambda m: {"bias": m.normal(m.spec.nheads, 1, m.spec.seqlen_k)},
    "bias_rows": lambda m: {"bias": m.normal(m.spec.batch, 1, m.spec.seqlen_q, 1)},
    "softcap": lambda m: {"softcap": 1.5},
    "alibi": lambda m: {"alibi_slopes": m.normal(m.spec.nheads, dtype=_state(m)).abs()},
    "alibi_batch": lambda m: {"alibi_slopes": m.normal(_sequences(m), m.spec.nheads, dtype=_state(m)).abs() * 0.3},
    "sink": lambda m: {"sink": m.normal(m.spec.nheads, dtype=_state(m))},
    "sink_batch": lambda m: {"sink": m.normal(_sequences(m), m.spec.nheads, dtype=_state(m))},
    "dropout": lambda m: {"dropout_p": 0.3, "dropout_seed": 1234567890123},
    "scale": lambda m: {"softmax_scale": -0.3},
}
# These need the dense form: the packed form has no argument for them.
DENSE_ONLY = ("segments", "mask", "padding", "bias", "bias_shared", "bias_rows")
EXCLUSIVE = (
    ("causal", "top_left"),
    ("window", "window_left", "window_right"),
    ("mask", "padding"),
    ("bias", "bias_shared", "bias_rows"),
    ("alibi", "alibi_batch"),
    ("sink", "sink_batch"),
)


def compatible(features: Sequence[str]) -> bool:
    """Whether no two of the features set the same option."""
    return all(len(set(features) & set(group)) <= 1 for group in EXCLUSIVE)


def _state(maker: _Maker) -> torch.dtype:
    return torch.float64 if maker.spec.dtype == torch.float64 else torch.float32


def _sequences(maker: _Maker) -> int:
    lengths = maker.spec.lengths_q
    return maker.spec.batch if lengths is None else len(lengths)


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same (batch, seqlen, nheads, dim) or (tokens, nheads, dim) values in another memory layout.

    "heads_first" stores heads before tokens, "last_dim" makes the last stride the largest, "sliced" cuts the tensor out
    of a larger buffer of NaN. "expanded" has stride 0 over heads, so it repeats the first head's values.
    """
    if layout == "contiguous":
        return tensor.contiguous()
    if layout == "heads_first":
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "last_dim":
        return tensor.transpose(-3, -1).contiguous().transpose(-3, -1)
    if layout == "sliced":
        shape = [2 * size + 1 for size in tensor.shape[:-1]] + [tensor.shape[-1] + 3]
        buffer = tensor.new_full(shape, float("nan"))
        place = [slice(1, None, 2)] * (tensor.ndim - 1) + [slice(1, 1 + tensor.shape[-1])]
        view = buffer[tuple(place)]
        return view.copy_(tensor)
    if layout == "expanded":
        return tensor[..., :1, :].contiguous().expand(tensor.shape)
    raise ValueError(f"layout: is {layout!r}, must be one of {', '.join(LAYOUTS)}")


def offsets(lengths: Sequence[int], dtype: torch.dtype = torch.int32, device: str | None = None) -> torch.Tensor:
    """cu_seqlens of the given lengths, on torch's default device if none is given."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def make(spec: Spec, seed: int = 0) -> Sample:
    """The sample that ``spec`` describes; the same seed gives the same numbers whatever dtype and layout.

    Raises:
        ValueError: a feature that is unknown, that contradicts another one, or that the packed form does not have.
    """
    unknown = [name for name in spec.features if name not in FEATURES]
    if unknown or not compatible(spec.features):
        raise ValueError(f"features: is {spec.features}, must be compatible ones of {', '.join(FEATURES)}")
    maker = _Maker(spec, seed)
    options: Options = {}
    if spec.lengths_q is None:
        lead_q: tuple[int, ...] = (spec.batch, spec.seqlen_q)
        lead_k: tuple[int, ...] = (spec.batch, spec.seqlen_k)
        lse_shape: tuple[int, ...] = (spec.batch, spec.nheads, spec.seqlen_q)
    else:
        if set(spec.features) & set(DENSE_ONLY):
            raise ValueError(f"features: is {spec.features}, the packed form has none of {', '.join(DENSE_ONLY)}")
        lengths_k = spec.lengths_k or spec.lengths_q
        lead_q, lead_k = (sum(spec.lengths_q) + spec.spare,), (sum(lengths_k) + spec.spare,)
        lse_shape = (spec.nheads, lead_q[0])
        options |= {
            "cu_seqlens_q": offsets(spec.lengths_q, device=spec.device),
            "cu_seqlens_k": offsets(lengths_k, device=spec.device),
        }
    q = lay_out(maker.normal(*lead_q, spec.nheads, spec.headdim, scale=spec.spread), spec.layout)
    k = lay_out(maker.normal(*lead_k, spec.nheads_k, spec.headdim, scale=spec.spread), spec.layout)
    v = lay_out(maker.normal(*lead_k, spec.nheads_k, spec.headdim_v, scale=spec.spread), spec.layout)
    for name in spec.features:
        options |= FEATURES[name](maker)
    dout = maker.normal(*lead_q, spec.nheads, spec.headdim_v)
    sample = Sample(spec, q, k, v, dout, maker.normal(*lse_shape, dtype=_state(maker)), options)
    for name, tensor in sample.float_tensors().items():
        tensor.requires_grad_(spec.requires_grad == "all" or name in spec.requires_grad)
    return sample


def sample_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    requires_grad: tuple[str, ...] | str = ("q", "k", "v"),
    seed: int = 0,
    **options: Any,
) -> Sample:
    """A sample of given tensors, with the options of ``tilewise.attention`` or, packed, ``attention_varlen``.

    The tensors become new leaves with the strides they have. dout and dlse are random.
    """
    lengths: list[tuple[int, ...] | None] = [None, None]
    if "cu_seqlens_q" in options:
        options.setdefault("cu_seqlens_k", options["cu_seqlens_q"])
        lengths = [tuple(options[f"cu_seqlens_{side}"].diff().tolist()) for side in "qk"]
    spec = Spec(
        batch=len(lengths[0]) if lengths[0] is not None else q.shape[0],
        seqlen_q=q.shape[-3],
        seqlen_k=k.shape[-3],
        nheads=q.shape[-2],
        nheads_k=k.shape[-2],
        headdim=q.shape[-1],
        headdim_v=v.shape[-1],
        dtype=q.dtype,
        device=q.device.type,
        requires_grad=requires_grad,
        lengths_q=lengths[0],
        lengths_k=lengths[1],
    )
    maker = _Maker(spec, seed)
    q, k, v = q.detach(), k.detach(), v.detach()
    rows = (q.shape[1], q.shape[0]) if spec.varlen else (q.shape[0], q.shape[2], q.shape[1])
    dout = maker.normal(*q.shape[:-1], v.shape[-1])
    floats = {
        name: options[name].detach() for name in ("bias", "alibi_slopes", "sink") if options.get(name) is not None
    }
    sample = Sample(spec, q, k, v, dout, maker.normal(*rows, dtype=_state(maker)), options | floats)
    for name, tensor in sample.float_tensors().items():
        tensor.requires_grad_(spec.requires_grad == "all" or name in spec.requires_grad)
    return sample
