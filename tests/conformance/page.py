"""The report as one HTML page that needs no other file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import SECTIONS, Cell, Outcome, SuiteReport, SuiteResult, counts, sentence_of

_GLYPH = {
    Outcome.PASSED: "✓",
    Outcome.FAILED: "✗",
    Outcome.NOT_APPLICABLE: "·",
    Outcome.DEVIATION: "≠",
    Outcome.SKIPPED: "?",
}
_SHOWN = (Outcome.PASSED, Outcome.DEVIATION, Outcome.NOT_APPLICABLE, Outcome.FAILED)


def to_html(report: SuiteReport, details: str, summaries: Mapping[str, str]) -> str:
    """A page that needs no other file.

    `details` is a line about the run; `summaries` has a line about each backend.
    """
    template = Template(files("mcast.conformance").joinpath("page.html").read_text("utf-8"))
    verdict = "conforms" if report.passed else "does not conform"
    return template.substitute(
        verdict=verdict,
        verdict_class="passed" if report.passed else "failed",
        details=escape(details),
        columns=len(report.providers),
        cards="\n".join(
            [_card(report, backend, summaries.get(backend, "")) for backend in report.providers]
            + [_missing_card(backend, why) for backend, why in report.unavailable.items()]
        ),
        filters="".join(
            f'<button data-show="{outcome.value}">{_GLYPH[outcome]} {_words(outcome)}</button>'
            for outcome in _SHOWN
        ),
        providers="".join(f"<span>{escape(backend)}</span>" for backend in report.providers),
        loose="".join(
            f"<li>{escape(result.backend or 'all')} {_test(result)}</li>" for result in report.loose
        ),
        sections="\n".join(_section(report, title, names) for title, names in SECTIONS),
    )


def _words(outcome: Outcome) -> str:
    return outcome.value.replace("-", " ")


def _prose(text: str) -> str:
    return re.sub(r"\*(\w+)\*", r"<em>\1</em>", re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))


def _card(report: SuiteReport, backend: str, summary: str) -> str:
    lines = []
    for title, names in (("clauses", CLAUSES), ("facts", FACTS)):
        found = counts(report, backend, names)
        shown = [outcome for outcome in _SHOWN if found[outcome]]
        bar = "".join(f'<i class="{o.value}" style="flex-grow:{found[o]}"></i>' for o in shown)
        text = " · ".join(f"{found[o]} {_words(o)}" for o in shown)
        lines.append(
            f'<div class="count"><b>{len(names)}</b> {title}</div><div class="bar">{bar}</div><p>{text}</p>'
        )
    return (
        f'<article><h2>{escape(backend)}</h2><p class="soft">{escape(summary)}</p>{"".join(lines)}</article>'
    )


def _missing_card(backend: str, why: str) -> str:
    return f'<article class="missing"><h2>{escape(backend)}</h2><p>not tested: {escape(why)}</p></article>'


def _section(report: SuiteReport, title: str, names: Sequence[str]) -> str:
    rows = "\n".join(_row(report, name) for name in names)
    return f"<section><h3>{escape(title)}</h3>\n{rows}\n</section>"


def _row(report: SuiteReport, name: str) -> str:
    cells = {backend: column[name] for backend, column in report.providers.items()}
    chips = "".join(
        f'<span class="chip {cell.outcome.value}" title="{escape(backend)}: {_words(cell.outcome)}">'
        f"<em>{escape(backend)}</em>{_GLYPH[cell.outcome]} {_words(cell.outcome)}</span>"
        for backend, cell in cells.items()
    )
    proof = f"<p>Proof: {_prose(CLAUSES[name].proof)}</p>" if name in CLAUSES else ""
    found = " ".join(sorted({cell.outcome.value for cell in cells.values()}))
    evidence = "".join(_evidence(backend, cell) for backend, cell in cells.items())
    return (
        f'<details id="{name}" data-outcomes="{found}">'
        f"<summary><b>{name}</b><span>{_prose(sentence_of(name))}</span>"
        f'<span class="chips">{chips}</span></summary><div class="more">{proof}{evidence}</div></details>'
    )


def _evidence(backend: str, cell: Cell) -> str:
    tests = "".join(f"<li>{_test(result)}</li>" for result in cell.results)
    reason = f"<p>{_prose(cell.reason)}</p>" if cell.reason else ""
    return f"<h4>{escape(backend)}: {_words(cell.outcome)}</h4>{reason}<ul>{tests}</ul>"


def _test(result: SuiteResult) -> str:
    reason = f" <small>{escape(result.reason)}</small>" if result.outcome is Outcome.FAILED else ""
    glyph = f'<span class="{result.outcome.value}">{_GLYPH[result.outcome]}</span>'
    return f"{glyph} <code>{escape(result.test)}</code>{reason}"
