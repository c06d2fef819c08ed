"""The command `mcast`: one file for each sub-command, which imports what it needs when it runs.

After bad input it prints one sentence on stderr and exits with status 2; after a run that fails, with status
1.
"""

from __future__ import annotations

import errno as E
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from io import RawIOBase, TextIOWrapper
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_group

from mcast.cli.status import ExitStatus
from mcast.cli.terminal import Failure, discard_stdout, json_output, say

if TYPE_CHECKING:
    from typer._click.core import Command, Context, Parameter
    from typer._click.formatting import HelpFormatter
    from typing_extensions import Buffer

SUMMARIES = {
    "info": "Show which providers work here, and what the others need.",
    "doctor": "Find what is wrong on this host, and how to repair it.",
    "demo": "Multicast a file, and verify each copy.",
    "send": "Send files and folders to every `mcast recv` in GROUP.",
    "recv": "Receive what the next `mcast send` sends to GROUP.",
    "ping": "Ask the members of GROUP; show losses and round trips.",
    "groups": "Show the multicast groups and their members.",
    "mgid": "Show the addresses of a group on each link layer.",
    "listen": "Print the messages sent to groups.",
    "top": "Show live what sources send to groups, and what is lost.",
    "record": "Record messages to groups in a pcapng file.",
    "replay": "Send the messages of a capture to their groups again.",
    "bench": "Measure message rate, loss and latency.",
    "conformance": "Check that backends keep the contract.",
    "sim": "Serve a simulated fabric, or simulate runs with faults.",
    "lab": "Run commands on Soft-RoCE or InfiniBand, in a small guest.",
}
"""The commands in the order of the help, each with the first sentence of its own help.

The file of a command, which has its name, is imported when the command is used.
"""


class _Reader:
    """Reads the value of an option by a function.

    Typer would make a type of pydantic for each option of the command, also for those that are not given;
    that takes as long as all else until the command runs.
    """

    def __init__(self, read: Callable[[Any], object]) -> None:
        self._read = read

    def coerce(self, value: Any, param: TyperArgument | TyperOption, ctx: Context) -> object:
        """Return the value of what the command line, the environment or the default has."""
        try:
            if param.multiple or param.nargs == -1:
                return [self._read(one) for one in value or ()]
            return None if value is None else self._read(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=ctx, param=param) from error


def _without_pydantic(params: list[Parameter]) -> list[Parameter]:
    """Let the parameters be read by their own parsers alone; typer itself reads all but text and flags.

    A release of typer that describes parameters otherwise reads all of them itself.
    """
    for one in params:
        kind = getattr(one, "type_descriptor", None)
        if kind is not None and "get_runtime_param" not in vars(one):
            read = kind.parameter_info.parser or (str if kind.annotation in (str, list[str]) else None)
            if read is not None:
                vars(one)["get_runtime_param"] = partial(_Reader, read)
            elif one.default is None and getattr(one, "is_flag", False):
                one.default = False
    return params


class _Group(TyperGroup):
    """Commands whose help cuts no summary short."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        return _without_pydantic(super().get_params(ctx))

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(999)) for name, one in self.commands.items()])


def help_record(one: Parameter, ctx: Context) -> tuple[str, str] | None:
    """Return name and description of an option, or of an argument: without the type that Python knows."""
    found = one.get_help_record(ctx)
    return (one.display_name_raw, found[1]) if found and isinstance(one, TyperArgument) else found


class _Plain(TyperCommand):
    """A command whose arguments are shown as manual pages show them: FILE, [FILE] or FILE..."""

    def get_params(self, ctx: Context) -> list[Parameter]:
        return _without_pydantic(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        pieces = [self.options_metavar or ""]
        for one in self.params:
            if isinstance(one, TyperArgument):
                name = one.display_name_raw if one.nargs == 1 else f"{one.display_name_raw}..."
                pieces.append(name if one.required else f"[{name}]")
        return pieces

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        for title, kind in (("Arguments", TyperArgument), ("Options", TyperOption)):
            shown = [one for one in self.get_params(ctx) if isinstance(one, kind)]
            if rows := [row for one in shown if (row := help_record(one, ctx))]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:  # an option without its value is refused without a context
            vars(error)["ctx"] = ctx
            raise


class _Command(_Plain):
    """A command whose arguments may be negative numbers, which are no options."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        options = [one for one in self.params if isinstance(one, TyperOption)]
        flags = {name: one.is_flag for one in options for name in (*one.opts, *one.secondary_opts)}
        words, numbers, rest = list[str](), list[str](), iter(args)
        for word in rest:
            if word == "--":
                numbers += rest
            elif word[1:].isdecimal() and word[0] == "-" and word[:2] not in flags:
                numbers.append(word)
            else:
                words += [word] if flags.get(word, True) else [word, *islice(rest, 1)]
        return super().parse_args(ctx, [*words, *(["--", *numbers] if numbers else [])])


