"""`mcast recv`: one file that `mcast send` sends to a group, verified."""

from __future__ import annotations

import json
import time
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
    from mcast.cast.drive import ReceivingParty
    from mcast.cast.receiver import FileReceiver
    from mcast.endpoint.settings import Settings

_NAMED = 5
"""How many gaps are named; JSON has all."""


@with_settings
def recv(
    group: GroupArgument,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to; - is stdout.")],
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = "rdma",
    wait: Annotated[
        float | None, typer.Option(min=0.1, metavar="SECONDS", help="Give up if no transfer begins in time.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="How long the sender may be silent.")
    ] = 10.0,
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Receive the next file that `mcast send` sends to GROUP.

    FILE gets its name when it is whole, verified and on the disk; an older file is replaced then. Stdout, a
    pipe or a device gets the bytes as they come. The status is 0 if the copy was verified, else 1.
    """
    from mcast.cast.drive import DEPTH, ReceivingParty, run
    from mcast.cast.files import STANDARD, open_sink

    refuse_simulated(backend, "send")
    with ExitStack() as stack:
        stack.enter_context(ends_cleanly())
        try:
            sink = stack.enter_context(closing(open_sink(output)))
            sink.open()
        except OSError as error:
            raise Failure(f"cannot write {output}: {error.strerror}", 2) from None
        endpoint = stack.enter_context(endpoint_at(backend, bind, device, DEPTH, settings))
        party = ReceivingParty(endpoint, group, sink, patience)
        with ReceiveWatch(
            party.core, f"{group} as {endpoint.address} ({endpoint.device.name})", wait
        ) as watch:
            run(party, watch.look)
        outcome = outcome_of(party, sink.name, group, watch.seconds)
    apart = output == STANDARD
    if as_json:
        typer.echo(json.dumps(outcome, indent=1), err=apart)
    elif outcome["verified"] and (not apart or console(stderr=True).is_terminal):
        _show(outcome, apart)
    if not outcome["verified"]:
        raise Failure(_why(outcome, kept=apart))


class ReceiveWatch(Watch):
    """Shows where the command listens, then how much has come. Ends the wait for a sender."""

    def __init__(self, core: FileReceiver, place: str, wait: float | None) -> None:
        super().__init__(f"listening to {place}")
        self._core, self._place, self._wait = core, place, wait
        self._opened = time.perf_counter()

    def look(self) -> None:
        """Show the present state; called after each turn."""
        core = self._core
        if core.highest:
            self.show("receiving", core.bytes, core.size)
        elif not core.welcome and self._wait is not None and time.perf_counter() - self._opened > self._wait:
            late = ", but a transfer that had begun before is under way" if core.missed_one else ""
            core.fail(f"no transfer began on {self._place} within {self._wait:g} s{late}")


def outcome_of(party: ReceivingParty, file: str, group: McastAddress, seconds: float) -> dict[str, Any]:
    """What happened, as JSON shows it."""
    core, endpoint = party.core, party.endpoint
    return {
        "backend": endpoint.backend.name,
        "file": file,
        "verified": core.verified,
        "failure": core.failure,
        "size": core.bytes,
        "sha256": core.digest,
        "group": str(group),
        "device": endpoint.device.name,
        "port": endpoint.port.port_num,
        "receiver": str(endpoint.address),
        "sender": core.sender,
        "sender_address": core.address,
        "pieces": core.pieces,
        "lost": [[gap.start, gap.stop - 1] for gap in core.lost],
        "doubles": core.doubles,
        "seconds": seconds,
        "bytes_per_second": core.bytes / seconds if seconds > 0 else 0.0,
        "rejected": dict(core.rejected),
    }


def _show(outcome: dict[str, Any], apart: bool) -> None:
    from rich.filesize import decimal

    console(stderr=apart).print(
        f"{outcome['file']}: {outcome['size']:,} bytes, SHA-256 {outcome['sha256'][:16]}... verified\n"
        f"{outcome['sender_address']} ({outcome['sender']}) -> {outcome['group']} -> {outcome['receiver']} "
        f"({outcome['device']})\n{outcome['pieces']:,} pieces on {outcome['backend']}, "
        f"{decimal(int(outcome['bytes_per_second']))}/s",
        markup=False,
    )


def _why(outcome: dict[str, Any], kept: bool) -> str:
    why: str = outcome["failure"]
    gaps = outcome["lost"]
    if gaps:
        count = sum(last - first + 1 for first, last in gaps)
        named = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in gaps[:_NAMED])
        why += f"; {count} of the pieces so far are lost ({named}{', ...' if len(gaps) > _NAMED else ''})"
    if outcome["pieces"] and not kept:
        why += f"; {outcome['size']:,} bytes had come, and none of them are kept"
    return why
