"""`mcast replay`: sends the messages of a capture file to groups again."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from mcast.cli.options import BackendName, Bind, Device, Json, endpoint_at, refuse_in_process, with_settings
from mcast.cli.signals import interruptible
from mcast.cli.terminal import Failure, UsageError, console, group, json_output, plural, say, stdin_as_file
from mcast.cli.values import factor, number_option
from mcast.wire.addresses import Gid, McastAddress, Mgid
from mcast.wire.mapping import ipv4_group_of

if TYPE_CHECKING:
    from mcast.capture.replay import CaptureSummary, RecordedMessage
    from mcast.cli.outputs import ReplayOutput
    from mcast.endpoint.blocking import Endpoint, Sender
    from mcast.endpoint.settings import Settings

_JOIN_TIMEOUT = 10.0
_LONG = 60.0
"""Seconds between two messages from which on a pause is announced."""


def _require(file: Path, contents: CaptureSummary, limit: int, whose: str) -> None:
    """Raise Failure if a message of the file is larger than `limit` bytes."""
    if contents.largest > limit:
        raise UsageError(
            f"a message in {file} has {contents.largest:,} bytes, {whose} carries {limit:,}: "
            "use a port with a larger MTU",
        )


@with_settings()
def replay(
    given: Annotated[str, typer.Argument(metavar="FILE", help="A pcapng or pcap file; - is stdin.")],
    group: Annotated[
        McastAddress | None,
        typer.Option(parser=group, metavar="GROUP", help="Send all messages to this group instead."),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            parser=factor(0.001, 1e6), metavar="X", help="X times as fast, as 10 or 10x. [default: 1]"
        ),
    ] = None,
    at_once: Annotated[bool, typer.Option("--max", help="As fast as possible, without pauses.")] = False,
    keep_copies: Annotated[
        bool,
        typer.Option("--keep-copies", help="Send also the copies that tcpdump -i any has of a message."),
    ] = False,
    members: Annotated[
        int, number_option(min=0, max=1 << 20, help="Wait until N members of each group answer.")
    ] = 0,
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = None,
    *,
    settings: Settings,
    as_json: Json = False,
) -> None:
    """Send the messages of a capture to their groups again.

    FILE is from `mcast record`, `mcast sim run --pcap`, tcpdump (udp port 4791) or Wireshark. The whole file
    is read before anything is sent. Packets that are not messages to a group are counted and left out. So are
    copies of a message that were captured on other interfaces of one host.
    """
    from mcast.capture.replay import read_messages

    if at_once and speed is not None:
        raise UsageError("--speed and --max both set the speed: give one of them")
    refuse_in_process(backend, "receive")
    with ExitStack() as stack:
        stack.enter_context(interruptible())
        file = Path(stack.enter_context(stdin_as_file(given)))
        contents = _contents(file, keep_copies)
        pace = None if at_once else speed or 1.0
        endpoint = stack.enter_context(endpoint_at(backend, bind, device, settings))
        _require(file, contents, endpoint.max_message_size, f"one MTU of {endpoint.device.name}")
        senders = _senders(endpoint, contents, group, listen=members > 0)
        for sender in dict.fromkeys(senders.values()):
            _require(file, contents, sender.max_message_size, f"the MTU of {sender.group}")
        for sender in dict.fromkeys(senders.values()):
            sender.ready(members, _JOIN_TIMEOUT)
        _announce(contents.pause, pace)
        started = endpoint.backend.now()
        with _reading(file) as source:
            # If the file grows, only the messages that were counted before are sent.
            messages = islice(read_messages(source, keep_copies=keep_copies), contents.messages)
            sent = _send_all(endpoint, senders, messages, pace, contents)
        outcome = _outcome(endpoint, given, contents, senders, sent, endpoint.backend.now() - started)
    if as_json:
        json_output.result(outcome)
    else:
        _show(outcome)


@contextmanager
def _reading(file: Path) -> Iterator[BinaryIO]:
    """The open file; damage in the file becomes one sentence."""
    from mcast.pcapng.reader import CaptureError

    try:
        with file.open("rb") as source:
            yield source
    except CaptureError as error:
        raise UsageError(f"cannot read {file}: {error}") from None


def _contents(file: Path, keep_copies: bool) -> CaptureSummary:
    from mcast.capture.replay import summarize

    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise UsageError(
                f"{file} is not a regular file, and a replay reads it twice: save it to a file first"
            )
        with _reading(file) as source:
            contents = summarize(source, keep_copies)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    if not contents.messages:
        raise UsageError(f"{file} has no multicast message{_but(contents.skipped)}")
    return contents


def _but(skipped: Mapping[str, int]) -> str:
    return "".join(f"; {_left_out(why, count)}" for why, count in skipped.items())


def _left_out(why: str, count: int) -> str:
    return f"{count:,} {plural('packet', count)} left out: {why}"


def _announce(pause: int, speed: float | None) -> None:
    """Say on stderr that the replay will stand still for long."""
    if speed is not None and pause / 1e9 / speed > _LONG:
        say(
            f"replay: the longest pause between two messages takes {_span(pause / 1e9 / speed)}, as in the "
            "recording: --speed X divides all pauses, --max leaves them out",
            err=True,
        )


def _span(seconds: float) -> str:
    """Return a time in the largest unit of which there are two."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    name, size = next((unit for unit in units if seconds >= 2 * unit[1]), ("seconds", 1.0))
    return f"{seconds / size:,.0f} {name}"


