"""The groups that a program on some hosts of a fabric can see, and their members."""

from __future__ import annotations

from collections import defaultdict

from mcast.api import NO_IGMP_TABLE, GroupInfo, GroupMember, GroupSource, GroupTable
from mcast.backends.model.port import Port
from mcast.backends.sim.core.fabric import FabricCore
from mcast.backends.sim.core.port import FabricPort
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import RECEIVING

_ELSEWHERE = "members on other hosts: switches know them by IGMP, a host does not"
_UNTRUSTED = "members on other hosts: the SA names them only to programs that have its SM_Key"

SeenMembers = defaultdict[Gid, dict[str, GroupMember]]
"""Group -> port -> its membership."""


def group_table(fabric: FabricCore, hosts: frozenset[int]) -> GroupTable:
    """The tables of the hosts' ports; a program on every host sees the switches' or the SA's too."""
    seen, everywhere = SeenMembers(dict), hosts == fabric.topology.hosts
    read = _read_igmp if fabric.subnet is None else _read_sa
    mlids = read(fabric, fabric.topology.ports_of(hosts), everywhere, seen)
    groups = (
        GroupInfo(mgid, tuple(member for _, member in sorted(members.items())), mlids.get(mgid, 0))
        for mgid, members in sorted(seen.items())
    )
    never, elsewhere = ((NO_IGMP_TABLE,), _ELSEWHERE) if fabric.subnet is None else ((), _UNTRUSTED)
    return GroupTable(tuple(groups), never if everywhere else (*never, elsewhere))


def _read_igmp(
    fabric: FabricCore, ports: list[FabricPort], everywhere: bool, seen: SeenMembers
) -> dict[Gid, int]:
    for own in ports:
        for group in own.igmp:
            _note(seen[group], own, GroupSource.HOST)
    if everywhere:
        for group, listeners in fabric.igmp.snooping.items():
            for port in listeners.values():
                _note(seen[group], port, GroupSource.SWITCH)
    return {}


def _read_sa(
    fabric: FabricCore, ports: list[FabricPort], everywhere: bool, seen: SeenMembers
) -> dict[Gid, int]:
    assert fabric.subnet is not None
    for port in ports:
        for mgid, held in fabric.subnet.clients[port.index].memberships.items():
            _note(seen[mgid], port, GroupSource.HOST, send_only=not held & RECEIVING)
    mlids = {Gid(group.mgid): group.mlid for group in fabric.subnet.sa.groups}
    for group in fabric.subnet.sa.groups:
        members = seen[Gid(group.mgid)]
        for member in group.members if everywhere else ():
            port = fabric.topology.port_with(member.guid)
            _note(members, port, GroupSource.SA, send_only=not member.join_state & RECEIVING)
    return mlids


def _note(members: dict[str, GroupMember], port: Port, where: GroupSource, send_only: bool = False) -> None:
    name = f"{port.name}/1"
    known = members.get(name, GroupMember(name, frozenset(), send_only))
    members[name] = known._replace(seen_in=known.seen_in | {where}, send_only=send_only)
