"""Which backend runs a call: found once for equal facts, remembered, and handed from a forward to its derivatives."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.device import device_facts
from tilewise.dispatch import registry
from tilewise.dispatch.choose import choose, choose_derivative
from tilewise.inputs import Arguments, facts_key, problem_of
from tilewise.problem import Problem

_PLANS: dict[object, Plan] = {}
_LIMIT = 4096


class Plan:
    """A problem and the backend that runs it."""

    __slots__ = ("_derivatives", "backend", "problem")

    def __init__(self, problem: Problem, backend: Any) -> None:
        self.problem = problem
        self.backend = backend
        self._derivatives: dict[object, Plan] = {}

    def derivative(self, derivative: str, arguments: Arguments) -> Plan:
        """The plan of a derivative by ``arguments.needs_grad``; otherwise they are the arguments of this plan."""
        key = derivative, arguments.needs_grad, torch.get_num_threads()
        plan = self._derivatives.get(key)
        if plan is None:
            plan = self._derivatives[key] = find(arguments, derivative)
        return plan


def make(problem: Problem, derivative: str, arguments: Arguments) -> Plan:
    """Choose, remembering nothing."""
    facts = device_facts(arguments.q.device)
    if derivative == "forward":
        name = choose(problem, facts, arguments.backend).name
    else:
        problem = problem.replace(derivative=derivative)
        name = choose_derivative(problem, facts, arguments.backend)
    # with no pair to compute there is nothing to be fast at, and one room knows every empty case
    return Plan(problem, registry.load("reference" if problem.is_empty else name))


def find(arguments: Arguments, derivative: str) -> Plan:
    """The plan of a call, checked; remembered by facts, device, threads and request.

    Raises:
        InvalidInput, InvalidType, UnsupportedProblem: naming the argument or every refusal's reasons.
    """
    key: object
    if arguments.cu_seqlens_q is None:
        key, problem = (facts_key(arguments), derivative, torch.get_num_threads()), None
    else:
        # the lengths, which may be read, are facts too
        problem = problem_of(arguments)
        key = (problem, derivative, arguments.backend, arguments.q.device, torch.get_num_threads())
    try:
        plan = _PLANS.get(key)
    except TypeError:  # symbolic sizes have no hash
        return make(problem_of(arguments), derivative, arguments)
    if plan is None:
        plan = make(problem or problem_of(arguments), derivative, arguments)
        if len(_PLANS) >= _LIMIT:
            _PLANS.clear()
        _PLANS[key] = plan
    return plan
