"""The kernel's SA client of one port: memberships of many ids, counted per MGID and JoinState bit.

Facts: SA, "One port, many ids". Bits that the port holds already cost no request; requests for one group
are serialised; a bit whose count reaches 0 is left with a Delete that nobody waits for. No clock, no I/O:
`ask(method, mask, record, answered)` sends a request and calls `answered(reply)` later, with None when the
SA stays silent.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable

from mcast.addresses import Gid
from mcast.backends.sim.mapping import ZERO_GID
from mcast.backends.sim.mcmember import JoinState, McMask, McMemberRecord, SaMethod, SaStatus
from mcast.backends.sim.sa import SaReply

Ask = Callable[[SaMethod, int, McMemberRecord, Callable[[SaReply | None], None]], None]
Joined = Callable[[int, McMemberRecord | None], None]

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
    """One id's part in a group of the port. `joined(errno, record)` is called once, unless left before."""

    __slots__ = ("active", "bits", "group", "joined", "left", "mask", "record")

    def __init__(self, group: _Group, mask: int, record: McMemberRecord, joined: Joined) -> None:
        self.group, self.mask, self.record, self.joined = group, mask, record, joined
        self.bits = record.join_state
        self.active = self.left = False


class _Group:
    """What the port holds of one MGID: counts per bit, the SA's record, members that wait for an answer."""

    __slots__ = ("busy", "counts", "held", "mgid", "record", "waiting")

    def __init__(self, mgid: Gid) -> None:
        self.mgid = mgid
        self.record: McMemberRecord | None = None
        self.held = JoinState(0)
        self.counts: dict[int, int] = dict.fromkeys(_BITS, 0)
        self.waiting: deque[SaMembership] = deque()
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
            member.group.counts[member.bits] -= 1
        self._proceed(member.group)

    def _proceed(self, group: _Group) -> None:
        """Serve who waits; then give back what nobody holds any more; one request at a time."""
        while not group.busy:
            if group.waiting:
                member = group.waiting.popleft()
                if not member.left:
                    self._serve(group, member)
            elif unused := [bit for bit in _BITS if group.held & bit and not group.counts[bit]]:
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
            member.joined(errno.EINVAL, None)
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
        elif not member.left:
            member.joined(errno.ETIMEDOUT if reply is None else errno.EINVAL, None)
        self._proceed(group)

    def _activate(self, group: _Group, member: SaMembership) -> None:
        member.active = True
        group.counts[member.bits] += 1
        member.joined(0, group.record)

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
