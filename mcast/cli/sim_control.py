"""Faults (`ctl`) and packet capture (`tap`) of a served fabric, for `mcast sim`."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcast.cli.signals import interruptible
from mcast.cli.terminal import UsageError, discard_stdout, packet_sink, plain, say
from mcast.cli.values import number_option

if TYPE_CHECKING:
    from mcast.backends.sim.served.client import ServedBackend

Socket = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Socket of the fabric. [default: MCAST_SIM, or the user's own]"),
]


def observing(socket: Path | None) -> ServedBackend:
    """The served fabric, on which this process takes no host; one sentence where there is none."""
    from mcast.backends.sim.served.attach import attach
    from mcast.errors.tree import BackendUnavailable

    try:
        return attach("sim", socket=socket, host="all")
    except BackendUnavailable as error:
        raise UsageError(f"{error.detail}: {error.fix}") from None


def tap(
    output: Annotated[str, typer.Option("--write", "-w", metavar="FILE", help="Output file; - is stdout.")],
    count: Annotated[
        int | None, number_option("--count", "-C", min=1, help="End after this many packets.")
    ] = None,
    socket: Socket = None,
) -> None:
    """Write the served fabric's packets as pcapng while it runs.

    `mcast sim tap -w - | wireshark -k -i -` shows them at once. A reader that is too slow loses packets,
    which are counted, and delays nobody. Ends after --count, with its reader, or with Ctrl-C; the status is
    then 0.
    """
    from mcast.backends.sim.served.tap import write_pcapng

    with interruptible(), observing(socket) as fabric, packet_sink(output) as file, fabric.tap() as tapped:
        try:
            deque(write_pcapng(tapped, file, fabric.fabric.link_layer, fabric.epoch, count), maxlen=0)
        except KeyboardInterrupt:  # the usual way to end it
            pass
        except BrokenPipeError:  # another one: Wireshark is closed
            discard_stdout()
        lost = tapped.close()
    say(f"tap: {tapped.written:,} packets written, {lost:,} lost because the reader was slow", err=True)


def ctl(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="WORDS", help="A fault with its fields; or list; or undo and a port, a fault, or all."
        ),
    ],
    socket: Socket = None,
) -> None:
    """Inject faults into the served fabric while programs use it.

    The faults and their fields are those of scenarios: restart-sm, link-down roce2, drop 1%, delay 5ms roce0,
    drop rate=0.1 group=239.1.1.1 until=10s. A lasting fault ends at the time `until`, or by `undo`.
    """
    from mcast.errors.tree import McastError

    with observing(socket) as fabric:
        try:
            lines = fabric.control(words)
        except McastError as error:
            raise UsageError(error.detail) from None
    for line in lines:
        say(plain(line))
