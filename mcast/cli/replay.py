"""`mcast replay`: the messages of a capture file, sent to groups again."""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import typer

from mcast.api import MULTICAST_QPN, McastAddress
from mcast.cli.interrupt import ends_cleanly
from mcast.cli.place import BackendName, Bind, Device, Json, endpoint_at, refuse_simulated
from mcast.cli.terminal import Failure, console, group
from mcast.wire.addresses import Gid, Mgid
from mcast.wire.mapping import ipv4_group_of

if TYPE_CHECKING:
    from mcast.endpoint.blocking import Endpoint, Sender

_BOUND = 10.0
_BATCH = 64
_DEPTH = 512
"""Receives of an endpoint that listens to nobody."""


class Recorded(NamedTuple):
    """A message of a capture: sent at `t` ns after 1970."""

    t: int
    group: Gid
    payload: bytes
    imm: int | None


class Contents(NamedTuple):
    """What a capture has: messages by group, the largest payload, ns from first to last, packets skipped."""

    groups: Mapping[Gid, int]
    largest: int
    span: int
    skipped: Mapping[str, int]

    @property
    def messages(self) -> int:
        return sum(self.groups.values())


def messages_of(file: BinaryIO, skipped: Counter[str] | None = None) -> Iterator[Recorded]:
    """The messages to groups in a capture, in its order; counts the other packets. Raises CaptureError."""
    from mcast.pcapng.dissect import Skipped, datagram
    from mcast.pcapng.reader import read_frames

    for frame in read_frames(file):
        try:
            found = datagram(frame)
            if found.dest_qp != MULTICAST_QPN or not found.dest.is_multicast:
                raise Skipped("for one queue pair, not for a group")
        except Skipped as why:
            if skipped is not None:
                skipped[str(why)] += 1
        else:
            yield Recorded(frame.t, found.dest, found.payload, found.imm)


def contents_of(file: BinaryIO) -> Contents:
    """Read it all, without sending anything. Raises CaptureError."""
    groups, skipped = Counter[Gid](), Counter[str]()
    largest = 0
    first = last = None
    for message in messages_of(file, skipped):
        groups[message.group] += 1
        largest = max(largest, len(message.payload))
        first = message.t if first is None else min(first, message.t)
        last = message.t if last is None else max(last, message.t)
    return Contents(groups, largest, (last or 0) - (first or 0), skipped)


def play(
    endpoint: Endpoint, senders: Mapping[Gid, Sender], messages: Iterator[Recorded], speed: float | None
) -> Iterator[int]:
    """Send each message over its group's sender, with the gaps of the recording divided by `speed`.

    None: without gaps. Yields how many have been sent, after each batch: what is due together goes together.
    """
    clock, sent = endpoint.backend.now, 0
    batch: list[Recorded] = []
    start: float | None = None
    first = 0

    def due(message: Recorded) -> float:
        assert start is not None
        return start if speed is None else start + (message.t - first) / 1e9 / speed

    for message in messages:
        if start is None:
            start, first = clock(), message.t
        late = due(message) <= clock()
        alike = bool(batch) and (batch[0].group, batch[0].imm) == (message.group, message.imm)
        if batch and not (late and alike and len(batch) < _BATCH):
            sent += _send(senders, batch)
            yield sent
            batch = []
        while (left := due(message) - clock()) > 0:
            endpoint.next_event(left)  # lets the endpoint act meanwhile: answer probes, join again
        batch.append(message)
    if batch:
        yield sent + _send(senders, batch)


def _send(senders: Mapping[Gid, Sender], batch: list[Recorded]) -> int:
    payloads = [message.payload for message in batch]
    sender = senders.get(batch[0].group)
    if sender is None:
        raise Failure(
            f"a message to {batch[0].group} was not there when the file was read first: it has changed"
        )
    return sender.send_batch(payloads, batch[0].imm, _BOUND)


