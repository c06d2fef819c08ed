"""`mcast demo`: multicast a file from one sender to N receivers in this process, and verify each copy."""

from __future__ import annotations

import hashlib
import io
import json
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from mcast.api import McastAddress
from mcast.cli.place import BackendName
from mcast.cli.terminal import console, group, size
from mcast.cli.transfer import Receiver, Transfer

_DEFAULT_SIZE = 4 << 20
_BLOCK = 1 << 20


def demo(
    file: Annotated[
        Path | None, typer.Argument(help="The file to send; made up if there is none.", show_default=False)
    ] = None,
    receivers: Annotated[int, typer.Option(min=1, max=1000, help="How many receivers.")] = 3,
    backend: BackendName = "sim",
    file_size: Annotated[
        int | None,
        typer.Option("--size", parser=size, metavar="BYTES", help="Size of the made-up file. [default: 4M]"),
    ] = None,
    address: Annotated[
        McastAddress, typer.Option("--group", parser=group, metavar="ADDRESS", help="The group to use.")
    ] = "239.1.1.1",  # type: ignore[assignment]  # text, read by the parser
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Multicast a file, and verify each copy."""
    from mcast.contract.registry import SIMULATED, open_backend

    if file and file_size is not None:
        raise typer.BadParameter("--size is of the made-up file: leave it out, or leave out FILE")
    options = {"ports": receivers + 1} if backend in SIMULATED else {}
    with (
        _opened(file) if file else _made_up(_DEFAULT_SIZE if file_size is None else file_size) as source,
        open_backend(backend, **options) as fabric,
        fabric.event_channel() as channel,
    ):
        expected = hashlib.file_digest(source, "sha256").hexdigest()
        transfer = Transfer(fabric, channel, address, receivers, source)
        started = time.perf_counter()
        with _progress(transfer.messages) as advance:
            for sent in transfer.run():
                advance(sent)
        outcome: dict[str, Any] = {
            "backend": backend,
            "file": str(file) if file else None,
            "size": source.tell(),
            "sha256": expected,
            "group": str(address),
            "sender": str(transfer.place.address),
            "message_size": transfer.message_size,
            "messages": transfer.messages,
            "receivers": [_outcome(receiver, expected, started) for receiver in transfer.receivers],
        }
    if as_json:
        typer.echo(json.dumps(outcome, indent=1))
    else:
        _show(outcome)
    if not all(receiver["verified"] for receiver in outcome["receivers"]):
        raise typer.Exit(1)


def _opened(file: Path) -> io.BufferedReader:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise typer.BadParameter(f"{file} is not a regular file")
        return file.open("rb")
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None


@contextmanager
def _made_up(length: int) -> Iterator[io.BufferedRandom]:
    """A temporary file of `length` bytes, the same every time."""
    random = Random(length)
    with tempfile.TemporaryFile() as source:
        for start in range(0, length, _BLOCK):
            source.write(random.randbytes(min(_BLOCK, length - start)))
        source.seek(0)
        yield source


def _outcome(receiver: Receiver, expected: str, started: float) -> dict[str, Any]:
    seconds = receiver.finished - started
    return {
        "device": receiver.place.device.name,
        "port": receiver.place.port.port_num,
        "address": str(receiver.place.address),
        "messages": receiver.file.received,
        "bytes": receiver.file.bytes,
        "lost": receiver.file.lost,
        "seconds": seconds,
        "bytes_per_second": receiver.file.bytes / seconds if seconds > 0 else 0.0,
        "sha256": receiver.file.digest,
        "verified": receiver.file.digest == expected,
    }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal; it goes when the work is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    err = console(stderr=True)
    columns = (TextColumn("multicasting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda sent: bar.update(task, completed=sent)


def _show(outcome: dict[str, Any]) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    out, receivers = console(), outcome["receivers"]
    out.print(
        f"{outcome['file'] or 'made-up file'}: {outcome['size']:,} bytes, "
        f"SHA-256 {outcome['sha256'][:16]}...\n"
        f"{outcome['sender']} -> {outcome['group']} on {outcome['backend']}, "
        f"{outcome['messages']:,} messages of up to {outcome['message_size']:,} bytes\n",
        markup=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("receiver", "address"):
        table.add_column(name)
    for name in ("messages", "bytes", "lost", "rate"):
        table.add_column(name, justify="right")
    table.add_column("SHA-256")
    for receiver in receivers:
        table.add_row(
            f"{receiver['device']}/{receiver['port']}",
            receiver["address"],
            f"{receiver['messages']:,}",
            f"{receiver['bytes']:,}",
            f"{receiver['lost']:,}",
            f"{decimal(int(receiver['bytes_per_second']))}/s",
            "[green]equal[/]" if receiver["verified"] else "[red]differs[/]",
        )
    out.print(table)
    verified = sum(receiver["verified"] for receiver in receivers)
    lost = sum(receiver["lost"] for receiver in receivers)
    typer.echo(
        f"\ndemo: {verified}/{len(receivers)} receivers verified, "
        f"{outcome['messages']} messages each, {lost} lost"
    )
