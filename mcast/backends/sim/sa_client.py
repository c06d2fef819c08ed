"""The kernel's SA client of one port: memberships of many ids, counted per MGID and JoinState bit.

Facts: SA, "One port, many ids". Bits that the port holds already cost no request; requests for one group
are serialised; a bit whose count reaches 0 is left with a Delete that nobody waits for. No clock, no I/O:
`ask(method, mask, record, answered)` sends a request and calls `answered(reply)` later, with None when the
SA stays silent.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import Enum

from mcast.addresses import Gid
from mcast.backends.sim.sa import SaReply
from mcast.mapping import ZERO_GID
from mcast.mcmember import JoinState, McMask, McMemberRecord, SaMethod, SaStatus

Ask = Callable[[SaMethod, int, McMemberRecord, Callable[[SaReply | None], None]], None]
Joined = Callable[[int, McMemberRecord | None, str], None]

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

_BITS = (JoinState.FULL, JoinState.SEND_ONLY_FULL)
_COMPARED = {
    McMask.QKEY: "qkey",
    McMask.TCLASS: "tclass",
    McMask.PKEY: "pkey",
    McMask.SL: "sl",
    McMask.FLOW_LABEL: "flow_label",
    McMask.HOP_LIMIT: "hop_limit",
}


class SaMembership:
    """One id's part in a group of the port. `joined(errno, record, why)` is called with the
    outcome, and again with ENETRESET when the membership is lost; never after it was left. `refused` is the
    status of an SA that said no."""

    __slots__ = ("active", "bits", "group", "joined", "left", "mask", "record", "refused")

    def __init__(self, group: _Group, mask: int, record: McMemberRecord, joined: Joined) -> None:
        self.group, self.mask, self.record, self.joined = group, mask, record, joined
        self.bits = record.join_state
        self.active = self.left = False
        self.refused: SaStatus | None = None


class _Group:
    """What the port holds of one MGID: members by bit, the SA's record, members that wait for an answer."""

    __slots__ = ("active", "busy", "held", "mgid", "record", "waiting")

    def __init__(self, mgid: Gid) -> None:
        self.mgid = mgid
        self.record: McMemberRecord | None = None
        self.held = JoinState(0)
        self.active: dict[int, dict[SaMembership, None]] = {}
        self.waiting: list[SaMembership] = []  # an empty deque takes 600 bytes
        self.busy = False


class SaClient:
    """All SA memberships of a port."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._groups: dict[Gid, _Group] = {}

    @property
    def memberships(self) -> dict[Gid, JoinState]:
        """The MGIDs that the port holds, with the bits that the SA granted."""
        return {mgid: group.held for mgid, group in self._groups.items() if group.held}

    def join(self, mask: int, record: McMemberRecord, joined: Joined) -> SaMembership:
        """Join one MGID with one bit. A zero MGID makes a group of its own, named by the SA's answer."""
        mgid = Gid(record.mgid)
        group = self._groups.get(mgid)
        if group is None:
            group = _Group(mgid)
            if mgid != ZERO_GID:
                self._groups[mgid] = group
        member = SaMembership(group, mask, record, joined)
        group.waiting.append(member)
        self._proceed(group)
        return member

    def leave(self, member: SaMembership) -> None:
        """Leave; during a request in flight the Delete follows its answer."""
        member.left = True
        if member.active:
            member.active = False
            del member.group.active[member.bits][member]
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
        for group in list(self._groups.values()):
            if group.record is not None and lost(group.record):
                members = [member for some in group.active.values() for member in some]
                group.active.clear()
                group.held = JoinState(0)
                for member in members:
                    member.active = False
                    member.joined(errno.ENETRESET, None, f"{why.name}: {why.value}")
                self._proceed(group)

    def _proceed(self, group: _Group) -> None:
        """Serve who waits; then give back what nobody holds any more; one request at a time."""
        while not group.busy:
            if group.waiting:
                member = group.waiting.pop(0)
                if not member.left:
                    self._serve(group, member)
            elif unused := [bit for bit in _BITS if group.held & bit and not group.active.get(bit)]:
                self._give_back(group, JoinState(sum(unused)), DELETE_REPEATS)
            else:
                if not group.held:
                    group.record = None
                    self._groups.pop(group.mgid, None)
                return

    def _serve(self, group: _Group, member: SaMembership) -> None:
        if group.record is None or not group.held & member.bits:
            group.busy = True
            self._ask(
                SaMethod.SET, member.mask, member.record, lambda reply: self._granted(group, member, reply)
            )
        elif _differs(member.mask, member.record, group.record):
            member.joined(errno.EINVAL, None, "it differs from what this port holds of the group")
        else:
            self._activate(group, member)

    def _granted(self, group: _Group, member: SaMembership, reply: SaReply | None) -> None:
        group.busy = False
        if reply is not None and reply.status is SaStatus.OK:
            group.record = reply.records[0]
            group.mgid = Gid(group.record.mgid)
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

    def _activate(self, group: _Group, member: SaMembership) -> None:
        member.active = True
        group.active.setdefault(member.bits, {})[member] = None
        member.joined(0, group.record, "")

    def _give_back(self, group: _Group, bits: JoinState, repeats: int) -> None:
        assert group.record is not None
        group.busy = True

        def answered(reply: SaReply | None) -> None:
            if reply is None and repeats:
                self._give_back(group, bits, repeats - 1)
                return
            group.busy = False
            group.held &= ~bits
            self._proceed(group)

        self._ask(SaMethod.DELETE, McMask.JOIN, group.record._replace(join_state=bits), answered)


def _differs(mask: int, wanted: McMemberRecord, have: McMemberRecord) -> bool:
    """The local comparison of a second join, as strict as the SA's for the masked fields."""
    return any(mask & bit and getattr(wanted, name) != getattr(have, name) for bit, name in _COMPARED.items())
