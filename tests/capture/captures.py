"""Captures that are made up."""

from __future__ import annotations

import io
import struct

from mcast.backends.sim import Fabric
from mcast.pcapng.writer import NS, CapturedPacket, Direction, Writer
from mcast.wire import packets
from mcast.wire.addresses import Gid

GROUP = "239.1.1.1"


def capture(times: list[float], sizes: list[int] | None = None) -> bytes:
    """Messages for the group from 10.0.0.9 at these seconds."""
    file = io.BytesIO()
    writer = Writer(file, Fabric.roce(ports=1).link_layer, ["port"])
    for number, t in enumerate(times):
        payload = bytes([number]) * (sizes[number] if sizes else 8)
        writer.write(CapturedPacket(round(t * NS), "port", Direction.OUT, frame(payload)))
    return file.getvalue()


def frame(payload: bytes, psn: int = 0, hop_limit: int = 1) -> bytes:
    message = packets.Datagram(
        Gid("::ffff:10.0.0.9"),
        Gid(f"::ffff:{GROUP}"),
        9,
        0xFFFFFF,
        0x01234567,
        0xFFFF,
        psn,
        payload,
        hop_limit=hop_limit,
    )
    return packets.roce(message, bytes(6), bytes(6))


class Made:
    """A capture file of either byte order, byte by byte."""

    def __init__(self, order: str = "<") -> None:
        self.order = order

    def pcap(self, *found: tuple[float, bytes], link_type: int = 1) -> bytes:
        """Of packets at these seconds."""
        head = struct.pack(f"{self.order}IHHIIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, link_type)
        return head + b"".join(self._record(t, data) for t, data in found)

    def _record(self, t: float, data: bytes) -> bytes:
        second, fraction = divmod(round(t * 1_000_000), 1_000_000)
        return struct.pack(f"{self.order}IIII", second, fraction, len(data), len(data)) + data

    def section(self) -> bytes:
        return self.block(0x0A0D0D0A, struct.pack(f"{self.order}IHHq", 0x1A2B3C4D, 1, 0, -1))

    def interface(self, link_type: int = 1) -> bytes:
        return self.block(1, struct.pack(f"{self.order}HHI", link_type, 0, 0))

    def packet(self, t: float, data: bytes, interface: int = 0) -> bytes:
        """An Enhanced Packet Block."""
        head = struct.pack(f"{self.order}IIIII", interface, *self._ticks(t), len(data), len(data))
        return self.block(6, head + data)

    def obsolete_packet(self, t: float, data: bytes, interface: int = 0) -> bytes:
        """A Packet Block, as old programs wrote."""
        head = struct.pack(f"{self.order}HHIIII", interface, 0xFFFF, *self._ticks(t), len(data), len(data))
        return self.block(2, head + data)

    def _ticks(self, t: float) -> tuple[int, int]:
        return divmod(round(t * 1_000_000), 1 << 32)

    def block(self, kind: int, body: bytes) -> bytes:
        body += bytes(-len(body) % 4)
        size = len(body) + 12
        return struct.pack(f"{self.order}II", kind, size) + body + struct.pack(f"{self.order}I", size)


def cooked(data: bytes, direction: int, interface: int | None = None) -> bytes:
    """An Ethernet frame as `tcpdump -i any` writes it: LINUX_SLL2, or LINUX_SLL without an interface."""
    if interface is None:
        return struct.pack(">HHH8s", direction, 1, 6, bytes(8)) + data[12:]
    return data[12:14] + struct.pack(">HIHBB8s", 0, interface, 1, direction, 6, bytes(8)) + data[14:]
