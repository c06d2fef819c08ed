"""The kernel's SA client of one port: memberships of many ids, counted per MGID and JoinState bit.

Facts: SA, "One port, many ids". Bits that the port holds already cost no request; requests for one group
are serialised; a bit whose count reaches 0 is left with a Delete that nobody waits for. No clock, no I/O:
`ask(method, mask, record, answered)` sends a request and calls `answered(reply)` later, with None when the
SA stays silent.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import lru_cache

from mcast.addresses import Gid
from mcast.backends.sim.sa import SaReply
from mcast.mapping import ZERO_GID
from mcast.mcmember import JoinState, McMask, McMemberRecord, SaMethod, SaStatus, make_record

Ask = Callable[[SaMethod, int, McMemberRecord, Callable[[SaReply | None], None]], object]

MEANING = {
    SaStatus.NO_RESOURCES: "no MLID is left, or the SA is out of another resource",
    SaStatus.REQ_INVALID: "a field does not fit the group, the partition or what the SM can do",
    SaStatus.NO_RECORDS: "there is no such record",
    SaStatus.TOO_MANY_RECORDS: "more than one record fits",
    SaStatus.INVALID_GID: "the port's GID is not of this subnet",
    SaStatus.INSUF_COMPS: "the group does not exist, and the request names too little to create it",
    SaStatus.UNSUP_METHOD_ATTR: "the SM does not know this request",
}
"""What the kernel's -EINVAL hides: the SA's status in words (facts: SA)."""


class Reset(Enum):
    """Port events that end the port's memberships (facts: SA, -ENETRESET)."""

    PORT_ERR = "the port's link went down"
    LID_CHANGE = "the port was given another LID"
    CLIENT_REREGISTER = "the SM restarted, or another took over"
    PKEY_CHANGE = "the group's P_Key moved in the port's table, or left it"


DELETE_REPEATS = 3

# Plain ints, and names of this module: to look up and to combine enum members costs ten times as much.
_FULL, _SEND_ONLY = int(JoinState.FULL), int(JoinState.SEND_ONLY_FULL)
_STATES = tuple(JoinState(bits) for bits in range(16))
_MASK = McMask.QKEY | McMask.TCLASS | McMask.PKEY | McMask.SL | McMask.FLOW_LABEL | McMask.HOP_LIMIT
_COMPARED = tuple((1 << at, at) for at in range(len(McMemberRecord._fields)) if _MASK >> at & 1)
_JOIN = int(McMask.JOIN)
_SET, _DELETE, _OK = SaMethod.SET, SaMethod.DELETE, SaStatus.OK


class SaMember(ABC):
    """One id's part in a group of the port; a subclass says what becomes of it.

    asked    component mask and record of its join, until the SA has granted it
    refused  the status of an SA that said no
    """

    __slots__ = ("active", "asked", "bits", "group", "left", "refused")

    group: _Group
    asked: tuple[int, McMemberRecord] | None

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.active = self.left = False
        self.asked = None
        self.refused: SaStatus | None = None

    @abstractmethod
    def joined(self, failed: int, record: McMemberRecord | None, why: str) -> None:
        """The outcome: an errno or the group's record, without members' fields; and again with ENETRESET
        when the membership is lost. Never called after it was left.
        """


class _Group:
    """What the port holds of one MGID: how many members by bit, the SA's record, who waits for an answer."""

    __slots__ = ("busy", "full", "held", "mgid", "record", "send_only", "waiting")

    def __init__(self, mgid: Gid) -> None:
        self.mgid = mgid
        self.record: McMemberRecord | None = None
        self.held = 0
        self.full = self.send_only = 0
        self.waiting: deque[SaMember] | None = None  # an empty one takes 600 bytes
        self.busy = False

    def count(self, bits: int, change: int) -> None:
        if bits == _FULL:
            self.full += change
        else:
            self.send_only += change


