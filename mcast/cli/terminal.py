"""Errors, output and values that the commands share."""

from __future__ import annotations

import errno as E
import json
import os
import re
import shutil
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from enum import Enum
from io import UnsupportedOperation
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from mcast.cli.status import ExitStatus

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text

    from mcast.wire.addresses import McastAddress


BACKEND = "MCAST_BACKEND"
"""The variable with the name of the backend to use, where no option says so."""

STANDARD = "-"
"""The name of stdin or stdout where a file is asked for."""


class Failure(Exception):
    """Ends the command with this sentence on stderr and this exit status."""

    def __init__(self, sentence: str, status: int = ExitStatus.FAILED) -> None:
        super().__init__(sentence)
        self.status = status


class UsageError(Failure):
    """Ends the command before it has begun."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, ExitStatus.USAGE)


def plain(text: str) -> str:
    """The text without characters that move a cursor, because the name of a file may come from a stranger.

    The bytes of a name that are UTF-8 are shown as such in every locale.
    """
    with suppress(UnicodeEncodeError):  # of surrogates that stand for no byte
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text
    )


def plural(noun: str, count: int) -> str:
    """The noun as it stands behind that number."""
    return noun if count == 1 else f"{noun}s"


def say(*lines: str, err: bool = False) -> None:
    """Print the lines on stdout or stderr at once, with nothing in them that moves a cursor."""
    typer.echo(plain("\n".join(lines)), err=err)


def json_value(value: Any) -> Any:
    """Return the value with named tuples as mappings and members of enumerations as their values."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value.as_dict() if hasattr(value, "as_dict") else value._asdict()
    if isinstance(value, Mapping):
        return {name: json_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(one) for one in value]
    return value.value if isinstance(value, Enum) else value


class JsonOutput:
    """The output of a command that was called with --json: one object, its result or its error.

    `on_stderr` is True where stdout has the data that the command receives.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a command."""
        self.wanted: bool = False
        self.on_stderr: bool = False
        self.is_printed: bool = False

    def want(self, wanted: bool) -> bool:
        """Note the option --json. It is read before the other options, whose refusal is an object, too."""
        self.wanted = wanted
        return wanted

    def result(self, found: Mapping[str, Any] | tuple[Any, ...]) -> None:
        """Print the result."""
        self.is_printed = True
        say(json.dumps(json_value(found), indent=1), err=self.on_stderr)

    def error(self, sentence: str, status: int) -> bool:
        """Print the error on one line, unless the result is printed; return True if the error was printed."""
        if not self.wanted or self.is_printed:
            return False
        self.is_printed = True
        say(json.dumps({"error": sentence, "status": status}), err=self.on_stderr)
        return True


json_output: JsonOutput = JsonOutput()
"""JSON output of the command that runs."""

Json = Annotated[
    bool,
    typer.Option("--json", is_eager=True, callback=json_output.want, help="Print JSON, for programs."),
]
"""The option of every command that has JSON: a flag."""


