"""A trace as a pcapng file: the packets of the run, for Wireshark.

Each port is an interface. A message stands once, on its sender's interface, as it leaves; an answer of the SA
on the interface of the port that asked. A message that a port did not get has a comment with that port and
the reason. Times are virtual, in ns from 1970.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from ipaddress import IPv4Address
from itertools import islice
from typing import BinaryIO

from mcast.api import LinkLayer
from mcast.backends.sim.trace.events import (
    Entry,
    FabricMade,
    IgmpLeave,
    IgmpReport,
    MessagesLost,
    PortMade,
    SaAnswered,
    SaAsked,
    Send,
    Trace,
    TraceEvent,
)
from mcast.pcapng.writer import CapturedPacket, Direction, write_packets
from mcast.wire import packets
from mcast.wire.addresses import Gid
from mcast.wire.mapping import group_mac
from mcast.wire.mcmember import McMemberRecord, SaMethod, SaStatus

MAX_PENDING_REQUESTS = 1 << 17
"""Maximum number of unanswered SA requests that are remembered, because an answer may need its request."""

_MAX_NAMED_PORTS = 100
"""Maximum number of ports that the comment of a lost message names; of the rest it has the number."""


def write(trace: Trace, file: BinaryIO) -> None:
    """Write the trace's packets. Raises ValueError if the trace does not begin with its fabric and ports."""
    fabric = next((event for _, event in trace if isinstance(event, FabricMade)), None)
    if fabric is None:
        raise ValueError("the trace does not say what its fabric is: it must begin with a line 'fabric'")
    ports = [event.port for _, event in trace if isinstance(event, PortMade)]
    write_packets(LinkLayer(fabric.link_layer), ports, packets_of(trace), file)


def packets_of(trace: Trace) -> Iterator[CapturedPacket]:
    """The packets of a trace, in order."""
    return Packets(trace).of(trace)


class Packets:
    """Makes packets of a trace, which may come in pieces; remembers the ports, and the requests to the SA.

    `ports`: entries of which this reads the ports.
    """

    def __init__(self, ports: Iterable[Entry]) -> None:
        self._ports = {event.port: event for _, event in ports if isinstance(event, PortMade)}
        self._by_gid = {gid: port for port in self._ports.values() for gid in port.gids}
        self._asked: dict[int, McMemberRecord] = {}
        self._losses: dict[int, str] = {}

    @property
    def ports(self) -> tuple[str, ...]:
        """The names of the ports."""
        return tuple(self._ports)

    def of(self, entries: Iterable[Entry]) -> Iterator[CapturedPacket]:
        """The packets of a piece of the trace, in order; what is lost is said if the loss is in the piece."""
        piece = list(entries)
        self._losses = dict(_losses([event for _, event in piece]))
        for t, event in piece:
            for port, direction, data, comment in self._packets(event):
                yield CapturedPacket(t, port, direction, data, comment)

    def _packets(self, event: TraceEvent) -> Iterator[tuple[str, Direction, bytes, str]]:
        if isinstance(event, Send):
            for index, payload in enumerate(event.payloads):
                # A device sends nothing of a message larger than its MTU (K-DATA-6).
                if len(payload) <= self._ports[event.port].mtu:
                    comment = self._losses.get(event.first + index, "")
                    yield event.port, Direction.OUT, self._message(event, index, payload), comment
        elif isinstance(event, IgmpReport | IgmpLeave):
            if event.group.is_multicast and event.group.ipv4 is not None:
                yield event.port, Direction.OUT, self._igmp(event, event.group.ipv4), ""
        elif isinstance(event, SaAsked):
            self._asked[event.tid] = event.record
            if len(self._asked) > MAX_PENDING_REQUESTS:
                del self._asked[next(iter(self._asked))]
            method = SaMethod[event.method]
            data = packets.sa_request(method, event.tid, event.mask, event.record, event.lid)
            yield event.port, Direction.OUT, data, ""
        elif isinstance(event, SaAnswered) and event.status is not None:
            # A refusal carries the record of its request.
            record = event.record or self._asked.get(event.tid)
            if record is None:  # of a request from before the first piece
                return
            method, status = SaMethod[event.method], SaStatus[event.status]
            data = packets.sa_answer(method, status, event.tid, event.mask, record, event.lid)
            yield event.port, Direction.IN, data, ""

    def _igmp(self, event: IgmpReport | IgmpLeave, group: IPv4Address) -> bytes:
        mac = packets.mac_of(self._ports[event.port].guid)
        return packets.igmp_report(IPv4Address(event.source), group, isinstance(event, IgmpReport), mac)

    def _message(self, send: Send, index: int, payload: bytes) -> bytes:
        port = self._ports[send.port]
        message = packets.Datagram(
            source=send.source,
            dest=send.group,
            src_qp=send.qp,
            dest_qp=send.dest_qp,
            qkey=send.qkey,
            pkey=send.pkey,
            psn=send.psn + index & 0xFFFFFF,
            payload=payload,
            imm=send.imm,
            hop_limit=send.hop_limit,
            traffic_class=send.traffic_class,
            flow_label=send.flow_label,
            slid=send.slid,
            dlid=send.dlid,
            sl=send.sl,
        )
        if port.lid:
            return packets.infiniband(message)
        return packets.roce(message, packets.mac_of(port.guid), self._mac_of(send.group))

    def _mac_of(self, gid: Gid) -> bytes:
        target = self._by_gid.get(gid)
        return group_mac(gid) if target is None else packets.mac_of(target.guid)


def _losses(events: Sequence[TraceEvent]) -> Iterator[tuple[int, str]]:
    """Number -> a comment with the reasons, for each message that was sent and that some port did not get.

    The work grows with the lines of the trace and with the messages that were sent, however many messages a
    line claims.
    """
    sent = [n for e in events if isinstance(e, Send) for n in range(e.first, e.first + len(e.payloads))]
    lost = sorted((e for e in events if isinstance(e, MessagesLost)), key=lambda e: e.first)
    begun = 0
    covering: dict[int, MessagesLost] = {}
    ends: list[tuple[int, int]] = []
    for message in sorted(sent):
        while begun < len(lost) and lost[begun].first <= message:
            covering[begun] = lost[begun]
            heappush(ends, (lost[begun].first + lost[begun].count, begun))
            begun += 1
        while ends and ends[0][0] <= message:
            del covering[heappop(ends)[1]]
        if covering:
            first = islice(covering.values(), _MAX_NAMED_PORTS)
            named = [f"lost at {e.port} QP {e.qp}: {e.reason}" for e in first]
            more = len(covering) - len(named)
            yield message, "\n".join(named + [f"lost at {more:,} more"] * (more > 0))
