"""How far a result may be from fp64: twice as far as plain PyTorch in the same dtype, plus one rounding.

No tolerance is typed by hand: the yardstick is the same attention in plain torch operators in the inputs' own dtype
(``attention_oracle(..., dtype=q.dtype)``). Two figures are held against it, the worst element and the root mean
square: the first finds one wrong row, the second a loss of precision everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FACTOR = 2.0


class Verdict(NamedTuple):
    """Errors against fp64 and what they may be; ``worst`` is the index of the largest error."""

    name: str
    ok: bool
    reason: str
    error: float
    budget: float
    rms_error: float
    rms_budget: float
    worst: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.name}: {'within' if self.ok else 'over'} budget{': ' + self.reason if self.reason else ''}; "
            f"max error {self.error:.3e} (budget {self.budget:.3e}) at {self.worst}, "
            f"rms error {self.rms_error:.3e} (budget {self.rms_budget:.3e})"
        )


def _refused(name: str, reason: str, worst: tuple[int, ...] = ()) -> Verdict:
    return Verdict(name, False, reason, float("nan"), 0.0, float("nan"), 0.0, worst)


def _first(where: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(index) for index in where.nonzero()[0])


def _non_finite(actual: torch.Tensor, expected: torch.Tensor) -> tuple[str, tuple[int, ...]] | None:
    """What is wrong with NaN and infinities: they must stand exactly where fp64 has them."""
    differs = (actual.isnan() != expected.isnan()) | (
        (actual.isinf() | expected.isinf()) & (actual != expected) & ~(actual.isnan() & expected.isnan())
    )
    if not bool(differs.any()):
        return None
    where = _first(differs)
    return f"is {actual[where].item()}, fp64 has {expected[where].item()}", where


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean().sqrt()


def within_budget(
    actual: torch.Tensor,
    expected: torch.Tensor,
    yardstick: torch.Tensor | None,
    *,
    name: str = "out",
    floor: float = 0.0,
) -> Verdict:
    """Judge ``actual`` against ``expected`` (fp64), with plain PyTorch's ``yardstick`` as the measure.

    Where the yardstick is not finite though fp64 is (plain PyTorch overflowed or lost the row) it measures nothing:
    there fp64 alone judges, and four roundings of the largest expected element are allowed. ``yardstick=None`` means
    that everywhere. fp64 cannot measure itself: for an fp64 ``actual`` give plain fp32 attention as the yardstick,
    whose error is then counted in fp64's units.

    ``floor`` is an error always allowed. A result that is 0 by cancellation, such as dq of a softmax over one key, has
    no size of its own to round: what may be lost there is relative to the products that cancel, which the caller knows.
    """
    if actual.shape != expected.shape:
        return _refused(name, f"shape is {tuple(actual.shape)}, must be {tuple(expected.shape)}")
    if expected.dtype != torch.float64:
        return _refused(name, f"expected must be fp64, is {expected.dtype}")
    epsilon = torch.finfo(actual.dtype).eps
    is_fp64 = actual.dtype == torch.float64
    actual, expected = actual.detach().double(), expected.detach()
    wrong = _non_finite(actual, expected)
    if wrong is not None:
        return _refused(name, *wrong)
    finite = expected.isfinite()
    if not bool(finite.any()):
        return Verdict(name, True, "", 0.0, 0.0, 0.0, 0.0, ())
    lost = finite.clone()
    if yardstick is not None:
        plain = yardstick.detach().double()
        units = epsilon / torch.finfo(yardstick.dtype).eps if is_fp64 else 1.0
        lost &= ~plain.isfinite()
        measure = torch.where(finite & ~lost, plain - torch.where(finite, expected, 0.0), 0.0) * units
    else:
        measure = torch.zeros_like(expected)
    error = torch.where(finite, actual - expected, 0.0).nan_to_num(0.0)
    size = torch.where(finite, expected, 0.0)
    rounding_unit = epsilon * (4 if bool(lost.any()) else 1)
    worst = _first(error.abs() == error.abs().max())
    max_error = float(error.abs().max())
    max_budget = max(FACTOR * float(measure.abs().max()) + rounding_unit * float(size.abs().max()), floor)
    rms_error = float(_rms(error))
    rms_budget = max(FACTOR * float(_rms(measure)) + rounding_unit * float(_rms(size)), floor)
    ok = max_error <= max_budget and rms_error <= rms_budget
    return Verdict(name, ok, "", max_error, max_budget, rms_error, rms_budget, worst)


def assert_within_budget(
    actual: torch.Tensor,
    expected: torch.Tensor,
    yardstick: torch.Tensor | None,
    *,
    name: str = "out",
    floor: float = 0.0,
) -> Verdict:
    """``within_budget``, raising AssertionError with the numbers when the answer is no."""
    verdict = within_budget(actual, expected, yardstick, name=name, floor=floor)
    if not verdict.ok:
        raise AssertionError(str(verdict))
    return verdict
