"""Break one rule of the simulator at a time: a clause of the suite must notice, by name."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import mcast.conformance
from mcast.api import QpType, UdParam
from mcast.backends.model import cm
from mcast.backends.model.port import Port
from mcast.backends.model.qp import Qp
from mcast.backends.model.queue_pairs import QueuePairs
from mcast.backends.sim.backend import SimQueuePair
from mcast.backends.sim.core.igmp import Igmp
from mcast.backends.sim.core.sa import SubnetAdmin
from mcast.backends.sim.core.switching import Switching
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import JoinState

SUITE = Path(mcast.conformance.__file__).parent


class Mutation(NamedTuple):
    """Replace `owner.name` by `make(original)`; `clause` must fail on `backend`."""

    clause: str
    backend: str
    owner: type
    name: str
    make: Callable[[Any], Any]


def attach_twice_delivers_twice(original: Any) -> Any:
    def attached(self: Switching, port: Port, gid: Gid, dlid: int) -> Iterator[Qp]:
        for qp in original(self, port, gid, dlid):
            yield from [qp] * TIMES_ATTACHED.get((qp, gid), 1)

    return attached


TIMES_ATTACHED: dict[tuple[Qp, Gid], int] = {}


def counting_attach(original: Any) -> Any:
    def attach(self: QueuePairs, qp: Qp, gid: Gid, lid: int) -> int:
        TIMES_ATTACHED[qp, gid] = TIMES_ATTACHED.get((qp, gid), 0) + 1
        return int(original(self, qp, gid, lid))

    return attach


def detach_ignores_the_mlid(original: Any) -> Any:
    return lambda self, qp, gid, lid: original(self, qp, gid, qp.attached.get(gid, lid))


def attach_before_retrieval(original: Any) -> Any:
    def joined(self: cm.CmaId, membership: cm.CmaMembership, ud: UdParam) -> None:
        if self.qp is not None and membership.bits == JoinState.FULL:
            self.network.queue_pairs.attach(self.qp, membership.mgid, ud.destination.dlid)
        original(self, membership, ud)

    return joined


def send_only_is_forgotten(original: Any) -> Any:
    return lambda self, address, context, bits: original(self, address, context, int(JoinState.FULL))


def send_only_attaches(original: Any) -> Any:
    def attach(self: cm.CmaId, event: cm.QueuedEvent) -> cm.QueuedEvent:
        assert event.membership is not None
        bits, event.membership.bits = event.membership.bits, int(JoinState.FULL)
        try:
            return original(self, event)  # type: ignore[no-any-return]
        finally:
            event.membership.bits = bits

    return attach


def leave_keeps_the_attachment(original: Any) -> Any:
    def end(self: cm.CmaId, membership: cm.CmaMembership) -> None:
        qp, self.qp = self.qp, None
        original(self, membership)
        self.qp = qp

    return end


def leave_discards_messages(original: Any) -> Any:
    def leave(self: cm.CmaId, address: Any) -> int:
        if self.qp is not None:
            self.qp.queue.clear()
        return int(original(self, address))

    return leave


def detach_takes_all_groups(original: Any) -> Any:
    def detach(self: QueuePairs, qp: Qp, gid: Gid, lid: int) -> int:
        result = int(original(self, qp, gid, lid))
        for other, mlid in list(qp.attached.items()):
            original(self, qp, other, mlid)
        return result

    return detach


def detach_leaves_group(original: Any) -> Any:
    def detach(self: SimQueuePair, gid: Gid, lid: int) -> None:
        self._fabric.core.igmp.snooping.pop(gid, None)
        original(self, gid, lid)

    return detach


def any_qp_may_attach(original: Any) -> Any:
    def refuses(self: QueuePairs, qp: Qp, gid: Gid, lid: int) -> int:
        kind, qp.type = qp.type, QpType.UD
        try:
            return int(original(self, qp, gid, lid))
        finally:
            qp.type = kind

    return refuses


def no_limits(original: Any) -> Any:
    def attach(self: QueuePairs, qp: Qp, gid: Gid, lid: int) -> int:
        limits = qp.port.limits
        before = limits.groups, limits.qps_per_group
        limits.groups = limits.qps_per_group = 1 << 20
        try:
            return int(original(self, qp, gid, lid))
        finally:
            limits.groups, limits.qps_per_group = before

    return attach


def everyone_is_a_member(original: Any) -> Any:
    return lambda self, port, gid, dlid: list(self._topology.ports)


def context_is_lost(original: Any) -> Any:
    return lambda self, mask, flags, address, context: original(self, mask, flags, address, str(context))


def sm_supports_send_only(original: Any) -> Any:
    def handle(self: SubnetAdmin, *request: Any) -> Any:
        before, self.send_only_full_member = self.send_only_full_member, True
        try:
            return original(self, *request)
        finally:
            self.send_only_full_member = before

    return handle


def nothing(_: Any) -> Any:
    return lambda *arguments: None


def answers(errno_: int) -> Callable[[Any], Any]:
    return lambda original: lambda *arguments: original(*arguments) and errno_


ROCE, IB = "sim-roce", "sim-ib"
MUTATIONS = {
    "duplicate attach delivers twice": (
        Mutation("AT-4", ROCE, QueuePairs, "attach", counting_attach),
        Mutation("AT-4", ROCE, Switching, "_attached", attach_twice_delivers_twice),
    ),
    "detach ignores the MLID": (Mutation("DT-3", IB, QueuePairs, "detach", detach_ignores_the_mlid),),
    "leave forgets to cancel": (Mutation("LV-2", ROCE, cm.CmChannel, "purge", nothing),),
    "leave keeps the membership": (Mutation("JEX-14", ROCE, cm.CmaId, "_give_up", nothing),),
    "leave keeps the attachment": (Mutation("LV-1", IB, cm.CmaId, "_end", leave_keeps_the_attachment),),
    "leave discards messages": (Mutation("LV-3", ROCE, cm.CmaId, "leave", leave_discards_messages),),
    "leave has the wrong errno": (Mutation("LV-5", IB, cm.CmaId, "leave", answers(errno.EINVAL)),),
    "destroy leaves nothing": (Mutation("LV-4", IB, cm.CmaId, "_give_up", nothing),),
    "attach before retrieval": (Mutation("JEX-15", ROCE, cm.CmaId, "_joined", attach_before_retrieval),),
    "send-only attaches": (Mutation("JEX-8", IB, cm.CmaId, "attach_on_retrieval", send_only_attaches),),
    "send-only receives": (Mutation("JEX-7", ROCE, cm.CmaId, "_join_roce", send_only_is_forgotten),),
    "send-only sends IGMP": (Mutation("JEX-10", ROCE, cm.CmaId, "_join_roce", send_only_is_forgotten),),
    "SM support is not asked": (Mutation("JEX-9", IB, SubnetAdmin, "handle", sm_supports_send_only),),
    "full member sends no IGMP": (Mutation("JEX-3", ROCE, Igmp, "join", nothing),),
    "join on an unbound id": (Mutation("JEX-12", ROCE, cm.CmaId, "_refused_by_kernel", nothing),),
    "no route has the wrong errno": (Mutation("JEX-13", ROCE, cm.CmaId, "resolve", answers(errno.EIO)),),
    "context is lost": (Mutation("JEX-17", IB, cm.CmaId, "join", context_is_lost),),
    "detach takes all groups": (Mutation("DT-4", ROCE, QueuePairs, "detach", detach_takes_all_groups),),
    "detach leaves the fabric": (Mutation("DT-2", ROCE, SimQueuePair, "_detach_mcast", detach_leaves_group),),
    "RC and UC may attach": (Mutation("AT-3", ROCE, QueuePairs, "_refuses", any_qp_may_attach),),
    "limits are ignored": (Mutation("DT-7", ROCE, QueuePairs, "attach", no_limits),),
    "delivery without a join": (Mutation("AT-5", ROCE, Igmp, "members", everyone_is_a_member),),
}


class OnlyClauses:
    """Runs the tests of these clauses, and keeps which of them failed, and which passed a test."""

    def __init__(self, clauses: set[str]) -> None:
        self.clauses = clauses
        self.proves: dict[str, set[str]] = {}
        self.failed: set[str] = set()
        self.passed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            proved = {clause for mark in item.iter_markers("clause") for clause in mark.args}
            self.proves[item.nodeid] = proved & self.clauses
        items[:] = [item for item in items if self.proves[item.nodeid]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed |= self.proves[report.nodeid]
        elif report.when == "call" and report.passed:
            self.passed |= self.proves[report.nodeid]


def run_clauses(clauses: set[str], backend: str) -> OnlyClauses:
    outcome = OnlyClauses(clauses)
    options = f"-q -c {os.devnull} --import-mode importlib -p no:cacheprovider -p mcast.conformance.plugin"
    files = [
        path for path in SUITE.glob("test_*.py") if any(f'"{one}"' in path.read_text() for one in clauses)
    ]
    where = (f"--rootdir={SUITE}", f"--require-backend={backend}")
    pytest.main([*options.split(), *where, *map(str, files)], plugins=[outcome])
    return outcome


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_broken_rule_fails_its_clause(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clause, backend = MUTATIONS[what][0][:2]
    for mutation in MUTATIONS[what]:
        original = getattr(mutation.owner, mutation.name)
        monkeypatch.setattr(mutation.owner, mutation.name, mutation.make(original))
    assert run_clauses({clause}, backend).failed, f"{clause} passes although {what}"


@pytest.mark.parametrize("backend", [ROCE, IB])
def test_the_unbroken_rules_pass(backend: str) -> None:
    clauses = {m.clause for ms in MUTATIONS.values() for m in ms if m.backend == backend}
    outcome = run_clauses(clauses, backend)
    assert outcome.passed == clauses
    assert outcome.failed == set()
