"""Every example runs from the command line, and prints the differences that its text promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# (file, how many differences it prints, what they may be)
PRINTED = {
    "packed_documents.py": (2, 5e-6),
    "pair_bias_gradient.py": (1, 1e-5),
    "second_derivatives.py": (3, 1e-12),
    "explain_before_running.py": (0, 0.0),
}
ELSEWHERE = {"transformers_minilm.py"}  # has a test of its own


def test_every_example_is_run_by_a_test():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED) | ELSEWHERE


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs_and_its_differences_are_rounding(name):
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    count, most = PRINTED[name]
    differences = [float(number) for number in re.findall(r"\d\.\de[+-]\d\d", done.stdout)]
    assert len(differences) == count
    assert all(difference <= most for difference in differences)
