"""The two ways a call is refused: the input is wrong, or no backend runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.dispatch.choose import Trace
    from tilewise.problem import Problem


class InvalidInput(ValueError):
    """An argument is wrong: the message names it, says what it was and what it must be."""


class InvalidType(InvalidInput, TypeError):
    """An argument has a type or dtype that the function does not take."""


class UnsupportedProblem(NotImplementedError):
    """A right input that no backend (or not the one asked for) runs.

    ``problem`` holds the facts of the call, ``trace`` every backend with all its reasons.
    """

    def __init__(self, message: str, problem: Problem, trace: Trace) -> None:
        super().__init__(message)
        self.problem = problem
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.problem, self.trace)
