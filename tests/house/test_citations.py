"""Each clause, fact and pitfall that code, tests and pages cite has its row, and each row is leaned on.

A citation is the id of a row in docs/facts, alone or behind its page (`docs/facts/sa.md#` and the id), or the
number of a section of docs/pitfalls.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mcast.conformance.markdown_table import lines

ROOT = Path(__file__).parents[2]
FACTS = ROOT / "docs" / "facts"
PAGE_OF = {
    line.id: page.name for page in sorted(FACTS.glob("*.md")) for line in lines(page.read_text("utf-8"))
}
"""Id -> the page with its row."""

_PREFIXES = "|".join(sorted({id_.partition("-")[0] for id_ in PAGE_OF}))
CITED = re.compile(
    rf"(?:docs/facts/(\w+\.md)#)?(?<![\w-])((?:{_PREFIXES})(?:-[A-Z]+)?-\d+)\b|docs/facts/(\w+\.md)"
)
PITFALLS = re.compile(r"docs/pitfalls\.md, (\d+)(?: and (\d+))?")


class Citation(NamedTuple):
    """Citation in a file: the id or number of a row, "" if it means a page; the page, "" if it names none."""

    file: str
    page: str
    row: str


def cited_in(file: str, text: str) -> Iterator[Citation]:
    for found in CITED.finditer(text):
        yield Citation(file, found[1] or found[3] or "", found[2] or "")
    for found in PITFALLS.finditer(text):
        yield from (Citation(file, "pitfalls.md", number) for number in found.groups() if number)


SUFFIXES = {".py", ".c", ".h", ".sh", ".md", ".toml", ".html"}


def sources() -> Iterator[Path]:
    """Every text file that the repository shows to its readers, this one left out."""
    tops = [ROOT / name for name in ("mcast", "lab", "tests", "docs", "benchmarks", "examples", "scripts")]
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(path for top in tops for path in top.rglob("*")),
    ]:
        if path.suffix in SUFFIXES and path.is_file() and not path.is_symlink() and path != Path(__file__):
            yield path


def citations() -> Iterator[Citation]:
    for path in sources():
        yield from cited_in(str(path.relative_to(ROOT)), path.read_text("utf-8"))


def rows() -> dict[str, str]:
    """Row -> its page: ids, and the numbers of the pitfalls."""
    pitfalls = re.findall(r"^## (\d+)\. ", (ROOT / "docs" / "pitfalls.md").read_text("utf-8"), re.M)
    return PAGE_OF | dict.fromkeys(pitfalls, "pitfalls.md")


def faults(cited: Iterable[Citation], page_of: Mapping[str, str]) -> list[str]:
    """Return the faults of the citations, a sentence each."""
    found = []
    for file, page, row in dict.fromkeys(cited):
        if row and row not in page_of:
            found.append(f"{file} cites {row}, which has no row")
        elif row and page and page_of[row] != page:
            found.append(f"{file} cites {row} of {page}: the row is in {page_of[row]}")
        elif not row and page not in page_of.values():
            found.append(f"{file} cites the page {page}, which is not there")
    return found


def idle(cited: Iterable[Citation], page_of: Mapping[str, str]) -> list[str]:
    """The rows that nothing but the pages of facts themselves leans on."""
    used = {row for file, _, row in cited if not file.startswith("docs/facts/")}
    return [row for row in page_of if row not in used]


def test_each_citation_leads_to_its_row() -> None:
    found = [*citations()]
    assert len(found) > 300
    assert faults(found, rows()) == []


def test_each_row_has_who_leans_on_it() -> None:
    assert idle(citations(), PAGE_OF) == []


def test_each_row_stands_once() -> None:
    ids = [line.id for page in FACTS.glob("*.md") for line in lines(page.read_text("utf-8"))]
    anchors = [
        id_ for page in FACTS.glob("*.md") for id_ in re.findall(r'<a id="(.*?)">', page.read_text("utf-8"))
    ]
    assert sorted(ids) == sorted(set(ids)) == sorted(anchors)


def test_each_test_that_a_row_names_is_there() -> None:
    named = {
        name for page in FACTS.glob("*.md") for name in re.findall(r"`(test_\w+)`", page.read_text("utf-8"))
    }
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 100
    assert named - set(re.findall(r"^(?:async )?def (test_\w+)", tests, re.M)) == set()


def test_no_sheet_is_cited_by_another_name() -> None:
    """While the sheets lay elsewhere they were named by subject; nobody could open those."""
    other = re.compile(r"\bfacts?: (kernel|SA|users)\b|\bfact sheet")
    assert [path for path in sources() if other.search(path.read_text("utf-8"))] == []


TEXT = """
IDs stand alone (K-JOIN-1, JEX-3/4), or behind a page: docs/facts/sa.md#SA-MLID-1, SA-MLID-9.
docs/facts/sa.md#K-JOIN-1 is elsewhere; docs/facts/gone.md is nowhere; docs/pitfalls.md, 3 and 26.
"""


def test_a_wrong_citation_is_found() -> None:
    page_of = {"K-JOIN-1": "kernel.md", "JEX-3": "clauses.md", "SA-MLID-1": "sa.md", "3": "pitfalls.md"}
    found = [*cited_in("x.py", TEXT)]
    assert faults(found, page_of) == [
        "x.py cites SA-MLID-9, which has no row",
        "x.py cites K-JOIN-1 of sa.md: the row is in kernel.md",
        "x.py cites the page gone.md, which is not there",
        "x.py cites 26, which has no row",
    ]


def test_a_row_that_nobody_leans_on_is_found() -> None:
    page_of = {"K-JOIN-1": "kernel.md", "K-JOIN-2": "kernel.md", "K-JOIN-3": "kernel.md"}
    found = [*cited_in("docs/facts/sa.md", "K-JOIN-1"), *cited_in("mcast/api.py", "K-JOIN-2")]
    assert idle(found, page_of) == ["K-JOIN-1", "K-JOIN-3"]
