"""RoCEv2 groups over UDP sockets: a member without a card. `PROVIDER.status()` says whether it can run.

A RoCEv2 UD message is a UDP datagram to port 4791, and a group is an IPv4 multicast group, so an ordinary
process can be a member. Importing this works everywhere.

host       the interfaces, as devices with one port, and what the kernel reports of them
sockets    the sockets of queue pairs, and who may bind which port
network    the groups and queue pairs of a backend
datapath   what passes between a queue pair and its sockets; the rules are in csrc/ring.c
backend    the contract's objects
watcher    the thread of a backend
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mcast.api import Backend, Finding, Provider, Status

if TYPE_CHECKING:
    from mcast.api import Testbed


def _status() -> Status:
    from mcast.backends.udp.availability import status

    return status()


def _open() -> Backend:
    from mcast.backends.udp.availability import no_socket, require_available, unavailable

    require_available()
    from mcast.backends.udp.backend import UdpBackend

    try:
        return UdpBackend()
    except OSError as error:
        raise unavailable(no_socket(error)) from error


def _checks(listen: float) -> tuple[Finding, ...]:
    from mcast.backends.udp.doctor import examine

    return examine(listen)


def _testbed() -> AbstractContextManager[Testbed]:
    from mcast.backends.udp.testbed import udp_testbed

    return udp_testbed()


PROVIDER = Provider(
    "udp",
    "RoCEv2 groups over UDP sockets, without a card",
    _status,
    _open,
    _testbed,
    _checks,
)
