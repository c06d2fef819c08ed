"""The table of causes: a fabric shows every row, every error has rows, and all texts are made of them."""

from __future__ import annotations

import ast
import errno as E
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

import mcast
from mcast.api import (
    CmEvent,
    CmId,
    Destination,
    EventChannel,
    Gid,
    JoinAttrEx,
    LinkLayer,
    McastAddress,
    McastError,
    Mgid,
    Phase,
    PortSpace,
    QpError,
    QpInit,
    QpState,
    QpType,
    QueuePair,
    WcStatus,
    mcast_error,
)
from mcast.backends.sim import Fabric, Limits, open_fabric
from mcast.backends.sim.clock import SimulationStalled, VirtualClock
from mcast.backends.sim.faults import Drop, Refuse, Requests
from mcast.backends.sim.trace.events import SaAsked
from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.endpoint.policy import Lost
from mcast.errors.cause import Cause, Row
from mcast.errors.causes import atlas, causes_of_status, errno_name, likely_causes
from mcast.errors.rows import FILE, ROWS
from mcast.wire.mcmember import SaStatus

ROOT = Path(mcast.__file__).parent
GROUP, OTHER = "239.1.1.1", "239.2.2.2"
BROADCAST = Mgid("ff12:401b:ffff::ffff:ffff")


class Host:
    """An id bound to a port, on a channel of its own."""

    def __init__(self, fabric: Fabric, *, space: PortSpace = PortSpace.UDP, bound: bool = True) -> None:
        self.fabric = fabric
        self.channel: EventChannel = open_fabric(fabric).event_channel()
        self.id: CmId = self.channel.create_id(space)
        if bound:
            self.id.bind_addr("10.0.0.1")

    @property
    def qp(self) -> QueuePair:
        return self.id.qp or self.id.create_qp()

    def join(self, group: str | Mgid = GROUP, send_only: bool = False) -> CmEvent:
        how = JoinAttrEx.send_only if send_only else JoinAttrEx.full_member
        self.id.join_multicast_ex(how(group))
        event = self.channel.get_event(timeout=20)
        assert event is not None
        return event.check()


def roce(**options: object) -> Fabric:
    return Fabric.roce(ports=2, **options)  # type: ignore[arg-type]


def infiniband(**options: object) -> Fabric:
    return Fabric.infiniband(ports=2, **options)  # type: ignore[arg-type]


def refused_by_sa(status: SaStatus) -> None:
    fabric = infiniband()
    with fabric.rules.when(Requests(), Refuse(status)):
        Host(fabric).join()


def forged(**wrong: Any) -> JoinAttrEx:
    right: dict[str, Any] = {"comp_mask": 3, "join_flags": 0, "addr": McastAddress.of(GROUP)}
    return JoinAttrEx.model_construct(**(right | wrong))


NO_ADDRESS = McastAddress.model_construct(address=None)
"""Of no family."""


def after_close() -> None:
    host = Host(roce())
    host.id.close()
    host.join()


def stalled() -> None:
    Host(roce()).channel.get_event(timeout=None)


def bound_twice() -> None:
    Host(roce()).id.bind_addr("10.0.0.2")


def resolved_twice() -> None:
    host = Host(roce(), bound=False)
    host.id.resolve_addr(GROUP, "10.0.0.1")
    host.id.resolve_addr(GROUP, "10.0.0.1")


def second_qp() -> None:
    host = Host(roce())
    host.id.create_qp()
    host.id.create_qp()


def joined_twice() -> None:
    host = Host(roce())
    host.join()
    host.join()


def one_qp_too_many() -> None:
    fabric = roce(limits=Limits(qps_per_group=1))
    for _ in range(2):
        host = Host(fabric)
        host.id.create_qp()
        host.join()


def joined_where_the_device_went() -> None:
    fabric = roce()
    host = Host(fabric)
    fabric.remove_device(fabric.ports[0])
    host.id.join_multicast(GROUP)


def told_that_the_device_went() -> None:
    fabric = roce()
    host = Host(fabric)
    fabric.remove_device(fabric.ports[0])
    event = host.channel.get_event(timeout=1)
    assert event is not None
    event.check()


