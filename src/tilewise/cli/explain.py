"""explain: what a call would do, for shapes given as options or JSON; nothing is allocated."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise.cli.shapes import FIELDS, Shapes
from tilewise.device import GPU_NAMES, known_gpu
from tilewise.errors import InvalidInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``explain``: one for each field of a problem."""
    for field in FIELDS.values():
        field.add(parser)
    parser.add_argument("--problem", help="JSON, a file that holds it, or - for standard input; options go before it")
    known = ", ".join(GPU_NAMES)
    parser.add_argument("--device", help=f"explain it for this device: cuda, or a GPU's name: {known} (the CPU)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _problem(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    if text == "-":
        text = sys.stdin.read()
    elif not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"--problem: {text!r} is neither JSON nor a file: {error.strerror}") from error
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"--problem: is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"--problem: is {type(found).__name__}, must be an object of fields")
    return found


def _device(name: str | None) -> str | torch.device | None:
    if name is None or known_gpu(name):
        return name
    try:
        device = torch.device(name)
    except RuntimeError as error:
        known = ", ".join(GPU_NAMES)
        raise InvalidInput(
            f"--device: is {name!r}, must be one of torch's, such as cpu or cuda:1, or {known}"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"--device: is {name!r}, but there are {torch.cuda.device_count()} CUDA devices here")
    return device


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation; 1 when no backend runs the problem."""
    given = {name: value for name in FIELDS if (value := getattr(arguments, name)) is not None}
    shapes = Shapes.read({**_problem(arguments.problem), **given})
    function = tilewise.explain if shapes.cu_seqlens_q is None else tilewise.explain_varlen
    explanation = function(**shapes.arguments(), device=_device(arguments.device))
    print(json.dumps(explanation.as_dict(), indent=2) if arguments.json else explanation)
    return 0 if explanation.backend is not None else 1
