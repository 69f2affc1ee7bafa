"""The page: one HTML file without a link to anything, readable on a phone, light or dark."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.demo import svg


@dataclass(frozen=True)
class Section:
    """One part of the demo: what it says in words, its table, and its charts (HTML from ``svg.chart``).

    The first ``text_columns`` columns of the table are words, the others numbers.
    """

    title: str
    words: Sequence[str]
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text_columns: int = 1
    charts: Sequence[str] = ()
    verdict: str = ""


STYLE = """
:root { color-scheme: light dark; --s0: #c2410c; --s1: #0369a1; --s2: #15803d; --s3: #7e22ce; --line: #8884; }
@media (prefers-color-scheme: dark) { :root { --s0: #fb923c; --s1: #38bdf8; --s2: #4ade80; --s3: #c084fc; } }
body { font: 16px/1.55 system-ui, sans-serif; margin: 0 auto; max-width: 44rem; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
.text { text-align: left; }
@media (max-width: 30rem) { table { font-size: .78rem; } th, td { padding-right: .35rem; } }
.verdict { border-left: 4px solid var(--s2); padding: .2rem .8rem; }
footer { margin-top: 3rem; font-size: .85rem; opacity: .75; }
"""


def _table(section: Section) -> str:
    if not section.rows:
        return ""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="text"' if column < section.text_columns else "" for column in range(len(row))]
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in section.rows)
    head = f"<thead><tr>{cells('th', section.head)}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _section(number: int, section: Section) -> str:
    words = "".join(f"<p>{html.escape(text)}</p>" for text in section.words)
    verdict = f'<p class="verdict">{html.escape(section.verdict)}</p>' if section.verdict else ""
    title = f"<h2>{number}. {html.escape(section.title)}</h2>"
    return f"<section>{title}{words}{_table(section)}{verdict}{''.join(section.charts)}</section>"


def render(title: str, introduction: str, sections: Sequence[Section], footer: str) -> str:
    """The whole file."""
    body = "".join(_section(number, section) for number, section in enumerate(sections, start=1))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}{svg.STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(introduction)}</p>{body}"
        f"<footer>{html.escape(footer)}</footer></body></html>\n"
    )