def left_where_the_device_went() -> None:
    fabric = roce()
    host = Host(fabric)
    host.join()
    fabric.remove_device(fabric.ports[0])
    host.id.leave_multicast(GROUP)


def silent_sa() -> None:
    fabric = infiniband()
    with fabric.rules.when(Requests(), Drop()):
        Host(fabric).join()


def address_removed() -> None:
    fabric = roce()
    host = Host(fabric)
    fabric.set_ipv4(fabric.ports[0], None)
    host.join()


def sm_restarted() -> None:
    fabric = infiniband()
    host = Host(fabric)
    host.join()
    fabric.restart_sm()
    event = host.channel.get_event(timeout=20)
    assert event is not None
    event.check()


def no_send_only() -> None:
    fabric = infiniband()
    assert fabric.sa is not None
    fabric.sa.send_only_full_member = False
    Host(fabric).join(send_only=True)


def foreign_partition() -> None:
    """The port is taken out of the partition in which its id is bound."""
    fabric = infiniband(partitions={0x8001: [0]})
    host = Host(fabric, bound=False)
    host.id.bind_addr("10.1.0.1")
    interface = fabric.ports[0].interfaces[1]
    kept = interface.broadcast
    fabric.set_pkeys(fabric.ports[0], [0xFFFF])
    interface.broadcast = kept  # the kernel has not heard of it yet
    host.join()


def no_partition() -> None:
    fabric = infiniband()
    host = Host(fabric)
    fabric.set_pkeys(fabric.ports[0], [])
    host.id.create_qp()


def left_twice() -> None:
    host = Host(roce())
    host.join()
    host.id.leave_multicast(GROUP)
    host.id.leave_multicast(GROUP)


def attach(gid: str, lid: int = 0, fabric: Fabric | None = None, kind: QpType = QpType.UD) -> QueuePair:
    space = PortSpace.UDP if kind is QpType.UD else PortSpace.TCP
    qp = Host(fabric or roce(), space=space).id.create_qp(QpInit(qp_type=kind))
    qp.attach_mcast(gid, lid)
    return qp


def without_multicast() -> Fabric:
    fabric = roce()
    fabric.ports[0].multicast = False
    return fabric


def detach(gid: str, kind: QpType = QpType.UD, fabric: Fabric | None = None) -> None:
    space = PortSpace.UDP if kind is QpType.UD else PortSpace.TCP
    Host(fabric or roce(), space=space).id.create_qp(QpInit(qp_type=kind)).detach_mcast(gid, 0)


def attach_beyond_limit() -> None:
    fabric = roce(limits=Limits(groups=1))
    qp = attach("ff0e::1", 0, fabric)
    qp.attach_mcast("ff0e::2", 0)


def sent(change: Callable[[Destination], Destination] = lambda to: to, size: int = 1, state: int = 0) -> None:
    host = Host(roce())
    qp = host.qp
    ud = host.join().ud
    assert ud is not None
    if state:
        qp.modify(QpState.RESET)
    qp.send(change(ud.destination), [bytes(size)])


def sent_over_a_halted_queue() -> None:
    host = Host(roce())
    qp = host.qp
    ud = host.join().ud
    assert ud is not None
    qp.modify(QpState.SQD)
    qp.send(ud.destination, [b"x"], timeout=0.01)


def sent_by_rc() -> None:
    qp = Host(roce(), space=PortSpace.TCP).id.create_qp(QpInit(qp_type=QpType.RC))
    qp.send(Destination(gid=Gid("::ffff:239.1.1.1")), [b"x"])


def failed(call: str, status: WcStatus) -> None:
    fabric = roce()
    host = Host(fabric)
    qp = host.qp
    ud = host.join().ud
    assert ud is not None
    fabric.fail_qp(qp.core, status)  # type: ignore[attr-defined]
    if call == "send":
        qp.send(ud.destination, [b"x"])
    else:
        qp.recv(timeout=1)


def registered_in_err() -> None:
    qp = Host(roce()).qp
    qp.modify(QpState.ERR)
    qp.register(bytearray(4096), recv_slot=2048)


def registered_in_use() -> None:
    host = Host(roce())
    qp = host.qp
    ud = host.join().ud
    assert ud is not None
    qp.send(ud.destination, [b"x"])
    with qp.recv(timeout=1):
        qp.register(bytearray(4096), recv_slot=2048)


