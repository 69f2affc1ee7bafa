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


def driver() -> str:
    """The GPU driver's version, empty where it cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine(device: torch.device, stated_commit: str | None = None) -> dict[str, Any]:
    """What a figure depends on beside the code; ``stated_commit`` is told where the source is no checkout."""
    facts = device_facts(device)
    name = facts.name if device.type == "cuda" else _first_line("/proc/cpuinfo", "model name") or platform.processor()
    on_gpu = {"cuda": torch.version.cuda, "driver": driver()} if device.type == "cuda" else {}
    return {
        "device": name,
        "arch": facts.arch,
        "threads": facts.threads,
        "cores": os.cpu_count(),
        "torch": facts.torch,
        **on_gpu,
        "triton": facts.triton,
        "python": platform.python_version(),
        "commit": stated_commit or commit(),
        "date": datetime.date.today().isoformat(),
    }


def write(path: Path, rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Replace ``path`` by one line a row, each with the machine's facts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    append(path, rows, facts)


def append(path: Path, rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Add one line a row, so that a run that is cut off leaves what it has measured."""
    with path.open("a") as file:
        file.writelines(json.dumps({**row, **facts}) + "\n" for row in rows)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a recorded file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]
