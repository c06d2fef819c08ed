"""A MkDocs hook: what is drawn or asked for when the site is built, and what is shown there alone.

A line `<!-- include: NAME WORDS -->` becomes what the function NAME makes of the words. Tables are in
the pages' text: `scripts/tables.py` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r"^<!-- include: (\w+) ?(.*?) -->$", re.M)


def file(path: str) -> str:
    """A file as it is."""
    return (ROOT / path).read_text("utf-8").rstrip()


def help_of(words: str) -> str:
    """Return the help of a command, at 80 columns."""
    from typer.testing import CliRunner

    from mcast.cli import app

    arguments = [*words.split(), "--help"]
    done = CliRunner().invoke(app, arguments, prog_name="mcast", env={"COLUMNS": "80"})
    if done.exit_code:
        raise ValueError(f"mcast {' '.join(arguments)}: status {done.exit_code}")
    return f"```text\n{done.output.strip()}\n```"


def picture(words: str) -> str:
    """A picture of `scripts/pictures.py`: the function's name, and its argument."""
    from scripts import pictures

    name, _, argument = words.partition(" ")
    drawn: str = getattr(pictures, name)(argument)
    return drawn


INCLUDES: dict[str, Callable[[str], str]] = {
    function.__name__: function for function in (file, help_of, picture)
}


def pages_of_ids() -> dict[str, str]:
    """Id of a clause or a fact -> the page, built, with its row."""
    from mcast.conformance.markdown_table import lines

    pages = (ROOT / "docs" / "facts").glob("*.md")
    return {line.id: f"facts/{page.stem}.html" for page in pages for line in lines(page.read_text("utf-8"))}


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """MkDocs' event: a page as HTML. What is made from code cites ids, and gets links to their rows."""
    if not page.file.src_uri.startswith(("errors.md", "reference/")):
        return html
    up = "../" * page.file.src_uri.count("/")
    found = pages_of_ids()
    html = re.sub(r"docs/pitfalls\.md, (?=\d)", f'<a href="{up}pitfalls.html">pitfall</a> ', html)
    return re.sub(
        r"(?<![\w#-])[A-Z]+(-[A-Z]+)?-\d+\b(?![^<]*>|</a>)",
        lambda id_: f'<a href="{up}{found[id_[0]]}#{id_[0]}">{id_[0]}</a>' if id_[0] in found else id_[0],
        html,
    )


_ENDS_OF_TABLE = re.compile(r"^<!-- (?:table: .*|end of table) -->$", re.M)
_FOR_TESTS = re.compile(r"^(```\w+) title=\"(?:not run by the tests|run by make test-all|prints).*\"$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: a page's text, before it is rendered, without what blocks' titles tell the tests."""
    included = INCLUDE.sub(lambda found: INCLUDES[found[1]](found[2]), markdown)
    return _FOR_TESTS.sub(r"\1", _ENDS_OF_TABLE.sub("", included))
