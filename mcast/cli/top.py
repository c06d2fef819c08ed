"""`mcast top`: which sources send how much to which group, and what is lost, as it happens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from mcast.cli import clients
from mcast.cli.listening import DEFAULT_DEPTH, Demo, listening, opened
from mcast.cli.options import BackendName, Bind, Device, with_settings
from mcast.cli.signals import interruptible
from mcast.cli.terminal import UsageError, console, group, json_output, json_value, say
from mcast.cli.values import MAX_SECONDS, number_option, seconds
from mcast.wire.addresses import LOCAL_CONTROL, McastAddress
from mcast.wire.mapping import ipv4_group_of

if TYPE_CHECKING:
    from rich.console import Group as Lines

    from mcast.api import Backend, ClientProcess
    from mcast.endpoint.settings import Settings
    from mcast.endpoint.watching import Rates, Sample, SequenceCounts


@with_settings(DEFAULT_DEPTH)
def top(
    groups: Annotated[
        list[McastAddress] | None,
        typer.Argument(
            parser=group, metavar="GROUP", help="Groups to show; default: all that this host can see."
        ),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(
            parser=seconds(0.05, MAX_SECONDS), metavar="SECONDS", help="Seconds between two samples."
        ),
    ] = 1.0,
    count: Annotated[int | None, number_option("--count", "-C", min=1, help="End after N samples.")] = None,
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = None,
    demo: Demo = False,
    *,
    settings: Settings,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", is_eager=True, callback=json_output.want, help="Print a line of JSON for each sample."
        ),
    ] = False,
) -> None:
    """Show live what sources send to groups, and what is lost.

    The command joins the groups as a full member, and shows what a member on this port gets. Ctrl-C ends it.
    """
    from mcast.endpoint.watching import samples

    with interruptible(), opened(backend, demo, bind) as fabric:
        wanted = groups or _groups_here(fabric)
        with listening(fabric, wanted, bind, device, settings, demo) as endpoint:
            seen = samples(endpoint, interval, count)
            try:
                if as_json:
                    for sample in seen:
                        shown = sample.as_dict() | {"clients": clients.others(endpoint.backend)}
                        say(json.dumps(json_value(shown)))
                elif console().is_terminal:
                    _show_live(seen, endpoint.backend)
                else:
                    before: list[ClientProcess] = []
                    for sample in seen:
                        there_now = clients.others(endpoint.backend)
                        say(*_lines(sample, there_now if there_now != before else []))
                        before = there_now
            except KeyboardInterrupt:
                pass  # the usual way to end this command


def _groups_here(backend: Backend) -> list[McastAddress]:
    """The IPv4 groups that have a member as far as this host can see, without control traffic."""
    found = (ipv4_group_of(info.mgid) for info in backend.groups().groups)
    groups = [McastAddress.of(each) for each in found if each is not None and each not in LOCAL_CONTROL]
    if not groups:
        raise UsageError("no group with a member is seen here: name a GROUP, such as 239.1.1.1")
    return groups


# --- as text -----------------------------------------------------------------------------


def _rate(rates: Rates) -> str:
    from rich.filesize import decimal

    return f"{rates.messages_per_second:,.0f} msg/s, {decimal(int(rates.bytes_per_second))}/s"


def _lost(sample: Sample) -> str:
    stats = sample.stats
    reasons = [f"{sample.gaps:,} in gaps"] if sample.gaps else []
    reasons += [f"{lost:,} {why}" for why, lost in sample.dropped.items()]
    free = f"{stats.receive_free:,} of {stats.receive_depth:,} free, minimum {stats.receive_low_water:,}"
    return f"receive queue {free}; lost {', '.join(reasons) or 'nothing'}"


def _lines(sample: Sample, there: Sequence[ClientProcess]) -> Iterator[str]:
    """A line for each group, one for what was lost, and one for each program on the fabric."""
    at = time.strftime("%H:%M:%S", time.localtime(sample.time))
    for found in sample.groups:
        gaps = "" if found.sequence.gaps is None else f", {found.sequence.gaps:,} gaps"
        sources = len(found.sources) + found.forgotten_sources
        yield f"{at} {found.group}: {_rate(found.rates)} from {sources} source{'s' * (sources != 1)}{gaps}"
    yield f"{at} {_lost(sample)}"
    yield from (f"{at} {event}" for event in sample.events)
    yield from (f"{at} on the fabric: {clients.words_of(guest)}" for guest in there)


def _show_live(seen: Iterable[Sample], backend: Backend) -> None:
    from rich.live import Live

    events: list[str] = []
    with Live(console=console(), auto_refresh=False) as live:
        for sample in seen:
            events = [*events, *map(str, sample.events)][-_EVENTS_SHOWN:]
            live.update(_table(sample, events, clients.others(backend)), refresh=True)


_EVENTS_SHOWN, _SOURCES_SHOWN, _CLIENTS_SHOWN = 5, 10, 10
"""Maximum number of events, sources and programs on a screen; JSON has all."""


def _table(sample: Sample, events: Sequence[str], there: Sequence[ClientProcess]) -> Lines:
    from rich.console import Group as Lines
    from rich.table import Table
    from rich.text import Text

    from mcast.endpoint.watching import SEQUENCE

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("group, source", overflow="fold")
    for name in ("messages", "msg/s", "rate", *SEQUENCE):
        table.add_column("again" if name == "duplicates" else name, justify="right")
    for found in sample.groups:
        busiest = sorted(found.sources, key=lambda one: -one.rates.messages_per_second)[:_SOURCES_SHOWN]
        table.add_row(found.group, *_cells(found.rates, found.sequence), style="bold")
        for one in busiest:
            table.add_row(f"  {one.source} QP {one.qp_num}", *_cells(one.rates, one.sequence))
        more = len(found.sources) - len(busiest) + found.forgotten_sources
        if more:
            table.add_row(f"  and {more:,} more sources")
    event_lines = [Text(event, style="yellow") for event in events]
    event_lines += [Text(f"on the fabric: {clients.words_of(guest)}") for guest in there[:_CLIENTS_SHOWN]]
    return Lines(table, Text(f"\n{_lost(sample)}"), *event_lines)


def _cells(rates: Rates, sequence: SequenceCounts) -> Iterator[str]:
    from rich.filesize import decimal

    yield f"{rates.messages:,}"
    yield f"{rates.messages_per_second:,.0f}"
    yield f"{decimal(int(rates.bytes_per_second))}/s"
    yield from ("-" if count is None else f"{count:,}" for count in sequence)
