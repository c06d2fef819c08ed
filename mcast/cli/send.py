"""`mcast send`: a file to every receiver in a group, verified by each."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcast.cli.interrupt import ends_cleanly
from mcast.cli.place import (
    BackendName,
    Bind,
    Device,
    GroupArgument,
    Json,
    endpoint_at,
    refuse_simulated,
    with_settings,
)
from mcast.cli.progress import Watch
from mcast.cli.terminal import Failure, console
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from mcast.cast.drive import SendingParty
    from mcast.cast.sender import FileSender, ReceiverState
    from mcast.endpoint.settings import Settings

_NAMED = 10
"""How many lost pieces of a receiver are named; JSON has all."""


def _receivers(number: int | None) -> int | None:
    from mcast.cast.packets import MOST_RECEIVERS

    if number is not None and number > MOST_RECEIVERS:
        raise typer.BadParameter(f"{number} is more than {MOST_RECEIVERS}")
    return number


@with_settings
def send(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to send; - is stdin.")],
    group: GroupArgument,
    receivers: Annotated[
        int | None,
        typer.Option(
            "--receivers", "-n", min=1, callback=_receivers, metavar="N", help="How many to wait for."
        ),
    ] = None,
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = "rdma",
    wait: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for receivers.")
    ] = 60.0,
    patience: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long a receiver may be silent.")
    ] = 10.0,
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Send FILE to every `mcast recv` in GROUP.

    Waits for --receivers N receivers, or for all that join within a second after the first. Lost pieces are
    sent again. The status is 0 if every receiver has verified its copy, else 1.
    """
    from mcast.cast.drive import DEPTH, SendingParty, run
    from mcast.cast.files import Source
    from mcast.cast.sender import Patience

    refuse_simulated(backend, "receive")
    times = Patience(wait=wait, silence=patience)
    with ExitStack() as stack:
        stack.enter_context(ends_cleanly())
        try:
            source = stack.enter_context(closing(Source(file)))
        except OSError as error:
            raise Failure(f"cannot read {file}: {error.strerror}", 2) from None
        endpoint = stack.enter_context(endpoint_at(backend, bind, device, DEPTH, settings))
        party = SendingParty(endpoint, group, source, receivers, times)
        with SendWatch(party.core, receivers) as watch:
            run(party, watch.look)
        outcome = outcome_of(party, source.name, group, watch.seconds)
    if as_json:
        typer.echo(json.dumps(outcome, indent=1))
    elif not party.core.failure:
        _show(outcome)
    if party.core.failure:
        came = ", ".join(f"{peer.address} ({peer.name})" for peer in party.core.peers.values())
        raise Failure(": ".join(filter(None, [party.core.failure, came])))
    if not all(receiver["verified"] for receiver in outcome["receivers"]):
        raise typer.Exit(1)


class SendWatch(Watch):
    """Shows who has joined, then how much every receiver has."""

    def __init__(self, core: FileSender, wanted: int | None) -> None:
        super().__init__("")
        self._core, self._wanted = core, f" of {wanted}" if wanted else ""

    def look(self) -> None:
        """Show the present state; called after each turn."""
        core = self._core
        if core.started:
            self.show("sending", core.placed_bytes, core.size)
        else:
            self.wait(f"waiting: {len(core.peers)}{self._wanted} joined")


def outcome_of(party: SendingParty, file: str, group: McastAddress, seconds: float) -> dict[str, Any]:
    """What happened, as JSON shows it."""
    core, endpoint = party.core, party.endpoint
    return {
        "backend": endpoint.backend.name,
        "file": file,
        "size": core.bytes,
        "sha256": core.digest,
        "group": str(group),
        "device": endpoint.device.name,
        "port": endpoint.port.port_num,
        "sender": str(endpoint.address),
        "pieces": core.pieces,
        "sent_again": core.repeated,
        "seconds": seconds,
        "bytes_per_second": core.bytes / seconds if seconds > 0 else 0.0,
        "receivers": [_receiver(peer) for peer in core.peers.values()],
        "rejected": dict(core.rejected),
    }


def _receiver(peer: ReceiverState) -> dict[str, Any]:
    from mcast.cast.sender import Fate

    return {
        "name": peer.name,
        "address": peer.address,
        "verified": peer.fate is Fate.VERIFIED,
        "outcome": peer.fate.value,
        "words": peer.words,
        "pieces": peer.has,
        "missed": peer.repaired,
        "lost": list(peer.lost),
    }


def _show(outcome: dict[str, Any]) -> None:
    from rich.filesize import decimal
    from rich.markup import escape
    from rich.table import Table

    out, receivers = console(), outcome["receivers"]
    out.print(
        f"{outcome['file']}: {outcome['size']:,} bytes, SHA-256 {outcome['sha256'][:16]}...\n"
        f"{outcome['sender']} -> {outcome['group']} on {outcome['backend']}, "
        f"{outcome['pieces']:,} pieces, {outcome['sent_again']:,} sent again, "
        f"{decimal(int(outcome['bytes_per_second']))}/s\n",
        markup=False,
    )
    if receivers:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("receiver", overflow="fold")
        table.add_column("address", no_wrap=True)
        for name in ("has", "missed"):
            table.add_column(name, justify="right")
        table.add_column("outcome")
        for receiver in receivers:
            colour = "green" if receiver["verified"] else "red"
            table.add_row(
                escape(receiver["name"]),
                receiver["address"],
                f"{receiver['pieces']:,}",
                f"{receiver['missed']:,}",
                f"[{colour}]{_outcome_words(receiver)}[/]",
            )
        out.print(table)
    verified = sum(receiver["verified"] for receiver in receivers)
    typer.echo(f"\nsend: {verified}/{len(receivers)} receivers verified, {outcome['pieces']} pieces each")


def _outcome_words(receiver: dict[str, Any]) -> str:
    from rich.markup import escape

    if lost := receiver["lost"]:
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        return f"{receiver['outcome']}: {', '.join(map(str, lost[:_NAMED]))}{more}"
    return escape(": ".join(filter(None, [receiver["outcome"], receiver["words"]])))
