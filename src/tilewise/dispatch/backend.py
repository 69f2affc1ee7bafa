"""What a backend is: it says with all its reasons whether it can, for how much, and runs."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from tilewise.descale import FP8
from tilewise.device import DeviceFacts, at_least
from tilewise.inputs import Inputs
from tilewise.problem import Problem

State = tuple[torch.Tensor, torch.Tensor]
Gradients = dict[str, torch.Tensor]


class Reason(NamedTuple):
    """One thing that keeps a backend from running a problem."""

    what: str
    has: str
    needs: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.what}: has {self.has}, needs {self.needs}"
        return f"{text}  -> {self.hint}" if self.hint else text


def forward_only(problem: Problem) -> tuple[Reason, ...]:
    """Why an fp8 problem with a gradient does not run: e4m3 is a form to store inputs in, and has no backward."""
    asked = problem.needs_grad or () if problem.derivative == "forward" else (problem.derivative,)
    if problem.dtype != FP8 or not asked:
        return ()
    return (Reason("gradient", ", ".join(asked), "none for fp8", "detach the inputs, or train in bf16"),)


def old_triton(facts: DeviceFacts, wanted: tuple[int, int]) -> tuple[Reason, ...]:
    """Why a machine's Triton, older than ``wanted`` or absent, does not do."""
    if at_least(facts.triton, wanted):
        return ()
    version = ".".join(map(str, wanted))
    return (Reason("triton", facts.triton or "none", f">= {version}", f"pip install 'triton>={version}'"),)


class Backend(Protocol):
    """One implementation of exact attention.

    ``auto_devices`` are the device types on which "auto" may choose it. ``supports`` is pure, lists every reason and
    never raises; empty means yes. ``cost`` estimates seconds, for choosing among those that can.
    """

    name: str
    auto_devices: frozenset[str]

    def supports(self, problem: Problem, facts: DeviceFacts) -> tuple[Reason, ...]: ...

    def cost(self, problem: Problem, facts: DeviceFacts) -> float: ...

    def tile(self, problem: Problem, facts: DeviceFacts) -> tuple[int, int]:
        """(query rows, key columns) of a tile of the forward, for explain."""
        ...

    def copies(self, problem: Problem) -> dict[str, int]:
        """Bytes of inputs that the forward stores anew in a form of its own, whatever their strides, for explain."""
        ...

    def forward(self, problem: Problem, inputs: Inputs) -> State:
        """(out, lse): out like q but headdim_v wide; lse (batch, nheads, seqlen_q), packed (nheads, total_q)."""
        ...

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
    ) -> Gradients:
        """The gradients named in ``problem.needs_grad``, each with shape and dtype of its tensor in ``inputs``."""
        ...


class Recorded(NamedTuple):
    """out with torch's own graph behind it, lse, and the node of attention; no node where its gradients would not do.

    The node keeps what torch's node of attention on a CPU does: q, k, v and out (heads second) and lse.
    """

    out: torch.Tensor
    lse: torch.Tensor
    node: Any


class Prepared(Protocol):
    """What a backend's ``prepared(problem)`` may give for plain problems: its calls with all but q, k and v looked up.

    ``prepared`` may be missing or give None; ``forward`` and ``backward`` are then what there is.
    """

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """out, contiguous."""
        ...

    def record(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Recorded:
        """out, contiguous, recorded by torch."""
        ...


class SecondOrder(Protocol):
    """The rest of the calculus, for backends that have it."""

    def jvp(self, problem: Problem, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, tangents: Gradients) -> State:
        """Tangents of (out, lse) for the tangents of the inputs; a missing name is a zero tangent."""
        ...

    def second(
        self,
        problem: Problem,
        inputs: Inputs,
        out: torch.Tensor,
        lse: torch.Tensor,
        tangents: Gradients,
        dout: torch.Tensor,
        dlse: torch.Tensor,
    ) -> Gradients:
        """Gradient, by the primals in ``problem.needs_grad``, of <dout, jvp_out> + <dlse, jvp_lse>."""
        ...
