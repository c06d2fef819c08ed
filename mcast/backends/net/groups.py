"""The groups that this host can see: its IGMP lists, the snooping tables of its bridges, the SA's table.

On Ethernet the kernel shows a membership by IGMP alone, and not which program has it. On InfiniBand the
memberships are in the kernel's SA client, which shows them to nobody, so the SA has to be asked.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv4Address
from typing import NamedTuple

from mcast.api import (
    NO_IGMP_TABLE,
    DeviceInfo,
    GroupInfo,
    GroupMember,
    GroupSource,
    GroupTable,
    LinkLayer,
    PortInfo,
    PortState,
)
from mcast.backends.net import hostnet, netlink
from mcast.wire.addresses import ZERO_GID, Gid
from mcast.wire.mcmember import JoinState

SOCKETS = "who holds a membership: the kernel counts RDMA ids and sockets of a port together"
NO_BRIDGE = (
    "members on other hosts, and whether the switch knows ours: no bridge of this host carries these ports, "
    "or it has no address; look at the switch's IGMP snooping table, of a Linux bridge by `bridge mdb show`"
)
UNTRUSTED = "the members of groups on InfiniBand: the SA names them only to programs that have its SM_Key"
NO_SAQUERY = "groups on InfiniBand: install infiniband-diags, which has saquery, to ask the SA"


class SaRecord(NamedTuple):
    """A membership as the SA has it; `port_gid` is None where the SA does not tell the port."""

    mgid: Gid
    mlid: int
    port_gid: Gid | None
    join_state: JoinState


class _Table:
    """The group table while it is collected."""

    def __init__(self) -> None:
        self._members: defaultdict[Gid, dict[str, GroupMember]] = defaultdict(dict)
        self._mlids: dict[Gid, int] = {}
        self.unseen: dict[str, None] = {}

    def group(self, mgid: Gid, mlid: int) -> None:
        """Note that the group exists."""
        self._mlids[mgid] = mlid
        self._members[mgid] = self._members[mgid]

    def member(self, mgid: Gid, port: str, where: GroupSource, send_only: bool = False) -> None:
        known = self._members[mgid].get(port, GroupMember(port, frozenset()))
        self._members[mgid][port] = known._replace(seen_in=known.seen_in | {where}, send_only=send_only)

    def done(self) -> GroupTable:
        groups = (
            GroupInfo(mgid, tuple(member for _, member in sorted(members.items())), self._mlids.get(mgid, 0))
            for mgid, members in sorted(self._members.items())
        )
        return GroupTable(tuple(groups), tuple(self.unseen))


def group_table(
    devices: Iterable[DeviceInfo], netdevs_of: Callable[[str, PortInfo], Iterable[str]]
) -> GroupTable:
    """The groups that the ports of these devices, and the tables around them, know now.

    `netdevs_of` returns the interfaces of a device's port.
    """
    ports = [(device.name, port) for device in devices for port in device.ports]
    table = _Table()
    ethernet = {
        netdev: f"{device}/{port.port_num}"
        for device, port in ports
        if port.link_layer is LinkLayer.ETHERNET
        for netdev in netdevs_of(device, port)
    }
    if ethernet:
        _read_igmp(ethernet, table)
        _read_bridges(ethernet, table)
        table.unseen |= dict.fromkeys((NO_IGMP_TABLE, SOCKETS))
    infiniband = [
        (device, port.port_num)
        for device, port in ports
        if port.link_layer is LinkLayer.INFINIBAND and port.state is PortState.ACTIVE
    ]
    names = {gid: f"{device}/{port.port_num}" for device, port in ports for gid in port.gids.values()}
    for device, number in infiniband:
        _read_sa(device, number, names, table)
    return table.done()


def _read_igmp(ports: dict[str, str], table: _Table) -> None:
    try:
        memberships = hostnet.igmp_memberships()
    except OSError as error:
        table.unseen[f"what the kernel of this host has joined: {error}"] = None
        return
    for netdev, groups in memberships.items():
        for group in groups if netdev in ports else ():
            table.member(Gid(group), ports[netdev], GroupSource.HOST)


def _read_bridges(ports: dict[str, str], table: _Table) -> None:
    """A bridge's port leads to a port of this host, or to others behind it."""
    ours = {hostnet.bridge_port_of(netdev): port for netdev, port in ports.items()}
    try:
        entries = netlink.snooping_table()
    except OSError as error:
        table.unseen[f"what bridges of this host know: {error}"] = None
        return
    if not any(ours) and not any(entry.port in ports or entry.bridge in ports for entry in entries):
        table.unseen[NO_BRIDGE] = None
        return
    for entry in entries:
        if isinstance(entry.group, IPv4Address):  # of IPv6 groups RoCEv2 makes no use
            name = ours.get(entry.port, f"{entry.bridge}/{entry.port}")
            table.member(Gid(entry.group), name, GroupSource.SWITCH)


def _read_sa(device: str, number: int, names: dict[Gid, str], table: _Table) -> None:
    try:
        records = ask_sa(device, number)
    except FileNotFoundError:
        table.unseen[NO_SAQUERY] = None
        return
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        table.unseen[f"groups on InfiniBand: {' '.join(str(error).split())}"] = None
        return
    for record in records:
        table.group(record.mgid, record.mlid)
        if record.port_gid is None:
            table.unseen[UNTRUSTED] = None
        else:
            name = names.get(record.port_gid, str(record.port_gid))
            send_only = not record.join_state & (JoinState.FULL | JoinState.NON)
            table.member(record.mgid, name, GroupSource.SA, send_only)


def ask_sa(device: str, number: int) -> tuple[SaRecord, ...]:
    """Every MCMemberRecord that the SA of that port shows. Needs access to /dev/infiniband/umad*.

    Raises FileNotFoundError without saquery, and RuntimeError with saquery's words when there is no answer,
    or with the field that its answer lacks.
    """
    said = hostnet.run("saquery", "-C", device, "-P", str(number), "MCMR")
    try:
        return tuple(read_records(said))
    except (KeyError, ValueError) as error:
        raise RuntimeError(f"saquery prints records of another form: {error}") from None


def read_records(text: str) -> Iterator[SaRecord]:
    """The records that saquery printed, as lines of `name....value` under a heading each."""
    for dump in text.split("MCMember Record dump:")[1:]:
        lines = (line.strip().partition(".") for line in dump.splitlines() if "." in line)
        fields = {name.lower(): rest.lstrip(".") for name, _, rest in lines}
        port_gid = Gid(fields["portgid"])
        yield SaRecord(
            Gid(fields["mgid"]),
            int(fields["mlid"], 16),
            None if port_gid == ZERO_GID else port_gid,
            JoinState(int(fields["joinstate"], 16)),
        )
