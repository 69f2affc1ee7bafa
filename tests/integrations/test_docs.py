"""Every Python block in docs/ runs, and prints exactly the text block that follows it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
BLOCKS = [
    pytest.param(code, text, id=f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 2}")
    for page in sorted(DOCS.glob("*.md"))
    for match in BLOCK.finditer(page.read_text())
    for code, text in [match.groups()]
]


def test_the_pages_have_blocks():
    assert len(BLOCKS) >= 7


@pytest.mark.parametrize(("code", "text"), BLOCKS)
def test_a_block_prints_what_the_page_says(code, text):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (text or "")
