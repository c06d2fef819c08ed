"""The kernel's SA client of one port: memberships of many ids, counted for each MGID and JoinState bit.

Source: SA-SHARE-1, SA-SHARE-2. No clock, no I/O: `ask(method, mask, record, answered)` sends a request and
calls `answered(reply)` later, with None when the SA does not answer.

A group has at most one request in flight:

    idle     --a join with a bit that the port lacks-->     joining (Set)     --reply, or none--> idle
    idle     --a bit that no member has any more-->         leaving (Delete)  --reply-->          idle
    leaving  --no reply, up to MAX_DELETE_RETRIES times-->  leaving (Delete again), then idle

A join with a bit that the port already holds costs no request: the client compares it with the record that
it has. Joins that meet a request in flight wait in order; each reply calls `advance`, which serves them
before it gives bits back. A group with neither bits nor waiting members is forgotten.

A member gets the outcome of its join by `on_join_result`: once when the join is complete, and once more, with
ENETRESET, if a port event ends the membership (`reset`). A member that has left is never called. If it leaves
while its Set is in flight, the Delete follows the answer (SA-CANCEL-1).

Deliberately not handled: joining again after a reset, which is up to the program (SA-RESET-2), and the
outcome of the last Delete, on which nobody waits.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Protocol

from mcast.wire.addresses import ZERO_GID, Gid
from mcast.wire.mcmember import (
    JOIN_STATES,
    JoinState,
    McMask,
    McMemberRecord,
    SaMethod,
    SaStatus,
    field_getter,
    make_record,
)


class Reply(Protocol):
    """An answer of the SA: `records` is empty unless `status` is OK."""

    @property
    def status(self) -> SaStatus: ...
    @property
    def records(self) -> tuple[McMemberRecord, ...]: ...


SendSaRequest = Callable[[SaMethod, int, McMemberRecord, Callable[[Reply | None], None]], object]

STATUS_TEXT = {
    SaStatus.NO_RESOURCES: "no MLID is left, or the SA is out of another resource",
    SaStatus.REQ_INVALID: "a field does not fit the group, the partition or what the SM can do",
    SaStatus.NO_RECORDS: "there is no such record",
    SaStatus.TOO_MANY_RECORDS: "more than one record fits",
    SaStatus.INVALID_GID: "the port's GID is not of this subnet",
    SaStatus.INSUF_COMPS: "the group does not exist, and the request names too little to create it",
    SaStatus.UNSUP_METHOD_ATTR: "the SM does not know this request",
}
"""The SA's status in words, which the kernel hides behind -EINVAL (SA-STATUS-1)."""


class ResetReason(Enum):
    """Port events that end the port's memberships (SA-RESET-1)."""

    PORT_ERR = "the port's link went down"
    LID_CHANGE = "the port was given another LID"
    CLIENT_REREGISTER = "the SM restarted, or another took over"
    PKEY_CHANGE = "the group's P_Key moved in the port's table, or left it"


MAX_DELETE_RETRIES = 3

# Plain ints of this module, because looking up and combining enum members takes ten times as long.
_FULL, _SEND_ONLY = int(JoinState.FULL), int(JoinState.SEND_ONLY_FULL)
_COMPARED = int(McMask.COMPARED | McMask.PKEY)
_JOIN = int(McMask.JOIN)
_SET, _DELETE, _OK = SaMethod.SET, SaMethod.DELETE, SaStatus.OK


class SaMember(ABC):
    """One id's part in a group of the port. A subclass decides what the outcome changes.

    bits     the one JoinState bit that it joins with
    request  component mask and record of its join, until the SA has granted it
    refused  the status of an SA that refused the join

    `SaClient.join` sets all but `bits`.
    """

    __slots__ = ("active", "bits", "group", "left", "refused", "request")

    bits: int
    group: _Group
    request: tuple[int, McMemberRecord] | None
    refused: SaStatus | None
    active: bool
    left: bool

    @abstractmethod
    def on_join_result(self, failed: int, record: McMemberRecord | None, why: str) -> None:
        """Take the outcome: an errno, or the group's record without members' fields.

        Called again with ENETRESET when the membership is lost; never called after the member left.
        """


