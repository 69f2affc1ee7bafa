"""The proof kit: fp64 oracle, error budgets, random calls, NaN poison. It imports no test framework."""

from tilewise.testing.budget import Verdict, assert_within_budget, within_budget
from tilewise.testing.factories import (
    DENSE_ONLY,
    FEATURES,
    LAYOUTS,
    Sample,
    Spec,
    compatible,
    lay_out,
    make,
    offsets,
    sample_of,
)
from tilewise.testing.judge import assert_exact, judge, poison
from tilewise.testing.oracle import attention_oracle, varlen_oracle, visible_pairs
from tilewise.testing.poison import poison_unseen, poisoned_memory

__all__ = [
    "DENSE_ONLY",
    "FEATURES",
    "LAYOUTS",
    "Sample",
    "Spec",
    "Verdict",
    "assert_exact",
    "assert_within_budget",
    "attention_oracle",
    "compatible",
    "judge",
    "lay_out",
    "make",
    "offsets",
    "poison",
    "poison_unseen",
    "poisoned_memory",
    "sample_of",
    "varlen_oracle",
    "visible_pairs",
    "within_budget",
]
