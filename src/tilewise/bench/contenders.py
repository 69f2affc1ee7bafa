"""Who takes part in a GPU case: tilewise's backends and its peers, each checked before it is timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewise.bench import gate, peers
from tilewise.bench.cases import Case
from tilewise.descale import out_dtype
from tilewise.functional import attention, attention_varlen

Call = Callable[[], torch.Tensor]
PREFIX = "tilewise-"


class DeviceLost(RuntimeError):
    """A contender broke the CUDA context; nothing more can run in this process."""


class Setting:
    """A case's tensors on the GPU, and what a contender's results are held against."""

    def __init__(self, case: Case, backward: bool, device: str = "cuda") -> None:
        self.case, self.backward = case, backward
        self.tensors = case.tensors(device)
        self.options = case.options(device)
        self.leaves = dict(zip("qkv", self.tensors, strict=True))
        if case.bias:
            self.leaves["bias"] = self.options["bias"]
        q, _, v = self.tensors
        self.dout = torch.randn((*q.shape[:-1], v.shape[-1]), device=q.device, dtype=out_dtype(q.dtype))

    @functools.cached_property
    def samples(self) -> gate.Samples:
        """What the results must be."""
        return gate.Samples(self.case, self.tensors, self.dout, self.options.get("bias"))

    def ours(self, backend: str) -> Call:
        """tilewise's call."""
        function: Any = attention if self.case.lengths is None else attention_varlen
        return lambda: function(*self.tensors, **self.options, backend=backend)

    def call(self, name: str) -> Call:
        """The call of a contender.

        Raises:
            peers.Refusal, or what the peer raises: it cannot run the case.
        """
        if name.startswith(PREFIX):
            return self.ours(name.removeprefix(PREFIX))
        return peers.PEERS[name](self.case, self.tensors, self.options)


@dataclass
class Field:
    """The contenders that may be timed: by pass their work, their worst error over its budget, and who was refused."""

    forward: dict[str, Call] = field(default_factory=dict)
    backward: dict[str, Callable[[], object]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def assemble(setting: Setting, names: Sequence[str]) -> Field:
    """Everyone among ``names`` who runs the case and computes what it asks for."""
    found = Field()
    for name in names:
        try:
            _admit(setting, name, found)
        except Exception as error:  # whatever keeps a contender from running is its answer, and is shown
            found.forward.pop(name, None)
            found.refused[name, "forward"] = peers.told(error)
            if isinstance(error, gate.GateFailed):
                found.wrong.append(str(error))
            _require_device(name, error)
    return found


def _wait() -> None:
    """Until the GPU is done, so that what went wrong there is told of the contender that did it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _require_device(name: str, error: BaseException) -> None:
    try:
        _wait()
    except Exception as lost:
        raise DeviceLost(f"{name} broke the CUDA context: {peers.told(error)}") from lost


def _admit(setting: Setting, name: str, found: Field) -> None:
    call = setting.call(name)
    with torch.no_grad():
        results = {"out": call()}
    _wait()
    work = None
    if setting.backward:
        try:
            results = gate.run(call, setting.leaves, setting.dout)
            work = _backward_of(setting, call)
            for _ in range(2):  # not every backward can be run again
                work()
            _wait()
        except Exception as error:  # a peer without a backward says so in its own way
            work = None
            found.refused[name, "backward"] = peers.told(error)
            _require_device(name, error)
    verdicts = setting.samples.verdicts(results)
    if name.startswith(PREFIX):
        gate.require(name, setting.case, verdicts)
    for what, verdict in verdicts.items():
        if not verdict.error <= gate.ANOTHER_FUNCTION * verdict.size:
            raise peers.Refusal(f"computes another function: {what} is off by {verdict.error / verdict.size:.2g} of it")
    found.errors[name] = max(verdict.error / verdict.budget for verdict in verdicts.values())
    found.forward[name] = call
    if work is not None:
        found.backward[name] = work


def _backward_of(setting: Setting, call: Call) -> Callable[[], object]:
    """The backward alone, again and again, of one forward."""
    out, leaves = call(), list(setting.leaves.values())
    return lambda: torch.autograd.grad(out, leaves, setting.dout, retain_graph=True)
