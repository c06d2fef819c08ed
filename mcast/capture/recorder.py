"""The messages that an endpoint receives, as packets in a pcapng file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import BinaryIO

from mcast.api import Batch, Destination, LinkLayer, Message, TimestampClock
from mcast.arguments.file_objects import FileWriter
from mcast.endpoint.blocking import Endpoint
from mcast.pcapng.writer import CapturedPacket, Direction, Writer
from mcast.wire import packets
from mcast.wire.addresses import Gid
from mcast.wire.mapping import group_mac, mgid_fields
from mcast.wire.partition import DEFAULT_PKEY

__all__ = ["Recorder", "make_recorder", "record"]

_BATCH = 256
_POLL_SECONDS = 0.5
"""Maximum number of seconds that one wait for messages lasts."""

_COMMENT = (
    "Recorded by mcast from what a member received: payload, immediate, source GID and QP number, group and "
    "time of arrival are real. PSNs are counted, and MAC addresses, hop limit and P_Key filled in."
)


class Recorder:
    """Writes received messages as packets of one port.

    writer        where the packets go
    port          the name of the port in the file
    link_layer    the link layer of the port, which decides on the headers
    destinations  MGID -> the destination that the join of the group gave; messages of other groups are left
                  out
    epoch         when the clock of `Message.timestamp` was 0, in nanoseconds since 1970: packets have the
                  times of the messages; None: the times at which batches are taken
    """

    def __init__(
        self,
        writer: Writer,
        port: str,
        link_layer: LinkLayer,
        destinations: Mapping[Gid, Destination],
        epoch: int | None = None,
    ) -> None:
        self._writer, self._port, self._epoch = writer, port, epoch
        self._infiniband = link_layer is LinkLayer.INFINIBAND
        self._destinations = destinations
        self._counts: Counter[tuple[Gid, int]] = Counter()
        self.messages: int = 0
        self.bytes: int = 0

    @property
    def sources(self) -> int:
        """Number of queue pairs that have sent messages."""
        return len(self._counts)

    def take(self, batch: Batch, t: int, limit: int | None = None) -> None:
        """Write a batch that arrived at `t`, in nanoseconds since 1970.

        Writes no more than `limit` messages over all batches.
        """
        for message in batch:
            destination = self._destinations.get(message.group)
            if destination is not None and (limit is None or self.messages < limit):
                stamp = message.timestamp
                at = t if self._epoch is None or stamp is None else self._epoch + stamp
                self._writer.write(
                    CapturedPacket(at, self._port, Direction.IN, self._packet(message, destination))
                )
                self.messages += 1
                self.bytes += len(message.payload)

    def _packet(self, message: Message, to: Destination) -> bytes:
        source = message.source, message.src_qp
        fields = mgid_fields(message.group)
        datagram = packets.Datagram(
            source=message.source,
            dest=message.group,
            src_qp=message.src_qp,
            dest_qp=to.qp_num,
            qkey=to.qkey,
            pkey=(fields.pkey if fields else None) or DEFAULT_PKEY,
            psn=self._counts[source] & 0xFFFFFF,
            payload=bytes(message.payload),
            imm=message.imm,
            hop_limit=to.hop_limit,
            traffic_class=to.traffic_class,
            flow_label=to.flow_label,
            slid=message.src_lid,
            dlid=to.dlid,
            sl=to.sl,
        )
        self._counts[source] += 1
        if self._infiniband:
            return packets.infiniband(datagram)
        mac = packets.mac_of(int.from_bytes(message.source))
        return packets.roce(datagram, mac, group_mac(message.group))


def make_recorder(endpoint: Endpoint, file: BinaryIO) -> Recorder:
    """A recorder of the groups that the endpoint has joined, into a file that is open for writing bytes.

    Packets have the times that the device has noted, if the endpoint was opened with `timestamps`. Raises
    ValueError if these are of a clock of the device's own, which nobody can tell as time of day.
    """
    port = f"{endpoint.device.name}/{endpoint.port.port_num}"
    layer = endpoint.port.link_layer
    destinations = {one.mgid: one.destination for one in endpoint.groups}
    writer = Writer(file, layer, [port], _COMMENT)
    return Recorder(writer, port, layer, destinations, _epoch(endpoint))


def _epoch(endpoint: Endpoint) -> int | None:
    """When the clock of the endpoint's time stamps was 0, in nanoseconds since 1970; None without stamps."""
    clock = endpoint.timestamp_clock
    if clock is TimestampClock.DEVICE:
        raise ValueError(
            f"{endpoint.device.name} has timestamps of its own clock, which cannot be converted to time "
            "of day: record without timestamps"
        )
    if clock is TimestampClock.VIRTUAL:
        return time.time_ns() - int(endpoint.backend.now() * 1e9)
    return None if clock is None else 0


def record(
    endpoint: Endpoint, recorder: Recorder, file: BinaryIO, count: int | None, duration: float | None
) -> Iterator[None]:
    """Record until the recorder has `count` messages, or `duration` s have passed; None: no such end.

    Yields after each wait, at least every _POLL_INTERVAL seconds: by then `file` holds all that has arrived.
    """
    clock = endpoint.backend.now
    end = None if duration is None else clock() + duration
    while count is None or recorder.messages < count:
        left = _POLL_SECONDS if end is None else min(end - clock(), _POLL_SECONDS)
        if left <= 0:
            return
        with endpoint.recv_batch(_BATCH, left) as batch:
            recorder.take(batch, time.time_ns(), count)
        FileWriter(file).flush()
        yield