def _require(file: Path, contents: Contents, limit: int, whose: str) -> None:
    """Raise Failure if a message of the file is longer."""
    if contents.largest > limit:
        raise Failure(
            f"a message in {file} has {contents.largest:,} bytes, {whose} carries {limit:,}: "
            "use a port with a larger MTU",
            2,
        )


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A pcapng or pcap file.")],
    group: Annotated[
        McastAddress | None,
        typer.Option(parser=group, metavar="GROUP", help="Send all to this one, not each to its own."),
    ] = None,
    speed: Annotated[
        float | None, typer.Option(min=0.001, metavar="X", help="So many times as fast. [default: 1]")
    ] = None,
    at_once: Annotated[bool, typer.Option("--max", help="As fast as it can, without the gaps.")] = False,
    members: Annotated[
        int, typer.Option(min=0, metavar="N", help="Wait until so many members answer, in each group.")
    ] = 0,
    bind: Bind = None,
    device: Device = None,
    backend: BackendName = "rdma",
    as_json: Json = False,
) -> None:
    """Send the messages of a capture to their groups again.

    FILE is from `mcast record`, `mcast sim run --pcap`, tcpdump (udp port 4791) or Wireshark. It is read as a
    whole before anything is sent; what is no message to a group is counted and left out.
    """
    if at_once and speed is not None:
        raise Failure("--speed and --max both say how fast: give one of them", 2)
    refuse_simulated(backend, "receive")
    contents = _contents(file)
    with ends_cleanly(), endpoint_at(backend, bind, device, _DEPTH) as endpoint:
        _require(file, contents, endpoint.max_message_size, f"one MTU of {endpoint.device.name}")
        senders = _senders(endpoint, contents, group, listen=members > 0)
        for sender in dict.fromkeys(senders.values()):
            _require(file, contents, sender.max_message_size, f"the MTU of {sender.group}")
        for sender in dict.fromkeys(senders.values()):
            sender.ready(members, _BOUND)
        started = endpoint.backend.now()
        with _reading(file) as source:
            # A file that grows is read as far as its contents were known.
            messages = islice(messages_of(source), contents.messages)
            sent = _play(endpoint, senders, messages, None if at_once else speed or 1.0, contents)
        outcome = _outcome(endpoint, file, contents, senders, sent, endpoint.backend.now() - started)
    if as_json:
        typer.echo(json.dumps(outcome, indent=1))
    else:
        _show(outcome)


@contextmanager
def _reading(file: Path) -> Iterator[BinaryIO]:
    """The file, opened; damage in it becomes one sentence."""
    from mcast.pcapng.reader import CaptureError

    try:
        with file.open("rb") as source:
            yield source
    except CaptureError as error:
        raise Failure(f"cannot read {file}: {error}", 2) from None


def _contents(file: Path) -> Contents:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise Failure(f"{file} is not a regular file, which could be read twice", 2)
        with _reading(file) as source:
            contents = contents_of(source)
    except OSError as error:
        raise Failure(f"cannot read {file}: {error.strerror}", 2) from None
    if not contents.messages:
        raise Failure(f"{file} has no message to a group{_but(contents.skipped)}", 2)
    return contents


def _but(skipped: Mapping[str, int]) -> str:
    return (
        ", but " + "; ".join(f"{count:,} packets: {why}" for why, count in skipped.items()) if skipped else ""
    )


def _senders(
    endpoint: Endpoint, contents: Contents, group: McastAddress | None, listen: bool
) -> dict[Gid, Sender]:
    """For each group of the capture what sends to it here; one address is joined once.

    `listen` joins as full members, whom others answer over the group: not every fabric carries unicast.
    """
    targets = {mgid: group or McastAddress.of(ipv4_group_of(mgid) or Mgid(mgid)) for mgid in contents.groups}
    join = endpoint.join if listen else endpoint.sender
    joined = {address: join(address, timeout=_BOUND) for address in dict.fromkeys(targets.values())}
    return {mgid: joined[address] for mgid, address in targets.items()}


def _play(
    endpoint: Endpoint,
    senders: Mapping[Gid, Sender],
    messages: Iterator[Recorded],
    speed: float | None,
    contents: Contents,
) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    err, sent = console(stderr=True), 0
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=contents.messages)
        for sent in play(endpoint, senders, messages, speed):
            bar.update(task, completed=sent)
    if sent < contents.messages:
        raise Failure(f"{sent:,} of {contents.messages:,} messages were sent: the file has become shorter")
    return sent


def _outcome(
    endpoint: Endpoint,
    file: Path,
    contents: Contents,
    senders: Mapping[Gid, Sender],
    sent: int,
    seconds: float,
) -> dict[str, Any]:
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
        "skipped": dict(contents.skipped),
    }


def _show(outcome: dict[str, Any]) -> None:
    groups = ", ".join(dict.fromkeys(each["group"] for each in outcome["groups"]))
    console().print(
        f"replay: {outcome['sent']:,} messages to {groups} in {outcome['seconds']:.3g} s, recorded in "
        f"{outcome['recorded_seconds']:.3g} s",
        markup=False,
    )
    for why, count in outcome["skipped"].items():
        console().print(f"left out: {count:,} packets: {why}", markup=False)
