"""`mcast demo`: multicast a file from one sender to N receivers in this process, and verify each copy."""

from __future__ import annotations

import hashlib
import json
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcast.cli.place import BackendName, is_alone, places_of, require, with_settings
from mcast.cli.terminal import Failure, console, group
from mcast.cli.values import size
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from mcast.api import Backend
    from mcast.cast.drive import ReceivingParty
    from mcast.cast.sender import ReceiverState
    from mcast.endpoint.settings import Settings

_WAIT, _PATIENCE = 30.0, 60.0
"""How many seconds the ends may take to find each other, and how long one may be silent before it is given
up."""

_DEFAULT_SIZE = 4 << 20
_BLOCK = 1 << 20


@with_settings
def demo(
    file: Annotated[
        Path | None, typer.Argument(help="The file to send; without it one is made up.", show_default=False)
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
    *,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Multicast a file, and verify each copy.

    Sender and receivers do what `mcast send` and `mcast recv` do, and ignore all others.
    """
    from mcast.contract.registry import open_backend

    if file and file_size is not None:
        raise typer.BadParameter("--size is for a made-up file: leave out --size or FILE")
    options = {"ports": receivers + 1} if is_alone(backend) else {}
    with (
        _given(file) if file else _made_up(_DEFAULT_SIZE if file_size is None else file_size) as path,
        open_backend(backend, **options) as fabric,
    ):
        require(settings, places_of(fabric))
        outcome = _transfer(fabric, address, receivers, path, settings)
    outcome = {"backend": backend, "file": str(file) if file else None, **outcome}
    if as_json:
        typer.echo(json.dumps(outcome, indent=1))
    else:
        _show(outcome)
    if not all(receiver["verified"] for receiver in outcome["receivers"]):
        raise typer.Exit(1)


def _given(file: Path) -> AbstractContextManager[Path]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise typer.BadParameter(f"{file} is not a regular file")
        file.open("rb").close()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None
    return nullcontext(file)


@contextmanager
def _made_up(length: int) -> Iterator[Path]:
    """A temporary file of `length` bytes, the same every time."""
    random = Random(length)
    with tempfile.NamedTemporaryFile() as made:
        for start in range(0, length, _BLOCK):
            made.write(random.randbytes(min(_BLOCK, length - start)))
        made.flush()
        yield Path(made.name)


def _transfer(
    backend: Backend, group: McastAddress, receivers: int, path: Path, settings: Settings
) -> dict[str, Any]:
    """Send the file from the first port to receivers on the others in turn; return what happened, for
    JSON."""
    from mcast.cast.files import Source
    from mcast.cast.together import ends, run
    from mcast.cli.send import SendWatch

    with path.open("rb") as file:
        expected = hashlib.file_digest(file, "sha256").hexdigest()
    finished: dict[int, float] = {}
    with ExitStack() as stack:
        source = stack.enter_context(closing(Source(str(path.absolute()))))
        try:
            parties = ends(backend, group, receivers, source, _WAIT, _PATIENCE, settings)
            sender, takers = stack.enter_context(parties)
        except ValueError as error:
            raise Failure(str(error)) from None
        watch = stack.enter_context(SendWatch(sender.core, receivers))

        def look() -> None:
            watch.look()
            for taker in takers:
                if taker.core.complete:
                    finished.setdefault(taker.number, watch.seconds)

        run(sender, takers, look)
    if sender.core.failure:
        here = sender.endpoint.device.name
        deaf = next(taker.endpoint for taker in takers if taker.number not in sender.core.peers)
        raise Failure(
            f"{deaf.device.name} ({deaf.address}) joined {group}, but it and {here} heard nothing "
            f"of each other within {_WAIT:g} s: check the cabling, and IGMP snooping or the SM"
        )
    return {
        "size": sender.core.bytes,
        "sha256": expected,
        "group": str(group),
        "sender": str(sender.endpoint.address),
        "message_size": sender.core.piece,
        "messages": sender.core.pieces,
        "sent_again": sender.core.repeated,
        "receivers": [
            _outcome(taker, sender.core.peers[taker.number], finished.get(taker.number, 0.0), expected)
            for taker in takers
        ],
    }


def _outcome(taker: ReceivingParty, peer: ReceiverState, seconds: float, expected: str) -> dict[str, Any]:
    endpoint, core = taker.endpoint, taker.core
    return {
        "device": endpoint.device.name,
        "port": endpoint.port.port_num,
        "address": str(endpoint.address),
        "messages": core.pieces,
        "bytes": core.bytes,
        "lost": peer.repaired,
        "seconds": seconds,
        "bytes_per_second": core.bytes / seconds if seconds > 0 else 0.0,
        "sha256": core.digest if core.complete else None,
        "outcome": peer.fate.value,
        "verified": core.verified and core.digest == expected,
    }


def _show(outcome: dict[str, Any]) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    out, receivers = console(), outcome["receivers"]
    out.print(
        f"{outcome['file'] or 'made-up file'}: {outcome['size']:,} bytes, "
        f"SHA-256 {outcome['sha256'][:16]}...\n"
        f"{outcome['sender']} -> {outcome['group']} on {outcome['backend']}, "
        f"{outcome['messages']:,} messages of up to {outcome['message_size']:,} bytes\n"
        + (f"{outcome['sent_again']:,} messages were sent again\n" if outcome["sent_again"] else ""),
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
            "[green]equal[/]" if receiver["verified"] else f"[red]{receiver['outcome']}[/]",
        )
    out.print(table)
    verified = sum(receiver["verified"] for receiver in receivers)
    lost = sum(receiver["lost"] for receiver in receivers)
    typer.echo(
        f"\ndemo: {verified}/{len(receivers)} receivers verified, "
        f"{outcome['messages']} messages each, {lost} lost"
    )