def copied_from_device() -> None:
    host, memory = Host(roce()), os.memfd_create("device")
    os.truncate(memory, 4096)
    host.qp.register_dmabuf(memory, 4096, recv_slot=1024)
    os.close(memory)
    host.qp.recv_one(0)


def endpoint(fabric: Fabric) -> mcast.Endpoint:
    return mcast.open_endpoint(open_fabric(fabric), "10.0.0.1", rejoin=None)


def endpoint_without_multicast() -> None:
    with endpoint(roce(limits=Limits(groups=0))) as there:
        there.join(GROUP)


def endpoint_on_ipv6() -> None:
    fabric = roce()
    with mcast.open_endpoint(open_fabric(fabric), fabric.ports[0].addresses[1]) as there:
        there.sender(GROUP)


def alone() -> None:
    with endpoint(roce()) as there:
        there.join(GROUP).ready(members=1, timeout=0.1)


def unheeded() -> None:
    with open_fabric(roce()) as backend:
        one, other = (mcast.open_endpoint(backend, f"10.0.0.{number}") for number in (1, 2))
        other.join(GROUP)
        one.join(GROUP).ready(members=1, timeout=0.1)


def away() -> None:
    fabric = roce()
    with mcast.open_endpoint(open_fabric(fabric), "10.0.0.1") as there:
        there.join(GROUP)
        fabric.remove_device(fabric.ports[0])
        assert isinstance(there.next_event(timeout=1), Lost)
        there.join(OTHER)


def moved() -> None:
    fabric = roce()
    with endpoint(fabric) as there:
        there.join(GROUP)
        fabric.bond_failover(fabric.ports[0])
        lost = there.next_event(timeout=1)
        assert isinstance(lost, Lost)
        raise lost.error


