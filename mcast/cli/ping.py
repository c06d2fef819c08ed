"""`mcast ping`: ask the members of a group, or answer.

It takes mckey's flags, and works with a mckey at the other end.
"""

from __future__ import annotations

from contextlib import ExitStack
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mcast.arguments.amounts import parse_int
from mcast.cli.options import (
    BackendName,
    Bind,
    Device,
    Json,
    choose_backend,
    in_option_names,
    port_of,
    refuse_in_process,
    require,
    with_settings,
)
from mcast.cli.signals import interruptible
from mcast.cli.status import ExitStatus
from mcast.cli.terminal import Failure, UsageError, console, group, json_output, print_table, say
from mcast.cli.values import MAX_SECONDS, message_size, number_option, seconds
from mcast.wire.addresses import McastAddress, Mgid
from mcast.wire.kinds import PortSpace
from mcast.wire.probe import PROBE_SIZE

if TYPE_CHECKING:
    from mcast.api import Backend
    from mcast.bench.ping import AnswerResult, PingResult
    from mcast.endpoint.ports import LocalPort
    from mcast.endpoint.settings import Settings
    from mcast.wire.probe import Peer

_TIME = seconds(0.001, MAX_SECONDS)
_SPACES = {PortSpace.UDP: "0x111", PortSpace.IPOIB: "0x2"}


