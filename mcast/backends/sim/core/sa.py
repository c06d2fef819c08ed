"""The InfiniBand Subnet Administrator's MCMemberRecord service, as a pure state machine.

No clock, no I/O, no threads: `SubnetAdmin.handle` takes one request and returns the answer together with the
traps that the request raises. Sources: IBA vol 1, 15.2.5.17 (o15-0.1.x, o15-0.2.x), RFC 4391 for the IPoIB
groups, and what was seen on OpenSM 3.3 (docs/facts/sa.md). Where OpenSM differs from the specification,
`Quirks` has a switch.

A request is checked as a whole before anything changes: `_Refused` ends it with a status and no effect. A
group exists from the Set that creates it until its last FULL or SEND_ONLY_FULL membership ends; a well-known
group of the partition file stays without members. `SubnetAdmin` alone changes groups. The switches are not
called: they fetch the MLIDs whose ports changed by `drain_changes`.

Deliberately not handled: other attributes of the SA than MCMemberRecord, the delivery of traps, and routing.

GUIDs are ints, GIDs are 16 bytes; MTU, rate and packet lifetime are codes as on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

from mcast.wire.addresses import ZERO_GID
from mcast.wire.mad import SEND_ONLY_FULL_MEMBER
from mcast.wire.mapping import LINK_LOCAL, Signature, ipoib_broadcast_mgid
from mcast.wire.mcmember import (
    JOIN_STATES,
    MLID_FIRST,
    MLID_LAST,
    JoinState,
    McMask,
    McMemberRecord,
    SaMethod,
    SaStatus,
    field_getter,
    make_record,
)
from mcast.wire.partition import DEFAULT_PKEY, FULL_MEMBER, PARTITION, matching_pkeys
from mcast.wire.units import MTU, PACKET_LIFE, RATE, Quantity, Selector, is_selected

DEFAULT_PREFIX = bytes.fromhex("fe80000000000000")
"""The default GID prefix.

In a PortGID it stands for the subnet's own prefix, whatever that is (IBA 4.1.1).
"""
IPOIB_QKEY = 0x00000B1B

_GET_MULTI = 0x14
_IPOIB_SIGNATURES = (Signature.IPOIB_IPV4.value.to_bytes(2), Signature.IPOIB_IPV6.value.to_bytes(2))
_SA_SIGNATURE = Signature.SA_ASSIGNED.value.to_bytes(2)


@dataclass(frozen=True, slots=True)
class Quirks:
    """Differences of an SA from the specification, one switch for each difference.

    `Quirks()` is the specification.
    """

    drops_send_only_full: bool = False
    """Leaving FULL drops the port though it keeps SEND_ONLY_FULL, if no other full member is there.

    The empty group then stays forever (SA-LEAVE-6); in a group without any full member, leaving one bit loses
    the others too.
    """
    reports_lost_bits: bool = False
    """The answer to the leave of the last full bit names the member's other bits.

    The group is gone nevertheless (SA-LEAVE-5).
    """
    takes_unmasked: bool = False
    """Create takes HopLimit, Scope, PacketLifeTime and a free MLID although their mask bits are 0."""
    ignores_packet_life: bool = False
    """PacketLifeTime is stored as sent: its selector is not applied, neither join nor query compares it."""
    ignores_scope_and_mlid: bool = False
    """Join does not compare Scope and MLID (o15-0.2.4 spares only ProxyJoin), create takes any Scope."""
    compares_lone_selector: bool = False
    """An MTU or rate selector is applied although the mask bit of its value is 0."""
    echoes_proxy_join: bool = False
    """The answer to a Set returns the request's ProxyJoin instead of the stored one."""
    queries_creator: bool = False
    """Queries match ProxyJoin, and untrusted ones JoinState, with the request that created the group."""
    ignores_port_prefix: bool = False
    """A query finds a member by GUID alone, whatever the prefix of PortGID."""
    refuses_default_prefix: bool = False
    """On a subnet with a prefix of its own, a PortGID with the default prefix is refused (IBA 4.1.1)."""
    skips_ipoib_flags: bool = False
    """The reserved flag bits of an MGID signed 401B or 601B are not checked."""
    counter_over_prefix: bool = False
    """An assigned MGID counts little-endian in bytes 10..13, over the prefix, and failures use numbers up."""
    knows_no_ndr_rates: bool = False
    """The codes of 800 and 1200 Gb/s, 23 and 24, are no rates yet, and rank below all that are."""
    purges_empty_partitions: bool = False
    """A partition without a port in service loses its well-known groups without full members.

    They return, with the lowest free MLIDs, with its first port (SA-SM-6).
    """
    silent_on_unknown_method: bool = False
    """Of the methods that MCMemberRecord does not have, only GetMulti is answered with UNSUP_METHOD_ATTR."""

    OPENSM_3_3: ClassVar[Quirks]
    """OpenSM 3.3 as measured (docs/facts/sa.md)."""