SHOWN: dict[tuple[Phase | None, str], Callable[[], object]] = {
    (None, "the object was closed or destroyed before"): after_close,
    (None, "a call without timeout waits for what nothing on this fabric will ever cause"): stalled,
    (Phase.BIND, "the address is on no local interface"): lambda: Host(roce(), bound=False).id.bind_addr(
        "10.9.9.9"
    ),
    (Phase.BIND, "PortSpace.IPOIB binds on InfiniBand alone"): lambda: Host(roce(), space=PortSpace.IPOIB),
    (Phase.BIND, "the id is bound, or being resolved, already"): bound_twice,
    (Phase.RESOLVE, "no route leads to the group, and no source was given"): lambda: Host(
        roce(), bound=False
    ).id.resolve_addr(GROUP),
    (Phase.RESOLVE, "the source is on no local interface"): lambda: Host(roce(), bound=False).id.resolve_addr(
        GROUP, "10.9.9.9"
    ),
    (Phase.RESOLVE, "the id is resolved, or being resolved, already"): resolved_twice,
    (Phase.CREATE_QP, "the id is bound to no device"): lambda: Host(roce(), bound=False).id.create_qp(),
    (Phase.CREATE_QP, "the id has a QP already"): second_qp,
    (Phase.CREATE_QP, "the QP type does not go with the port space"): lambda: Host(roce()).id.create_qp(
        QpInit(qp_type=QpType.RC)
    ),
    (Phase.CREATE_QP, "a queue is deeper than the device allows"): lambda: Host(
        roce(limits=Limits(queue_depth=8))
    ).id.create_qp(QpInit(max_recv_wr=9)),
    (Phase.CREATE_QP, "the port's P_Key table lacks the partition of the id's address"): no_partition,
    (Phase.CREATE_QP, "the device, or its driver, cannot keep a QP's own multicast from it"): lambda: Host(
        roce()
    ).id.create_qp(QpInit(block_loopback=True)),
    (Phase.JOIN, "the id is not bound to a device; 0.0.0.0 and 127.0.0.1 bind to none"): lambda: Host(
        roce(), bound=False
    ).join(),
    (Phase.JOIN, "the id is of a port space without UD"): lambda: Host(roce(), space=PortSpace.TCP).join(),
    (Phase.JOIN, "comp_mask or join_flags is none that exists"): lambda: Host(roce()).id.join_multicast_ex(
        forged(join_flags=2)
    ),
    (Phase.JOIN, "the group is a unicast or the zero address, or of an unknown family"): lambda: Host(
        roce()
    ).id.join_multicast_ex(forged(addr=NO_ADDRESS)),
    (
        Phase.JOIN,
        "the SA refused: Q_Key, P_Key, SL, flow label, traffic class, MTU or rate are not the group's",
    ): lambda: refused_by_sa(SaStatus.REQ_INVALID),
    (Phase.JOIN, "the SA refused: this port is no member of the group's partition"): lambda: refused_by_sa(
        SaStatus.REQ_INVALID
    ),
    (Phase.JOIN, "the SM does not know send-only full members"): lambda: refused_by_sa(SaStatus.REQ_INVALID),
    (Phase.JOIN, "the SA refused: no MLID is left for another group"): lambda: Host(
        infiniband(max_mlid=0xC000)
    ).join(),
    (Phase.JOIN, "the SA refused the port's GID: it is not of this subnet"): lambda: refused_by_sa(
        SaStatus.INVALID_GID
    ),
    (
        Phase.JOIN,
        "the group does not exist, and the request names too little to create it",
    ): lambda: refused_by_sa(SaStatus.INSUF_COMPS),
    (Phase.JOIN, "a reserved bit of comp_mask is set"): lambda: Host(roce()).id.join_multicast_ex(
        forged(comp_mask=7)
    ),
    (Phase.JOIN, "RoCEv2 carries no IPv6 group and no raw MGID"): lambda: Host(roce()).join("ff0e::1"),
    (Phase.JOIN, "the IPoIB broadcast group is unknown on this port"): lambda: Host(
        infiniband(ipoib=False)
    ).join(),
    (Phase.JOIN, "this id joined that group before: the first leave would detach for both"): joined_twice,
    (
        Phase.JOIN,
        "the group has all the QPs that the device allows, or the device all its groups",
    ): one_qp_too_many,
    (Phase.JOIN, "the SA did not answer"): silent_sa,
    (Phase.JOIN, "the device was removed"): joined_where_the_device_went,
    (Phase.JOIN, "the address that the id is bound to was removed"): address_removed,
    (
        Phase.JOIN,
        "the port or the SM restarted, or the port's LID or P_Key changed: the membership is gone",
    ): sm_restarted,
    (Phase.LEAVE, "the id has not joined exactly this address and port"): lambda: Host(
        roce()
    ).id.leave_multicast(GROUP),
    (Phase.LEAVE, "the group was left before"): left_twice,
    (Phase.LEAVE, "the address is of an unknown family"): lambda: Host(roce()).id.leave_multicast(NO_ADDRESS),
    (Phase.LEAVE, "the device was removed"): left_where_the_device_went,
    (Phase.ATTACH, "the QP is not UD"): lambda: attach("ff0e::1", kind=QpType.RC),
    (Phase.ATTACH, "the GID is not a multicast GID"): lambda: attach("fe80::1"),
    (Phase.ATTACH, "the MLID is outside 0xC000..0xFFFE"): lambda: attach("ff0e::1", 1, infiniband()),
    (
        Phase.ATTACH,
        "the QP is attached to this MGID with another MLID: the kernel would leak the attachment",
    ): lambda: attach("ff0e::1", 1).attach_mcast("ff0e::1", 2),
    (Phase.ATTACH, "max_mcast_qp_attach or max_mcast_grp is reached"): attach_beyond_limit,
    (Phase.ATTACH, "the device has no multicast"): lambda: attach("ff0e::1", fabric=without_multicast()),
    (
        Phase.DETACH,
        "the QP is not attached with exactly this MGID and MLID, or was detached before",
    ): lambda: detach("ff0e::1"),
    (Phase.DETACH, "the GID is not multicast, or the QP is not UD"): lambda: detach("ff0e::1", QpType.RC),
    (Phase.DETACH, "the device has no multicast"): lambda: detach("ff0e::1", fabric=without_multicast()),
    (Phase.MODIFY, "the state machine has no such step"): lambda: Host(roce()).qp.modify(QpState.INIT),
    (
        Phase.EVENT,
        "the device was removed, and every membership on it has ended",
    ): told_that_the_device_went,
    (Phase.SEND, "UD carries at most one MTU in a message; a longer one would vanish"): lambda: sent(
        size=1025
    ),
    (Phase.SEND, "the QP is not in RTS"): lambda: sent(state=1),
    (Phase.SEND, "the destination's port or GID does not exist on this device"): lambda: sent(
        lambda to: to.model_copy(update={"port_num": 2})
    ),
    (Phase.SEND, "the destination has no GRH, which RoCE always needs"): lambda: sent(
        lambda to: to.model_copy(update={"is_global": False})
    ),
    (Phase.SEND, "the QP is not UD"): sent_by_rc,
    (Phase.SEND, "the source GID that the destination names has gone with its address"): lambda: sent(
        lambda to: to.model_copy(update={"sgid_index": 9})
    ),
    (
        Phase.SEND,
        "the send queue stayed full or halted for the whole timeout",
    ): sent_over_a_halted_queue,
    **{
        (phase, row.cause.why): lambda call=phase.value, status=row.status: failed(  # type: ignore[misc]
            call, WcStatus[status or "FATAL_ERR"]
        )
        for phase in (Phase.SEND, Phase.RECV)
        for row in ROWS
        if row.phase is phase and row.errno == E.EIO
    },
    (Phase.BIND, "the device or its driver has no multicast"): endpoint_without_multicast,
    (
        Phase.JOIN,
        "the endpoint is bound to an IPv6 address, and RoCE sends to an IPv4 group from an IPv4 address",
    ): endpoint_on_ipv6,
    (Phase.JOIN, "the device was removed, and the endpoint waits for the device to come back"): away,
    (Phase.RECV, "fewer members than asked for have joined yet"): alone,
    (
        Phase.RECV,
        "the others are in no call: a member answers inside calls that receive, send or close",
    ): unheeded,
    (Phase.RECV, "the fabric does not deliver the group to them, or their answers to this port"): alone,
    (
        Phase.EVENT,
        "the port's address moved to another link (ADDR_CHANGE): memberships stay with the old one",
    ): moved,
    (Phase.REGISTER, "the QP is in ERR, where its receive memory stays as it is"): registered_in_err,
    (Phase.REGISTER, "messages are queued or leased, so the receive memory is in use"): registered_in_use,
    (
        Phase.RECV,
        "messages arrive in the memory of another device, which the CPU cannot read",
    ): copied_from_device,
}
"""Each row that a simulated fabric can show, by phase and reason, and how."""


