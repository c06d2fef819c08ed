"""The MTU of a group on InfiniBand, which a join event does not tell.

A message that is longer, and no longer than the port's MTU, is sent and vanishes on the way.
"""

from __future__ import annotations

from contextlib import suppress

from mcast.api import MtuSource
from mcast.backends.rdma.net.ipoib import ENCAPSULATION, IpoibInterface
from mcast.backends.rdma.sa.umad import ANSWER_SECONDS, SaUnreachable, subnet_administrator
from mcast.wire.addresses import Gid
from mcast.wire.units import MTU


def mtu_of(
    mgid: Gid, device: str, port: int, port_mtu: int, interface: IpoibInterface | None
) -> tuple[int, MtuSource] | None:
    """The group's MTU in bytes, and where it is known from; None if it is the port's, or cannot be known.

    Every member that makes a group through an IPoIB interface has joined the broadcast group, so no such
    group has a smaller MTU than that one. The SA is asked only if that leaves a doubt.
    """
    least = None if interface is None else _broadcast_mtu(interface)
    if least is not None and least >= port_mtu:
        return None
    with suppress(SaUnreachable):
        asked = ask_sa(mgid, device, port)
        if asked is not None:
            return asked, MtuSource.SA
    return None if least is None else (least, MtuSource.IPOIB)


def ask_sa(mgid: Gid, device: str, port: int) -> int | None:
    """The MTU in the SA's record of the group; None if there is none. Raises Silent."""
    with subnet_administrator(device, port, ANSWER_SECONDS) as sa:
        record = sa.group(mgid)
    return None if record is None else MTU.value.get(record.mtu)


def _broadcast_mtu(interface: IpoibInterface) -> int | None:
    """Return the smallest MTU that the interface's broadcast group can have.

    None if that is unknown, as in connected mode.
    """
    if interface.mtu <= ENCAPSULATION:
        return None  # it is gone
    return next((size for size in MTU.value.values() if size >= interface.mtu), None)