Quirks.OPENSM_3_3 = Quirks(**{switch.name: True for switch in fields(Quirks)})


class SaPort(NamedTuple):
    """An end port as the SA knows it: `mtu` is the neighbour MTU, `rate` the link's rate, both as codes."""

    guid: int
    lid: int = 0
    pkeys: tuple[int, ...] = (DEFAULT_PKEY,)
    mtu: int = 4
    rate: int = 3


class WellKnownGroup(NamedTuple):
    """A group of the partition file; `mgid` None means the IPoIB broadcast group of `pkey`."""

    pkey: int = DEFAULT_PKEY
    mgid: bytes | None = None
    qkey: int = IPOIB_QKEY
    mtu: int = 4
    rate: int = 3
    sl: int = 0
    tclass: int = 0
    flow_label: int = 0
    packet_life: int = 18


class SaMembership(NamedTuple):
    """One membership of a group."""

    guid: int
    join_state: JoinState
    proxy_join: bool


class Notice(NamedTuple):
    """A trap: 66 when a group gets its first full member, 67 when it loses its last (SA-SM-3)."""

    trap: int
    mgid: bytes


class SaReply(NamedTuple):
    """An answer: `records` is empty unless `status` is OK, `notices` are the traps the request raised."""

    status: SaStatus
    records: tuple[McMemberRecord, ...] = ()
    notices: tuple[Notice, ...] = ()


# Plain ints, because operations on enum members cost ten times as much and these run on every request.
# A member's state is its JoinState bits, plus _PROXY if another port joined for it.
_PROXY = 0x10
_FULL, _SEND_ONLY_FULL = int(JoinState.FULL), int(JoinState.SEND_ONLY_FULL)
_KEEPS_ALIVE = _FULL | _SEND_ONLY_FULL
_NO_STATE = JOIN_STATES[0]
_EXACTLY = int(Selector.EXACTLY)
_JOIN, _CREATE, _COMPARED = int(McMask.JOIN), int(McMask.CREATE), int(McMask.COMPARED)
_MGID, _PORT_GID, _MLID, _PKEY = (
    int(bit) for bit in (McMask.MGID, McMask.PORT_GID, McMask.MLID, McMask.PKEY)
)
_HOP, _SCOPE, _LIFE = int(McMask.HOP_LIMIT), int(McMask.SCOPE), int(McMask.PACKET_LIFE)
_JOIN_STATE, _PROXY_JOIN = int(McMask.JOIN_STATE), int(McMask.PROXY_JOIN)
_MEMBER_FIELDS = _PORT_GID | _JOIN_STATE | _PROXY_JOIN
_RATE_PAIR = int(McMask.RATE | McMask.RATE_SELECTOR)
_SELECTORS = int(McMask.MTU_SELECTOR | McMask.RATE_SELECTOR | McMask.LIFE_SELECTOR)


class _Selected(NamedTuple):
    """A field and the selector before it: their bits, their places, and the rank of each encoded value."""

    pair: int
    alone: int
    selector_at: int
    value_at: int
    rank: tuple[int, ...]


def _selected(field: str, rank: tuple[int, ...]) -> _Selected:
    at = McMemberRecord._fields.index(field)
    return _Selected(3 << at - 1, 1 << at - 1, at - 1, at, rank)


_OLD_RATES = Quantity(RATE.unit, {code: gbps for code, gbps in RATE.value.items() if gbps < 800})
_MTU_RULE, _LIFE_RULE = _selected("mtu", MTU.rank), _selected("packet_life", PACKET_LIFE.rank)

_SET, _DELETE, _OK = SaMethod.SET, SaMethod.DELETE, SaStatus.OK
_reply: Callable[[tuple[Any, ...]], SaReply] = partial(tuple.__new__, SaReply)
_notice: Callable[[tuple[int, bytes]], Notice] = partial(tuple.__new__, Notice)
"""With all fields, in half of the constructor's time."""
_REFUSALS = {status: SaReply(status) for status in SaStatus}


class _Refused(Exception):
    """Ends a request with its status. Nothing has been changed by then (SA-CREATE-5)."""


