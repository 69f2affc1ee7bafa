"""The command line: ``python -m tilewise info | explain | demo | bench``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from tilewise.errors import InvalidInput, UnsupportedProblem

# Sub-command -> module that has add_arguments(parser) and run(arguments) -> exit status.
COMMANDS = {
    "info": "tilewise.cli.info",
    "explain": "tilewise.cli.explain",
    "demo": "tilewise.cli.demo",
    "bench": "tilewise.cli.bench",
}


def parser() -> argparse.ArgumentParser:
    """The parser of every sub-command."""
    top = argparse.ArgumentParser(prog="python -m tilewise", description="Exact attention that says what it does.")
    commands = top.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        summary = (module.__doc__ or "").strip().splitlines()[0].partition(": ")[2]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit status: 0 done, 1 a check failed, 2 the request was wrong."""
    parsed = parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except (InvalidInput, UnsupportedProblem) as error:
        print(f"tilewise {parsed.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # whoever reads, head perhaps, has seen enough; what is still buffered must not be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
