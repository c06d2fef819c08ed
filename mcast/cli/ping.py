"""`mcast ping`: ask the members of a group, and answer; with mckey's flags, and with mckey as the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from ipaddress import IPv4Address, IPv6Address
from random import SystemRandom
from typing import Annotated, Any

import typer

from mcast.api import (
    Backend,
    Batch,
    Closed,
    InvalidArgument,
    JoinAttrEx,
    McastError,
    Message,
    NotSupported,
    PortSpace,
    QpError,
    QpInit,
    QueuePair,
)
from mcast.cli.echo import Answerer, Member, Pinger, padded
from mcast.cli.place import (
    BackendName,
    Bind,
    BusyPoll,
    Device,
    Dscp,
    Json,
    ServiceLevel,
    TrafficClass,
    port_of,
    refuse_simulated,
    require,
    settings_of,
)
from mcast.cli.terminal import Failure, console, group
from mcast.endpoint.ports import Place, choose
from mcast.endpoint.probe import PROBE_SIZE, Peer
from mcast.endpoint.settings import DEFAULTS, Settings
from mcast.wire.addresses import ZERO_GID, Gid, McastAddress, Mgid

_BOUND = 10.0
"""The longest that a join or a send may take, in seconds."""

_SLICE = 0.002
"""With several queue pairs, so long is each listened to in its turn."""

_SPACES = {PortSpace.UDP: "0x111", PortSpace.IPOIB: "0x2"}


def _mgid(text: str) -> McastAddress:
    try:
        return McastAddress(address=Mgid(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _space(text: str) -> PortSpace:
    try:
        space = PortSpace(int(text, 0))
    except ValueError:
        space = PortSpace.TCP
    if space not in _SPACES:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(_SPACES.values())} (UDP, IPoIB)")
    return space


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
        typer.Option("-M", parser=_mgid, metavar="MGID", help="A raw MGID instead; wants -b or --device."),
    ] = None,
    answer: Annotated[bool, typer.Option("--answer", help="Answer the pings of others instead.")] = False,
    bind: Bind = None,
    device: Device = None,
    qps: Annotated[int, typer.Option("-c", min=1, max=56, metavar="N", help="Queue pairs that join.")] = 1,
    count: Annotated[
        int | None,
        typer.Option(
            "-C", min=1, metavar="N", help="Pings of each queue pair; --answer: messages.  [default: 10; all]"
        ),
    ] = None,
    size: Annotated[
        int, typer.Option("-S", min=PROBE_SIZE, metavar="BYTES", help="Length of a ping; see above.")
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
        float, typer.Option("-i", min=0.001, metavar="SECONDS", help="From one ping to the next.")
    ] = 1.0,
    timeout: Annotated[
        float, typer.Option("-W", min=0.001, metavar="SECONDS", help="Wait so long for the last answers.")
    ] = 1.0,
    busy_poll: BusyPoll = 0.0,
    traffic_class: TrafficClass = None,
    dscp: Dscp = None,
    service_level: ServiceLevel = None,
    backend: BackendName = "rdma",
    as_json: Json = False,
) -> None:
    """Ask the members of GROUP; show losses and round trips.

    Every endpoint of mcast answers pings of 61 bytes; `mcast ping --answer` answers those of any length.
    The flags are mckey's: without --answer this sends as mckey -s does, and a mckey at the other end counts
    what comes, and answers nothing. The status is 0 if anybody answered, or with --answer pinged or sent.
    """
    wanted = [found for found in (address, mapped, unmapped) if found is not None]
    if len(wanted) != 1:
        raise Failure("give one group: GROUP, -m ADDR or -M MGID", 2)
    if unmapped is not None and bind is None and device is None:
        raise Failure("-M leads to no port: say where with -b ADDR or --device DEV", 2)
    if answer and send_only:
        raise Failure("a send-only member hears nothing that it could answer: leave out -o or --answer", 2)
    settings = settings_of(busy_poll, traffic_class, dscp, service_level)
    refuse_simulated(backend, "answer")
    from mcast.contract.registry import open_backend

    with open_backend(backend) as opened:
        place = _place(opened, bind, device)
        require(settings, [place])
        with joined(opened, place, wanted[0], qps, space, send_only, no_loopback, settings) as station:
            if answer:
                outcome = answer_all(station, count, _live)
            else:
                station.require(size)
                outcome = ping_all(station, count or 10, size, interval, timeout, _live)
    if as_json:
        typer.echo(json.dumps(outcome, indent=1))
    else:
        (_show_heard if answer else _show_members)(outcome)
    if not (outcome["heard"] if answer else outcome["members"]):
        raise typer.Exit(1)


def _place(backend: Backend, bind: IPv4Address | IPv6Address | None, device: str | None) -> Place:
    try:
        return choose(backend, bind, *port_of(device))
    except ValueError as error:
        raise Failure(str(error).replace("bind=ADDRESS", "--bind ADDRESS"), 2) from None


def _live(line: str) -> None:
    """One line for each answer, where somebody watches."""
    out = console()
    if out.is_terminal:
        out.print(line, markup=False)


class Station:
    """Some queue pairs of one port in a group."""

    def __init__(
        self, backend: Backend, place: Place, address: McastAddress, qps: Sequence[QueuePair], send_only: bool
    ) -> None:
        self.backend, self.place, self.address, self.qps, self.send_only = (
            backend,
            place,
            address,
            qps,
            send_only,
        )
        self.destinations: dict[int, Any] = {}
        self.gids = frozenset(place.port.gids.values())

    @property
    def now(self) -> float:
        """Seconds on the clock that timeouts run on."""
        return self.backend.now()

    def require(self, size: int) -> None:
        """Raise Failure if a message of that size cannot be sent."""
        limit = min(qp.max_message_to(self.destinations[qp.qp_num]) for qp in self.qps)
        if size > limit:
            raise Failure(f"-S {size} is more than one MTU carries on {self.place.device.name}: {limit}", 2)

    def gid(self, qp: QueuePair) -> Gid:
        """The GID that messages of the queue pair come from."""
        index = self.destinations[qp.qp_num].sgid_index
        return self.place.port.gids.get(index, ZERO_GID)

    def listen(self, until: float) -> Iterator[tuple[QueuePair, Message]]:
        """What comes until then, own messages too; each is valid until the next is asked for."""
        while (rest := until - self.now) > 0:
            for qp in self.qps:
                with self._received(qp, rest if len(self.qps) == 1 else min(rest, _SLICE)) as batch:
                    for message in batch:
                        yield qp, message

    def _received(self, qp: QueuePair, timeout: float) -> Batch | nullcontext[tuple[()]]:
        try:
            return qp.recv(64, timeout)
        except QpError:  # an answer that could not be sent: other messages still can be received
            qp.reset()
            return nullcontext(())

    def answer(self, qp: QueuePair, message: Message, echo: bytes, alone: bool) -> bool:
        """Answer to the group, or to the asker alone; whether it could be sent.

        Whoever asks chooses where an answer goes: to where there is no way from here, for example.
        """
        group = self.destinations[qp.qp_num]
        try:
            qp.send_one(group.reply_to(message) if alone else group, echo, timeout=_BOUND)
        except Closed:
            raise
        except McastError as error:
            if isinstance(error, QpError):
                qp.reset()
            return False
        return True


@contextmanager
def joined(
    backend: Backend,
    place: Place,
    address: McastAddress,
    qps: int,
    space: PortSpace = PortSpace.UDP,
    send_only: bool = False,
    no_loopback: bool = False,
    settings: Settings = DEFAULTS,
) -> Iterator[Station]:
    """That many queue pairs on the place, all in the group."""
    join = JoinAttrEx.send_only(address) if send_only else JoinAttrEx.full_member(address)
    with ExitStack() as stack:
        channel = stack.enter_context(backend.event_channel())
        ids = [stack.enter_context(channel.create_id(space)) for _ in range(qps)]
        made = []
        for cm_id in ids:
            cm_id.bind_addr(place.address)
            try:
                made.append(cm_id.create_qp(QpInit(block_loopback=no_loopback, busy_poll=settings.busy_poll)))
            except (NotSupported, InvalidArgument):
                if not no_loopback:
                    raise
                raise Failure(f"{place.device.name} cannot keep own messages back: leave out -l") from None
            cm_id.join_multicast_ex(join, made[-1])
        station = Station(backend, place, address, made, send_only)
        for _ in ids:
            event = channel.get_event(_BOUND)
            if event is None:
                raise Failure(f"{address} was not joined within {_BOUND:g} s: is a subnet manager running?")
            ud = event.check().ud
            assert ud is not None
            to = ud.destination.marked(settings.traffic_class, settings.service_level)
            station.destinations[event.context.qp_num] = to
        yield station


def ping_all(
    station: Station, count: int, size: int, interval: float, timeout: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Ask `count` times; Ctrl-C ends it early. What happened, as JSON shows it."""
    numbers = [qp.qp_num for qp in station.qps]
    pinger = Pinger(station.gids, numbers, SystemRandom().randrange(1 << 32), station.send_only)
    place = station.place
    say(f"ping {station.address} from {place.address} ({place.device.name}), {size} bytes")
    started = next_at = station.now
    with suppress(KeyboardInterrupt):
        for seq in range(1, count + 1):
            for qp in station.qps:
                probe = pinger.ask(seq, qp.qp_num, station.gid(qp), station.now)
                qp.send_one(station.destinations[qp.qp_num], padded(probe, size), timeout=_BOUND)
            next_at = max(next_at + interval, station.now)
            for _, message in station.listen(next_at if seq < count else station.now + timeout):
                source = Peer(message.source, message.src_qp)
                if answer := pinger.hears(message.payload, source, station.now):
                    say(f"{_name(source)}: seq={answer[0]} time={answer[1] * 1e3:.3f} ms")
                if seq == count and pinger.answered_by_all(seq):
                    break
    return _head(station) | {
        "message_size": size,
        "sent": pinger.sent,
        "seconds": station.now - started,
        "members": [_member(pinger, *found) for found in sorted(pinger.members.items())],
        "others": [_source(peer) | {"messages": number} for peer, number in sorted(pinger.others.items())],
    }


