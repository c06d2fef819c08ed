"""The host's IPv4 interfaces as devices with one port each, and the kernel's reports of changes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

from mcast.api import DeviceInfo, Gid, LinkLayer
from mcast.backends.model.port import Interface, Limits, Port
from mcast.backends.udp import _native
from mcast.wire.addresses import LocalAddress
from mcast.wire.partition import DEFAULT_PKEY
from mcast.wire.units import MTU

_UP, _LOOPBACK, _RUNNING, _MULTICAST = 0x1, 0x8, 0x40, 0x1000
"""IFF_UP and the others of <net/if.h>."""
_RTMGRP_LINK, _RTMGRP_IPV4_IFADDR = 0x1, 0x10
_NEWLINK = 16
_HEADER, _LINK = struct.Struct("@IHHII"), struct.Struct("@BxHiII")
_BESIDE = 96
"""Bytes of an Ethernet MTU beside a RoCE MTU, as the kernel counts them (iboe_get_mtu).

These are the longest headers of any RoCE packet.
"""
_DEPTH = 1 << 16
_RATE = 10.0
"""Gbit/s, where the kernel knows no speed."""


def roce_mtu(ethernet: int) -> int:
    """The largest RoCE MTU of an interface with this MTU; the smallest where none fits."""
    return max((size for size in MTU.code if size + _BESIDE <= ethernet), default=min(MTU.code))


class UdpPort(Port):
    """An interface. `interface_index` is the kernel's number of it."""

    def __init__(self, index: int, name: str, number: int, flags: int, hardware: bytes) -> None:
        multicast = bool(flags & (_MULTICAST | _LOOPBACK))
        guid, limits = _guid(hardware, number), Limits(queue_depth=_DEPTH)
        rate = _rate(name)
        super().__init__(
            index, name, LinkLayer.ETHERNET, guid, 0, min(MTU.code), rate, limits, None, None, multicast
        )
        self.interface_index: int = number
        self.interfaces.clear()
        self._known: dict[IPv4Address, Interface] = {}
        self.gids.clear()

    def sgid_index(self, source: LocalAddress) -> int:
        return next((index for index, gid in self.gids.items() if gid.ipv4 == source), 0)

    def set_addresses(self, addresses: list[IPv4Address]) -> bool:
        """Take these addresses; return True if they are others than before.

        An address keeps its GID's place, and one that comes back is the interface of the ids that had it.
        """
        if [one.ipv4 for one in self.interfaces] == addresses:
            return False
        for address, one in self._known.items():
            one.ipv4 = address if address in addresses else None
        for address in addresses:
            if address not in self._known:
                self._known[address] = Interface(self, DEFAULT_PKEY, address)
        self.interfaces[:] = [self._known[address] for address in addresses]
        for index in [index for index, gid in self.gids.items() if gid.ipv4 not in addresses]:
            del self.gids[index]
        for address in addresses:
            if Gid(address) not in self.gids.values():
                place = next(place for place in range(1, len(addresses) + 1) if place not in self.gids)
                self.gids[place] = Gid(address)
        return True

    def info(self) -> DeviceInfo:
        found = super().info()
        reason = "" if self.multicast else f"its flag MULTICAST is off (ip link set {self.name} multicast on)"
        return found.model_copy(update={"num_comp_vectors": 1, "no_multicast": reason})


def _guid(hardware: bytes, number: int) -> int:
    """The EUI-64 of a hardware address of six bytes; others have none, and get the interface's number."""
    if len(hardware) != 6:
        return 0x0200_00FF_FE00_0000 | number
    return int.from_bytes(bytes((hardware[0] ^ 2,)) + hardware[1:3] + b"\xff\xfe" + hardware[3:])


def _rate(name: str) -> float:
    try:
        speed = int(Path("/sys/class/net", name, "speed").read_text())
    except (OSError, ValueError):
        return _RATE
    return speed / 1000 if speed > 0 else _RATE


class Change:
    """Changes of a port since the last look."""

    def __init__(self, port: UdpPort) -> None:
        self.port: UdpPort = port
        self.links: list[bool] = []
        self.gids: bool = False
        self.gone: bool = False


class Host:
    """The interfaces that have been seen, by their number. A number is never used twice."""

    def __init__(self) -> None:
        self.netlink: socket.socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0
        )
        self._ports: dict[int, UdpPort] = {}
        self._made = 0
        self._unread: list[tuple[int, int]] = []
        self.loopback_up: bool = False
        try:
            self.netlink.bind((0, _RTMGRP_LINK | _RTMGRP_IPV4_IFADDR))
            list(self.poll(at_once=True))
        except BaseException:
            self.netlink.close()
            raise

    @property
    def ports(self) -> list[UdpPort]:
        """Those that are there, and have an address."""
        return [port for port in self._ports.values() if port.interfaces]

    def poll(self, at_once: bool = False) -> Iterator[Change]:
        """Read what the kernel reports, and return what has changed.

        Without a report nothing is read, unless `at_once`. Where the interfaces cannot be read, as no
        descriptor is left, reports wait for the next look.
        """
        flags = self._unread
        flags += self._reports()
        if not flags and not at_once:
            return
        try:
            interfaces = _native.interfaces()
        except OSError:
            if at_once:
                raise
            return
        self._unread = []
        there = set()
        for name, number, now, mtu, hardware, addresses in interfaces:
            there.add(number)
            if now & _LOOPBACK:
                self.loopback_up = bool(now & _UP)
            port = self._ports.get(number)
            if port is None:
                port = self._ports[number] = UdpPort(self._made, name, number, now, hardware)
                self._made += 1
                port.up = _is_up(now)
            change = Change(port)
            port.name, port.mtu = name, roce_mtu(mtu)
            port.multicast = bool(now & (_MULTICAST | _LOOPBACK))
            change.gids = port.set_addresses([IPv4Address(one) for one in addresses])
            for up in (*(_is_up(one) for which, one in flags if which == number), _is_up(now)):
                if up != port.up:
                    port.up = up
                    change.links.append(up)
            if change.links or change.gids:
                yield change
        for number in self._ports.keys() - there:
            change = Change(self._ports.pop(number))
            change.gone = True
            change.port.up = False
            change.port.removed = True
            change.port.removals += 1
            yield change

    def _reports(self) -> Iterator[tuple[int, int]]:
        """Each message that waits, as number and flags of the interface that it is about, or as (0, 0)."""
        while True:
            try:
                data = self.netlink.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:  # ENOBUFS: more has happened than the kernel has kept
                yield 0, 0
                continue
            while len(data) >= _HEADER.size:
                length, kind, *_ = _HEADER.unpack_from(data)
                if length < _HEADER.size:
                    break
                found = (0, 0)
                if kind == _NEWLINK and length >= _HEADER.size + _LINK.size:
                    _, _, number, flags, _ = _LINK.unpack_from(data, _HEADER.size)
                    found = (number, flags)
                yield found
                data = data[length + 3 & ~3 :]

    def interface(self, hosts: frozenset[int], address: LocalAddress) -> Interface | None:
        """The interface that has the address."""
        return next((one for port in self.ports for one in port.interfaces if one.ipv4 == address), None)

    def route(self, hosts: frozenset[int], address: object) -> Interface | None:
        """The interface by which the kernel would send to the address."""
        if not isinstance(address, IPv4Address):
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((str(address), 9))
                source = IPv4Address(probe.getsockname()[0])
            except OSError:
                return None
        return self.interface(hosts, source)

    def close(self) -> None:
        """Hear no more."""
        self.netlink.close()


def _is_up(flags: int) -> bool:
    return bool(flags & _UP) and bool(flags & _RUNNING)
