"""`mcast top`: who sends how much to which group, and what is lost, as it happens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import ip_network
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcast.api import Backend, McastAddress
from mcast.cli.interrupt import ends_cleanly
from mcast.cli.listen import Demo, listening, opened
from mcast.cli.place import BackendName, Bind, Device
from mcast.cli.terminal import Failure, console, group
from mcast.endpoint.meter import SEQUENCE, Meter
from mcast.wire.mapping import ipv4_group_of

if TYPE_CHECKING:
    from rich.console import Group as Lines

    from mcast.endpoint.blocking import Endpoint
    from mcast.endpoint.stats import EndpointStats

_BATCH = 256
_LOCAL_CONTROL = ip_network("224.0.0.0/24")
"""Routers' and hosts' own chatter: not joined unless it is named."""


def top(
    groups: Annotated[
        list[McastAddress] | None,
        typer.Argument(parser=group, metavar="GROUP", help="Which groups; else all that ports here are in."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.05, metavar="SECONDS", help="Time between looks.")] = 1.0,
    count: Annotated[
        int | None, typer.Option("--count", "-C", min=1, metavar="N", help="End after so many looks.")
    ] = None,
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = "rdma",
    demo: Demo = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a look, one a line.")] = False,
) -> None:
    """Show live who sends how much to groups, and what is lost.

    Takes part as an ordinary full member: what it shows is what a member on this port gets. Ends with Ctrl-C.
    """
    with ends_cleanly(), opened(backend, demo) as fabric:
        wanted = groups or _groups_here(fabric)
        with listening(fabric, wanted, bind, device, demo) as endpoint:
            looks = _looks(endpoint, interval, count)
            try:
                if as_json:
                    for look in looks:
                        print(json.dumps(look), flush=True)
                elif console().is_terminal:
                    _show_live(looks)
                else:
                    for look in looks:
                        print(*_lines(look), sep="\n", flush=True)
            except KeyboardInterrupt:
                pass  # the usual way to end it


def _groups_here(backend: Backend) -> list[McastAddress]:
    """The IPv4 groups that somebody is seen in, control traffic left out."""
    found = (ipv4_group_of(info.mgid) for info in backend.groups().groups)
    groups = [McastAddress.of(each) for each in found if each is not None and each not in _LOCAL_CONTROL]
    if not groups:
        raise Failure("nobody is seen in a group here: name a GROUP, such as 239.1.1.1", 2)
    return groups


def _looks(endpoint: Endpoint, interval: float, count: int | None) -> Iterator[dict[str, Any]]:
    """What was heard in each interval, `count` times."""
    meter = Meter({member.mgid: str(member.group.address) for member in endpoint.groups})
    clock = endpoint.backend.now
    last = clock()
    number = 0
    while count is None or number < count:
        number += 1
        while (left := last + interval - clock()) > 0:
            with endpoint.recv_batch(_BATCH, left) as batch:
                meter.take(batch)
        now = clock()
        groups, stats, events = meter.look(now - last), endpoint.stats(), list(_events(endpoint))
        yield {
            "time": time.time(),
            "seconds": now - last,
            "groups": groups,
            "receive_queue": _queue(stats),
            "dropped": {why: lost for why, lost in stats.dropped.items() if lost},
            "port_counters": dict(stats.port_counters),
            "events": events,
        }
        last = now


def _queue(stats: EndpointStats) -> dict[str, int | None]:
    return {
        "depth": stats.receive_depth,
        "free": stats.receive_free,
        "low_water": stats.receive_low_water,
        "empty": stats.receive_empty,
    }


def _events(endpoint: Endpoint) -> Iterator[str]:
    while (event := endpoint.next_event(0.0)) is not None:
        yield str(event)


# --- as text -----------------------------------------------------------------------------


def _rate(found: Mapping[str, Any]) -> str:
    from rich.filesize import decimal

    return f"{found['messages_per_second']:,.0f} msg/s, {decimal(int(found['bytes_per_second']))}/s"


def _lost(look: Mapping[str, Any]) -> str:
    queue = look["receive_queue"]
    dropped = ", ".join(f"{lost:,} {why}" for why, lost in look["dropped"].items()) or "nothing"
    free = f"{queue['free']:,} of {queue['depth']:,}, at the least {queue['low_water']:,}"
    return f"receives free {free}; lost {dropped}"


def _lines(look: Mapping[str, Any]) -> Iterator[str]:
    """A line for each group, and one for what was lost."""
    at = time.strftime("%H:%M:%S", time.localtime(look["time"]))
    for found in look["groups"]:
        gaps = "" if found["gaps"] is None else f", {found['gaps']:,} gaps"
        sources = len(found["sources"]) + found["forgotten_sources"]
        yield f"{at} {found['group']}: {_rate(found)} from {sources} source{'s' * (sources != 1)}{gaps}"
    yield f"{at} {_lost(look)}"
    yield from (f"{at} {event}" for event in look["events"])


def _show_live(looks: Iterable[dict[str, Any]]) -> None:
    from rich.live import Live

    events: list[str] = []
    with Live(console=console(), auto_refresh=False) as live:
        for look in looks:
            events = [*events, *look["events"]][-_EVENTS_SHOWN:]
            live.update(_table(look, events), refresh=True)


_EVENTS_SHOWN, _SOURCES_SHOWN = 5, 10
"""What fits on a screen; JSON has all."""


def _table(look: Mapping[str, Any], events: Sequence[str]) -> Lines:
    from rich.console import Group as Lines
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("group, source", overflow="fold")
    for name in ("messages", "msg/s", "rate", *SEQUENCE):
        table.add_column("again" if name == "duplicates" else name, justify="right")
    for found in look["groups"]:
        busiest = sorted(found["sources"], key=lambda one: -one["messages_per_second"])[:_SOURCES_SHOWN]
        for each, name in ((found, found["group"]), *((one, _source(one)) for one in busiest)):
            table.add_row(
                name,
                f"{each['messages']:,}",
                f"{each['messages_per_second']:,.0f}",
                f"{decimal(int(each['bytes_per_second']))}/s",
                *("-" if each[field] is None else f"{each[field]:,}" for field in SEQUENCE),
                style="bold" if each is found else "",
            )
        more = len(found["sources"]) - len(busiest) + found["forgotten_sources"]
        if more:
            table.add_row(f"  and {more:,} more sources")
    return Lines(table, Text(f"\n{_lost(look)}"), *(Text(event, style="yellow") for event in events))


def _source(found: Mapping[str, Any]) -> str:
    return f"  {found['source']} QP {found['qp_num']}"
