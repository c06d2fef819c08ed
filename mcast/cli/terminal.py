"""What the commands share: how they fail, how they write, and the values they read."""

from __future__ import annotations

import shutil
import textwrap
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mcast.contract.registry import backend_names
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


class Failure(Exception):
    """Ends the command with this sentence on stderr and this exit status."""

    def __init__(self, sentence: str, status: int = 1) -> None:
        super().__init__(sentence)
        self.status = status


def plain(text: str) -> str:
    """The text with nothing in it that moves a cursor: the name of a file may be a stranger's."""
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text
    )


def console(stderr: bool = False) -> Console:
    """Plain text where it is not a terminal; no colour where NO_COLOR is set."""
    from rich.console import Console

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(plain(text), **options)

    return PlainConsole(stderr=stderr, highlight=False, soft_wrap=False)


def wrapped(label: str, text: str) -> None:
    """Print the label and beside it the text, in as many lines as the width asks for."""
    indent = " " * len(label)
    width = max(shutil.get_terminal_size().columns, len(label) + 20)
    lines = textwrap.wrap(text, width - len(label), break_long_words=False, break_on_hyphens=False)
    typer.echo(label + f"\n{indent}".join(lines or [""]))


def backend_name(name: str) -> str:
    """The name of a registered backend."""
    if name not in backend_names():
        raise typer.BadParameter(f"{name!r} is no backend; there are {', '.join(backend_names())}")
    return name


def group(text: str) -> McastAddress:
    """A group address, with the reason in one sentence when it is none."""
    try:
        return McastAddress.of(text)
    except ValueError as error:
        raise typer.BadParameter(sentence(error)) from None


def sentence(error: ValueError) -> str:
    """What a model refuses, without pydantic's frame around it."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(
            found["msg"].removeprefix("Value error, ")
            if found["type"] == "value_error"
            else f"{'.'.join(map(str, found['loc']))} is {found['input']!r}: {found['msg']}"
            for found in error.errors()
        )
    return str(error)


_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


MAX_SIZE = 1 << 30
"""The largest file that is made up: it takes room on the disk, which others need too."""


def size(text: str) -> int:
    """A number of bytes up to MAX_SIZE: 4194304, 4096K, 4M or 1G."""
    number, unit = (text[:-1], text[-1:].upper()) if text[-1:].upper() in _UNITS else (text, "")
    if not (number.isascii() and number.isdecimal()):
        raise typer.BadParameter(f"{text!r} is no size: write bytes, or a number with K, M or G, like 4M")
    if len(number) > 20 or (wanted := int(number) * _UNITS.get(unit, 1)) > MAX_SIZE:
        raise typer.BadParameter(f"{text} is too much: at most 1G is made up; give a FILE to send more")
    return wanted


def output_file(path: Path | None) -> Path | None:
    """A file that can be written; asked before the work, not after it, and without making one."""
    from mcast.cast.files import open_sink

    if path is not None:
        try:
            if not (path.is_fifo() or path.is_char_device()):  # whoever reads would see its end
                with closing(open_sink(str(path.absolute()))) as sink:
                    sink.open()
        except OSError as error:
            raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
    return path


def write_file(path: Path, data: bytes) -> None:
    """Write all of the file or none of it; one sentence if it cannot be written."""
    from mcast.cast.files import open_sink

    try:
        with closing(open_sink(str(path.absolute()))) as sink:
            sink.open()
            sink.write(data)
            sink.finish()
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from None