@pytest.mark.parametrize(("phase", "why"), SHOWN, ids=[f"{phase}-{why[:40]}" for phase, why in SHOWN])
def test_a_fabric_shows_each_cause(phase: Phase | None, why: str) -> None:
    with pytest.raises(McastError) as caught:
        SHOWN[phase, why]()
    error = caught.value
    assert why in [cause.why for cause in likely_of(error)]
    assert phase in (None, error.phase)


def likely_of(error: McastError) -> tuple[Cause, ...]:
    """The table's causes; what the fabric was found to say goes before them."""
    return error.causes if not error.found else error.found + error._likely("")


def test_no_row_is_dead() -> None:
    shown = {(row.phase, row.cause.why) for row in ROWS if not row.only}
    assert shown == set(SHOWN)
    for row in ROWS:
        assert row.source
        assert all(row.cause)
        assert row.status == "" or row.status in WcStatus.__members__ or row.status in SaStatus.__members__
    assert len({(row.phase, row.errno, row.status, row.cause) for row in ROWS}) == len(ROWS)


NAME = re.compile(r"\bE[A-Z]{3,}[A-Z0-9]*\b")
NO_ERRNO = {"EOF", "ENOTSUP", "ERROR", "EXACTLY", "ETHERNET", "ESTABLISHED", "EVENT"}
"""Words that look like one. ENOTSUP is EOPNOTSUPP on Linux."""


def named(text: str) -> set[str]:
    return {name for name in NAME.findall(text) if name not in NO_ERRNO and hasattr(E, name)}


