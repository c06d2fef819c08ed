"""What `mcast sim` does to a fabric that is served: faults by `ctl`, and its packets by `tap`."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcast.cli.interrupt import ends_cleanly
from mcast.cli.terminal import NotBegun, forget_stdout, packet_sink, plain, say
from mcast.cli.values import number_option

if TYPE_CHECKING:
    from mcast.backends.sim.served.client import ServedBackend

Socket = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Where it is served. [default: MCAST_SIM, or the user's own place]"),
]


def looking_on(socket: Path | None) -> ServedBackend:
    """The served fabric, on which this process takes no host; one sentence where there is none."""
    from mcast.backends.sim.served.attach import attach
    from mcast.errors.tree import BackendUnavailable

    try:
        return attach("sim", socket=socket, host="all")
    except BackendUnavailable as error:
        raise NotBegun(f"{error.detail}: {error.fix}") from None


def tap(
    output: Annotated[str, typer.Option("--write", "-w", metavar="FILE", help="Where to; - is stdout.")],
    count: Annotated[
        int | None, number_option("--count", "-C", min=1, help="End after this many packets.")
    ] = None,
    socket: Socket = None,
) -> None:
    """Write the served fabric's packets as pcapng while it runs.

    `mcast sim tap -w - | wireshark -k -i -` shows them as they come. A reader that is too slow loses packets,
    which are counted, and holds nobody up. Ends after --count, with its reader, or with Ctrl-C; the status is
    then 0.
    """
    from mcast.backends.sim.served.tap import write_pcapng

    with ends_cleanly(), looking_on(socket) as fabric, packet_sink(output) as file, fabric.tap() as tapped:
        try:
            deque(write_pcapng(tapped, file, fabric.fabric.link_layer, fabric.epoch, count), maxlen=0)
        except KeyboardInterrupt:  # the usual way to end it
            pass
        except BrokenPipeError:  # another one: Wireshark is closed
            forget_stdout()
        lost = tapped.close()
    say(f"tap: {tapped.written:,} packets written, {lost:,} lost because the reader was slow", err=True)


def ctl(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="WORDS", help="FAULT and its fields; or list; or `mend` and a PORT, a FAULT, or all."
        ),
    ],
    socket: Socket = None,
) -> None:
    """Do faults to the served fabric while programs use it.

    The faults and their fields are those of scenarios: restart-sm, link-down roce2, drop 1%, delay 5ms roce0,
    drop rate=0.1 group=239.1.1.1 until=10s. What lasts ends at until, or by `mend`.
    """
    from mcast.errors.tree import McastError

    with looking_on(socket) as fabric:
        try:
            lines = fabric.control(words)
        except McastError as error:
            raise NotBegun(error.detail) from None
    for line in lines:
        say(plain(line))
