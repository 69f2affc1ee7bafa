"""``attn_implementation="tilewise"`` for Transformers 5.x.

    import tilewise.integrations.transformers
    tilewise.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")

What a mask says is the whole truth about which pairs take part, as in Transformers' eager attention; only where there
is no mask do ``is_causal`` and ``sliding_window`` decide.  An option that this attention does not honour is refused by
name.  Rows of padded queries are 0 (eager: the mean of all values), never NaN.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tilewise import functional
from tilewise.errors import InvalidInput, InvalidType
from tilewise.integrations.transformers_mask import Resolved, Segments, StructuredMask, build_mask, resolve

NAME = "tilewise"

# What the framework passes through every attention module and that changes nothing about attention.
HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "return_dict",
        "use_cache",
    }
)


def register() -> None:
    """Make ``attn_implementation="tilewise"`` known to Transformers (5.0 or newer); calling it again changes nothing.

    Raises ImportError where Transformers is missing or too old.
    """
    library = importlib.import_module("transformers")
    importlib.import_module("transformers.masking_utils")
    if int(library.__version__.split(".")[0]) < 5:
        raise ImportError(f"tilewise needs transformers 5.0 or newer, found {library.__version__}")
    library.AttentionInterface.register(NAME, attention_forward)
    library.AttentionMaskInterface.register(NAME, build_mask)


@dataclass(frozen=True)
class Options:
    """What a model may ask of its attention, beside the tensors and the mask; None is "not asked for"."""

    is_causal: bool | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    position_bias: Tensor | None = None
    position_ids: Tensor | None = None
    seq_idx: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    max_length_q: int | Tensor | None = None
    max_length_k: int | Tensor | None = None
    output_attentions: bool | None = None
    deterministic: bool | None = None

    @classmethod
    def read(cls, options: dict[str, Any]) -> Options:
        """Known options by name; harmless ones are dropped, unknown ones raise TypeError unless they are None."""
        unknown = [name for name in options if name not in _OPTION_NAMES and name not in HARMLESS]
        unknown = [name for name in unknown if options[name] is not None]
        if unknown:
            raise TypeError(
                f'attn_implementation="{NAME}" does not know the option {", ".join(sorted(unknown))} that the model '
                f'passes to its attention, and would not ignore it: use attn_implementation="eager" for this model'
            )
        return cls(**{name: options[name] for name in options if name in _OPTION_NAMES})


_OPTION_NAMES = frozenset(field.name for field in fields(Options))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' attention interface.

    query (batch, nheads, seqlen_q, headdim), key (batch, nheads_k, seqlen_k, headdim), value (batch, nheads_k,
    seqlen_k, headdim_v).  Returns ((batch, seqlen_q, nheads, headdim_v), None), or with ``output_attentions`` the
    probabilities (batch, nheads, seqlen_q, seqlen_k) as second, which is the only case that materialises them.

    ``attention_mask``: None, a ``StructuredMask``, a bool tensor (True takes part) or a float tensor (added to the
    scores), 4-D, broadcastable to (batch, nheads, seqlen_q, seqlen_k).  ``dropout`` applies while ``module.training``.
    ``scaling`` None is headdim ** -0.5.  ``options``: the fields of ``Options`` and the names in ``HARMLESS``.

    Packed sequences are kept apart by ``cu_seq_lens_q/k`` (batch 1), by ``seq_idx``, and, under a causal mask, by 2-D
    ``position_ids`` that start again, also beside an all-ones attention_mask (eager lets them see each other there).
    Two limits of that last help, where ``attention_mask=None`` or explicit sequences are the way: a graph that is being
    traced cannot look into an attention_mask, and a few models (GPTBigCode, Persimmon, CTRL, Moshi, Llama 4 in
    Transformers 5.24, GPT-2 in 5.0) do not hand ``position_ids`` on to their attention.

    Raises TypeError for unknown options, InvalidInput for contradictory ones, UnsupportedProblem where no backend runs.
    """
    opts = Options.read(options)
    if isinstance(scaling, Tensor):  # a learned scale keeps its gradient
        query, scaling = query * scaling, 1.0
    query, key, value = _same_batch(query, key, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    dropout_p = float(dropout) if module.training else 0.0
    scores: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": opts.softcap or 0.0,
        "sink": opts.s_aux,
        "dropout_p": dropout_p,
        "deterministic": bool(opts.deterministic),
    }
    weights_wanted = _weights_wanted(opts)
    if dropout_p > 0.0 and weights_wanted:
        scores["dropout_seed"] = torch.randint(2**62, (), device=q.device)  # the same pairs in both
    if _is_plain_varlen(attention_mask, opts) and not weights_wanted:
        return _varlen(module, q, k, v, opts, scores), None
    where, pairs = _pairs(module, q, k, attention_mask, opts)
    if where != slice(None):
        k, v = k[:, where], v[:, where]
    out = functional.attention(q, k, v, **scores, **pairs).contiguous()
    if not weights_wanted:
        return out, None
    # The probabilities are the attention of values that are the unit vectors.
    unit = torch.eye(k.shape[1], dtype=v.dtype, device=v.device)[None, :, None, :].expand(*k.shape[:3], -1)
    seen = functional.attention(q, k, unit, **scores, **pairs)
    weights = seen.new_zeros(*query.shape[:3], key.shape[2])
    weights[..., where] = seen.transpose(1, 2)
    return out, weights