def _senders(
    endpoint: Endpoint, contents: CaptureSummary, group: McastAddress | None, listen: bool
) -> dict[Gid, Sender]:
    """MGID in the capture -> what sends to its group here. Each address is joined once.

    With `listen` the groups are joined as full members, whose questions others answer over the group, because
    not every fabric delivers unicast answers.
    """
    targets = {mgid: group or McastAddress.of(ipv4_group_of(mgid) or Mgid(mgid)) for mgid in contents.groups}
    join = endpoint.join if listen else endpoint.sender
    joined = {address: join(address, timeout=_JOIN_TIMEOUT) for address in dict.fromkeys(targets.values())}
    return {mgid: joined[address] for mgid, address in targets.items()}


def _send_all(
    endpoint: Endpoint,
    senders: Mapping[Gid, Sender],
    messages: Iterator[RecordedMessage],
    speed: float | None,
    contents: CaptureSummary,
) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mcast.capture.replay import FileChanged, replay
    from mcast.cli.progress import PlainLines

    err, sent = console(stderr=True), 0
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_interactive) as bar:
        task, lines = bar.add_task("", total=contents.messages), PlainLines(disable=err.is_interactive)
        try:
            for sent in replay(endpoint, senders, messages, speed):
                bar.update(task, completed=sent)
                lines.show(f"replaying: {sent:,} of {contents.messages:,} messages")
        except FileChanged as error:
            raise Failure(str(error)) from None
    if sent < contents.messages:
        raise Failure(
            f"{sent:,} of {contents.messages:,} messages were sent: the file was shortened during the replay"
        )
    return sent


def _outcome(
    endpoint: Endpoint,
    file: str,
    contents: CaptureSummary,
    senders: Mapping[Gid, Sender],
    sent: int,
    seconds: float,
) -> ReplayOutput:
    return {
        "backend": endpoint.backend.name,
        "file": str(file),
        "sender": str(endpoint.address),
        "device": endpoint.device.name,
        "port": endpoint.port.port_num,
        "groups": [
            {"recorded": str(mgid), "group": str(senders[mgid].group.address), "messages": count}
            for mgid, count in contents.groups.items()
        ],
        "sent": sent,
        "seconds": seconds,
        "recorded_seconds": contents.span / 1e9,
        "longest_pause_seconds": contents.pause / 1e9,
        "skipped": dict(contents.skipped),
    }


def _show(outcome: ReplayOutput) -> None:
    from mcast.capture.replay import COPY_REASON

    groups = ", ".join(dict.fromkeys(each["group"] for each in outcome["groups"]))
    console().print(
        f"replay: {outcome['sent']:,} messages to {groups} in {outcome['seconds']:.3g} s; the capture "
        f"spans {outcome['recorded_seconds']:.3g} s",
        markup=False,
    )
    for why, count in outcome["skipped"].items():
        hint = "; --keep-copies sends these, too" if why == COPY_REASON else ""
        console().print(_left_out(why, count) + hint, markup=False)
