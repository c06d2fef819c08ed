"""What `mcast sim` does to a fabric that is served: faults by `ctl`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcast.cli.terminal import Failure, plain
from mcast.errors.tree import BackendUnavailable, McastError

if TYPE_CHECKING:
    from mcast.backends.sim.shared.client import SharedBackend

Socket = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Where it is served. [default: MCAST_SIM, or the user's own place]"),
]


def looking_on(socket: Path | None) -> SharedBackend:
    """The served fabric, on which this process takes no host; one sentence where there is none."""
    from mcast.backends.sim.shared.attach import attach

    try:
        return attach("sim", socket=socket, host="all")
    except BackendUnavailable as error:
        raise Failure(f"{error.detail}: {error.fix}", 2) from None


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

    The faults and their fields are those of scenarios: restart-sm, cut roce2, drop 1%, delay 5ms roce0,
    drop rate=0.1 group=239.1.1.1 until=10s. What lasts ends at until, or by `mend`.
    """
    with looking_on(socket) as fabric:
        try:
            lines = fabric.control(words)
        except McastError as error:
            raise Failure(error.detail, 2) from None
    for line in lines:
        typer.echo(plain(line))
