"""Recorded results: one JSON line a figure, with the machine, the versions and the commit."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from tilewise.device import device_facts


def _first_line(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def commit() -> str:
    """The commit of the source that runs, "+" when it was changed since; empty outside a checkout."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ":/src"], cwd=folder, capture_output=True)
    except OSError:
        return ""
    return head.stdout.strip() + ("+" if changed.returncode == 1 else "") if head.returncode == 0 else ""


def machine(device: torch.device) -> dict[str, Any]:
    """What a figure depends on beside the code."""
    facts = device_facts(device)
    name = facts.name if device.type == "cuda" else _first_line("/proc/cpuinfo", "model name") or platform.processor()
    return {
        "device": name,
        "arch": facts.arch,
        "threads": facts.threads,
        "cores": os.cpu_count(),
        "torch": facts.torch,
        "triton": facts.triton,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def write(path: Path, rows: list[dict[str, Any]], device: torch.device) -> None:
    """Replace ``path`` by one line a row, each with the machine's facts."""
    facts = machine(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({**row, **facts}) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a recorded file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]
