"""Write the parts of README.md that code can say, each between its markers.

    python -m scripts.readme                                     the feature table, an explanation and the speeds
    python -m scripts.readme --demo demo.log --test test.log     and what the two commands printed

A log is what ``make demo`` or ``make test`` printed. tests/unit/test_readme.py checks what can be said again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from pathlib import Path
from typing import Any

from scripts import features, gpu_speed
from tilewise.bench import record

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SPEED = ROOT / "benchmarks" / "results" / "cpu.jsonl"


def block(text: str, name: str) -> str:
    """What stands between the markers of ``name``; KeyError where there are none."""
    found = re.search(rf"<!-- begin:{name} -->\n(.*?)<!-- end:{name} -->", text, re.DOTALL)
    if found is None:
        raise KeyError(f"README.md has no markers begin:{name} and end:{name}")
    return found.group(1).strip("\n")


def replaced(text: str, name: str, content: str) -> str:
    """``text`` with ``content`` between the markers of ``name``."""
    block(text, name)
    pattern = rf"(<!-- begin:{name} -->\n).*?(<!-- end:{name} -->)"
    return re.sub(pattern, lambda found: f"{found.group(1)}{content}\n{found.group(2)}", text, flags=re.DOTALL)


def fenced(lines: str) -> str:
    """``lines`` as a block of plain text."""
    return f"```text\n{lines}\n```"


def demo_block(log: str) -> str:
    """The demo's own lines, from the first that names the machine."""
    lines = [line.rstrip() for line in log.splitlines()]
    start = next(index for index, line in enumerate(lines) if line.startswith("tilewise "))
    text = "\n".join(lines[start:]).strip("\n")
    return fenced(re.sub(r"(The page with the plots: )\S*(tilewise-demo/index.html)", r"\1\2", text))


def test_block(log: str) -> str:
    """The closing lines: ruff's, mypy's, the total coverage and pytest's."""
    wanted = r"^(All checks passed!|Success: .*|TOTAL .*|Required test coverage .*|\d+ passed.*)$"
    return fenced("\n".join(re.findall(wanted, re.sub(r"^=+ | =+$", "", log, flags=re.MULTILINE), re.MULTILINE)))


def _speed_row(row: dict[str, Any]) -> list[str]:
    name = row["contender"].removeprefix("tilewise-")
    return [row["case"], row["pass"], f"`{name}`", f"{row['ms']:.4g}", f"{row['ratio_to_torch']:.2f}"]


def speed(rows: list[dict[str, Any]]) -> str:
    """Markdown from recorded rows: speed against torch's attention in the same run, then memory and host cost."""
    facts = rows[0]
    lines = ["| case | pass | backend | ms | speed / torch SDPA |", "| --- | --- | --- | ---: | ---: |"]
    ours = [row for row in rows if row["figure"] == "time" and row["contender"].startswith("tilewise-")]
    lines += [f"| {' | '.join(_speed_row(row))} |" for row in ours]
    lines.append("")
    for row in rows:
        if row["figure"] == "memory":
            lines.append(
                f"- Peak memory of {row['case']}, {row['pass']}, `{row['contender'].removeprefix('tilewise-')}`: "
                f"{row['extra_mib']:.0f} MiB above the {row['returned_mib']:.0f} MiB that it returns."
            )
        if row["figure"] == "host":
            lines.append(
                f"- Host cost of one warm call of a shape called before: {row['us']:.0f} us,"
                f" {row['us_over_torch']:+.0f} us over torch's."
            )
    lines += [
        "",
        f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, commit {facts['commit']}, "
        f"{facts['date']}: `{facts['command']}`",
    ]
    return "\n".join(lines)


def explained(text: str) -> str:
    """What the example prints that asks for an explanation."""
    example = next(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "tilewise.explain(" in code)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    return fenced(printed.getvalue().rstrip())


def main() -> None:
    """Rewrite README.md."""
    parser = argparse.ArgumentParser(description="Write the parts of README.md that code can say.")
    parser.add_argument("--demo", type=Path, help="what make demo printed")
    parser.add_argument("--test", type=Path, help="what make test printed")
    arguments = parser.parse_args()
    text = replaced(README.read_text(encoding="utf-8"), "features", features.table())
    text = replaced(text, "explain", explained(text))
    if SPEED.exists():
        text = replaced(text, "speed", speed(record.read(SPEED)))
    if gpu_speed.RECORD.exists():
        text = replaced(text, "gpu", gpu_speed.short(record.read(gpu_speed.RECORD)))
        gpu_speed.main()
    for name, path, write in (("demo", arguments.demo, demo_block), ("test", arguments.test, test_block)):
        if path is not None:
            text = replaced(text, name, write(path.read_text(encoding="utf-8")))
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
