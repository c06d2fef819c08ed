"""`mcast demo`: multicast a file from one sender to N receivers in this process, and verify each copy."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcast import backend_names
from mcast.cli.options import OBJECTS_DEPTH, is_in_process, local_ports_of, require, with_settings
from mcast.cli.status import ExitStatus
from mcast.cli.terminal import (
    BACKEND,
    Failure,
    Json,
    backend_name,
    console,
    group,
    json_output,
    plural,
    print_table,
    say,
    stdin_as_file,
)
from mcast.cli.values import number_option, size
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from mcast.api import Backend
    from mcast.cast.io.one_thread import ReceivingEnd
    from mcast.cast.io.sending import ObjectReport
    from mcast.cast.protocol.sender import ReceiverReport
    from mcast.endpoint.settings import Settings

_JOIN_TIMEOUT, _PEER_TIMEOUT = 30.0, 60.0
"""Seconds that the ends may take to find each other, and that one may be silent before it is given up."""

_DEFAULT_SIZE = 4 << 20
_BLOCK = 1 << 20


@with_settings(OBJECTS_DEPTH)
def demo(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="The file to send, - for stdin; without it a file is generated.",
            show_default=False,
        ),
    ] = None,
    receivers: Annotated[int, number_option(min=1, max=1000, help="Number of receivers.")] = 3,
    backend: Annotated[
        str,
        typer.Option(
            callback=backend_name,
            autocompletion=backend_names,
            envvar=BACKEND,
            metavar="NAME",
            help="Backend to use: sim is a simulated fabric, udp needs no card, rdma has cards.",
        ),
    ] = "sim",
    file_size: Annotated[
        int | None,
        typer.Option(
            "--size", parser=size, metavar="BYTES", help="Size of the generated file. [default: 4M]"
        ),
    ] = None,
    address: Annotated[
        McastAddress, typer.Option("--group", parser=group, metavar="ADDRESS", help="The group to use.")
    ] = "239.1.1.1",  # type: ignore[assignment]  # text, read by the parser
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Multicast a file, and verify each copy.

    This one process sends as `mcast send` does, and receives as several `mcast recv` do. Other senders and
    receivers in the group are ignored.
    """
    from mcast import open_backend

    if file and file_size is not None:
        raise typer.BadParameter("--size is for a generated file: leave out --size or FILE")
    options = {"ports": receivers + 1} if is_in_process(backend) else {}
    with (
        _given(file) if file else _made_up(_DEFAULT_SIZE if file_size is None else file_size) as path,
        open_backend(backend, **options) as fabric,
    ):
        require(settings, local_ports_of(fabric))
        outcome = _transfer(fabric, address, receivers, path, settings)
    outcome = {"backend": backend, "file": str(file) if file else None, **outcome}
    if as_json:
        json_output.result(outcome)
    else:
        _show(outcome)
    if not all(receiver["verified"] for receiver in outcome["receivers"]):
        raise typer.Exit(ExitStatus.FAILED)


@contextmanager
def _given(given: Path) -> Iterator[Path]:
    with stdin_as_file(str(given)) as name:
        yield _readable(Path(name))


def _readable(file: Path) -> Path:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise typer.BadParameter(f"{file} is not a regular file")
        file.open("rb").close()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None
    return file


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
    """Send the file from the first port to receivers on the others in turn.

    Returns what happened, for JSON.
    """
    from mcast.api import TimedOut
    from mcast.cast.io.one_thread import ends, run
    from mcast.cast.protocol.packets import segment_size
    from mcast.cli.send import SendWatch

    finished: dict[int, float] = {}
    with ExitStack() as stack:
        watch = stack.enter_context(SendWatch(receivers, path.stat().st_size))
        try:
            both = ends(
                backend, group, receivers, path, _JOIN_TIMEOUT, _PEER_TIMEOUT, settings, watch.on_progress
            )
            sender, takers = stack.enter_context(both)
        except ValueError as error:
            raise Failure(str(error)) from None

        def on_progress() -> None:
            for taker in takers:
                if taker.received is not None:
                    finished.setdefault(taker.context.number, watch.seconds)

        here, pieces = sender.group.endpoint, segment_size(sender.group.max_message_size)
        try:
            run(sender, takers, on_progress)
        except TimedOut:
            deaf = next((one.group.endpoint for one in takers if not sender.has_member(one)), None)
            if deaf is None:  # a send took too long
                raise
            raise Failure(
                f"{deaf.device.name} ({deaf.address}) joined {group}, but exchanged no message with "
                f"{here.device.name} within {_JOIN_TIMEOUT:g} s: check the cabling, and IGMP snooping or "
                "the subnet manager"
            ) from None
    report = sender.result
    assert report is not None
    assert report.digest is not None, "all_receivers() cuts nothing short"
    return {
        "size": report.size,
        "blake3": report.digest.hex(),
        "group": str(group),
        "sender": str(here.address),
        "message_size": pieces,
        "messages": report.segments,
        "sent_again": report.repairs,
        "receivers": [
            _outcome(taker, sender.report_of(taker), finished.get(taker.context.number, 0.0), report)
            for taker in takers
        ],
    }


def _outcome(
    taker: ReceivingEnd, account: ReceiverReport | None, seconds: float, report: ObjectReport
) -> dict[str, Any]:
    endpoint, received = taker.group.endpoint, taker.received
    size = received.size if received is not None else 0
    verified = received is not None and received.digest == report.digest
    reason = account.reason if account is not None else "did not take part"
    return {
        "device": endpoint.device.name,
        "port": endpoint.port.port_num,
        "address": str(endpoint.address),
        "bytes": size,
        "lost": account.requested if account is not None else 0,
        "seconds": seconds,
        "bytes_per_second": size / seconds if seconds > 0 else 0.0,
        "blake3": received.digest.hex() if received is not None else None,
        "outcome": "verified" if verified else reason,
        "verified": verified,
    }


def _show(outcome: dict[str, Any]) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    from mcast.api import SIMULATED

    out, receivers = console(), outcome["receivers"]
    sent, again = outcome["messages"], outcome["sent_again"]
    simulated = " (simulated)" if outcome["backend"] in SIMULATED else ""
    out.print(
        f"{outcome['file'] or 'generated file'}: {outcome['size']:,} bytes, "
        f"BLAKE3 {outcome['blake3'][:16]}...\n"
        f"{outcome['sender']} -> {outcome['group']} on {outcome['backend']}{simulated}, "
        f"{sent:,} {plural('message', sent)} of up to {outcome['message_size']:,} bytes\n"
        + (f"{again:,} {plural('message', again)} repaired losses\n" if again else ""),
        markup=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("receiver", "address"):
        table.add_column(name)
    for name in ("bytes", "lost", "rate"):
        table.add_column(name, justify="right")
    table.add_column("BLAKE3")
    for receiver in receivers:
        table.add_row(
            f"{receiver['device']}/{receiver['port']}",
            receiver["address"],
            f"{receiver['bytes']:,}",
            f"{receiver['lost']:,}",
            f"{decimal(int(receiver['bytes_per_second']))}/s",
            "[green]equal[/]" if receiver["verified"] else f"[red]{receiver['outcome']}[/]",
        )
    print_table(out, table)
    verified = sum(receiver["verified"] for receiver in receivers)
    lost = sum(receiver["lost"] for receiver in receivers)
    say(
        f"\ndemo: {verified}/{len(receivers)} receivers verified, "
        f"{sent} {plural('message', sent)} each, {lost} lost"
    )
