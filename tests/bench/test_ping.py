"""Pings of a group: who answers, what is lost, how long it takes; what others send."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcast import McastAddress, QpError, open_endpoint
from mcast.api import QpState
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Duplicate, Messages
from mcast.backends.sim.trace.events import Send
from mcast.bench.echo import ALL_OTHERS, MAX_SOURCES, Answerer, Pinger, padded, parsed
from mcast.bench.ping import PingResult, answer_all, joined, ping_all
from mcast.endpoint.ports import choose
from mcast.endpoint.settings import Settings
from mcast.wire.addresses import Gid
from mcast.wire.probe import PROBE_SIZE, Kind, Peer, Probe

GROUP = McastAddress.of("239.1.1.1")
HERE, THERE, ELSEWHERE = (Gid(f"::ffff:10.0.0.{number}") for number in (1, 2, 3))

# --- counting --------------------------------------------------------------------------------


def pinger(first: int = 0) -> Pinger:
    return Pinger({HERE}, [17], first, send_only=False)


def echo(probe: Probe, asker: Gid = HERE) -> memoryview:
    return memoryview(Probe(Kind.REPLY, probe.number, Peer(asker, 17)).pack())


@settings(deadline=None)
@given(st.sets(st.integers(1, 50)), st.integers(0, (1 << 32) - 1))
def test_loss_and_round_trips_are_those_of_each_member(answered: set[int], first: int) -> None:
    counts, one, other = pinger(first), Peer(THERE, 1), Peer(ELSEWHERE, 1)
    for seq in range(1, 51):
        probe = counts.ask(seq, 17, HERE, now=seq)
        assert counts.on_message(echo(probe), one, seq + 0.25) == (seq, 0.25)
        if seq in answered:
            assert counts.on_message(echo(probe), other, seq + seq / 64) == (seq, seq / 64)
    assert counts.loss(counts.members[one]) == 0
    assert counts.members[one].times == (0.25, 0.25, 0.25, 0)
    if answered:
        member = counts.members[other]
        assert counts.loss(member) == pytest.approx(1 - len(answered) / 50)
        expected = (min(answered), sum(answered) / len(answered), max(answered))
        assert member.times[:3] == pytest.approx([number / 64 for number in expected])
    assert counts.answered_by_all(50) == (not answered or 50 in answered)


def test_only_first_answers_count() -> None:
    """Only the first answer to a ping of ours counts."""
    counts, peer = pinger(), Peer(THERE, 1)
    probe = counts.ask(1, 17, HERE, 0)
    assert counts.on_message(echo(probe, asker=ELSEWHERE), peer, 1) is None
    assert counts.on_message(echo(probe._replace(number=2)), peer, 1) is None
    assert counts.on_message(memoryview(probe.pack()), peer, 1) is None
    assert counts.members == {}
    assert counts.on_message(memoryview(b"of an application"), peer, 1) is None
    assert counts.others == {peer: 1}
    assert counts.on_message(echo(probe), peer, 1) == (1, 1)
    assert counts.on_message(echo(probe), peer, 2) is None
    assert (counts.members[peer].answers, counts.members[peer].doubles) == (1, 1)


@settings(deadline=None)
@given(
    st.integers(PROBE_SIZE, 4096),
    st.sampled_from([Kind.REQUEST, Kind.UNICAST_REQUEST]),
    st.integers(0, 1 << 31),
)
def test_an_answer_is_as_long_as_its_ping(size: int, kind: Kind, number: int) -> None:
    message = padded(Probe(kind, number, Peer(HERE, 17)), size)
    assert len(message) == size
    answer = Answerer().on_message(memoryview(message), Peer(HERE, 17))
    assert answer == (Probe(Kind.REPLY, number, Peer(HERE, 17)), kind is Kind.UNICAST_REQUEST)
    assert parsed(memoryview(padded(answer[0], size))) == answer[0]


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_whatever_comes_is_counted_by_who_sent_it(message: bytes) -> None:
    answerer = Answerer()
    assert answerer.on_message(memoryview(message), Peer(THERE, 1)) is None
    (heard,) = answerer.heard.values()
    assert (heard.pings, heard.messages, heard.smallest, heard.largest) == (0, 1, len(message), len(message))


# --- on a fabric -----------------------------------------------------------------------------


@contextmanager
def answering(fabric: Fabric, host: int, count: int, **options: Any) -> Iterator[dict[str, Any]]:
    """`mcast ping --answer -C count` on that host, in a thread. The dict has its QPs, then its outcome."""
    outcome: dict[str, Any] = {}
    ready = threading.Event()

    def answer() -> None:
        with (
            open_fabric(fabric, host=host) as backend,
            joined(backend, choose(backend, None, None, 1), GROUP, options.get("qps", 1)) as pairs,
        ):
            outcome["qps"] = [qp.qp_num for qp in pairs.qps]
            ready.set()
            outcome["heard"] = answer_all(pairs, count).heard

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert ready.wait(100)
    yield outcome
    thread.join(100)
    assert "heard" in outcome


def ping(
    fabric: Fabric,
    count: int,
    size: int = PROBE_SIZE,
    timeout: float = 3.0,
    interval: float = 0.02,
    **how: Any,
) -> PingResult:
    with (
        open_fabric(fabric, host=0) as backend,
        joined(backend, choose(backend, None, None, 1), GROUP, **({"qps": 1} | how)) as pairs,
    ):
        return ping_all(pairs, count, size, interval, timeout)


@pytest.mark.parametrize("size", [PROBE_SIZE, 100, 1024])
@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_every_member_answers(make: Any, size: int) -> None:
    fabric = make(3, clock="wall")
    with answering(fabric, 1, 5) as first, answering(fabric, 2, 5) as second:
        outcome = ping(fabric, 5, size)
    assert [member.answers for member in outcome.members] == [5, 5]
    assert [member.loss for member in outcome.members] == [0, 0]
    for member in outcome.members:
        times = member.milliseconds
        assert 0 < times[0] <= times[1] <= times[2]
    for heard in (first, second):
        assert [(one.pings, one.smallest, one.largest) for one in heard["heard"]] == [(5, size, size)]


def test_what_one_member_loses_is_its_loss() -> None:
    fabric = Fabric.roce(3, clock="wall")
    with (
        answering(fabric, 1, 8),
        answering(fabric, 2, 6),
        fabric.rules.when(Messages(source="roce0", target="roce2", nth=[2, 5]), Drop()),
    ):
        outcome = ping(fabric, 8)
    assert {member.address[-1]: member.loss for member in outcome.members} == {"2": 0, "3": 0.25}


def test_double_answers_are_counted_apart() -> None:
    fabric = Fabric.roce(2, clock="wall")
    with answering(fabric, 1, 4), fabric.rules.when(Messages(target="roce0"), Duplicate(1)):
        (member,) = ping(fabric, 4).members
    assert (member.answers, member.loss) == (4, 0)
    assert member.doubles in (3, 4)  # nobody waits for the last one


def test_a_send_only_member_is_answered_alone() -> None:
    fabric = Fabric.roce(3, clock="wall")
    with answering(fabric, 1, 3):
        (member,) = ping(fabric, 3, send_only=True).members
    assert (member.answers, member.loss) == (3, 0)


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_pings_carry_what_the_options_say(make: Any) -> None:
    fabric = make(2, clock="wall", trace=True)
    settings = Settings(busy_poll=0.5, traffic_class=26 << 2, service_level=3)
    with answering(fabric, 1, 3):
        (member,) = ping(fabric, 3, settings=settings).members
    assert member.answers == 3
    sent = {
        (event.port[-1], event.traffic_class, event.sl) for _, event in fabric.trace if type(event) is Send
    }
    assert sent == {("0", 26 << 2, 3), ("1", 0, 0)}


def test_several_queue_pairs_on_both_sides() -> None:
    fabric = Fabric.roce(2, clock="wall")
    with answering(fabric, 1, 6, qps=2) as heard:
        outcome = ping(fabric, 3, qps=2)
    assert [member.answers for member in outcome.members] == [6, 6]
    assert outcome.sent == 6
    assert len(heard["heard"]) == 4


@pytest.mark.parametrize("receives", [True, False], ids=["receives", "only sends"])
def test_any_endpoint_answers(receives: bool) -> None:
    fabric = Fabric.roce(2, clock="wall")
    stop = threading.Event()

    def application() -> None:
        with open_fabric(fabric, host=1) as backend, open_endpoint(backend) as endpoint:
            member = endpoint.join(GROUP)
            while not stop.is_set():
                if receives:
                    assert endpoint.recv(0.05) is None  # it sees no ping
                else:
                    member.send(b"news")
                    stop.wait(0.01)

    thread = threading.Thread(target=application)
    thread.start()
    try:
        outcome = ping(fabric, 20)
    finally:
        stop.set()
        thread.join(100)
    (member,) = outcome.members
    assert member.answers > 5


def test_nobody_there_is_nobody() -> None:
    outcome = ping(Fabric.roce(2, clock="wall"), 2, timeout=0.05)
    assert (outcome.sent, outcome.members) == (2, ())


@pytest.mark.parametrize("qps", [1, 2])
def test_failed_answer_does_not_end_answering(qps: int) -> None:
    """A ping that cannot be answered does not end the answering.

    It comes over IPv6 to a member that answers over IPv4: that answer puts its queue pair into ERR.
    """
    fabric = Fabric.roce(2, clock="wall")
    here, there = fabric.ports
    with answering(fabric, 1, 5, qps=qps) as heard:
        with (
            open_fabric(fabric, host=0) as backend,
            joined(backend, choose(backend, None, None, 1), GROUP, 1) as pairs,
        ):
            (qp,) = pairs.qps
            question = Probe(Kind.UNICAST_REQUEST, 1, Peer(here.gids[0], qp.qp_num)).pack()
            for qp_num in heard["qps"]:
                to = {"gid": there.gids[0], "qp_num": qp_num, "sgid_index": 0}
                qp.send_one(pairs.destinations[qp].model_copy(update=to), question)
        after = ping(fabric, 30).members  # more than are waited for: some come while it is in ERR
    assert len(heard["qps"]) == len(after) == qps
    failed = [(one.by_qp, one.address) for one in heard["heard"] if one.unanswered]
    assert sorted(failed) == sorted((qp_num, str(here.gids[0])) for qp_num in heard["qps"])


def test_late_failure_does_not_end_listening() -> None:
    """An answer that failed later does not end the listening.

    A card says so only after the call, when the answering member listens again.
    """
    fabric = Fabric.roce(2, clock="wall")
    with (
        open_fabric(fabric, host=0) as backend,
        joined(backend, choose(backend, None, None, 1), GROUP, 1) as pairs,
    ):
        (qp,) = pairs.qps
        to = pairs.destinations[qp].model_copy(update={"gid": fabric.ports[1].gids[0], "qp_num": 17})
        with pytest.raises(QpError):
            qp.send_one(to, b"over IPv4 to an IPv6 address")
        while qp.state is QpState.ERR:
            assert list(pairs.listen(pairs.now + 0.01)) == []
        qp.send_one(pairs.destinations[qp], b"usable again")
        heard = pairs.listen(pairs.now + 60)
        assert bytes(next(heard)[1].payload) == b"usable again"


def test_invented_sources_fill_no_memory() -> None:
    answerer, counts = Answerer(), pinger()
    for qp_num in range(1, 12_000):
        answerer.on_message(memoryview(b"x"), Peer(THERE, qp_num))
        counts.on_message(memoryview(b"x"), Peer(THERE, qp_num), 0)
    assert len(answerer.heard) == len(counts.others) == MAX_SOURCES + 1
    assert answerer.heard[ALL_OTHERS].messages == counts.others[ALL_OTHERS] == 11_999 - MAX_SOURCES


def test_other_messages_are_not_answered() -> None:
    # What mckey -s does: messages without content, the queue pair's number as immediate.
    """Messages of others are counted and not answered."""
    fabric = Fabric.roce(2, clock="wall")
    with (
        answering(fabric, 1, 10) as heard,
        open_fabric(fabric, host=0) as backend,
        open_endpoint(backend) as endpoint,
        endpoint.join(GROUP) as group,
    ):
        group.send_batch([bytes(100)] * 10, imm=endpoint.qp_num)
    (source,) = heard["heard"]
    assert (source.messages, source.pings, source.largest) == (10, 0, 100)


def test_a_ping_has_room_for_one_mtu() -> None:
    with (
        open_fabric(Fabric.roce(1)) as backend,
        joined(backend, choose(backend, None, None, 1), GROUP, 2) as pairs,
    ):
        assert pairs.max_message_size == 1024
