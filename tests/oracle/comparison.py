"""OpenSM and `sa.py` side by side: every request goes to both, and every answer must be the same."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from mcast.backends.sim.core.sa import IPOIB_QKEY, Quirks, SaGroup, SaMembership, SaReply, SubnetAdmin
from mcast.wire.addresses import ZERO_GID
from mcast.wire.mcmember import MLID_FIRST, McMask, McMemberRecord, SaMethod, SaStatus

from .opensm import ROWS_IN_A_MAD, Answer, NoAnswer, OpenSm
from .requests import (
    HELD,
    HIGHEST_HELD,
    LAST_ASSIGNED,
    LOWEST_HELD,
    METHODS,
    Kind,
    Step,
    plain_mgid,
)
from .topology import HOSTS, Host

IPOIB_SIGNATURES = (b"\x40\x1b", b"\x60\x1b")
UNKNOWN_GUID = 0xDEAD
NO_GROUP = McMemberRecord(mgid=b"\xff\x1f" + bytes(14))
CHECKED_MLIDS = 64
"""MLIDs looked at by `check`, from the first; a subnet with more does not fill them."""


class Difference(AssertionError):
    """OpenSM and the model disagree."""


class Request(NamedTuple):
    host: str
    method: int
    mask: int
    record: McMemberRecord
    sm_key: int

    def __str__(self) -> str:
        mask = McMask(self.mask & (1 << 18) - 1)
        return (
            f"{self.host} method={self.method:#04x} mask={self.mask:#x} ({mask!r}) sm_key={self.sm_key}\n"
            f"    {shown(self.record)}"
        )


class Comparison:
    """One subnet, twice."""

    def __init__(self, opensm: OpenSm, quirks: Quirks = Quirks.OPENSM_3_3) -> None:
        self.quirks = quirks
        self.opensm = opensm
        self.topology = opensm.topology
        self.hosts: dict[str, Host] = {host.name: host for host in self.topology.hosts}
        self.model: SubnetAdmin = self.topology.model(quirks)
        self._empty = self.groups()
        self.compared = 0
        self.statuses: Counter[int | None] = Counter()  # None: no answer
        self._assigned = plain_mgid(1)

    # -- steps

    def take(self, step: Step) -> None:
        """Let one step happen on both sides. Raises Difference."""
        up = self._up(step.host)
        match step.kind:
            case Kind.NOTHING:
                pass
            case Kind.DOWN:
                if step.host not in self.opensm.unlinked and len(self.opensm.unlinked) < len(HOSTS) - 2:
                    self.opensm.unlink(step.host)
                    self.model.port_down(self.hosts[step.host].guid)
            case Kind.UP:
                if self.opensm.unlinked:
                    self._relink(min(self.opensm.unlinked))
            case Kind.RESTART:
                self.opensm.restart_sm()
                self.model.restart()
            case Kind.CHECK:
                self.check()
            case Kind.FILL:
                self._fill(up)
            case _:
                self.compare(self._request(step, up))

    def _up(self, name: str) -> str:
        """The host, or the first that is not down: without a cable there is no request."""
        return (
            name
            if name not in self.opensm.unlinked
            else next(host for host in HOSTS if host not in self.opensm.unlinked)
        )

    def _relink(self, name: str) -> None:
        self.opensm.relink(name)
        self.model.port_up(self.hosts[name].guid)

    def _fill(self, host: str) -> None:
        """Create groups until the MLIDs are used up, where they are few."""
        for number in range(self.topology.mlids if self.topology.mlids <= CHECKED_MLIDS else 2):
            record = self._base(host, plain_mgid(0x10000 + number))
            self.compare(Request(host, SaMethod.SET, int(McMask.CREATE), record, 0))

    def _base(self, host: str, mgid: bytes) -> McMemberRecord:
        gid = self.topology.subnet_prefix + self.hosts[host].guid.to_bytes(8)
        qkey, pkey = 0x01234567, 0xFFFF
        if mgid[2:4] in IPOIB_SIGNATURES:
            qkey, pkey = IPOIB_QKEY, int.from_bytes(mgid[4:6])
        return McMemberRecord(mgid=mgid, port_gid=gid, qkey=qkey, pkey=pkey, join_state=1)

    def _request(self, step: Step, host: str) -> Request:
        target = {"itself": host, "the SM's": self.topology.hosts[0].name}.get(step.target, step.target)
        guid = {"unknown": UNKNOWN_GUID, "zero": 0}.get(target) if target not in self.hosts else None
        if guid is None:
            guid = self.hosts[target].guid
        mgid = self._assigned if step.mgid == LAST_ASSIGNED else step.mgid
        state = step.state
        if state >= HELD:
            group = self.model.group(mgid)
            held = int(group.join_state(guid)) if group else 1
            lowest, highest = held & -held, 1 << held.bit_length() >> 1
            state = {HELD: held, LOWEST_HELD: lowest, HIGHEST_HELD: highest}[state]
        fields: dict[str, Any] = {"port_gid": self.topology.subnet_prefix + guid.to_bytes(8), "mgid": mgid}
        if step.kind is Kind.WILD:
            record = step.wild if step.whole else step.wild._replace(**fields)
            return Request(host, step.method, step.mask, record, 0)
        record = self._base(host, mgid)._replace(**fields, join_state=state)
        mask = {Kind.CREATE: McMask.CREATE, Kind.JOIN: McMask.JOIN, Kind.LEAVE: McMask.JOIN}.get(
            step.kind, step.mask
        )
        mask = int(mask)
        sm_key = 1 if step.kind in (Kind.GET, Kind.TABLE) else 0
        for tweak in step.tweaks:
            values = dict(tweak.values)
            sm_key = values.pop("sm_key", sm_key)
            if prefix := values.pop("prefix", None):
                values["port_gid"] = prefix + guid.to_bytes(8)
            record = record._replace(**values)
            mask = (mask | tweak.on) & ~tweak.off
        return Request(host, METHODS.get(step.kind, step.method), mask, record, sm_key)

    # -- comparing

    def compare(self, request: Request) -> SaReply | None:
        """Send the request both ways. Raises Difference unless status and every field are the same."""
        reply = self.model.handle(self.hosts[request.host].guid, *request[1:])
        self.compared += 1
        expected = None if reply is None else Answer(int(reply.status), self._rows(request, reply))
        try:
            answer = self.opensm.ask(*request) if expected else self._no_answer(request)
        except NoAnswer as heard:
            raise Difference(_both_sides(request, str(heard), expected)) from None
        if answer != expected:
            raise Difference(_both_sides(request, _shown(answer), expected))
        self.statuses[answer.status if answer else None] += 1
        if request.method == SaMethod.SET and request.record.mgid == ZERO_GID and answer and answer.records:
            self._assigned = answer.records[0].mgid
        return reply

    def _no_answer(self, request: Request) -> Answer | None:
        """Send what must not be answered, and then something that makes the client look for an answer."""
        self.opensm.tell(*request)
        self.opensm.ask(request.host, SaMethod.GET, int(McMask.MGID), NO_GROUP)
        return None

    def _rows(self, request: Request, reply: SaReply) -> tuple[McMemberRecord, ...]:
        """The model's records as OpenSM lists them: by MGID, then by GUID read backwards, the first three."""
        rows = sorted(reply.records, key=lambda row: (row.mgid, row.port_gid[:7:-1]))
        return tuple(rows[:ROWS_IN_A_MAD])

    def check(self) -> None:
        """Compare everything: the group under each MLID, and the membership of each port in each group."""
        readers: dict[int, str] = {}  # for each partition, a host that may read its groups
        for host in sorted(self.hosts.values(), key=lambda host: -len(host.pkeys)):
            if host.name in HOSTS and host.name not in self.opensm.unlinked:
                for pkey in host.pkeys:
                    readers.setdefault(pkey & 0x7FFF, host.name)
        used = {group.mlid for group in self.model.groups}
        for mlid in sorted(
            used | set(range(MLID_FIRST, MLID_FIRST + min(CHECKED_MLIDS, self.topology.mlids)))
        ):
            for reader in sorted(set(readers.values())):
                self.compare(Request(reader, SaMethod.GET, int(McMask.MLID), McMemberRecord(mlid=mlid), 0))
        for group in list(self.model.groups):
            if reader := readers.get(group.values.pkey & 0x7FFF, ""):
                for host in self.hosts.values():
                    gid = self.topology.subnet_prefix + host.guid.to_bytes(8)
                    record = McMemberRecord(mgid=group.mgid, port_gid=gid)
                    mask = int(McMask.MGID | McMask.PORT_GID)
                    self.compare(Request(reader, SaMethod.GET, mask, record, 1))

    # -- between sequences

    def clear(self) -> None:
        """Back to the empty subnet, comparing on the way: mend every cable, let every member leave."""
        for name in sorted(self.opensm.unlinked):
            self._relink(name)
        for group in list(self.model.groups):
            for member in list(group.members):
                if member.guid in group.ports and (by := self._leaver(group, member)) is not None:
                    self._leave(group, member, by)
        # A group stays for ever, or somebody else's is the file's now, or nobody here may end a member.
        if self.groups() != self._empty:
            self.take(Step(Kind.RESTART))

    def groups(self) -> dict[bytes, object]:
        return {group.mgid: (group.values, group.full_members, *group.members) for group in self.model.groups}

    def _leave(self, group: SaGroup, member: SaMembership, by: str) -> None:
        gid = self.topology.subnet_prefix + member.guid.to_bytes(8)
        record = McMemberRecord(mgid=group.mgid, port_gid=gid, join_state=member.join_state)
        reply = self.compare(Request(by, SaMethod.DELETE, int(McMask.JOIN), record, 0))
        assert reply, "every request to leave is answered"
        assert reply.status == SaStatus.OK, "the member could not leave"

    def _leaver(self, group: SaGroup, member: SaMembership) -> str | None:
        """A host that may end the membership: its own port, or any of the partition for a proxied one.

        None: the SM's own port was joined by proxy in a partition that no other host has.
        """
        for host in self.hosts.values():
            if host.name in HOSTS and (
                host.guid == member.guid
                or (member.proxy_join and group.values.pkey & 0x7FFF in {p & 0x7FFF for p in host.pkeys})
            ):
                return host.name
        return None

    def begin_anew(self) -> None:
        """After a difference the two sides have parted: a new SM and a new model."""
        for name in sorted(self.opensm.unlinked):
            self.opensm.relink(name)
        self.opensm.restart_sm()
        self.model = self.topology.model(self.quirks)


def shown(record: McMemberRecord) -> str:
    """The record's fields that are not 0, GIDs in hexadecimal."""
    values = record._asdict().items()
    return ", ".join(
        f"{name}={value.hex() if isinstance(value, bytes) else f'{value:#x}'}"
        for name, value in values
        if value
    )


def _shown(answer: Answer | None) -> str:
    if answer is None:
        return "no answer"
    status = SaStatus(answer.status) if answer.status in set(SaStatus) else answer.status
    return "\n           ".join([f"{status!r}", *map(shown, answer.records)])


def _both_sides(request: Request, opensm: str, model: Answer | None) -> str:
    return f"request  {request}\n  OpenSM   {opensm}\n  sa.py    {_shown(model)}"