def _mgid(text: str) -> McastAddress:
    try:
        return McastAddress(address=Mgid(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _space(text: str) -> PortSpace:
    number = parse_int(text, 16) if text[:2].lower() == "0x" else parse_int(text)
    space = next((one for one in _SPACES if one == number), None)
    if space is None:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(_SPACES.values())} (UDP, IPoIB)")
    return space


@with_settings()
def ping(
    address: Annotated[
        McastAddress | None,
        typer.Argument(
            parser=group, metavar="GROUP", help="The group, such as 239.1.1.1.", show_default=False
        ),
    ] = None,
    mapped: Annotated[
        McastAddress | None, typer.Option("-m", parser=group, metavar="ADDR", help="The same as GROUP.")
    ] = None,
    unmapped: Annotated[
        McastAddress | None,
        typer.Option("-M", parser=_mgid, metavar="MGID", help="A raw MGID instead; needs -b or --device."),
    ] = None,
    answer: Annotated[bool, typer.Option("--answer", help="Answer the pings of others instead.")] = False,
    bind: Bind = None,
    device: Device = None,
    qps: Annotated[int, number_option("-c", min=1, max=56, help="Queue pairs that join.")] = 1,
    count: Annotated[
        int | None,
        number_option("-C", min=1, help="Pings of each queue pair; --answer: messages.  [default: 10; all]"),
    ] = None,
    size: Annotated[
        int,
        typer.Option(
            "-S",
            parser=message_size(PROBE_SIZE, 1 << 16),
            metavar="BYTES",
            help="Length of a ping; see above.",
        ),
    ] = PROBE_SIZE,
    space: Annotated[
        PortSpace,
        typer.Option("-p", parser=_space, metavar="SPACE", help="Port space, 0x111 or 0x2 (IPoIB)."),
    ] = "0x111",  # type: ignore[assignment]  # text, read by the parser
    send_only: Annotated[bool, typer.Option("-o", help="Join as a send-only member.")] = False,
    no_loopback: Annotated[
        bool, typer.Option("-l", help="Ask the device to keep own messages from this host.")
    ] = False,
    interval: Annotated[
        float,
        typer.Option("-i", parser=_TIME, metavar="SECONDS", help="From one ping to the next."),
    ] = 1.0,
    timeout: Annotated[
        float,
        typer.Option("-W", parser=_TIME, metavar="SECONDS", help="Time to wait for the last answers."),
    ] = 1.0,
    *,
    settings: Settings,
    backend: BackendName = None,
    as_json: Json = False,
) -> None:
    """Ask the members of GROUP; show losses and round trips.

    Every endpoint of mcast that has joined to receive answers pings of 61 bytes, also one that only sends;
    `mcast ping --answer` answers those of any length.
    The flags are those of mckey. Without --answer this command sends as mckey -s does; a mckey at the other
    end counts messages, and answers nothing. Ctrl-C, or SIGTERM, ends it early, and the summary is printed.
    The status is 0 if a member answered, or, with --answer, if anybody sent a message; else it is 1.
    """
    wanted = [found for found in (address, mapped, unmapped) if found is not None]
    if len(wanted) != 1:
        raise UsageError("give one group: GROUP, -m ADDR or -M MGID")
    if unmapped is not None and bind is None and device is None:
        raise UsageError("-M does not say which port: give -b ADDR or --device DEV")
    if answer and send_only:
        raise UsageError("a send-only member receives no ping to answer: leave out -o or --answer")
    refuse_in_process(backend, "answer")
    from mcast.api import open_at
    from mcast.bench.ping import AnswerResult, answer_all, joined, ping_all

    with interruptible(), open_at(choose_backend(backend), bind, {}) as opened, ExitStack() as stack:
        local_port = _local_port(opened, bind, device)
        require(settings, [local_port])
        where = f"{local_port.address} ({local_port.device.name})"
        try:
            pairs = stack.enter_context(
                joined(opened, local_port, wanted[0], qps, space, send_only, no_loopback, settings)
            )
        except ValueError as error:
            raise Failure(f"{error}: leave out -l") from None
        outcome: PingResult | AnswerResult
        if answer:
            _live(f"answering {wanted[0]} as {where}")
            outcome = answer_all(pairs, count)
        elif size > (limit := pairs.max_message_size):
            raise UsageError(f"-S {size} is more than one MTU carries on {local_port.device.name}: {limit}")
        else:
            _live(f"ping {wanted[0]} from {where}, {size} bytes")
            outcome = ping_all(pairs, count or 10, size, interval, timeout, _answered)
        heard = bool(outcome.heard if isinstance(outcome, AnswerResult) else outcome.members)
        suspected = () if heard else opened.suspicions()
    if as_json:
        json_output.result(outcome)
    elif isinstance(outcome, AnswerResult):
        _show_heard(outcome)
    else:
        _show_members(outcome)
    if not heard:
        for cause in () if as_json else suspected:
            say(cause.shown("likely"))
        raise typer.Exit(ExitStatus.FAILED)


def _local_port(backend: Backend, bind: IPv4Address | IPv6Address | None, device: str | None) -> LocalPort:
    from mcast.endpoint.ports import choose

    try:
        return choose(backend, bind, *port_of(device))
    except ValueError as error:
        raise UsageError(in_option_names(error)) from None


def _live(line: str) -> None:
    """One line for each answer, where somebody watches."""
    out = console()
    if out.is_terminal:
        out.print(line, markup=False)


def _answered(peer: Peer, seq: int, seconds: float) -> None:
    _live(f"{peer.gid.ipv4 or peer.gid} QP {peer.qp_num}: seq={seq} time={seconds * 1e3:.3f} ms")


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        left = name in ("member", "sender")
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    return table


def _show_members(outcome: PingResult) -> None:
    if outcome.members:
        table = _table("member", "QP", "answers", "loss", "twice", "min", "avg", "max", "mdev ms")
        for member in outcome.members:
            table.add_row(
                member.address,
                str(member.qp),
                f"{member.answers:,}",
                f"{member.loss:.1%}",
                f"{member.doubles:,}",
                *(f"{number:.3f}" for number in member.milliseconds),
            )
        print_table(console(), table)
        say()
    for other in outcome.others:
        say(f"{other.messages} other messages from {other.address} QP {other.qp}")
    who = f"{len(outcome.members)} answered" if outcome.members else "no member answered"
    say(f"ping: {outcome.sent} sent in {outcome.seconds:.1f} s, {who}")
    if not outcome.members:
        say("  check that `mcast recv` or `mcast ping --answer` runs at the others")


def _show_heard(outcome: AnswerResult) -> None:
    if outcome.heard:
        table = _table("sender", "QP", "pings", "others", "bytes")
        for heard in outcome.heard:
            sizes = dict.fromkeys((heard.smallest, heard.largest))
            table.add_row(
                heard.address,
                str(heard.qp),
                f"{heard.pings:,}",
                f"{heard.messages:,}",
                "-".join(map(str, sizes)),
            )
        print_table(console(), table)
        say()
    pings = sum(heard.pings for heard in outcome.heard)
    failed = sum(heard.unanswered for heard in outcome.heard)
    others = sum(heard.messages for heard in outcome.heard)
    lost = f", {failed} could not be answered" if failed else ""
    say(f"ping: {pings - failed} pings answered{lost}, {others} other messages")