class NonBlockingWriter:
    """Writes lines to stdout in a thread of its own: a reader that does not read holds nobody up.

    Such a reader loses lines once MAX_LINES wait, and is told how many.
    """

    MAX_LINES = 1000
    """Maximum number of lines that wait."""
    LAST = 1.0
    """Seconds that the end waits for a reader that does not read."""

    def __init__(self) -> None:
        self._lines: Queue[str | None] = Queue(self.MAX_LINES)
        self._missed = 0
        self._thread = threading.Thread(target=self._write, name="mcast-writer", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Write the line, or count it. From any thread."""
        try:
            self._lines.put_nowait(line)
        except Full:
            self._missed += 1

    def _write(self) -> None:
        with suppress(OSError):  # nobody reads any more
            while (line := self._lines.get()) is not None:
                _write_line(line)
                missed, self._missed = self._missed, 0
                if missed:
                    _write_line(f"({missed} lines were dropped here: the reader was too slow)")

    def close(self) -> None:
        """Write what is left."""
        with suppress(Full):
            self._lines.put(None, timeout=self.LAST)
            self._thread.join(self.LAST)


def _write_line(line: str) -> None:
    """Past Python's buffer, whose lock nobody else could have while this waits."""
    text = f"{plain(line)}\n"
    try:
        fd = sys.stdout.fileno()
    except UnsupportedOperation:  # it is no file
        print(text, end="", flush=True)
        return
    data = text.encode(sys.stdout.encoding, "backslashreplace")
    while data:
        data = data[os.write(fd, data) :]


def console(stderr: bool = False) -> Console:
    """A console for plain text if the output is no terminal, and without colours if NO_COLOR is set."""
    from rich.console import Console

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:  # before its width is measured
            return super().render_str(plain(text), **options)

        def render(self, *what: Any, **options: Any) -> Iterator[Segment]:
            for one in super().render(*what, **options):
                yield one if one.control else one._replace(text=plain(one.text))

        def on_broken_pipe(self) -> None:  # where rich would end the process by a status of its own
            self.quiet = True
            raise BrokenPipeError

    # Of 0 columns, by which some terminals say that they do not know, rich would leave out everything.
    width = _USUAL if os.environ.get("COLUMNS") == "0" else None
    return PlainConsole(stderr=stderr, width=width, highlight=False, soft_wrap=False)


_NARROWEST = 20
"""The least columns for a text beside a label."""

_USUAL = 80
"""The columns that a terminal has."""

_NO_BREAK = "\N{NO-BREAK SPACE}"


def print_wrapped(label: str, text: str) -> None:
    """Print the label, and beside it the text, in as many lines as the terminal's width needs."""
    indent = " " * len(label)
    width = max(shutil.get_terminal_size().columns, len(label) + _NARROWEST)
    say(label + f"\n{indent}".join(_lines(text, width - len(label))))


def _lines(text: str, width: int) -> list[str]:
    """The text in lines of that width; a command between backticks is in one line, whatever its length."""
    kept = re.sub("`[^`]*`", lambda found: found[0].replace(" ", _NO_BREAK), text)
    lines = textwrap.wrap(kept, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


def print_beside(out: Console, label: Text, text: str) -> None:
    """Print the label, and beside it the text, in as many lines as the terminal's width needs."""
    lines = _lines(text, max(out.width - label.cell_len, _NARROWEST))
    out.print(label.append(f"\n{' ' * label.cell_len}".join(lines)), soft_wrap=True)


def print_table(out: Console, table: Table) -> None:
    """Print the table, on a terminal narrower than 80 columns rather too wide than with numbers cut."""
    needed = out.measure(table, options=out.options.update(width=_USUAL)).minimum
    table.width = needed if needed > out.width else None
    out.print(table, crop=False)


def print_unwrapped(out: Console, label: Text, text: str) -> None:
    """Print the label, and beside it the text in one line of any length, which may be pasted."""
    out.print(label.append(text), soft_wrap=True)


def backend_name(name: str) -> str:
    """Check that a backend has that name."""
    from mcast.api import BackendUnavailable, UnknownBackend, backend_names, provider

    with suppress(BackendUnavailable):  # it has that name, and its use will say what is wrong with it
        try:
            provider(name)
        except UnknownBackend:
            there = ", ".join(backend_names())
            raise typer.BadParameter(f"{name!r} is not a backend: choose one of {there}") from None
    return name


def group(text: str) -> McastAddress:
    """The group address in a text; one sentence says why a text has none."""
    from mcast.wire.addresses import McastAddress

    try:
        return McastAddress.of(text)
    except ValueError as error:
        raise typer.BadParameter(sentence(error)) from None


def sentence(error: ValueError) -> str:
    """Return the reasons of a validation error, without the frame that pydantic puts around them."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        from mcast.errors.validation import describe_validation_error

        return "; ".join(
            describe_validation_error({**found, "loc": ()} if found["type"] == "value_error" else dict(found))
            for found in error.errors()
        )
    return str(error)


def output_file(path: Path | None) -> Path | None:
    """Check before the work that the file can be written, without creating it."""
    from mcast.cast.io.files import open_sink

    if path is not None and str(path) != STANDARD:
        try:
            if not (path.is_fifo() or path.is_char_device()):  # opening a pipe once would end its reader
                with closing(open_sink(str(path.absolute()))) as sink:
                    sink.open()
        except OSError as error:
            raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
    return path


@contextmanager
def packet_sink(output: str) -> Iterator[BinaryIO]:
    """Where packets are written, STANDARD for stdout; one sentence if that cannot be."""
    name = "to stdout" if output == STANDARD else output
    if output == STANDARD and sys.stdout.isatty():
        raise UsageError("packets cannot be shown on a terminal: redirect stdout, or name a file")
    try:
        with ExitStack() as stack:
            try:
                # Not Python's own stdout, which may write through (PYTHONUNBUFFERED), a packet in pieces.
                target = sys.stdout.fileno() if output == STANDARD else output
                sink = stack.enter_context(open(target, "wb", closefd=output != STANDARD))
            except OSError as error:
                raise UsageError(f"cannot write {name}: {error.strerror}") from None
            yield sink
    except OSError as error:
        if type(error) is not OSError:  # one of the contract, or the reader is gone
            raise
        raise Failure(f"cannot write {name}: {error.strerror}") from None


def discard_stdout() -> None:
    """The reader of the pipe is gone, so the interpreter must not try to flush to it at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def stdin_as_file(name: str, ending: str = "", most: int | None = None) -> Iterator[str]:
    """The name of a file; for STANDARD that of a temporary one with all of stdin, which may be read twice.

    `most` is how many bytes of stdin are read at the most; None: all. A Failure of the block says STANDARD
    where it names the temporary file.
    """
    from mcast.arguments.file_objects import read_exactly

    if name != STANDARD:
        yield name
        return
    if sys.stdin is None:  # closed from the beginning
        raise UsageError(f"cannot read {STANDARD}: {os.strerror(E.EBADF)}")
    with tempfile.NamedTemporaryFile(prefix="stdin-", suffix=ending) as copy:
        try:
            left = sys.maxsize if most is None else most
            while part := read_exactly(sys.stdin.buffer, min(left, 1 << 20))[0]:
                copy.write(part)
                left -= len(part)
            copy.flush()
        except OSError as error:
            raise UsageError(f"cannot read {STANDARD} into {copy.name}: {error.strerror}") from None
        try:
            yield copy.name
        except Failure as error:
            raise Failure(str(error).replace(copy.name, STANDARD), error.status) from None


def require_one_stdout(*outputs: Path | str | bool | None) -> bool:
    """Return True if one of the outputs goes to stdout; refuse two, which would be mixed there."""
    count = sum(str(one) == STANDARD or one is True for one in outputs)
    if count > 1:
        raise UsageError("only one output can go to stdout: name a file for the other")
    return count == 1


def write_file(path: Path, data: bytes) -> None:
    """Write the whole file or nothing, STANDARD for stdout; one sentence if it cannot be written."""
    from mcast.arguments.file_objects import FileWriter
    from mcast.cast.io.files import open_sink

    if str(path) == STANDARD:
        sys.stdout.flush()
        FileWriter(sys.stdout.buffer).write_all(data)
        sys.stdout.buffer.flush()
        return
    try:
        with closing(open_sink(str(path.absolute()), wait_for_reader=True)) as sink:
            sink.open()
            sink.write(data)
            sink.finish()
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror or error}") from None
