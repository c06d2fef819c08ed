"""Every normative sentence of the five source documents, with an id: the spine of the suite.

The sentences are in docs/facts/clauses.md. A test names the clauses that it proves with the mark
`clause(*ids)`; the report is a table of clause and provider.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from mcast.conformance.markdown_table import lines


class Clause(NamedTuple):
    """One sentence: its id, the document, what it says in short, the section, and what proves it."""

    id: str
    document: str
    says: str
    where: str
    proof: str


CLAUSES = {
    line.id: Clause(line.id, line.heading, *line.cells)
    for line in lines(files("mcast.conformance").joinpath("clauses.md").read_text("utf-8"))
}
"""Id -> clause, in the order of the documents."""

DOCUMENTS = tuple(dict.fromkeys(clause.document for clause in CLAUSES.values()))
