"""Writes the manual pages in `man/` from what the commands say in their help: `make generated`."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer.main
from typer.core import TyperGroup

from mcast.cli import SUMMARIES, app, help_record, load
from mcast.cli.status import MEANINGS, OF_LAB, ExitStatus
from scripts.variables import SYSTEM, USE

if TYPE_CHECKING:
    from typer._click.core import Command, Context

FOLDER = Path(__file__).parents[1] / "man"

OTHER_END = {"send": "recv", "recv": "send", "record": "replay", "replay": "record"}
"""Command -> the command that takes what it gives."""

VARIABLES = {one.name: one.brief for one in (*USE, *SYSTEM) if one.brief}


def pages() -> dict[str, str]:
    """File name -> manual page, for `mcast` and each of its commands."""
    every = {name: load(name) for name in SUMMARIES}
    return {"mcast.1": _front()} | {f"mcast-{name}.1": _page(name, one) for name, one in every.items()}


def _front() -> str:
    command = typer.main.get_command(app)
    about = command.help or ""
    lines = [
        *_head("mcast", about),
        *_usage("mcast", command),
        ".SH DESCRIPTION",
        *_text(about),
        ".SH COMMANDS",
    ]
    for name, summary in SUMMARIES.items():
        lines += [".TP", f".BR mcast\\-{name} (1)", _plain(summary)]
    return _joined(
        [*lines, *_options("mcast", command), *_tail([f"mcast-{name}" for name in SUMMARIES], MEANINGS)]
    )


def _page(name: str, command: Command) -> str:
    words = f"mcast {name}"
    lines = [*_head(f"mcast-{name}", SUMMARIES[name]), *_usage(words, command)]
    lines += [".SH DESCRIPTION", *_text(command.help or ""), *_options(words, command)]
    if isinstance(command, TyperGroup):
        lines.append(".SH COMMANDS")
        for sub, one in command.commands.items():
            lines += [f".SS {_plain(f'{words} {sub}')}", *_synopsis(f"{words} {sub}", one), ".PP"]
            lines += [*_text(one.help or ""), *_options(f"{words} {sub}", one, within=True)]
    others = ["mcast", *(f"mcast-{other}" for one, other in OTHER_END.items() if one == name)]
    return _joined([*lines, *_tail(others, MEANINGS.keys() - (() if name == "lab" else OF_LAB))])


def _head(name: str, summary: str) -> Iterator[str]:
    yield f'.TH {name.upper()} 1 "" mcast "mcast manual"'
    # No hyphen of groff's in a command to paste. groff since 1.23 forgets the first two at a paragraph.
    yield from (".nh", ".ad l", ".nr HY 0", ".ds AD l")
    yield from (".SH NAME", f"{_plain(name)} \\- {_plain(summary.rstrip('.'))}", ".SH SYNOPSIS")


def _usage(words: str, command: Command) -> Iterator[str]:
    if not isinstance(command, TyperGroup) or words == "mcast":
        yield from _synopsis(words, command)
        return
    for sub, one in command.commands.items():
        yield from (*_synopsis(f"{words} {sub}", one), ".br")


def _context(words: str, command: Command) -> Context:
    """Return the context of the command's help, which keeps the names of --help that it has first."""
    settings = typer.main.get_command(app).context_settings
    return command.make_context(words, [], resilient_parsing=True, **settings)


def _synopsis(words: str, command: Command) -> Iterator[str]:
    with _context(words, command) as context:
        pieces = command.collect_usage_pieces(context)
    yield f".B {_plain(words)}"
    yield _plain(" ".join(pieces))


def _options(words: str, command: Command, within: bool = False) -> Iterator[str]:
    """Return the help of arguments and options."""
    with _context(words, command) as context:
        records = [found for one in command.get_params(context) if (found := help_record(one, context))]
    if records and not within:
        yield ".SH OPTIONS"
    for names, meaning in records:
        yield from (".TP", f".B {_plain(names)}", *_text(meaning))


def _tail(others: list[str], statuses: Collection[ExitStatus]) -> Iterator[str]:
    yield ".SH EXIT STATUS"
    for status in sorted(statuses):
        yield from (".TP", f".B {status.value}", _plain(MEANINGS[status]))
    yield ".SH ENVIRONMENT"
    for name, meaning in VARIABLES.items():
        yield from (".TP", f".B {name}", _plain(meaning))
    yield ".SH SEE ALSO"
    yield from (f".BR {_plain(other)} (1){',' * (other != others[-1])}" for other in others)


def _text(text: str) -> Iterator[str]:
    """The text's paragraphs, with a macro between two."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        yield _plain(paragraph)


def _plain(text: str) -> str:
    """The text as one line of roff that shows it as it is."""
    line = (
        " ".join(text.split())
        .replace("\\", "\\(rs")
        .replace("-", "\\-")
        .replace("`", "\\(ga")
        .replace("'", "\\(aq")
    )
    return f"\\&{line}" if line.startswith(".") else line


def _joined(lines: list[str]) -> str:
    return "\n".join(line for line in lines if line) + "\n"


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
