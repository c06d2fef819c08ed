"""`mcast sim`: plays a scenario on a simulated fabric, and shows what the applications saw."""

from __future__ import annotations

import resource
from contextlib import ExitStack, closing, suppress
from io import BytesIO
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcast.cli.signals import interruptible, on_signal
from mcast.cli.sim_cast import cast
from mcast.cli.sim_control import ctl, tap
from mcast.cli.status import ExitStatus
from mcast.cli.terminal import (
    Json,
    NonBlockingWriter,
    UsageError,
    console,
    json_output,
    output_file,
    print_table,
    require_one_stdout,
    say,
    stdin_as_file,
    write_file,
)
from mcast.cli.values import MAX_PORTS, MAX_SEED, number_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mcast.backends.sim.scenario.model import ScenarioFault, ScenarioTopology
    from mcast.backends.sim.scenario.runner import MemberResult, ObservedEvent, ScenarioResult

app: typer.Typer = typer.Typer(
    help="Serve a simulated fabric, or simulate runs with faults.", no_args_is_help=True
)

_PORTS = 16
"""Of a fabric that nobody has described."""

_SHOWN = 20
"""Maximum number of events that are shown; JSON has all."""

_WORDS = 2
"""Number of leading columns that hold words; the others hold numbers."""


def _file(option: str, words: str) -> Any:
    return typer.Option(option, metavar="FILE", callback=output_file, help=words)


def _ready_made() -> list[str]:
    from mcast.backends.sim.scenario.model import ready_made

    return list(ready_made())


app.command()(cast)


@app.command("list")
def list_() -> None:
    """List the scenarios that come with mcast."""
    from rich.padding import Padding

    from mcast.backends.sim.scenario.runner import load, ready_made

    for name in ready_made():
        say(name)
        console().print(Padding(load(name).summary, (0, 0, 0, 4)), markup=False)


@app.command()
def run(
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO",
            autocompletion=_ready_made,
            help="Name from `mcast sim list`, or a file; - is stdin.",
        ),
    ],
    as_json: Json = False,
    seed: Annotated[
        int | None,
        number_option(min=0, max=MAX_SEED, help="Seed to use instead of the scenario's."),
    ] = None,
    fail_if_lost: Annotated[
        bool, typer.Option("--fail-if-lost", help="End with status 1 if a member lost a message.")
    ] = False,
    html: Annotated[Path | None, _file("--html", "Write an HTML page: members, messages, losses.")] = None,
    pcap: Annotated[Path | None, _file("--pcap", "Write its packets as pcapng, for Wireshark.")] = None,
    trace: Annotated[Path | None, _file("--trace", "Write every event as a line of JSON.")] = None,
) -> None:
    """Simulate SCENARIO, and show what each member received and lost, and why.

    Time is virtual, so the same scenario and seed give the same result. With - as a FILE, that file
    goes to stdout, and a one-line summary on stderr replaces the table. The exit status is 2 if the scenario
    cannot be read.
    """
    from mcast.backends.sim.scenario import runner as scenarios
    from mcast.backends.sim.scenario.model import MAX_FILE_BYTES

    apart = require_one_stdout(html, pcap, trace, as_json) and not as_json
    with stdin_as_file(scenario, ".toml", MAX_FILE_BYTES + 1) as source:
        try:
            wanted = scenarios.load(source)
        except scenarios.BadScenario as error:
            raise UsageError(str(error)) from None
    result = scenarios.run(wanted if seed is None else wanted.model_copy(update={"seed": seed}))
    _write_trace(result, html, pcap, trace)
    if as_json:
        json_output.result(result.as_json())
    elif apart:
        say(_sum(result), err=True)
    else:
        _show(result)
    if fail_if_lost and any(member.lost for member in result.members):
        raise typer.Exit(ExitStatus.FAILED)


app.command()(ctl)
app.command()(tap)


