"""The command `mcast`: one file for each sub-command, which imports what it needs when it runs.

After bad input it prints one sentence on stderr and exits with status 2; after a run that fails, with status
1.
"""

from __future__ import annotations

import errno as E
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from io import RawIOBase, TextIOWrapper
from signal import SIGINT
from typing import BinaryIO, cast

import typer
from typing_extensions import Buffer

from mcast.cli import (
    bench,
    conformance,
    demo,
    doctor,
    groups,
    info,
    mgid,
    ping,
    record,
    recv,
    replay,
    send,
    sim,
    top,
)
from mcast.cli.terminal import Failure, forget_stdout, plain
from mcast.errors.tree import BackendError

app = typer.Typer(
    name="mcast",
    help="RDMA multicast: try it, check this host, send files, measure, test providers.",
    invoke_without_command=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    info.info,
    doctor.doctor,
    demo.demo,
    send.send,
    recv.recv,
    ping.ping,
    groups.groups,
    mgid.mgid,
    top.top,
    record.record,
    replay.replay,
    bench.bench,
    conformance.conformance,
):
    app.command()(command)
app.add_typer(sim.app, name="sim")
if find_spec("mcast.cli.lab"):
    from mcast.cli.lab import app as lab

    app.add_typer(lab, name="lab")


def _version(wanted: bool) -> None:
    if wanted:
        from mcast import __version__

        typer.echo(f"mcast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


class _Closed(RawIOBase):
    """A stream that was closed when the command was started."""

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        raise OSError(E.EBADF, os.strerror(E.EBADF), "stdout")


def main() -> None:
    """Run the command line and exit with its status."""
    if sys.stdout is None:  # closed from the beginning: printing shall fail, not vanish
        sys.stdout = TextIOWrapper(cast(BinaryIO, _Closed()), write_through=True)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr, because a file's name may be no text
    sys.exit(_run())


def _run() -> int:
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        return _say(error.format_message(), error.exit_code, context.command_path if context else "mcast")
    except Failure as error:
        return _say(str(error), error.status)
    except BackendError as error:
        return _say(str(error), 2)
    except KeyboardInterrupt:  # while a pipe's reader is slow to read the output
        return 128 + SIGINT
    except BrokenPipeError:
        forget_stdout()
        return 1
    except OSError as error:
        # An error of the contract, with its call and causes, or one of the system: a full disk, say.
        return _say(str(error), 1)


def _say(text: str, status: int, command: str = "mcast") -> int:
    try:
        sys.stdout.flush()
    except OSError:  # a full disk: what is left in the buffer must not be tried again at the end
        with suppress(OSError):
            forget_stdout()
    if sys.stderr is not None:  # it was closed from the beginning
        print(plain(text if text.startswith("Usage:") else f"{command}: {text}"), file=sys.stderr)
    return status
