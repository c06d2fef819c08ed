"""Endpoint in some groups, and generated traffic, for `mcast listen`, `top` and `record`.

Theory of operation. The command's own thread opens the backend and the endpoint, joins every group, and
receives. Without --demo there is no other thread.

With --demo one more thread sends, from the next port here if there is one, over an endpoint of its own, so
the two share nothing but the backend, whose clock is the wall's for that reason. The thread sleeps on `stop`
until its next batch is due. It ends when `stop` is set, at the end of the `with`, which waits for it (a send
takes JOIN_TIMEOUT seconds at most); or at its first error, without a word, because the listening endpoint
reports the same trouble.

Deliberately not handled: catching up. A slow machine sends less than _RATE. A lost membership is the
endpoint's to restore, by its rejoin policy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Annotated

import typer

from mcast.cli.options import choose_backend, endpoint_at, is_in_process, network_options
from mcast.cli.terminal import Failure, UsageError, group
from mcast.cli.values import MAX_SECONDS, number_option, seconds
from mcast.errors.tree import McastError
from mcast.wire.addresses import McastAddress

if TYPE_CHECKING:
    from mcast.api import Backend
    from mcast.endpoint.blocking import Endpoint
    from mcast.endpoint.ports import LocalPort
    from mcast.endpoint.settings import Settings

Groups = Annotated[
    list[McastAddress], typer.Argument(parser=group, metavar="GROUP", help="Such as 239.1.1.1.")
]
MaxMessages = Annotated[
    int | None, number_option("--count", "-C", min=1, help="End after this many messages.")
]
MaxSeconds = Annotated[
    float | None,
    typer.Option(parser=seconds(0.01, MAX_SECONDS), metavar="SECONDS", help="End after this time."),
]
Demo = Annotated[
    bool,
    typer.Option("--demo", help="Send generated messages to the groups, from another port of this host."),
]

DEFAULT_DEPTH = 4096
"""Messages that the receive queue holds by default: it is long, because bursts of many senders meet in it."""

JOIN_TIMEOUT = 10.0
"""The longest that a join or a send may take, in seconds."""

_RATE, _WORDS, _TICK = 1000, b"made-up message " * 16, 0.02
"""Made-up traffic: messages a second for each group, what they say, and the seconds between two batches."""


@contextmanager
def opened(wanted: str | None, demo: bool, bind: IPv4Address | IPv6Address | None) -> Iterator[Backend]:
    """Open the backend. A simulated one has nobody to listen to, unless this process sends as well."""
    from mcast.api import open_at

    name = choose_backend(wanted)
    alone = is_in_process(name)
    if alone and not demo:
        raise UsageError(
            f"{name!r} is a fabric inside this process, on which no other program can send: add --demo for "
            "made-up messages, run `mcast sim serve` in another terminal and export what it prints, or use "
            f"{network_options()}",
        )
    # Two threads, so time has to be the wall's.
    options: dict[str, object] = {"ports": 2, "clock": "wall"} if alone else {}
    with open_at(name, bind, options) as backend:
        yield backend


@contextmanager
def listening(
    backend: Backend,
    groups: Sequence[McastAddress],
    bind: IPv4Address | IPv6Address | None,
    device: str | None,
    settings: Settings,
    demo: bool,
) -> Iterator[Endpoint]:
    """An endpoint that is a full member of the groups; with `demo`, another port sends to them."""
    if demo and not (bind or device):
        first = _ports(backend)[0]
        device = f"{first.device.name}/{first.port.port_num}"
    with endpoint_at(backend, bind, device, settings, sequence=None) as endpoint:
        for group in groups:
            endpoint.join(group, timeout=JOIN_TIMEOUT)
        with _made_up_traffic(endpoint, groups) if demo else nullcontext():
            yield endpoint


def _ports(backend: Backend) -> list[LocalPort]:
    from mcast.endpoint.ports import active

    try:
        return active(backend)
    except ValueError as error:
        raise Failure(str(error)) from None


@contextmanager
def _made_up_traffic(listener: Endpoint, groups: Sequence[McastAddress]) -> Iterator[None]:
    """Send numbered messages to the groups in a thread, from another port if there is one."""
    from mcast.endpoint.blocking import open_endpoint

    here = listener.device.name, listener.port.port_num
    there = ((local_port.device.name, local_port.port.port_num) for local_port in _ports(listener.backend))
    device, port = next((port for port in there if port != here), here)
    stop = threading.Event()
    with open_endpoint(listener.backend, device=device, port_num=port, sequence=True) as endpoint:
        senders = [endpoint.sender(group, timeout=JOIN_TIMEOUT) for group in groups]
        payload = _WORDS[: min(sender.max_message_size for sender in senders)]
        batch = [payload] * round(_RATE * _TICK)

        def run() -> None:
            due = time.monotonic()
            while not stop.wait(max(0.0, due - time.monotonic())):
                due = max(due + _TICK, time.monotonic())  # a slow machine sends less, and does not catch up
                for sender in senders:
                    try:
                        sender.send_batch(batch, timeout=JOIN_TIMEOUT)
                    except McastError:  # the listening endpoint reports the same trouble
                        return

        thread = threading.Thread(target=run, name="mcast-demo-traffic")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