class SaGroup:
    """A multicast group, which only its `SubnetAdmin` may change.

    `values` has what all members share; its PortGID, JoinState and ProxyJoin are zero.
    """

    __slots__ = ("_created_with", "_full", "_shared", "_states", "mgid", "mlid", "values", "well_known")

    def __init__(self, values: McMemberRecord, created_with: int, well_known: bool = False) -> None:
        self.mgid: bytes = values.mgid
        self.mlid: int = values.mlid
        self.values: McMemberRecord = values
        self.well_known: bool = well_known
        self._shared = values[2:16]
        self._created_with = created_with
        self._full = 0  # members with FULL or SEND_ONLY_FULL
        self._states: dict[int, int] = {}

    @property
    def ports(self) -> KeysView[int]:
        """GUIDs of the members, send-only ones included, in order of joining."""
        return self._states.keys()

    @property
    def full_members(self) -> int:
        """Number of full members that the SA counts; OpenSM also counts those it dropped (SA-LEAVE-6)."""
        return self._full

    @property
    def members(self) -> Iterator[SaMembership]:
        """The memberships in order of joining."""
        return (SaMembership(guid, JOIN_STATES[s & 15], s >= _PROXY) for guid, s in self._states.items())

    def join_state(self, guid: int) -> JoinState:
        """The JoinState bits of the port, 0 if it is no member."""
        return JOIN_STATES[self._states.get(guid, 0) & 15]


@lru_cache(maxsize=4096)
def _partitions(pkeys: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int]]:
    """The partitions of a P_Key table, and those in which it makes a full member: one for many ports."""
    matching = [(pkey & PARTITION, matching_pkeys(pkey)) for pkey in pkeys]
    partitions = frozenset(base for base, others in matching if others)
    # A full member may talk to a limited one.
    return partitions, frozenset(base for base, others in matching if base in others)


class _Port:
    __slots__ = ("full", "gid", "groups", "partitions", "values")

    def __init__(self, values: SaPort, prefix: bytes) -> None:
        self.gid = prefix + values.guid.to_bytes(8)
        self.groups: dict[bytes, None] = {}  # MGIDs in order of joining
        self.update(values)

    def update(self, values: SaPort) -> None:
        self.values = values
        self.partitions, self.full = _partitions(values.pkeys)

    def shares_partition(self, other: _Port) -> bool:
        """Return True if the ports share a partition in which at least one of them is a full member."""
        return not (self.full.isdisjoint(other.partitions) and self.partitions.isdisjoint(other.full))