def _same_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Learned queries come with batch 1: as in the other implementations they serve every item."""
    batch = max(query.shape[0], key.shape[0])
    if query.shape[0] == key.shape[0] or 1 not in (query.shape[0], key.shape[0]):
        return query, key, value
    return query.expand(batch, -1, -1, -1), key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def _weights_wanted(opts: Options) -> bool:
    """Whether the caller asked for probabilities, by the option or by Transformers' recorder of layer outputs.

    Several models keep the option to themselves, and the recorder then returns an empty tuple without a word.
    """
    if opts.output_attentions:
        return True
    if torch.compiler.is_compiling():
        return False
    try:
        recorder = importlib.import_module("transformers.utils.output_capturing")._active_collector.get()
    except (ImportError, AttributeError):
        return False
    return any("attentions" in name for name in recorder or ())


def _pairs(module: torch.nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, opts: Options) -> Resolved:
    """Which keys are needed at all (a slice), and the mask arguments of ``functional.attention`` for those."""
    bias = opts.position_bias
    if mask is None:
        return slice(None), {**_without_mask(module, q, k, opts), "bias": bias}
    if isinstance(mask, StructuredMask):
        where, pairs = _structured(q, k, mask, opts)
        if bias is not None:
            pairs = {**pairs, "bias": bias if bias.shape[-1] == 1 else bias[..., where]}
        return where, pairs
    if mask.dim() != 4:
        raise InvalidInput(
            f"attention_mask has shape {tuple(mask.shape)}; it must be 4-D, broadcastable to (batch, nheads, seqlen_q, "
            f"seqlen_k) = {(q.shape[0], q.shape[2], q.shape[1], k.shape[1])}"
        )
    pairs = {"segments": _expanded(_explicit_segments(q, k, opts), q)}
    if mask.dtype == torch.bool:
        return slice(None), {**pairs, "mask": mask, "bias": bias}
    if not mask.dtype.is_floating_point:
        raise InvalidType(f"attention_mask is {mask.dtype}; it must be bool (True takes part) or float (added)")
    return slice(None), {**pairs, "bias": mask if bias is None else mask + bias}


def _structured(q: Tensor, k: Tensor, mask: StructuredMask, opts: Options) -> Resolved:
    """The pairs of a plan, found once and shared by the layers that get the same mask and the same positions."""
    plan, wanted = mask.plan, (q.shape[1], k.shape[1])
    if (plan.seqlen_q, plan.seqlen_k) != wanted or plan.batch not in (1, q.shape[0]):
        raise InvalidInput(
            f"attention_mask is for (batch, seqlen_q, seqlen_k) = {(plan.batch, plan.seqlen_q, plan.seqlen_k)}, "
            f"query and key have {(q.shape[0], *wanted)}"
        )
    segments = _explicit_segments(q, k, opts)
    if torch.compiler.is_compiling():  # the plan's numbers are no part of the graph's shapes
        return slice(None), {"mask": plan.split(segments).dense()}
    asked_by = (opts.position_ids, opts.seq_idx, opts.cu_seq_lens_q, opts.cu_seq_lens_k)
    for known_by, answer in mask.resolved:
        if all(a is b for a, b in zip(known_by, asked_by, strict=True)):
            return answer
    if segments is None and plan.causal:
        segments = _restarts(opts.position_ids, plan.seqlen_q, plan.seqlen_k, plan.shift, plan.padding)
    answer = resolve(plan.split(segments))
    mask.resolved.append((asked_by, answer))
    return answer


def _without_mask(module: torch.nn.Module, q: Tensor, k: Tensor, opts: Options) -> dict[str, Any]:
    """The pairs that the flags describe; the last query and the last key are of the same position."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    causal = _is_causal(module, seqlen_q, opts)
    segments = _explicit_segments(q, k, opts)
    if segments is None and causal:
        segments = _restarts(opts.position_ids, seqlen_q, seqlen_k, seqlen_k - seqlen_q, None)
    return {"causal": causal and seqlen_q > 1, "window_size": _window(causal, opts), "segments": _expanded(segments, q)}