def test_each_errno_that_a_rule_names_has_a_row() -> None:
    rules = (*(ROOT / "contract").glob("*.py"), ROOT / "errors" / "tree.py")
    docstrings = (path.read_text() for path in rules)
    clauses = (f"{one.says} {one.proof}" for one in CLAUSES.values())
    facts = (fact.says for fact in FACTS.values())
    wanted = named(" ".join((*docstrings, *clauses, *facts)))
    assert len(wanted) >= 20
    assert wanted - {errno_name(row.errno) for row in ROWS} == set()


NOT_TOLD = {
    "EAGAIN": "means: nothing yet",
    "EBADMSG": "of an answer by netlink that is cut off: sysfs is read instead",
    "ECONNREFUSED": "of the socket of a served fabric: becomes BackendUnavailable",
    "ECONNRESET": "of that socket: ends the client's session",
    "ENETDOWN": "of a send by udp from a port whose link is gone: the queue pair ends in ERR",
    "EPIPE": "of that socket: becomes the removal of the devices",
    "EPROTOTYPE": "of another program's socket at the path of a server: becomes FileExistsError",
}
"""Errnos that the backends handle themselves."""


def test_each_errno_in_the_backends_has_a_row() -> None:
    found: set[str] = set()
    for path in (ROOT / "backends").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("errno", "E"):
                found |= named(node.attr)
    assert "EADDRNOTAVAIL" in found
    assert found - {errno_name(row.errno) for row in ROWS} - set(NOT_TOLD) == set()


RECORDER = """
import json, mcast.errors.tree
seen = {}
made = mcast.errors.tree.McastError.__init__
def init(self, *args, **kwargs):
    made(self, *args, **kwargs)
    seen[f"{self.phase.value} {self.errno}"] = len(mcast.errors.tree.likely_causes(self.phase, self.errno))
mcast.errors.tree.McastError.__init__ = init
def pytest_unconfigure(config):
    print("SEEN", json.dumps(seen))
"""


def test_each_error_that_is_made_by_name_has_a_cause() -> None:
    """`mcast_error(E.EINVAL, "call", Phase.JOIN, ...)`, wherever it stands."""
    made: set[tuple[str, str, str]] = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "mcast_error":
                errno, call, phase = map(ast.unparse, node.args[:3])
                if errno.startswith("E.") and call.startswith("'") and phase.startswith("Phase."):
                    made.add((errno[2:], call.strip("'"), phase[6:]))
    assert len(made) > 10
    bare = [one for one in made if not likely_causes(Phase[one[2]], getattr(E, one[0]), one[1])]
    assert bare == []


