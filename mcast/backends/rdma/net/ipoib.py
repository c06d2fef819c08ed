"""The IPoIB interfaces of a port, from sysfs.

The hardware address of an IPoIB interface has 20 bytes: 4 of its queue pair, then the GID of its port, which
tells the interface's port. Its parent in sysfs does not tell it: both ports of a device have the same parent,
and some devices have none. The interface of a partition has the port's GID as well.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from mcast.backends.net.hostnet import NET
from mcast.wire.addresses import Gid
from mcast.wire.mapping import mgid_fields

ENCAPSULATION = 4
"""Bytes that IPoIB puts in front of a packet: an interface's MTU is the broadcast group's less these."""

_INFINIBAND = "32"
"""ARPHRD_INFINIBAND, as sysfs writes it."""
_GID_AT, _HARDWARE_BYTES = 4, 20
IFF_UP = 1


class IpoibInterface(NamedTuple):
    """One IPoIB interface.

    broadcast  the MGID of its broadcast group, which names the partition; None if it cannot be read
    mtu        the MTU of that group in bytes, as far as the interface uses it
    carrier    True if the interface has joined that group
    """

    name: str
    broadcast: Gid | None
    mtu: int
    up: bool
    carrier: bool

    @property
    def pkey(self) -> int | None:
        """The P_Key of the interface's partition, as a full member's; None if it cannot be read."""
        fields = None if self.broadcast is None else mgid_fields(self.broadcast)
        return None if fields is None else fields.pkey


def interfaces_of(gids: Collection[Gid], among: Collection[str] | None = None) -> tuple[IpoibInterface, ...]:
    """The interfaces of the port that has these GIDs, by name; `among` names those that are looked at."""
    names = port_gids() if among is None else {name: _port_gid(NET / name) for name in among}
    return tuple(_read(NET / name) for name in sorted(names) if names[name] in gids)


def port_gids() -> dict[str, Gid]:
    """Return the name of each interface -> the GID of its port.

    Reads two small files for each netdev of the host.
    """
    found = ((path.name, _port_gid(path)) for path in sorted(NET.glob("*")))
    return {name: gid for name, gid in found if gid is not None}


def _read(path: Path) -> IpoibInterface:
    return IpoibInterface(
        path.name,
        _gid_in(_text(path / "broadcast")),
        int(_text(path / "mtu") or 0) + ENCAPSULATION,
        bool(int(_text(path / "flags") or "0", 0) & IFF_UP),
        _text(path / "carrier") == "1",
    )


def _port_gid(path: Path) -> Gid | None:
    return _gid_in(_text(path / "address")) if _text(path / "type") == _INFINIBAND else None


def _gid_in(hardware: str) -> Gid | None:
    """The GID in a hardware address, written as in sysfs."""
    try:
        address = bytes.fromhex(hardware.replace(":", ""))
    except ValueError:
        return None
    return Gid(address[_GID_AT:]) if len(address) == _HARDWARE_BYTES else None


def _text(path: Path) -> str:
    """Return the text of a file; "" if it is gone or may not be read.

    The carrier of an interface that is down may not be read.
    """
    try:
        return path.read_text().strip()
    except OSError:
        return ""