def answer_all(station: Station, count: int | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Answer until each queue pair has heard `count` messages, or Ctrl-C. What was heard, for JSON."""
    answerers = {qp.qp_num: Answerer() for qp in station.qps}
    place = station.place
    say(f"answering {station.address} as {place.address} ({place.device.name})")
    with suppress(KeyboardInterrupt):
        while count is None or any(answerer.count < count for answerer in answerers.values()):
            for qp, message in station.listen(station.now + 0.5):
                source = Peer(message.source, message.src_qp)
                answer = answerers[qp.qp_num].hears(message.payload, source)
                if answer is not None:
                    echo, alone = answer
                    if not station.answer(qp, message, padded(echo, len(message.payload)), alone):
                        answerers[qp.qp_num].failed(source)
                if count is not None and all(one.count >= count for one in answerers.values()):
                    break
    return _head(station) | {
        "heard": [
            _source(peer)
            | {
                "by_qp": qp_num,
                "pings": heard.pings,
                "unanswered": heard.unanswered,
                "messages": heard.messages,
                "smallest": heard.smallest,
                "largest": heard.largest,
            }
            for qp_num, answerer in answerers.items()
            for peer, heard in sorted(answerer.heard.items())
        ]
    }


def _head(station: Station) -> dict[str, Any]:
    return {
        "backend": station.backend.name,
        "group": str(station.address),
        "device": station.place.device.name,
        "port": station.place.port.port_num,
        "address": str(station.place.address),
        "qps": [qp.qp_num for qp in station.qps],
    }


def _source(peer: Peer) -> dict[str, Any]:
    return {"address": str(peer.gid.ipv4 or peer.gid), "qp": peer.qp_num}


def _name(peer: Peer) -> str:
    return f"{peer.gid.ipv4 or peer.gid} QP {peer.qp_num}"


def _member(pinger: Pinger, peer: Peer, member: Member) -> dict[str, Any]:
    times = {name: seconds * 1e3 for name, seconds in member.times._asdict().items()}
    return _source(peer) | {
        "answers": member.answers,
        "doubles": member.doubles,
        "loss": pinger.loss(member),
        "milliseconds": times,
    }


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        left = name in ("member", "sender")
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    return table


def _show_members(outcome: dict[str, Any]) -> None:
    members = outcome["members"]
    if members:
        table = _table("member", "QP", "answers", "loss", "twice", "min", "avg", "max", "mdev ms")
        for member in members:
            table.add_row(
                member["address"],
                str(member["qp"]),
                f"{member['answers']:,}",
                f"{member['loss']:.1%}",
                f"{member['doubles']:,}",
                *(f"{number:.3f}" for number in member["milliseconds"].values()),
            )
        console().print(table)
        typer.echo()
    for other in outcome["others"]:
        typer.echo(f"{other['messages']} other messages from {other['address']} QP {other['qp']}")
    who = f"{len(members)} answered" if members else "nobody answered"
    typer.echo(f"ping: {outcome['sent']} sent in {outcome['seconds']:.1f} s, {who}")


def _show_heard(outcome: dict[str, Any]) -> None:
    if outcome["heard"]:
        table = _table("sender", "QP", "pings", "others", "bytes")
        for heard in outcome["heard"]:
            sizes = dict.fromkeys((heard["smallest"], heard["largest"]))
            table.add_row(
                heard["address"],
                str(heard["qp"]),
                f"{heard['pings']:,}",
                f"{heard['messages']:,}",
                "-".join(map(str, sizes)),
            )
        console().print(table)
        typer.echo()
    names = ("pings", "unanswered", "messages")
    pings, failed, others = (sum(heard[name] for heard in outcome["heard"]) for name in names)
    lost = f", {failed} could not be" if failed else ""
    typer.echo(f"ping: {pings - failed} pings answered{lost}, {others} other messages counted")
