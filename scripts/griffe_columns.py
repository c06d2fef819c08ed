"""A griffe extension: lines of a docstring in two columns become a definition list.

Docstrings are written to be read in an editor; Markdown would run their columns together:

    errno    why it failed
    context  the object given to the join
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

COLUMNS = re.compile(r"(?!\s|[-*#>|]|\d+\. )(\S+(?: \S+){0,5}?) {2,}(\S.*)")
"""A term of a few words, two spaces or more, and what it means."""


def defined(text: str) -> str:
    """The text with each line of two columns, and the lines indented under it, as a definition."""
    out: list[str] = []
    fenced = inside = False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        found = None if fenced else COLUMNS.fullmatch(line)
        if found:
            out += [] if inside or not out or not out[-1] else [""]
            out += [f"`{found[1]}`", f":   {found[2]}", ""]
        elif inside and line.startswith("  "):
            out[-1:] = [f"    {line.strip()}", ""]
        else:
            out.append(line)
        inside = bool(found) or (inside and line.startswith("  "))
    return "\n".join(out)


class Columns(Extension):
    """Rewrites the docstring of every object that has one."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = defined(obj.docstring.value)