class _Commands(_Group):
    """The commands, of which the help and the shell's completion need names and summaries alone."""

    def __init__(self, **options: Any) -> None:
        options["commands"] = {name: TyperCommand(name, help=text) for name, text in SUMMARIES.items()}
        super().__init__(**options)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, Command | None, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        return name, load(name) if name else found, rest

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        with _unread():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Context) -> object:
        with _unread():
            return super().invoke(ctx)


@contextmanager
def _unread() -> Iterator[None]:
    """End with our status if nobody reads the output any more, before typer ends with its own."""
    try:
        yield
    except BrokenPipeError:
        discard_stdout()
        raise typer.Exit(ExitStatus.BROKEN_PIPE) from None


def load(name: str) -> Command:
    """The command of this name, with its options."""
    module = import_module(f"mcast.cli.{name}")
    whole = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if hasattr(module, "app"):
        for below in module.app.registered_commands:
            below.cls = _Plain
        whole.add_typer(module.app, name=name, cls=_Group)
    else:
        whole.command(name, cls=_Command)(getattr(module, name))
    return get_group(whole).commands[name]


app: typer.Typer = typer.Typer(
    name="mcast",
    cls=_Commands,
    help="RDMA multicast: try it, check this host, send files, measure, test providers.",
    invoke_without_command=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from mcast import __version__

        say(f"mcast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())


class _ClosedStdout(RawIOBase):
    """A stream that was closed when the command was started."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError(E.EBADF, os.strerror(E.EBADF))

    def write(self, data: Buffer) -> int:
        raise OSError(E.EBADF, os.strerror(E.EBADF))


def main() -> None:
    """Run the command line and exit with its status."""
    if sys.stdout is None:  # closed from the beginning: printing shall fail, not vanish
        sys.stdout = TextIOWrapper(cast(BinaryIO, _ClosedStdout()), write_through=True)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr, because a file's name may be no text
    sys.exit(_run())


def _run() -> int:
    json_output.reset()
    try:
        status = app(standalone_mode=False)
        if status == ExitStatus.INTERRUPTED:  # typer has made that of a KeyboardInterrupt
            return _interrupted()
        sys.stdout.flush()
        return status if isinstance(status, int) else ExitStatus.DONE
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        if context:
            _read_json_options(context.command)
        command = context.command_path if context else "mcast"
        said = error.format_message().replace("Value error, ", "")
        if not (type(error) is typer.BadParameter or said.startswith("Usage:") or said.endswith("?")):
            said = f"{said.removesuffix('.')}: see `{command} --help`"  # what to do is in the other texts
        return _say(said, error.exit_code, command)
    except Failure as error:
        return _say(str(error), error.status)
    except KeyboardInterrupt:  # while a pipe's reader is slow to read the output
        return _interrupted()
    except BrokenPipeError:
        discard_stdout()
        return ExitStatus.BROKEN_PIPE
    except OSError as error:
        # An error of the contract, with its call and causes; or one of the system, which then is of stdout,
        # because files are named where they are written.
        unnamed = type(error) is OSError and error.filename is None
        return _say(f"cannot write to stdout: {error.strerror}" if unnamed else str(error), ExitStatus.FAILED)
    except Exception as error:
        from mcast.errors.tree import BackendError

        if not isinstance(error, BackendError):
            raise
        return _say(str(error), ExitStatus.USAGE)


def _interrupted() -> int:
    """Return the status of a command that Ctrl-C has ended where nothing is to be tidied up."""
    if "--json" in sys.argv:  # its options may not be read yet
        json_output.want(True)
        json_output.on_stderr |= _receives_on_stdout()
    json_output.error("interrupted", ExitStatus.INTERRUPTED)
    return ExitStatus.INTERRUPTED


def _read_json_options(command: Command) -> None:
    """Look for --json, and for stdout as the output of data.

    A word that is no option ends the command before its options are read.
    """
    names = {name for one in command.params for name in one.opts}
    if "--json" in names:
        json_output.want("--json" in sys.argv)
    if "--output" in names:
        json_output.on_stderr = _receives_on_stdout()


def _receives_on_stdout() -> bool:
    """Return True if the command line has stdout as the output of data."""
    return re.search(r"\0(-o|--output)[=\0]?-(\0|$)", "\0".join(sys.argv)) is not None


def _say(text: str, status: int, command: str = "mcast") -> int:
    is_reported = False
    try:
        sys.stdout.flush()
        is_reported = json_output.error(text, status) and json_output.on_stderr
    except OSError:  # a full disk: what is left in the buffer must not be tried again at the end
        with suppress(OSError):
            discard_stdout()
    if sys.stderr is not None and not is_reported:  # it was closed from the beginning
        with suppress(OSError):  # nobody can be told
            say(text if text.startswith("Usage:") else f"{command}: {text}", err=True)
    return status