@app.command()
def serve(
    fabric_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FABRIC.toml", help="Description of the fabric, as in a scenario; - is stdin."
        ),
    ] = None,
    socket: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Socket to serve at. [default: the user's own]")
    ] = None,
    fabric: Annotated[
        str | None, typer.Option(metavar="KIND", help="roce or infiniband. [default: roce]")
    ] = None,
    ports: Annotated[
        int | None,
        number_option(min=1, max=MAX_PORTS, help="Ports, each on a host. [default: 16]"),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(
            autocompletion=_ready_made, metavar="FILE", help="Cause its faults in real time; - is stdin."
        ),
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="Let members of this Unix group attach, too.")
    ] = None,
) -> None:
    """Serve a simulated fabric: every program that opens it is a host of its own.

    Programs attach to the fabric that MCAST_SIM=PATH names: export the line that this command prints. With
    --backend sim-shared they attach to the one at the user's default socket. The command serves until it is
    interrupted. The programs' devices are then removed, and return when the fabric is served again.
    """
    from mcast.backends.sim.scenario.runner import fabric_of
    from mcast.backends.sim.served.attach import VARIABLE, default_socket, make_socket_dir
    from mcast.backends.sim.served.server import FabricServer

    about, seed, faults = _described(fabric_file, scenario, fabric, ports)
    if group and socket is None:
        raise UsageError(
            "--group needs --socket PATH: the default socket is in a directory that others cannot enter"
        )
    # Each channel and queue pair of each client has descriptors here.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        path = make_socket_dir(default_socket()) if socket is None else socket.absolute()
    except OSError as error:
        raise UsageError(f"cannot serve: {error.strerror}") from None
    with ExitStack() as stack:
        writer = stack.enter_context(closing(NonBlockingWriter()))
        try:
            made = fabric_of(about, clock="wall", seed=seed)
            server = FabricServer(made, path, _group_number(group), writer.say)
        except OSError as error:
            elsewhere = "; choose another path with --socket" if isinstance(error, FileExistsError) else ""
            raise UsageError(f"cannot serve at {path}: {error.strerror or error}{elsewhere}") from None
        except ValueError as error:
            raise UsageError(str(error)) from None
        stack.callback(made.close)
        stack.callback(server.close)
        stack.enter_context(interruptible())
        stack.enter_context(on_signal(server.stop))
        writer.say(f"serving {about.ports} ports of {about.link_layer} at {path}")
        writer.say('programs with --backend sim, or mcast.open_endpoint("sim"), attach after')
        writer.say(f"  export {VARIABLE}={quote(str(path))}")
        writer.say("end with Ctrl-C")
        for fault in faults:
            server.control.faults.plan(fault)
        with suppress(KeyboardInterrupt):  # the usual way to end it
            server.run()


def _described(
    file: Path | None, scenario: str | None, kind: str | None, ports: int | None
) -> tuple[ScenarioTopology, int, Sequence[ScenarioFault]]:
    """Return the description of the fabric, its seed, and its faults."""
    from mcast.backends.sim.scenario import model

    if sum(one is not None for one in (file, scenario)) and (kind or ports):
        raise UsageError("the file describes the fabric: leave out --fabric and --ports")
    if file and scenario:
        raise UsageError("a scenario has a fabric of its own: give either FABRIC.toml or --scenario")
    if given := scenario or file:
        with stdin_as_file(str(given), ".toml", model.MAX_FILE_BYTES + 1) as source:
            try:
                if file:
                    return model.load_fabric(Path(source)), 0, ()
                found = model.load(source)
                return found.fabric, found.seed, found.faults
            except model.BadScenario as error:
                raise UsageError(str(error)) from None
    if kind not in (None, "roce", "infiniband"):
        raise UsageError(f"--fabric is {kind}: give roce or infiniband")
    shape = {"link_layer": kind or "roce", "ports": ports or _PORTS}
    return model.ScenarioTopology.model_validate(shape), 0, ()


def _group_number(name: str | None) -> int | None:
    import grp

    try:
        return None if name is None else grp.getgrnam(name).gr_gid
    except KeyError:
        raise UsageError(f"--group is {name}: this host has no such group") from None


def _write_trace(result: ScenarioResult, html: Path | None, pcap: Path | None, trace: Path | None) -> None:
    from mcast.backends.sim.trace import pcapng

    if html:
        write_file(html, result.page().encode())
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
    _show_members(result.table())
    _show_causes(result.members)
    _show_seen(result.seen)
    say("", _sum(result))


def _sum(result: ScenarioResult) -> str:
    lost, expected = (sum(getattr(m, name) for m in result.members) for name in ("lost", "expected"))
    sent = sum(member.sent for member in result.members)
    return f"sim: {sent:,} messages sent, {lost:,} of {expected:,} expected copies lost"


def _show_members(rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    names, *members = rows
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names[:_WORDS]:
        table.add_column(name, overflow="fold")
    for name in names[_WORDS:]:
        table.add_column(name, justify="right")
    for member in members:
        table.add_row(*member)
    print_table(console(), table)


def _show_causes(members: tuple[MemberResult, ...]) -> None:
    causes = [(member.device, why, count) for member in members for why, count in member.causes.items()]
    if causes:
        say("\nwhy messages were lost")
    for device, why, count in causes:
        say(f"  {device:8} {count:7,}  {why}")


def _show_seen(seen: tuple[ObservedEvent, ...]) -> None:
    say("\nevents that the applications received")
    for event in seen[:_SHOWN]:
        console().print(
            f"  {event.at:9.4f} s  {event.device:8} {event.what} {event.errno}".rstrip(), markup=False
        )
        if event.detail:
            console().print(f"{'':23}{event.detail}", markup=False)
    if len(seen) > _SHOWN:
        say(f"  ... and {len(seen) - _SHOWN} more: --json shows them all")
