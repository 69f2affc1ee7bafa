"""info: versions, devices, and which backends run on each of them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
from typing import Any

import torch

import tilewise
from tilewise.device import device_facts

OPTIONAL = ("numpy", "triton", "transformers")
DTYPES = (torch.float32, torch.bfloat16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``info``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends(device: torch.device) -> dict[str, dict[str, Any]]:
    """By backend: the dtypes in which it runs a small causal problem with gradients, and why not the others."""
    found: dict[str, dict[str, Any]] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        q = torch.empty(1, 256, 4, 64, dtype=dtype, device="meta", requires_grad=True)
        automatic = tilewise.explain(q, q, q, causal=True, device=device)
        for considered in automatic.trace:
            entry = found.setdefault(considered.name, {"runs": [], "chosen": [], "reasons": {}})
            by_name = tilewise.explain(q, q, q, causal=True, device=device, backend=considered.name)
            if by_name.backend is not None:
                entry["runs"].append(name)
            else:
                rows = (row for row in by_name.trace if row.name == considered.name)
                entry["reasons"][name] = [str(reason) for row in rows for reason in row.reasons]
            if considered.name == automatic.backend:
                entry["chosen"].append(name)
    return found


def collect() -> dict[str, Any]:
    """Everything ``info`` prints, as plain data."""
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    devices = [torch.device(name) for name in names]
    return {
        "versions": {
            "tilewise": tilewise.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: _version(name) for name in OPTIONAL},
        },
        "devices": {
            str(device): {"facts": dataclasses.asdict(device_facts(device)), "backends": _backends(device)}
            for device in devices
        },
    }


def _by_reason(reasons: dict[str, list[str]]) -> dict[str, list[str]]:
    """The dtypes that share a reason."""
    shared: dict[str, list[str]] = {}
    for dtype, those in reasons.items():
        for reason in those:
            shared.setdefault(reason, []).append(dtype)
    return shared


def _text(data: dict[str, Any]) -> str:
    lines = [f"{name:<13} {version or 'not installed'}" for name, version in data["versions"].items()]
    for name, device in data["devices"].items():
        facts = {key: value for key, value in device["facts"].items() if value not in ("", 0, None) and key != "torch"}
        lines += ["", f"device {name}", "  " + ", ".join(f"{key} {value}" for key, value in facts.items())]
        lines.append("  a small causal problem with gradients:")
        for backend, entry in device["backends"].items():
            runs = ", ".join(entry["runs"]) or "in no dtype"
            chosen = f'  ("auto" chooses it for {", ".join(entry["chosen"])})' if entry["chosen"] else ""
            lines.append(f"  {backend:<10} runs {runs}{chosen}")
            lines += [
                f"  {'':<10} not {', '.join(dtypes)}: {reason}"
                for reason, dtypes in _by_reason(entry["reasons"]).items()
            ]
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Print what is here."""
    data = collect()
    print(json.dumps(data, indent=2) if arguments.json else _text(data))
    return 0
