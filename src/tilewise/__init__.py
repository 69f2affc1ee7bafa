"""tilewise: exact attention in pure Python, on any device, as fast as the hardware allows, that says what it does."""

from tilewise.errors import InvalidInput, InvalidType, UnsupportedProblem
from tilewise.functional import (
    Explanation,
    attention,
    attention_varlen,
    attention_varlen_with_lse,
    attention_with_lse,
    explain,
    explain_varlen,
    merge_states,
    use_backend,
)
from tilewise.quantize import Quantized, quantize_fp8

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "InvalidInput",
    "InvalidType",
    "Quantized",
    "UnsupportedProblem",
    "attention",
    "attention_varlen",
    "attention_varlen_with_lse",
    "attention_with_lse",
    "explain",
    "explain_varlen",
    "merge_states",
    "quantize_fp8",
    "use_backend",
]