class _Group:
    """Memberships of the port in one MGID, and the one request in flight about it.

    held, record       the bits that the SA granted, and its record
    full, send_only    how many members have each bit
    joining, leaving   the member of a Set, or the bits of a Delete, which is repeated up to `retries` times
    waiting            the members that wait for an answer
    """

    __slots__ = (
        "client",
        "full",
        "held",
        "joining",
        "leaving",
        "mgid",
        "record",
        "retries",
        "send_only",
        "waiting",
    )

    def __init__(self, client: SaClient, mgid: Gid) -> None:
        self.mgid: Gid = mgid
        self.client: SaClient = client
        self.record: McMemberRecord | None = None
        self.held: int = 0
        self.full: int = 0
        self.send_only: int = 0
        self.joining: SaMember | None = None
        self.leaving: int = 0
        self.retries: int = 0
        self.waiting: deque[SaMember] | None = None  # an empty one takes 600 bytes

    def join(self, member: SaMember) -> None:
        if self.joining is None and not self.leaving:
            self._start_join(member)
            return
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append(member)

    def advance(self) -> None:
        """Serve the members that wait, then give back bits that no member has any more.

        One request is under way at a time.
        """
        while self.joining is None and not self.leaving:
            if self.waiting:
                member = self.waiting.popleft()
                if not member.left:
                    self._start_join(member)
                continue
            self.waiting = None
            if not self.held:
                self.record = None
                self.client.forget(self)
                return
            used = (_FULL if self.full else 0) | (_SEND_ONLY if self.send_only else 0)
            if not (unused := self.held & ~used):
                return
            self.retries = MAX_DELETE_RETRIES
            self._send_delete(unused)

    def _start_join(self, member: SaMember) -> None:
        assert member.request is not None
        mask, record = member.request
        if self.record is None or not self.held & member.bits:
            self.joining = member
            self.client.ask(_SET, mask, record, self._on_join_reply)
        elif _differs(mask, record, self.record):
            member.on_join_result(errno.EINVAL, None, "it differs from what this port holds of the group")
        else:
            self._activate(member)

    def _on_join_reply(self, reply: Reply | None) -> None:
        member, self.joining = self.joining, None
        assert member is not None
        if reply is not None and reply.status is _OK:
            answer = reply.records[0]
            self.record = _of_group(answer.mgid, answer[2:16])
            if self.mgid != answer.mgid:  # it was zero
                self.mgid = Gid(answer.mgid)
                self.client.groups[self.mgid] = self
            self.held |= member.bits
            if not member.left:
                self._activate(member)
        elif member.left:
            pass
        elif reply is None:
            member.on_join_result(errno.ETIMEDOUT, None, "the SA did not answer")
        else:
            status = f"{reply.status.name} ({reply.status:#06x})"
            member.refused = reply.status
            member.on_join_result(
                errno.EINVAL, None, f"the SA refused with {status}: {STATUS_TEXT[reply.status]}"
            )
        self.advance()

    def _activate(self, member: SaMember) -> None:
        member.active, member.request = True, None
        self.client.active[member] = None
        if member.bits == _FULL:
            self.full += 1
        else:
            self.send_only += 1
        member.on_join_result(0, self.record, "")

    def _send_delete(self, bits: int) -> None:
        assert self.record is not None
        self.leaving = bits
        shared = self.record[2:16]
        record = make_record((self.record.mgid, self.client.port_gid, *shared, JOIN_STATES[bits], False))
        self.client.ask(_DELETE, _JOIN, record, self._on_delete_reply)

    def _on_delete_reply(self, reply: Reply | None) -> None:
        if reply is None and self.retries:
            self.retries -= 1
            self._send_delete(self.leaving)
            return
        self.held &= ~self.leaving
        self.leaving = 0
        self.advance()


class SaClient:
    """All SA memberships of the port with that GID."""

    __slots__ = ("active", "ask", "groups", "port_gid")

    def __init__(self, ask: SendSaRequest, port_gid: Gid) -> None:
        self.ask: SendSaRequest = ask
        self.port_gid: Gid = port_gid
        self.groups: dict[Gid, _Group] = {}
        self.active: dict[SaMember, None] = {}  # in order of joining

    @property
    def memberships(self) -> dict[Gid, JoinState]:
        """The MGIDs that the port holds, with the bits that the SA granted."""
        return {mgid: JOIN_STATES[group.held] for mgid, group in self.groups.items() if group.held}

    def join(self, member: SaMember, mask: int, record: McMemberRecord) -> None:
        """Join one MGID with one bit.

        A zero MGID makes a group of its own, whose name is in the SA's answer.
        """
        mgid = record.mgid if isinstance(record.mgid, Gid) else Gid(record.mgid)
        group = self.groups.get(mgid)
        if group is None:
            group = _Group(self, mgid)
            if mgid != ZERO_GID:
                self.groups[mgid] = group
        member.group, member.request, member.refused = group, (mask, record), None
        member.active = member.left = False
        group.join(member)

    def leave(self, member: SaMember) -> None:
        """Leave; if a request is in flight, the Delete follows its answer (SA-CANCEL-1)."""
        member.left = True
        group = member.group
        if member.active:
            member.active = False
            del self.active[member]
            if member.bits == _FULL:
                group.full -= 1
            else:
                group.send_only -= 1
        group.advance()

    def forget(self, group: _Group) -> None:
        """Forget the group, of which the port has nothing left.

        Another group with its MGID may be there by now, and stays.
        """
        if self.groups.get(group.mgid) is group:
            del self.groups[group.mgid]

    def query(self, mgid: Gid, answered: Callable[[McMemberRecord | None], None]) -> None:
        """Get the group's record as the SA shows it to this port; None: no such group, or no answer."""
        self.ask(
            SaMethod.GET,
            McMask.MGID,
            McMemberRecord(mgid=mgid),
            lambda reply: answered(reply.records[0] if reply is not None and reply.records else None),
        )

    def reset(self, why: ResetReason, lost: Callable[[McMemberRecord], bool] = lambda record: True) -> None:
        """End the memberships in the groups that are `lost` by a port event.

        ENETRESET for every active member, no Delete, and no join by itself (SA-RESET-2).
        """
        known = list(self.groups.values())
        ended: dict[_Group, list[SaMember]] = {
            g: [] for g in known if g.record is not None and lost(g.record)
        }
        for member in self.active:
            if member.group in ended:
                ended[member.group].append(member)
        for group, members in ended.items():
            group.held = group.full = group.send_only = 0
            for member in members:
                member.active = False
                del self.active[member]
                member.on_join_result(errno.ENETRESET, None, f"{why.name}: {why.value}")
            group.advance()


@lru_cache(maxsize=4096)
def _of_group(mgid: bytes, shared: tuple[bytes | int, ...]) -> McMemberRecord:
    """The record without a member's fields; one object for all ports of a group."""
    return make_record((mgid, ZERO_GID, *shared, JOIN_STATES[0], False))


def _differs(mask: int, wanted: McMemberRecord, have: McMemberRecord) -> bool:
    """The local comparison of a second join, as strict as the SA's for the masked fields."""
    if not (compared := mask & _COMPARED):
        return False
    fields = field_getter(compared)
    return fields(wanted) != fields(have)