class SubnetAdmin:
    """The SA of a subnet: `add_port`, `handle` requests, read `groups`, `drain_changes` for the switches."""

    def __init__(
        self,
        *,
        subnet_prefix: bytes = DEFAULT_PREFIX,
        well_known: Iterable[WellKnownGroup] = (WellKnownGroup(),),
        max_mlid: int = MLID_LAST,
        sm_key: int = 1,
        send_only_full_member: bool = True,
        quirks: Quirks = Quirks(),
    ) -> None:
        """Start with the well-known groups.

        `well_known`: the groups of the partition file, by default the IPoIB broadcast group of 0xFFFF.
        `max_mlid`: the last MLID that every switch can hold. Without `send_only_full_member` the SA refuses
        JoinState 8. Raises ValueError for a prefix that is not 8 bytes, a `max_mlid` outside 0xC000..0xFFFE,
        a well-known group given twice, or more of them than MLIDs.
        """
        if len(subnet_prefix) != 8:
            raise ValueError(f"a subnet prefix has 8 bytes, not {len(subnet_prefix)}")
        if not MLID_FIRST <= max_mlid <= MLID_LAST:
            raise ValueError(f"max_mlid={max_mlid:#x}: multicast LIDs are {MLID_FIRST:#x}..{MLID_LAST:#x}")
        self.quirks = quirks
        self.sm_key = sm_key
        self._prefix = bytes(subnet_prefix)
        self._well_known: dict[bytes, WellKnownGroup] = {}
        for group in well_known:
            if (mgid := _well_known_mgid(group)) in self._well_known:
                raise ValueError(f"the well-known group {mgid.hex()} is given twice")
            self._well_known[mgid] = group
        self._mlids = max_mlid - MLID_FIRST + 1
        if len(self._well_known) > self._mlids:
            raise ValueError(f"{len(self._well_known)} well-known groups need as many MLIDs: raise max_mlid")
        self.send_only_full_member = send_only_full_member
        rates = _OLD_RATES if quirks.knows_no_ndr_rates else RATE
        self._rates = tuple(rates.value)
        self._rate_rule = _selected("rate", rates.rank)
        compared = (_MTU_RULE, self._rate_rule) + (() if quirks.ignores_packet_life else (_LIFE_RULE,))
        self._compared = tuple(
            (rule.alone if quirks.compares_lone_selector else rule.pair, *rule[2:]) for rule in compared
        )
        self._unmasked = _HOP | _SCOPE | _LIFE | _MLID if quirks.takes_unmasked else 0
        self._ports: dict[int, _Port] = {}
        self._down: dict[int, SaPort] = {}
        self._dirty: dict[int, None] = {}
        self._by_mgid: dict[bytes, SaGroup] = {}
        self._by_mlid: dict[int, SaGroup] = {}
        self.restart()

    # -- the subnet

    @property
    def capability_mask2(self) -> int:
        """ClassPortInfo:CapabilityMask2; only the SendOnlyFullMember bit is modelled."""
        return SEND_ONLY_FULL_MEMBER if self.send_only_full_member else 0

    @property
    def ports(self) -> dict[int, SaPort]:
        """The ports in service, by GUID."""
        return {guid: port.values for guid, port in self._ports.items()}

    def add_port(self, port: SaPort) -> None:
        """Bring a port into service, or give a known one new values. Its memberships stay."""
        self._down.pop(port.guid, None)
        if port.guid in self._ports:
            self._ports[port.guid].update(port)
        else:
            self._ports[port.guid] = _Port(port, self._prefix)
        if self.quirks.purges_empty_partitions:
            self._read_partitions()

    def port_down(self, guid: int) -> tuple[Notice, ...]:
        """Take the port out of service.

        It leaves its groups by the leave rules, and is unknown until `port_up` (SA-SM-1).

        KeyError if the port is not in service.
        """
        port = self._ports[guid]
        notices: list[Notice] = []
        for mgid in tuple(port.groups):
            self._drop(self._by_mgid[mgid], port, 15, notices)
        self._down[guid] = self._ports.pop(guid).values
        if self.quirks.purges_empty_partitions:
            self._read_partitions()
        return tuple(notices)

    def port_up(self, guid: int) -> None:
        """Bring the port back into service, without any membership. KeyError if it is not down."""
        self.add_port(self._down[guid])

    def restart(self) -> None:
        """Start the SM anew, or let another take over.

        All groups are lost, the well-known ones made again (SA-SM-2).
        """
        self._dirty.update(dict.fromkeys(self._by_mlid))
        for port in self._ports.values():
            port.groups.clear()
        self._by_mgid.clear()
        self._by_mlid.clear()
        self._used = 0  # bit i: MLID_FIRST + i is taken
        self._assigned = 0  # MGIDs given out
        self._read_partitions()

    def _read_partitions(self) -> None:
        """Make the well-known groups that are missing, then end those of unused partitions (SA-SM-6)."""
        for mgid, group in self._well_known.items():
            if made := self._by_mgid.get(mgid):
                made.well_known = True
            else:
                self._add_well_known(mgid, group)
        for mgid, group in self._well_known.items():
            if not self._in_use(group) and (made := self._by_mgid.get(mgid)):
                made.well_known = False
                if not made._full:
                    self._end(made)

    def _in_use(self, group: WellKnownGroup) -> bool:
        """Return True if the SM keeps the groups of this group's partition.

        It keeps all before there is any port, and always those of the default partition, in which its own
        port is (SA-PKEY-3)."""
        base = group.pkey & PARTITION
        if not self.quirks.purges_empty_partitions or not self._ports or base == DEFAULT_PKEY & PARTITION:
            return True
        return any(base in port.partitions for port in self._ports.values())

    def _add_well_known(self, mgid: bytes, group: WellKnownGroup) -> None:
        scope = mgid[1] & 15
        mlid = self._free_mlid(0)
        if mlid is None:  # OpenSM goes on without the group, and tries again when a port comes or goes
            return
        record = McMemberRecord(
            mgid=mgid,
            qkey=group.qkey,
            mlid=mlid,
            mtu_selector=_EXACTLY,
            mtu=group.mtu,
            tclass=group.tclass,
            pkey=group.pkey | FULL_MEMBER,
            rate_selector=_EXACTLY,
            rate=group.rate,
            life_selector=_EXACTLY,
            packet_life=group.packet_life,
            sl=group.sl,
            flow_label=group.flow_label,
            hop_limit=0 if scope == LINK_LOCAL else 255,
            scope=scope,
            join_state=_NO_STATE,
        )
        self._add_group(SaGroup(record, _FULL, well_known=True))

    # -- what a fabric reads

    @property
    def groups(self) -> Iterator[SaGroup]:
        """All groups in order of creation."""
        return iter(self._by_mgid.values())

    def group(self, mgid: bytes) -> SaGroup | None:
        """The group with this MGID, None if there is none."""
        return self._by_mgid.get(mgid)

    def forwarding(self, mlid: int) -> tuple[int, ...]:
        """Return the GUIDs that the switches connect under this MLID (SA-SM-5).

        Every member, send-only too; none if there is only one.
        """
        group = self._by_mlid.get(mlid)
        return tuple(group._states) if group is not None and len(group._states) > 1 else ()

    def drain_changes(self) -> tuple[int, ...]:
        """MLIDs whose set of ports changed since the last call, in order of their first change."""
        changed = tuple(self._dirty)
        self._dirty.clear()
        return changed

    # -- requests

    def handle(
        self, requester_guid: int, method: int, mask: int, record: McMemberRecord, sm_key: int = 0
    ) -> SaReply | None:
        """Answer one request of the port `requester_guid`; `mask` says which fields of `record` count.

        None is silence: a wrong non-zero SM_Key (C15-0.1.5, SA-REQUEST-5), a requester not in service, or an
        unknown method with `Quirks.silent_on_unknown_method`. A refused request changes nothing.
        """
        requester = self._ports.get(requester_guid)
        if requester is None or (sm_key and sm_key != self.sm_key):
            return None
        mask = int(mask)
        try:
            if method == _SET:
                return self._set(requester, mask, record)
            if method == _DELETE:
                return self._delete(requester, mask, record)
            if method == SaMethod.GET_TABLE:
                return SaReply(_OK, tuple(self._query(requester_guid, mask, record, bool(sm_key))))
            if method == SaMethod.GET:
                found = tuple(self._query(requester_guid, mask, record, bool(sm_key)))
                if len(found) != 1:
                    return _REFUSALS[SaStatus.TOO_MANY_RECORDS if found else SaStatus.NO_RECORDS]
                return SaReply(_OK, found)
        except _Refused as refused:
            return _REFUSALS[refused.args[0]]
        if self.quirks.silent_on_unknown_method and method != _GET_MULTI:
            return None
        return _REFUSALS[SaStatus.UNSUP_METHOD_ATTR]

    def _set(self, requester: _Port, mask: int, record: McMemberRecord) -> SaReply:
        """Join, and create the group first if there is none.

        Checks in OpenSM's order (SA-REQUEST-2, SA-JOIN-2, SA-JOIN-3).
        """
        port, bits = self._subject(requester, mask, record), int(record.join_state)
        if (
            port is None
            or (port is not requester and not port.shares_partition(requester))
            or (mask & _PKEY and not record.pkey & PARTITION)
            or (bits & _SEND_ONLY_FULL and not self.send_only_full_member)
        ):
            raise _Refused(SaStatus.REQ_INVALID)

        existing, assigned = self._by_mgid.get(record.mgid), self._assigned
        if existing is None:
            group, assigned = self._plan_group(mask, record, bits, port.values)
        elif self._joins(mask, record, existing):
            group = existing
        else:
            raise _Refused(SaStatus.REQ_INVALID)

        has, needs = port.values, group.values
        held, rank = group._states.get(has.guid, 0), self._rate_rule.rank
        if (
            (mask & _SELECTORS and not self._selectors_match(mask, record, group))
            or has.mtu < needs.mtu
            or rank[has.rate] < rank[needs.rate]
            or not bits
            or needs.pkey & PARTITION not in port.partitions
            or (held and not _may_modify(group, held, port, requester))
        ):
            raise _Refused(SaStatus.REQ_INVALID)

        if existing is None:
            self._assigned = assigned
            self._add_group(group)
        if held:
            state = held | bits
        else:
            state = bits | (_PROXY if port is not requester else 0)
            port.groups[group.mgid] = None
            self._dirty[group.mlid] = None
        group._states[has.guid] = state
        notices: tuple[Notice, ...] = ()
        if bits & _KEEPS_ALIVE and not held & _KEEPS_ALIVE:
            group._full += 1
            if group._full == 1:
                notices = (_notice((66, group.mgid)),)
        proxy = record.proxy_join if self.quirks.echoes_proxy_join else state >= _PROXY
        answer = make_record((group.mgid, record.port_gid, *group._shared, JOIN_STATES[state & 15], proxy))
        return _reply((_OK, (answer,), notices))

    def _delete(self, requester: _Port, mask: int, record: McMemberRecord) -> SaReply:
        """Leave the group (o15-0.1.14).

        Only bits that are all held, and only by a port that may modify the record (SA-LEAVE-1, SA-LEAVE-2,
        SA-LEAVE-3).
        """
        port, bits = self._subject(requester, mask, record), int(record.join_state)
        group = self._by_mgid.get(record.mgid)
        if group is None or port is None or not bits:
            raise _Refused(SaStatus.REQ_INVALID)
        held = group._states.get(port.values.guid, 0)
        if bits & ~held or not _may_modify(group, held, port, requester):
            raise _Refused(SaStatus.REQ_INVALID)
        notices: list[Notice] = []
        left = JOIN_STATES[self._drop(group, port, bits, notices)]
        path = (_EXACTLY, *record[5:8], _EXACTLY, record.rate, _EXACTLY, *record[11:15])
        answer = make_record((*record[:4], *path, group.values.scope, left, record.proxy_join))
        return _reply((_OK, (answer,), tuple(notices)))

    def _query(
        self, requester_guid: int, mask: int, record: McMemberRecord, trusted: bool
    ) -> Iterator[McMemberRecord]:
        """Records that match, of groups in a partition of the requester (SA-QUERY-1, SA-QUERY-2)."""
        self._check_codes(mask, record)
        partitions = self._ports[requester_guid].partitions
        one = self._by_mgid.get(record.mgid)
        for group in self.groups if not mask & _MGID else () if one is None else (one,):
            if (
                group.values.pkey & PARTITION in partitions
                and not (mask & _MLID and record.mlid != group.mlid)
                and not (mask & _SCOPE and record.scope != group.values.scope)
                and _fields_match(mask, record, group)
                and self._selectors_match(mask, record, group)
            ):
                yield from self._matching_members(mask, record, group, trusted)

    def _matching_members(
        self, mask: int, record: McMemberRecord, group: SaGroup, trusted: bool
    ) -> Iterator[McMemberRecord]:
        """Return a record for each matching member.

        A requester that is not trusted gets one record of the group, without members.
        """
        by_creator = self.quirks.queries_creator
        if by_creator:
            if mask & _PROXY_JOIN and record.proxy_join != (group._created_with >= _PROXY):
                return
            if not trusted and not mask & _PORT_GID:
                if not mask & _JOIN_STATE or record.join_state == group._created_with & 15:
                    yield group.values
                return
        members: Iterable[tuple[int, int]] = group._states.items()
        if mask & _PORT_GID:
            guid = int.from_bytes(record.port_gid[8:])
            known = self.quirks.ignores_port_prefix or self._owns_prefix(record.port_gid)
            members = ((guid, group._states[guid]),) if known and guid in group._states else ()
        matching = (
            (guid, state)
            for guid, state in members
            if not (mask & _JOIN_STATE and state & 15 != record.join_state)
            and not (mask & _PROXY_JOIN and not by_creator and (state >= _PROXY) != record.proxy_join)
        )
        if trusted:
            for guid, state in matching:
                port_gid = self._prefix + guid.to_bytes(8)
                yield McMemberRecord(
                    group.mgid, port_gid, *group._shared, JOIN_STATES[state & 15], state >= _PROXY
                )
        elif not mask & _MEMBER_FIELDS or any(True for _ in matching):
            yield group.values

    # -- rules

    def _subject(self, requester: _Port, mask: int, record: McMemberRecord) -> _Port | None:
        """Return the port that a Set or a Delete is about.

        Refuses a request without the required fields (SA-REQUEST-1, SA-REQUEST-3).
        """
        if mask & _JOIN != _JOIN:
            raise _Refused(SaStatus.INSUF_COMPS)
        if mask & _SELECTORS:
            self._check_codes(mask, record)
        if record.port_gid == requester.gid:
            return requester
        if not self._owns_prefix(record.port_gid):
            raise _Refused(SaStatus.INVALID_GID)
        return self._ports.get(int.from_bytes(record.port_gid[8:]))

    def _check_codes(self, mask: int, record: McMemberRecord) -> None:
        if mask & _RATE_PAIR == _RATE_PAIR and record.rate not in self._rates:
            raise _Refused(SaStatus.REQ_INVALID)
        if mask & _MTU_RULE.pair == _MTU_RULE.pair and record.mtu not in MTU.value:
            raise _Refused(SaStatus.REQ_INVALID)

    def _owns_prefix(self, port_gid: bytes) -> bool:
        prefix = port_gid[:8]
        return prefix == self._prefix or (prefix == DEFAULT_PREFIX and not self.quirks.refuses_default_prefix)

    def _joins(self, mask: int, record: McMemberRecord, group: SaGroup) -> bool:
        """o15-0.2.4: whether the masked fields match the group (SA-JOIN-1, SA-JOIN-4)."""
        if not _fields_match(mask, record, group):
            return False
        if self.quirks.ignores_scope_and_mlid:
            return True
        return not (
            (mask & _SCOPE and record.scope != group.values.scope)
            or (mask & _MLID and record.mlid != group.mlid)
        )

    def _selectors_match(self, mask: int, record: McMemberRecord, group: SaGroup) -> bool:
        """Return True if MTU, rate and packet lifetime satisfy the masked selectors (SA-JOIN-5)."""
        if not mask & _SELECTORS:
            return True
        fields: tuple[Any, ...] = record
        for needed, selector_at, value_at, rank in self._compared:
            if mask & needed == needed:
                wanted, have = rank[fields[value_at]], rank[group._shared[value_at - 2]]
                if not is_selected(fields[selector_at], have, wanted):
                    return False
        return True

    def _mgid_allowed(self, mask: int, record: McMemberRecord) -> bool:
        """Return True if a request may choose this MGID (o15-0.1.5, SA-MGID-1).

        An IPoIB group shares the values of its broadcast group (RFC 4391, SA-MGID-2).
        """
        mgid = record.mgid
        signature, scope = mgid[2:4], mgid[1] & 15
        ipoib = signature in _IPOIB_SIGNATURES
        if mgid[0] != 0xFF or (mgid[1] & 0xE0 and not (ipoib and self.quirks.skips_ipoib_flags)):
            return False
        if signature == _SA_SIGNATURE and scope == LINK_LOCAL:
            return False  # those are for the SA to assign
        if not ipoib:
            return True
        broadcast = ipoib_broadcast_mgid(int.from_bytes(mgid[4:6]), scope)
        if mgid == broadcast:
            return True
        group = self._by_mgid.get(broadcast)
        return group is not None and _fields_match(mask, record, group)

    # -- groups

    def _plan_group(self, mask: int, record: McMemberRecord, bits: int, port: SaPort) -> tuple[SaGroup, int]:
        """Return the group that a Set of an unknown MGID makes (o15-0.2.3), and the MGID count.

        The group is not entered yet (SA-CREATE-1, SA-CREATE-2, SA-CREATE-3).
        """
        if not bits & _KEEPS_ALIVE:
            raise _Refused(SaStatus.REQ_INVALID)
        if mask & _CREATE != _CREATE:
            raise _Refused(SaStatus.INSUF_COMPS)
        mgid, assigned = record.mgid, self._assigned
        if mgid == ZERO_GID:
            mgid, assigned = self._assign_mgid(record.scope if mask & _SCOPE else LINK_LOCAL)
        elif not self._mgid_allowed(mask, record):
            raise _Refused(SaStatus.REQ_INVALID)
        scope = mgid[1] & 15
        if mask & _SCOPE and record.scope != scope and not self.quirks.ignores_scope_and_mlid:
            raise _Refused(SaStatus.REQ_INVALID)
        mtu, rate = port.mtu, port.rate
        taken = mask | self._unmasked
        life = record.packet_life if taken & _LIFE else 0
        if mask & _SELECTORS:
            if mask & _MTU_RULE.pair == _MTU_RULE.pair:
                mtu = _choose(record, _MTU_RULE, tuple(MTU.value), mtu)
            if mask & _RATE_PAIR == _RATE_PAIR:
                rate = _choose(record, self._rate_rule, self._rates, rate)
            if not self.quirks.ignores_packet_life and mask & _LIFE_RULE.pair == _LIFE_RULE.pair:
                life = _choose_life(record)
        mlid = self._free_mlid(record.mlid if taken & _MLID else 0)
        if mlid is None:
            raise _Refused(SaStatus.NO_RESOURCES)
        hop_limit = record.hop_limit if taken & _HOP else 0
        scope = record.scope if taken & _SCOPE else scope
        path = (_EXACTLY, mtu, record.tclass, record.pkey, _EXACTLY, rate, _EXACTLY, life)
        tail = (record.sl, record.flow_label, hop_limit, scope, _NO_STATE, False)
        values = make_record((mgid, ZERO_GID, record.qkey, mlid, *path, *tail))
        return SaGroup(values, bits | (_PROXY if record.proxy_join else 0)), assigned

    def _assign_mgid(self, scope: int) -> tuple[bytes, int]:
        """Return the next free MGID, and the counter after it (SA-MGID-3).

        It is ff1<scope>:a01b:<subnet prefix>:<32-bit counter>.
        """
        head = bytes((0xFF, 0x10 | scope)) + _SA_SIGNATURE + self._prefix
        over_prefix = self.quirks.counter_over_prefix
        counter = self._assigned
        while True:
            number = counter & 0xFFFFFFFF
            mgid = (
                head[:10] + number.to_bytes(4, "little") + bytes(2)
                if over_prefix
                else head + number.to_bytes(4)
            )
            counter += 1
            if over_prefix:
                self._assigned = counter
            if mgid not in self._by_mgid:
                return mgid, counter

    def _free_mlid(self, wanted: int) -> int | None:
        """Return `wanted` if it is in range and free, otherwise the lowest free MLID.

        None when all are taken (SA-MLID-1, SA-MLID-2).
        """
        at = wanted - MLID_FIRST
        if not 0 <= at < self._mlids or self._used >> at & 1:
            at = (~self._used & (self._used + 1)).bit_length() - 1
        return MLID_FIRST + at if at < self._mlids else None

    def _add_group(self, group: SaGroup) -> None:
        self._used |= 1 << group.mlid - MLID_FIRST
        self._by_mgid[group.mgid] = self._by_mlid[group.mlid] = group

    def _drop(self, group: SaGroup, port: _Port, bits: int, notices: list[Notice]) -> int:
        """Take `bits` from a member, and end the group with its last full bit.

        Returns the bits left (SA-LEAVE-4).
        """
        guid = port.values.guid
        held = group._states[guid]
        left = held & ~bits & 15
        ends = held & _KEEPS_ALIVE and not left & _KEEPS_ALIVE
        if self.quirks.drops_send_only_full and not left & _FULL and group._full <= held & _FULL:
            left = 0
        if left:
            group._states[guid] = left | held & _PROXY
        else:
            del group._states[guid], port.groups[group.mgid]
            self._dirty[group.mlid] = None
        if ends:
            group._full -= 1
            if not group._full:
                notices.append(_notice((67, group.mgid)))
                self._end(group)
                return left if self.quirks.reports_lost_bits else 0
        return left

    def _end(self, group: SaGroup) -> None:
        """Remove the other members, and the group unless the partition file names it (SA-LEAVE-7)."""
        for guid in group._states:
            del self._ports[guid].groups[group.mgid]
            self._dirty[group.mlid] = None
        group._states.clear()
        if not group.well_known:
            del self._by_mgid[group.mgid], self._by_mlid[group.mlid]
            self._used ^= 1 << group.mlid - MLID_FIRST


