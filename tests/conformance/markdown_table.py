"""Reads a page of the documentation whose tables have rows with ids: the clauses, or the facts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_ROW = re.compile(r'\| <a id="([\w-]+)"></a>\1 \| (.+) \|')


class Line(NamedTuple):
    """A row: its id, the heading above the table, and the cells after the id."""

    id: str
    heading: str
    cells: tuple[str, ...]


def lines(page: str) -> Iterator[Line]:
    """The rows of a page, given as text, in their order."""
    heading = ""
    for line in page.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif found := _ROW.fullmatch(line):
            yield Line(found[1], heading, tuple(found[2].split(" | ")))
