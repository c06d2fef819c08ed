"""IPoIB interfaces in a sysfs of the test's own, since the card makes none."""

from __future__ import annotations

from pathlib import Path

from mcast.wire.addresses import Gid

_QUEUE_PAIR, _BROADCAST_QUEUE_PAIR = bytes.fromhex("80000208"), bytes.fromhex("00ffffff")
"""The first 4 bytes of a hardware address, and of a broadcast address."""


def plant(
    net: Path, name: str, gid: Gid | None = None, broadcast: Gid | None = None, **files: object
) -> None:
    """Write an interface as in /sys/class/net: with the GID of its port, and that of its broadcast group."""
    found: dict[str, object] = {"type": 32, "flags": "0x1003"}
    if gid is not None:
        found["address"] = (_QUEUE_PAIR + gid).hex(":")
    if broadcast is not None:
        found["broadcast"] = (_BROADCAST_QUEUE_PAIR + broadcast).hex(":")
    (net / name).mkdir(parents=True)
    for file, text in (found | files).items():
        (net / name / file).write_text(f"{text}\n")