def _well_known_mgid(group: WellKnownGroup) -> bytes:
    return group.mgid if group.mgid is not None else ipoib_broadcast_mgid(group.pkey | FULL_MEMBER)


def _may_modify(group: SaGroup, held: int, port: _Port, requester: _Port) -> bool:
    """Return True if this port may change the record (o15-0.2.1, SA-REQUEST-4).

    A proxied record may be changed by any port of the partition, others by their own port alone.
    """
    if held >= _PROXY:
        return group.values.pkey & PARTITION in requester.partitions
    return port is requester


def _fields_match(mask: int, record: McMemberRecord, group: SaGroup) -> bool:
    """Return True if the masked plain fields match the group's; two limited P_Keys do not match."""
    if mask & _PKEY and record.pkey not in matching_pkeys(group.values.pkey):
        return False
    if equal := mask & _COMPARED:
        fields = field_getter(equal)
        return fields(record) == fields(group.values)
    return True


def _choose(record: McMemberRecord, rule: _Selected, order: tuple[int, ...], limit: int) -> int:
    """The MTU or rate of a new group: as the selector asks, or else the port's own, `limit` (SA-CREATE-4)."""
    fields: tuple[Any, ...] = record
    selector = fields[rule.selector_at]
    value: int = fields[rule.value_at]
    if selector == Selector.EXACTLY:
        return value
    if selector == Selector.LESS and rule.rank[value] <= rule.rank[limit]:
        if value == order[0]:
            raise _Refused(SaStatus.REQ_INVALID)
        return order[order.index(value) - 1]
    if selector == Selector.GREATER and rule.rank[value] >= rule.rank[limit]:
        raise _Refused(SaStatus.REQ_INVALID)
    return limit


def _choose_life(record: McMemberRecord) -> int:
    """The packet lifetime of a new group; the last selector asks for the smallest, not the largest."""
    life = (record.packet_life + 1, record.packet_life - 1, record.packet_life, 0)[record.life_selector]
    if not 0 <= life < 64:
        raise _Refused(SaStatus.REQ_INVALID)
    return life
