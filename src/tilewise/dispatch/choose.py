"""The choice of a backend: a pure function of the problem, the device's facts and the backends."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tilewise.device import DeviceFacts
from tilewise.dispatch import registry
from tilewise.dispatch.backend import Backend, Reason
from tilewise.errors import UnsupportedProblem
from tilewise.problem import Problem


class Considered(NamedTuple):
    """One line of the trace: ``cost`` is None where the backend refused."""

    name: str
    reasons: tuple[Reason, ...]
    cost: float | None


Trace = tuple[Considered, ...]


class Choice(NamedTuple):
    """The backend that runs, and everything that was considered."""

    name: str
    trace: Trace


def _consider(backend: Backend, problem: Problem, facts: DeviceFacts, by_name: bool) -> Considered:
    reasons = backend.supports(problem, facts)
    if not reasons and not by_name and problem.device_type not in backend.auto_devices:
        places = ", ".join(sorted(backend.auto_devices))
        needs = places if places else "to be asked for by name"
        reasons = (Reason("auto", problem.device_type, needs, f'backend="{backend.name}" runs it'),)
    return Considered(backend.name, reasons, None if reasons else _cost(backend, problem, facts))


def _cost(backend: Backend, problem: Problem, facts: DeviceFacts) -> float:
    """Seconds, those of the backward included when one will follow."""
    seconds = backend.cost(problem, facts)
    if problem.derivative == "forward" and problem.needs_grad:
        seconds += backend.cost(problem.replace(derivative="backward"), facts)
    return seconds


def choose_among(
    problem: Problem, facts: DeviceFacts, request: str, backends: tuple[Backend, ...]
) -> tuple[str | None, Trace]:
    """The cheapest backend that can, or the one asked for by name; None when it refuses."""
    trace = tuple(_consider(backend, problem, facts, request == backend.name) for backend in backends)
    able = [row for row in trace if row.cost is not None and request in ("auto", row.name)]
    best = min(able, key=lambda row: row.cost or 0.0, default=None)
    return (None if best is None else best.name), trace


@functools.lru_cache(maxsize=8192)
def choose(problem: Problem, facts: DeviceFacts, request: str) -> Choice:
    """The choice among all backends.

    Raises:
        InvalidInput: ``request`` is no backend's name.
        UnsupportedProblem: no backend, or not the one asked for, runs the problem.
    """
    registry.check_name(request)
    backends = tuple(registry.load(name) for name in (registry.names() if request == "auto" else (request,)))
    name, trace = choose_among(problem, facts, request, backends)
    if name is None:
        raise UnsupportedProblem(refusal(problem, facts, request, trace), problem, trace)
    return Choice(name, trace)


@functools.lru_cache(maxsize=8192)
def choose_derivative(problem: Problem, facts: DeviceFacts, request: str) -> str:
    """Who computes ``problem.derivative``: the forward's choice if it can, else the cheapest that can.

    Another backend rounds the scores differently; beside scores of hundreds that shows in the gradients, since P is
    recomputed while out and lse are the forward's.
    """
    name = choose(problem.replace(derivative="forward"), facts, request).name
    return choose(problem, facts, request).name if registry.load(name).supports(problem, facts) else name


def survey(problem: Problem, facts: DeviceFacts, request: str) -> tuple[str | None, Trace]:
    """What ``choose`` would pick, None for a refusal, with the trace over every backend: for explain."""
    registry.check_name(request)
    return choose_among(problem, facts, request, tuple(registry.load(name) for name in registry.names()))


def refusal(problem: Problem, facts: DeviceFacts, request: str, trace: Trace) -> str:
    """The message a user reads when nothing runs the problem."""
    head = (
        "no backend runs this problem"
        if request == "auto"
        else f'backend "{request}" does not run this problem, and a backend asked for by name never falls back'
    )
    where = f"{facts.type} {facts.arch}".strip()
    lines = [head, f"  {problem.describe()} | {where}"]
    for row in trace:
        if request in ("auto", row.name):
            lines += [f"  {row.name:<10}{reason}" for reason in row.reasons]
    return "\n".join(lines)