def _window(causal: bool, opts: Options) -> tuple[int | None, int | None]:
    """A model's window counts the query itself; without causality it reaches as far to the right."""
    left = None if opts.sliding_window is None else opts.sliding_window - 1
    return left, None if causal else left


def _is_causal(module: torch.nn.Module, seqlen_q: int, opts: Options) -> bool:
    causal = opts.is_causal if opts.is_causal is not None else getattr(module, "is_causal", None)
    if causal is None and seqlen_q > 1:
        raise InvalidInput(
            f"is_causal: {type(module).__name__} passes no attention_mask and no is_causal, and has no is_causal of "
            "its own, so whether queries may see later keys is not known"
        )
    return causal is None or bool(causal)


def _explicit_segments(q: Tensor, k: Tensor, opts: Options) -> Segments | None:
    """Sequences that the caller names: ``seq_idx`` and ``cu_seq_lens_q/k``."""
    found: Segments | None = None
    if opts.seq_idx is not None:
        ids = opts.seq_idx
        if ids.dim() != 2 or ids.shape[-1] != q.shape[1] or q.shape[1] != k.shape[1]:
            raise InvalidInput(
                f"seq_idx has shape {tuple(ids.shape)}; it must be (batch, seqlen) for seqlen_q = seqlen_k, "
                f"here {q.shape[1]} and {k.shape[1]}"
            )
        found = Segments(ids, ids)
    if opts.cu_seq_lens_q is not None or opts.cu_seq_lens_k is not None:
        cu_q, cu_k = _offsets(q, opts)
        if cu_q is not cu_k and not torch.compiler.is_compiling() and not torch.equal(cu_q, cu_k):
            raise InvalidInput("cu_seq_lens_q and cu_seq_lens_k differ: pass them without an attention_mask")
        found = Segments(_ids(cu_q, q.shape[1], -1), _ids(cu_k, k.shape[1], -2)).combined(found)
    return found


def _offsets(q: Tensor, opts: Options) -> tuple[Tensor, Tensor]:
    if opts.cu_seq_lens_q is None or opts.cu_seq_lens_k is None:
        raise InvalidInput("cu_seq_lens_q and cu_seq_lens_k must be passed together")
    if q.shape[0] != 1:
        raise InvalidInput(f"cu_seq_lens_q describes sequences packed into one batch item, the batch is {q.shape[0]}")
    return opts.cu_seq_lens_q, opts.cu_seq_lens_k


