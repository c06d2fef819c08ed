"""The facts that were measured on the real stack, from docs/facts/kernel.md, which says how to measure them
again.

A test names the facts that it shows with the mark `fact(*ids)`. A fact without a test says in `beyond` why no
test through the contract can show it.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import NamedTuple

from mcast.conformance.markdown_table import Line, lines


class Fact(NamedTuple):
    """One row: id, topic, what was seen, the tests that show it, and why none can ("" if one does)."""

    id: str
    topic: str
    says: str
    tests: frozenset[str]
    beyond: str


def _fact(line: Line) -> Fact:
    says, _, again = line.cells
    shown = frozenset(re.findall(r"`(test_\w+)`", again))
    return Fact(line.id, line.heading, says, shown, again.partition("No test: ")[2])


FACTS = {
    line.id: _fact(line)
    for line in lines(files("mcast.conformance").joinpath("kernel.md").read_text("utf-8"))
}
"""Id -> fact, in the order of the page."""

TOPICS = tuple(dict.fromkeys(fact.topic for fact in FACTS.values()))
