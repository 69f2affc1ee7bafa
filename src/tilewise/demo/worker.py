"""One measurement in a fresh process: ``call`` starts it, ``main`` is what runs there.

The two speak in lines of JSON: {"step": [1, 40]} while it runs, {"result": {...}} at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

OnStep = Callable[[int, int], None]


class WorkerFailed(RuntimeError):
    """The process ended without a result; the message has its last words."""


def _lengths(arguments: dict[str, Any], _: OnStep) -> dict[str, Any]:
    from tilewise.demo import lengths

    return lengths.measure(**arguments)


def _gpt(arguments: dict[str, Any], on_step: OnStep) -> dict[str, Any]:
    from tilewise.demo import gpt

    return gpt.train(arguments["attention"], gpt.Shape(**arguments["shape"]), on_step)


def _minilm(arguments: dict[str, Any], _: OnStep) -> dict[str, Any]:
    from tilewise.demo import minilm

    return minilm.measure(**arguments)


TASKS: dict[str, Callable[[dict[str, Any], OnStep], dict[str, Any]]] = {
    "lengths": _lengths,
    "gpt": _gpt,
    "minilm": _minilm,
}


def call(task: str, arguments: dict[str, Any], on_step: OnStep | None = None) -> dict[str, Any]:
    """The result of ``task`` run in a fresh process; raises WorkerFailed."""
    command = [sys.executable, "-m", "tilewise.demo.worker", task, json.dumps(arguments)]
    result: dict[str, Any] | None = None
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            for line in process.stdout or ():
                message = json.loads(line) if line.startswith("{") else {}
                result = message.get("result", result)
                if on_step is not None and "step" in message:
                    on_step(*message["step"])
        if result is None:
            errors.seek(0)
            words = errors.read().strip().splitlines() or ["no word from it"]
            raise WorkerFailed(f"{task} {arguments}: exit status {process.returncode}: {words[-1]}")
    return result


def main(task: str, arguments: str) -> None:
    """Run ``task`` here and print its lines."""

    def on_step(step: int, steps: int) -> None:
        print(json.dumps({"step": [step, steps]}), flush=True)

    print(json.dumps({"result": TASKS[task](json.loads(arguments), on_step)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