def _ids(offsets: Tensor, seqlen: int, beyond: int) -> Tensor:
    """(1, seqlen): the number of the sequence each token is in, ``beyond`` for tokens after the last offset."""
    token = torch.arange(seqlen, device=offsets.device)
    ids = torch.searchsorted(offsets[1:].to(token.dtype).contiguous(), token, right=True)
    return torch.where(ids < offsets.shape[0] - 1, ids, beyond)[None]


def _expanded(segments: Segments | None, q: Tensor) -> tuple[Tensor, Tensor] | None:
    return None if segments is None else (segments.q.expand(q.shape[0], -1), segments.k.expand(q.shape[0], -1))


def _restarts(
    position_ids: Tensor | None, seqlen_q: int, seqlen_k: int, shift: int, padding: Tensor | None
) -> Segments | None:
    """Packed sequences that only their positions tell: a causal row whose positions fall back, or are 0 twice running.

    Positions of padding tell nothing.  2-D position_ids only: several positions per token are no sequence numbers.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[-1] != seqlen_q or seqlen_q == 1:
        return None
    compiling = torch.compiler.is_compiling()
    if compiling and seqlen_q != seqlen_k:
        return None
    start = _falls_back(position_ids[:, :-1], position_ids[:, 1:])
    if not compiling and not bool(start.any()):
        return None
    if padding is not None:
        keep = padding[:, max(shift, 0) : shift + seqlen_q]  # query i is key i + shift
        if keep.shape[-1] == seqlen_q:
            start = _starts_among(keep, position_ids.expand(keep.shape[0], -1))
        if not bool(start.any()):
            return None
    if shift != 0:
        raise InvalidInput(
            "position_ids start again in the middle of a call that continues a cache: which of the cached tokens "
            "belong to which sequence is not known.  Run packed sequences without a cache, or one a batch item"
        )
    ids = torch.nn.functional.pad(start.cumsum(-1), (1, 0))
    unused = seqlen_k - seqlen_q  # the rest of a static cache that held nothing before
    return Segments(ids, torch.nn.functional.pad(ids, (0, unused), value=-1) if unused else ids)


def _falls_back(before: Tensor, after: Tensor) -> Tensor:
    return (after < before) | ((after == 0) & (before == 0))


def _starts_among(keep: Tensor, position_ids: Tensor) -> Tensor:
    """Where the positions of kept tokens fall back, (batch, seqlen - 1): entry t is about token t + 1."""
    index = torch.arange(keep.shape[-1], device=keep.device).expand_as(keep)
    last_kept = torch.where(keep, index, -1).cummax(-1).values[:, :-1]
    before = position_ids.gather(-1, last_kept.clamp_min(0))
    return _falls_back(before, position_ids[:, 1:]) & keep[:, 1:] & (last_kept >= 0)


def _is_plain_varlen(mask: Tensor | None, opts: Options) -> bool:
    given = opts.cu_seq_lens_q is not None or opts.cu_seq_lens_k is not None
    return mask is None and given and opts.position_bias is None and opts.seq_idx is None


def _varlen(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, opts: Options, scores: dict[str, Any]) -> Tensor:
    """Sequences packed into one batch item, whose lengths may differ between queries and keys."""
    cu_q, cu_k = _offsets(q, opts)
    causal = _is_causal(module, q.shape[1], opts)
    longest = None
    if opts.max_length_q is not None and opts.max_length_k is not None:
        longest = (opts.max_length_q, opts.max_length_k)
    out = functional.attention_varlen(
        q[0],
        k[0],
        v[0],
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        max_seqlen=longest,
        causal=causal,
        window_size=_window(causal, opts),
        **scores,
    )
    return out[None].contiguous()