class SaClient:
    """All SA memberships of the port with that GID."""

    def __init__(self, ask: Ask, port_gid: Gid) -> None:
        self._ask, self._port_gid = ask, port_gid
        self._groups: dict[Gid, _Group] = {}
        self._active: dict[SaMember, None] = {}  # in order of joining

    @property
    def memberships(self) -> dict[Gid, JoinState]:
        """The MGIDs that the port holds, with the bits that the SA granted."""
        return {mgid: _STATES[group.held] for mgid, group in self._groups.items() if group.held}

    def join(self, member: SaMember, mask: int, record: McMemberRecord) -> None:
        """Join one MGID with one bit. A zero MGID makes a group of its own, named by the SA's answer."""
        mgid = record.mgid if isinstance(record.mgid, Gid) else Gid(record.mgid)
        group = self._groups.get(mgid)
        if group is None:
            group = _Group(mgid)
            if mgid != ZERO_GID:
                self._groups[mgid] = group
        member.group, member.asked = group, (mask, record)
        if group.waiting is None:
            group.waiting = deque()
        group.waiting.append(member)
        self._proceed(group)

    def leave(self, member: SaMember) -> None:
        """Leave; during a request in flight the Delete follows its answer."""
        member.left = True
        if member.active:
            member.active = False
            del self._active[member]
            member.group.count(member.bits, -1)
        self._proceed(member.group)

    def look_up(self, mgid: Gid, answered: Callable[[McMemberRecord | None], None]) -> None:
        """Get the group's record as the SA shows it to this port; None: no such group, or no answer."""
        self._ask(
            SaMethod.GET,
            McMask.MGID,
            McMemberRecord(mgid=mgid),
            lambda reply: answered(reply.records[0] if reply is not None and reply.records else None),
        )

    def reset(self, why: Reset, lost: Callable[[McMemberRecord], bool] = lambda record: True) -> None:
        """A port event ends the memberships in the groups that are `lost`: ENETRESET for every active member,
        no Delete, and no join by itself (facts: SA)."""
        known = list(self._groups.values())
        ended: dict[_Group, list[SaMember]] = {
            g: [] for g in known if g.record is not None and lost(g.record)
        }
        for member in self._active:
            if member.group in ended:
                ended[member.group].append(member)
        for group, members in ended.items():
            group.held = group.full = group.send_only = 0
            for member in members:
                member.active = False
                del self._active[member]
                member.joined(errno.ENETRESET, None, f"{why.name}: {why.value}")
            self._proceed(group)

    def _proceed(self, group: _Group) -> None:
        """Serve who waits; then give back what nobody holds any more; one request at a time."""
        while not group.busy:
            if group.waiting:
                member = group.waiting.popleft()
                if not member.left:
                    self._serve(group, member)
                continue
            group.waiting = None
            used = (_FULL if group.full else 0) | (_SEND_ONLY if group.send_only else 0)
            if unused := group.held & ~used:
                self._give_back(group, unused, DELETE_REPEATS)
                continue
            if not group.held:
                group.record = None
                self._groups.pop(group.mgid, None)
            return

    def _serve(self, group: _Group, member: SaMember) -> None:
        assert member.asked is not None
        mask, record = member.asked
        if group.record is None or not group.held & member.bits:
            group.busy = True
            self._ask(_SET, mask, record, lambda reply: self._granted(group, member, reply))
        elif _differs(mask, record, group.record):
            member.joined(errno.EINVAL, None, "it differs from what this port holds of the group")
        else:
            self._activate(group, member)

    def _granted(self, group: _Group, member: SaMember, reply: SaReply | None) -> None:
        group.busy = False
        if reply is not None and reply.status is _OK:
            record = group.record = _of_group(reply.records[0])
            if group.mgid != record.mgid:
                group.mgid = Gid(record.mgid)
            self._groups[group.mgid] = group
            group.held |= member.bits
            if not member.left:
                self._activate(group, member)
        elif member.left:
            pass
        elif reply is None:
            member.joined(errno.ETIMEDOUT, None, "the SA did not answer")
        else:
            status = f"{reply.status.name} ({reply.status:#06x})"
            member.refused = reply.status
            member.joined(errno.EINVAL, None, f"the SA refused with {status}: {MEANING[reply.status]}")
        self._proceed(group)

    def _activate(self, group: _Group, member: SaMember) -> None:
        member.active, member.asked = True, None
        self._active[member] = None
        group.count(member.bits, 1)
        member.joined(0, group.record, "")

    def _give_back(self, group: _Group, bits: int, repeats: int) -> None:
        assert group.record is not None
        group.busy = True

        def answered(reply: SaReply | None) -> None:
            if reply is None and repeats:
                self._give_back(group, bits, repeats - 1)
                return
            group.busy = False
            group.held &= ~bits
            self._proceed(group)

        record = make_record((group.record.mgid, self._port_gid, *group.record[2:16], _STATES[bits], False))
        self._ask(_DELETE, _JOIN, record, answered)


@lru_cache(maxsize=4096)
def _same(record: McMemberRecord) -> McMemberRecord:
    """One object for all ports that hold the same group."""
    return record


def _of_group(answer: McMemberRecord) -> McMemberRecord:
    """An answer without the member's fields."""
    return _same(make_record((answer.mgid, ZERO_GID, *answer[2:16], _STATES[0], False)))


def _differs(mask: int, wanted: McMemberRecord, have: McMemberRecord) -> bool:
    """The local comparison of a second join, as strict as the SA's for the masked fields."""
    return any(mask & bit and wanted[at] != have[at] for bit, at in _COMPARED)