def test_each_error_of_the_whole_suite_has_a_cause(tmp_path: Path) -> None:
    """Both simulated fabrics are put through the conformance suite, and every error on the way is asked."""
    import json

    (tmp_path / "recorder.py").write_text(RECORDER)
    suite = Path(__file__).parents[1] / "conformance"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "recorder", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(
        [*command, "--backend", "sim-roce", "--backend", "sim-ib"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=500,
        cwd=suite.parents[1],
    )
    seen = json.loads(done.stdout.rpartition("SEEN ")[2].splitlines()[0])
    assert len(seen) > 25, done.stdout
    made_up = {f"join {E.EDOM}", f"join {E.EACCES}"}  # by tests of the suite itself
    assert {error for error, causes in seen.items() if not causes} - made_up == set()


# --- what is found instead of guessed --------------------------------------------------


def refusal(join: Callable[[], object]) -> McastError:
    with pytest.raises(McastError) as caught:
        join()
    assert caught.value.errno == E.EINVAL
    return caught.value


def test_the_differing_q_key_is_named() -> None:
    error = refusal(lambda: Host(infiniband()).join(BROADCAST))
    assert [cause.why for cause in error.causes] == ["Q_Key is 0x1234567, the group's is 0xb1b"]
    assert "  found: Q_Key is 0x1234567, the group's is 0xb1b -> " in str(error)
    assert "likely" not in str(error)


def test_a_missing_partition_is_named() -> None:
    whys = [cause.why for cause in refusal(foreign_partition).causes]
    assert whys == ["P_Key is 0x8001, the port's table has 0xffff"]


def test_missing_send_only_support_is_named() -> None:
    (cause,) = refusal(no_send_only).found
    assert "does not know send-only full members" in cause.why


def test_a_status_that_says_it_all_needs_no_comparison() -> None:
    error = refusal(lambda: Host(infiniband(max_mlid=0xC000)).join())
    assert error.causes == causes_of_status("NO_RESOURCES")


def test_a_local_mismatch_is_named_too() -> None:
    """A second id of the port asks for another Q_Key than the first holds: no request goes out."""
    fabric = infiniband()
    first = Host(fabric, space=PortSpace.IPOIB)
    first.join(BROADCAST)
    error = refusal(lambda: Host(fabric).join(BROADCAST))
    assert [cause.why for cause in error.found] == ["Q_Key is 0x1234567, the group's is 0xb1b"]


def test_where_nothing_differs_the_likely_causes_stand() -> None:
    error = refusal(lambda: refused_by_sa(SaStatus.REQ_INVALID))
    assert error.found == ()
    assert all(cause.why.startswith(("the SA", "the SM", "the group")) for cause in error.causes)


def test_silent_sa_does_not_delay_the_event() -> None:
    """An SA that falls silent does not hold up the event."""
    fabric = infiniband()
    host = Host(fabric)
    host.id.join_multicast(BROADCAST)
    assert isinstance(fabric.clock, VirtualClock)
    fabric.clock.advance(0.001)
    with fabric.rules.when(Requests(), Drop()):
        before = fabric.clock.now
        event = host.channel.get_event(timeout=5)
        assert event is not None
        assert (event.errno, event.found) == (E.EINVAL, ())
        assert fabric.clock.now - before <= 0.3e9


def test_a_failed_attach_asks_no_sa() -> None:
    fabric = Fabric.infiniband(ports=2, trace=True, limits=Limits(groups=1))
    host = Host(fabric)
    host.qp.attach_mcast("ff0e::1", 0xC001)
    with pytest.raises(McastError) as caught:
        host.join()
    assert (caught.value.errno, caught.value.found) == (E.ENOMEM, ())
    assert caught.value.causes
    assert fabric.trace is not None
    assert not [one for _, one in fabric.trace if isinstance(one, SaAsked) and one.method == "GET"]


def test_an_sa_that_is_silent_is_not_asked_why() -> None:
    fabric = Fabric.infiniband(ports=2, trace=True)
    with fabric.rules.when(Requests(), Drop()), pytest.raises(McastError) as caught:
        Host(fabric).join()
    assert (caught.value.errno, caught.value.found) == (E.ETIMEDOUT, ())
    assert fabric.trace is not None
    assert not [one for _, one in fabric.trace if isinstance(one, SaAsked) and one.method == "GET"]


# --- ranking and rendering --------------------------------------------------------------


def test_impossible_causes_are_left_out() -> None:
    """The link layer and the call leave out what cannot be."""
    everything = likely_causes(Phase.JOIN, E.EINVAL)
    on_roce = likely_causes(Phase.JOIN, E.EINVAL, link_layer=LinkLayer.ETHERNET)
    assert any("SA" in cause.why for cause in everything)
    assert not any("SA" in cause.why for cause in on_roce)
    plain = likely_causes(Phase.JOIN, E.EINVAL, call="join_multicast")
    assert not any("comp_mask" in cause.why for cause in plain)
    assert set(plain) < set(everything)
    assert likely_causes(Phase.REGISTER, E.EINVAL, call="register_dmabuf")
    assert likely_causes(Phase.REGISTER, E.EINVAL, call="close") == ()


def test_the_status_of_a_qp_error_chooses_its_causes() -> None:
    error = QpError(WcStatus.LOC_PROT_ERR, "send", Phase.SEND)
    assert "registered" in error.causes[0].why
    assert len(error.causes) == 2
    assert len(QpError(WcStatus.FATAL_ERR, "send", Phase.SEND).causes) == 1


def test_an_error_knows_the_link_layer_of_its_port() -> None:
    for fabric, layer in ((roce(), LinkLayer.ETHERNET), (infiniband(), LinkLayer.INFINIBAND)):
        with pytest.raises(McastError) as caught:
            Host(fabric).id.leave_multicast(GROUP)
        assert caught.value.link_layer is layer
    with pytest.raises(McastError) as caught:
        Host(roce(), bound=False).id.join_multicast(GROUP)
    assert caught.value.link_layer is None


def test_what_was_found_survives_a_pickle() -> None:
    error = refusal(lambda: Host(infiniband()).join(BROADCAST))
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.found, copy.link_layer) == (str(error), error.found, LinkLayer.INFINIBAND)


