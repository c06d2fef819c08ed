"""`mcast sim`: plays a scenario on a simulated fabric, and shows what the applications saw."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcast.cli.terminal import Failure, console, output_file, write_file

if TYPE_CHECKING:
    from mcast.backends.sim.scenario.play import MemberResult, ScenarioResult, Seen

app = typer.Typer(help="Play scenarios with faults on a simulated fabric.", no_args_is_help=True)

_SHOWN = 20
"""How many lines of what the applications saw are shown; JSON has all."""


def _file(option: str, words: str) -> Any:
    return typer.Option(option, metavar="FILE", callback=output_file, help=words)


def _ready_made() -> list[str]:
    from mcast.backends.sim.scenario.model import ready_made

    return list(ready_made())


@app.command("list")
def list_() -> None:
    """Name the ready-made scenarios."""
    from rich.padding import Padding

    from mcast.backends.sim.scenario.play import load, ready_made

    for name in ready_made():
        typer.echo(name)
        console().print(Padding(load(name).summary, (0, 0, 0, 4)), markup=False)


@app.command()
def run(
    scenario: Annotated[
        str, typer.Argument(autocompletion=_ready_made, help="A ready-made name, or a TOML or YAML file.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    html: Annotated[
        Path | None, _file("--html", "Draw the run as a page: members, messages, losses.")
    ] = None,
    pcap: Annotated[Path | None, _file("--pcap", "Write its packets as pcapng, for Wireshark.")] = None,
    trace: Annotated[Path | None, _file("--trace", "Write all that happened as lines of JSON.")] = None,
) -> None:
    """Play SCENARIO, and show which member got or lost which messages, and why.

    Time is virtual, so the same scenario gives the same result. The exit status is 2 if the scenario cannot
    be read.
    """
    from mcast.backends.sim.scenario import play as scenarios

    try:
        wanted = scenarios.load(scenario)
    except scenarios.BadScenario as error:
        raise Failure(str(error), 2) from None
    result = scenarios.run(wanted)
    _write_trace(result, html, pcap, trace)
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=1))
    else:
        _show(result)


def _write_trace(result: ScenarioResult, html: Path | None, pcap: Path | None, trace: Path | None) -> None:
    from mcast.backends.sim.trace import pcapng, timeline

    if html:
        write_file(html, timeline.page(result.trace, result.scenario.name).encode())
    if pcap:
        packets = BytesIO()
        pcapng.write(result.trace, packets)
        write_file(pcap, packets.getvalue())
    if trace:
        write_file(trace, f"{result.trace}\n".encode())


def _show(result: ScenarioResult) -> None:
    scenario, out = result.scenario, console()
    out.print(f"{scenario.name}: {scenario.summary}".rstrip(": "), markup=False)
    fabric = scenario.fabric
    out.print(
        f"{fabric.link_layer}, ports {fabric.ports}, switches {fabric.switches}; "
        f"{scenario.seconds:g} s of virtual time, seed {scenario.seed}\n",
        markup=False,
    )
    _show_members(result.members)
    _show_causes(result.members)
    _show_seen(result.seen)
    lost, expected = (sum(getattr(m, name) for m in result.members) for name in ("lost", "expected"))
    sent = sum(member.sent for member in result.members)
    typer.echo(f"\nsim: {sent:,} messages sent, {lost:,} of {expected:,} expected copies lost")


def _show_members(members: tuple[MemberResult, ...]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("port", "group"):
        table.add_column(name, overflow="fold")
    for name in ("joins", "sent", "expected", "received", "lost", "twice", "late"):
        table.add_column(name, justify="right")
    for member in members:
        received = "send-only" if member.send_only else f"{member.received:,}"
        numbers = (member.lost, member.duplicates, member.out_of_order)
        table.add_row(
            member.device,
            member.group,
            str(member.joins),
            f"{member.sent:,}",
            f"{member.expected:,}",
            received,
            *(f"{number:,}" for number in numbers),
        )
    console().print(table)


def _show_causes(members: tuple[MemberResult, ...]) -> None:
    causes = [(member.device, why, count) for member in members for why, count in member.causes.items()]
    if causes:
        typer.echo("\nwhy messages were lost")
    for device, why, count in causes:
        typer.echo(f"  {device:8} {count:7,}  {why}")


def _show_seen(seen: tuple[Seen, ...]) -> None:
    typer.echo("\nwhat the applications were told")
    for event in seen[:_SHOWN]:
        console().print(
            f"  {event.at:9.4f} s  {event.device:8} {event.what} {event.errno}".rstrip(), markup=False
        )
        if event.detail:
            console().print(f"{'':23}{event.detail}", markup=False)
    if len(seen) > _SHOWN:
        typer.echo(f"  ... and {len(seen) - _SHOWN} more: --json shows them all")
