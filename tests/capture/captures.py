"""Captures that are made up."""

from __future__ import annotations

import io

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


def frame(payload: bytes) -> bytes:
    message = packets.Datagram(
        Gid("::ffff:10.0.0.9"),
        Gid(f"::ffff:{GROUP}"),
        9,
        0xFFFFFF,
        0x01234567,
        0xFFFF,
        0,
        payload,
    )
    return packets.roce(message, bytes(6), bytes(6))
