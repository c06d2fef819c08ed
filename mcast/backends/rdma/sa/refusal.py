"""Why the SA refused a join. The kernel reports only EINVAL, so the SA is asked about the group."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address

from mcast.api import PortSpace
from mcast.backends.rdma.sa.umad import (
    ANSWER_SECONDS,
    SaUnreachable,
    SubnetAdministrator,
    subnet_administrator,
)
from mcast.errors.cause import Cause
from mcast.errors.sa_refusal import PortView, refusal_causes
from mcast.wire.addresses import Gid, McastAddress
from mcast.wire.kernel_join import kernel_join
from mcast.wire.mapping import infiniband_mgid, mgid_fields
from mcast.wire.mcmember import JoinState, McMask, McMemberRecord
from mcast.wire.units import MTU, RATE


def find_causes(
    device: str,
    port: int,
    group: McastAddress,
    port_space: PortSpace,
    send_only: bool,
    broadcast: Gid | None,
) -> tuple[Cause, ...]:
    """The reasons against the join; () if they cannot be found out.

    `broadcast` is the MGID of the broadcast group of the id's IPoIB interface, which gives partition and
    scope.
    """
    if broadcast is None:
        return ()
    with suppress(SaUnreachable), subnet_administrator(device, port, ANSWER_SECONDS) as sa:
        return compare(sa, group, port_space, send_only, broadcast)
    return ()


def compare(
    sa: SubnetAdministrator, group: McastAddress, port_space: PortSpace, send_only: bool, broadcast: Gid
) -> tuple[Cause, ...]:
    """The kernel's request, compared with the SA's record of the group. Raises umad.Silent."""
    pattern = sa.group(broadcast)
    if pattern is None:
        return ()
    mgid = infiniband_mgid(group.address, port_space, pattern.mgid)
    join_state = JoinState.SEND_ONLY_FULL if send_only else JoinState.FULL
    mask, asked = kernel_join(pattern, mgid, sa.port.gid, port_space, join_state)
    capabilities = sa.capability_mask2() if send_only else None
    view = PortView(sa.port.pkeys, rate=RATE.nearest(sa.port.rate))
    return refusal_causes(mask, asked, sa.group(mgid), view, capabilities)


def broadcast_causes(sa: SubnetAdministrator, broadcast: Gid, mtu: int) -> tuple[Cause, ...]:
    """Why an IPoIB interface of the asking port, which has this MTU, cannot join its broadcast group.

    () if the SA has no reason against the join. Raises umad.Silent.
    """
    fields = mgid_fields(broadcast)
    if fields is None or fields.pkey is None:
        return ()
    pkey, group = fields.pkey, sa.group(broadcast)
    asked = McMemberRecord(mgid=broadcast, port_gid=sa.port.gid, pkey=pkey, join_state=JoinState.FULL)
    view = PortView(sa.port.pkeys, MTU.code[mtu], RATE.nearest(sa.port.rate))
    causes = refusal_causes(int(McMask.PKEY), asked, group, view)
    if group is None and not causes:
        why = f"the SM has no such group: its partition {pkey:#06x} is not for IPoIB"
        return (Cause(why, "saquery -g", "add the word ipoib to the partition in partitions.conf of the SM"),)
    return causes


def netdevs_with(
    addresses: Iterable[tuple[str, bytes]], source: IPv4Address | IPv6Address | None
) -> tuple[str, ...]:
    """The interfaces that have the address; without an address, every interface."""
    wanted = None if source is None else source.packed
    return tuple(dict.fromkeys(netdev for netdev, packed in addresses if wanted in (None, packed)))
