"""A MkDocs hook: what pages take from the code, the tests or README.md, put in when the site is built.

A line `<!-- include: NAME WORDS -->` becomes what the function NAME makes of the words; so a table has one
source, and a page cannot lag behind it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r"^<!-- include: (\w+) ?(.*?) -->$", re.M)


def readme(heading: str) -> str:
    """The section of README.md with this heading, without the heading."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.M | re.S)
    if not found:
        raise ValueError(f"README.md has no section {heading!r}")
    return found[1].strip()


def example(_: str) -> str:
    """The code that README.md begins with."""
    section = readme("An example")
    return section[: section.index("```", 3) + 3]


def file(path: str) -> str:
    """A file as it is."""
    return (ROOT / path).read_text("utf-8").rstrip()


def clauses(_: str) -> str:
    """Each document's clauses as a table."""
    from mcast.conformance.clauses import CLAUSES, DOCUMENTS

    parts = []
    for prefix, document in DOCUMENTS.items():
        rows = [row for row in CLAUSES.values() if row.document == document]
        parts.append(f"### {document} {{ #{prefix.lower()} }}\n")
        parts.append(table(("clause", "says", "proof"), [(row.id, row.says, row.proof) for row in rows]))
    return "\n".join(parts)


def facts(_: str) -> str:
    """How many facts were measured, by topic, and how many of them no test can show."""
    from mcast.conformance.facts import FACTS, TOPICS

    rows = []
    for topic in TOPICS.values():
        own = [fact for fact in FACTS.values() if fact.topic == topic]
        rows.append((topic, str(len(own)), str(sum(not fact.beyond for fact in own))))
    rows.append(("all", str(len(FACTS)), str(sum(not fact.beyond for fact in FACTS.values()))))
    return table(("topic", "facts", "shown by a test"), rows)


def deviations(_: str) -> str:
    """Where Soft-RoCE differs from the suite's sentences."""
    from mcast.backends.rdma.testbed import DEVIATIONS

    return table(("test that fails", "why"), [(f"`{test}`", why) for test, why in DEVIATIONS.items()])


def mutations(_: str) -> str:
    """Each planted mistake, and the clause that notices it."""
    planted = module("tests/sim/test_mutations.py").MUTATIONS
    return table(
        ("mistake planted in the simulator", "the clause that fails"),
        [(what, ", ".join(dict.fromkeys(one.clause for one in found))) for what, found in planted.items()],
    )


def commands(_: str) -> str:
    """What each command says of itself, at 80 columns."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from mcast.cli import app

    def text(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--help"], prog_name="mcast", env={"COLUMNS": "80"})
        if done.exit_code:
            raise ValueError(f"mcast {' '.join(words)} --help: status {done.exit_code}")
        return done.output.strip()

    parts = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        parts.append(f"## mcast {name}\n\n```text\n{text(name)}\n```\n")
        parts += [
            f"### mcast {name} {below}\n\n```text\n{text(name, below)}\n```\n"
            for below in getattr(command, "commands", {})
        ]
    return "\n".join(parts)


def errors(_: str) -> str:
    """The tree of exceptions, as the module's docstring draws it."""
    from mcast.errors import tree as errors

    assert errors.__doc__ is not None
    return "```text\n" + errors.__doc__.split("```")[1].strip("\n") + "\n```"


def atlas(_: str) -> str:
    """What each errno means in each phase."""
    from mcast.errors import causes

    return causes.atlas()


INCLUDES: dict[str, Callable[[str], str]] = {
    function.__name__: function
    for function in (readme, example, file, clauses, facts, deviations, mutations, commands, errors, atlas)
}


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


def module(path: str) -> ModuleType:
    """A module of the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: a page's text, before it is rendered."""
    return INCLUDE.sub(lambda found: INCLUDES[found[1]](found[2]), markdown)