def test_the_text_of_an_error_reads_well() -> None:
    error = mcast_error(E.ENETUNREACH, "resolve_addr", Phase.RESOLVE, {"dst": GROUP})
    assert str(error).splitlines() == [
        "resolve_addr(dst=239.1.1.1): ENETUNREACH: Network is unreachable",
        "  likely: no route leads to the group, and no source was given -> give src=, or add a route: "
        "ip route add 239.0.0.0/8 dev DEV",
        "    check: ip route get 239.1.1.1",
    ]


def test_error_is_shown_without_free_descriptors() -> None:
    """An error is shown though no file can be opened.

    Which is the error, maybe, and the first one: no causes are loaded.
    """
    program = """
import resource
from mcast.api import Phase, mcast_error
error = mcast_error(24, "event_channel", Phase.OPEN)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(error)
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    first, again, why = shown.splitlines()[:3]
    assert first == again == "event_channel(): EMFILE: Too many open files"
    assert why.startswith("  likely: ")


def test_the_atlas_has_every_row_and_is_sound_markdown() -> None:
    text = atlas()
    for row in ROWS:
        assert row.cause.why in text
    lines = text.splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert {re.sub("`[^`]*`", "", line).count("|") for line in tables} == {6}
    headings = [line for line in lines if line.startswith("### ")]
    assert len(headings) == len(set(headings)) == len({(row.phase, row.errno) for row in ROWS})


def test_row_is_found_by_errno_and_phase() -> None:
    """A row is found by its errno in its phase alone."""
    row: Row = next(row for row in ROWS if row.errno == E.ENETUNREACH)
    assert row.cause in likely_causes(Phase.RESOLVE, E.ENETUNREACH)
    assert likely_causes(Phase.SEND, E.ENETUNREACH) == ()
    assert issubclass(SimulationStalled, McastError)


def _known_errno(name: str) -> str:
    if name != "ENOTSUPP" and not hasattr(E, name):
        raise ValueError(f"{name!r} is no errno")
    return name


def test_error_is_shown_while_the_causes_load() -> None:
    """A signal's handler shows an error while its thread reads the rows for another one."""
    program = """
import tomllib
from mcast.api import Phase, mcast_error
error, loads, shown = mcast_error(24, "event_channel", Phase.OPEN), tomllib.loads, []
def loads_slowly(text):
    shown.append(str(error))
    return loads(text)
tomllib.loads = loads_slowly
print(error)
print(*shown)
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    first, why, *_, within = shown.splitlines()
    assert first == within == "event_channel(): EMFILE: Too many open files"
    assert why.startswith("  likely: ")


class _Row(BaseModel):
    """A row of rows.toml."""

    model_config = ConfigDict(extra="forbid", strict=True)
    phase: Annotated[Phase, BeforeValidator(lambda value: Phase(value))] | None = None
    errno: Annotated[
        str, AfterValidator(lambda name: name if name == "ENOTSUPP" else E.__dict__[name] and name)
    ]
    why: Annotated[str, Field(min_length=1)]
    check: Annotated[str, Field(min_length=1)]
    next_step: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]
    calls: Annotated[list[str], Field(min_length=1)] | None = None
    link_layer: Annotated[LinkLayer, BeforeValidator(lambda value: LinkLayer(value))] | None = None
    status: Annotated[str, Field(min_length=1)] | None = None
    only: Annotated[str, Field(min_length=1)] | None = None


def test_the_file_of_rows_keeps_its_model() -> None:
    """A field that nobody reads, or that is empty, is refused; each row is read, in the file's order."""
    rows = [_Row.model_validate(row) for row in tomllib.loads(FILE.read_text("utf-8"))["row"]]
    assert [(row.phase, row.why, row.status or "") for row in rows] == [
        (row.phase, row.cause.why, row.status) for row in ROWS
    ]
    statuses = {*SaStatus.__members__, *WcStatus.__members__}
    assert {row.status for row in rows if row.status} <= statuses
