"""The sockets of a queue pair, and what each kind of them receives.

own     bound to an address and a port that the kernel has chosen. It sends all messages, and receives
        unicast. The port is the upper 16 bits of the queue pair's number; peers that know it answer there.
group   bound to port 4791 of every address, with the memberships of the groups that the queue pair is
        attached to (IP_MULTICAST_ALL 0: of these alone). Each process has its own, and gets each message.
roce    bound to port 4791 of one address. The kernel gives unicast to the one that was bound last, so its
        process passes on what is for other queue pairs, whoever's these are, to their own sockets. Cards and
        Soft-RoCE send there always.

An unconnected socket with IP_PMTUDISC_DO sends datagrams with identification 0, which the ICRC covers.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Container
from contextlib import suppress
from ipaddress import IPv4Address
from random import SystemRandom

from mcast.wire.packets import ROCE_UDP_PORT

_IP_MTU_DISCOVER, _IP_PMTUDISC_DO = 10, 2
_IP_MULTICAST_ALL, _IP_PKTINFO, _SO_RCVBUFFORCE = 49, 8, 33
_UDP_GRO = 104
_QUEUE_BYTES = 1024
"""Minimum number of bytes that a datagram takes in a socket's buffer beside its own."""
MAX_BUFFER = 1 << 28

_random = SystemRandom()


def open_own(address: IPv4Address, taken: Container[int]) -> tuple[socket.socket, int]:
    """Open a queue pair's own socket; return it and the queue pair's number."""
    while True:
        own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            own.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
            own.bind((str(address), 0))
        except BaseException:
            own.close()
            raise
        # One of 256, so that an answer to a queue pair of before is not taken for one to its successor.
        number = own.getsockname()[1] << 8 | _random.randrange(256)
        if number not in taken:
            return own, number
        own.close()


def send_by(own: socket.socket, address: IPv4Address, interface: int) -> None:
    """Send multicast by the interface, and to members on this host, too."""
    request = struct.pack("@4s4si", bytes(4), address.packed, interface)
    own.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, request)
    own.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
    own.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 0)  # each message has its own


def open_group() -> socket.socket:
    """Open a socket for messages to groups; OSError with EADDRINUSE where the port is not shared."""
    found = _open_shared("")
    try:
        found.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
        found.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    except BaseException:
        found.close()
        raise
    return found


def open_roce(address: IPv4Address) -> socket.socket:
    """Open the socket that takes unicast to port 4791 of the address."""
    return _open_shared(str(address))


def _open_shared(address: str) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address, ROCE_UDP_PORT))
    except BaseException:
        found.close()
        raise
    return found


def open_member() -> socket.socket:
    """Open a socket for the memberships of a port, which receives nothing."""
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)


def max_buffer() -> int:
    """Return the maximum number of bytes of a socket's receive buffer, which is net.core.rmem_max.

    A socket is asked, because Linux 6.1 shows that file in the first network namespace alone, and in no
    container.
    """
    with open_member() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, (1 << 30) - 1)
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2  # the kernel doubles it


def make_room(one: socket.socket, messages: int, size: int) -> bool:
    """Ask for a buffer that holds that many messages; return True if the kernel gives it.

    Without CAP_NET_ADMIN it gives no more than net.core.rmem_max.
    """
    wanted = min(messages * (size + _QUEUE_BYTES), MAX_BUFFER)
    try:
        one.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, wanted)
    except PermissionError:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, wanted)
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2 >= wanted  # the kernel doubles it


def take_runs(one: socket.socket) -> None:
    """Receive messages whole that were sent as one datagram to cut, or that a device has joined (UDP GRO)."""
    with suppress(OSError):  # before Linux 5.0
        one.setsockopt(socket.IPPROTO_UDP, _UDP_GRO, 1)


class Memberships:
    """Sockets that are members of groups; there is another one when the kernel allows no more on the last.

    `on_open` is called with each new socket.
    """

    def __init__(
        self, interface: int, make: Callable[[], socket.socket], on_open: Callable[[socket.socket], None]
    ) -> None:
        self._interface, self._make, self._on_open = interface, make, on_open
        self.sockets: list[socket.socket] = []
        self._at: dict[IPv4Address, socket.socket] = {}

    def join(self, group: IPv4Address) -> None:
        """Join the group; OSError with the kernel's errno."""
        if group in self._at:
            return
        for one in reversed(self.sockets):
            try:
                self._ask(one, socket.IP_ADD_MEMBERSHIP, group)
            except OSError as error:
                if error.errno != errno.ENOBUFS:  # igmp_max_memberships
                    raise
            else:
                self._at[group] = one
                return
        one = self._make()
        self.sockets.append(one)
        self._on_open(one)
        self._ask(one, socket.IP_ADD_MEMBERSHIP, group)
        self._at[group] = one

    def leave(self, group: IPv4Address) -> None:
        """Leave the group; the kernel has forgotten it where the interface is gone."""
        one = self._at.pop(group, None)
        if one is not None:
            try:
                self._ask(one, socket.IP_DROP_MEMBERSHIP, group)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise

    def _ask(self, one: socket.socket, what: int, group: IPv4Address) -> None:
        one.setsockopt(
            socket.IPPROTO_IP, what, struct.pack("@4s4si", group.packed, bytes(4), self._interface)
        )

    def close(self) -> None:
        """Close the sockets, and leave all groups by that."""
        self._at.clear()
        for one in self.sockets:
            one.close()
        self.sockets.clear()
