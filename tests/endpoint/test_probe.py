"""Probes on the wire: what is one, and that nothing else is taken for one."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcast import Gid, Peer, open_endpoint
from mcast.api import Phase, QpState, TimedOut
from mcast.backends.model.qp import Burst, Header
from mcast.backends.sim import Fabric, open_fabric
from mcast.endpoint.probes import MAX_ECHOES
from mcast.wire.probe import PROBE_SIZE, Kind, Probe, parse

GROUP = "239.1.2.3"
PROBES = st.builds(
    Probe,
    st.sampled_from(Kind),
    st.integers(0, (1 << 32) - 1),
    st.builds(Peer, st.binary(min_size=16, max_size=16).map(Gid), st.integers(0, (1 << 24) - 1)),
    st.integers(0, 0xFFFF),
    st.integers(0, 0xFFFF),
)


@given(PROBES)
def test_what_is_packed_is_parsed(probe: Probe) -> None:
    packed = probe.pack()
    assert len(packed) == PROBE_SIZE
    assert parse(memoryview(packed)) == probe


@given(st.one_of(st.binary(max_size=200), st.binary(min_size=PROBE_SIZE, max_size=PROBE_SIZE)))
def test_other_bytes_are_none(payload: bytes) -> None:
    assert parse(memoryview(payload)) is None


@given(PROBES, st.integers(0, 9), st.integers(1, 255))
def test_a_flipped_byte_of_the_frame_makes_it_none(probe: Probe, place: int, value: int) -> None:
    packed = bytearray(probe.pack())
    packed[place] ^= value
    found = parse(memoryview(packed))
    assert found is None or (place == 9 and found.kind is not probe.kind)


@given(PROBES, st.binary(min_size=1, max_size=8))
def test_a_probe_with_a_tail_or_cut_short_is_none(probe: Probe, tail: bytes) -> None:
    assert parse(memoryview(probe.pack() + tail)) is None
    assert parse(memoryview(probe.pack()[: -len(tail)])) is None


@pytest.mark.parametrize(("own", "answers"), [(True, 1), (False, 0)])
def test_echo_to_another_host_is_ignored(own: bool, answers: int) -> None:
    """An echo to another host with the same queue pair number is not mine."""
    with (
        open_fabric(Fabric.roce()) as backend,
        open_endpoint(backend, "10.0.0.1") as other,
        open_endpoint(backend, "10.0.0.2") as asker,
    ):
        group = asker.join(GROUP)
        gid = Gid("::ffff:10.0.0.2") if own else Gid("::ffff:10.0.0.3")
        other.sender(GROUP).send(Probe(Kind.REPLY, 1, Peer(gid, asker.qp_num)).pack())
        with pytest.raises(TimedOut, match=f"{answers} of 2 members"):
            group.ready(members=2, timeout=0.01)


def test_failed_echo_does_not_disturb_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """An echo that cannot be sent does not disturb who receives."""
    with (
        open_fabric(Fabric.roce()) as backend,
        open_endpoint(backend, "10.0.0.1") as asker,
        open_endpoint(backend, "10.0.0.2") as receiver,
    ):
        out, group = asker.sender(GROUP), receiver.join(GROUP)
        out.send(Probe(Kind.REQUEST, 1, Peer(Gid(bytes(16)), 1)).pack())
        out.send(b"payload")

        def refuse(*_: object, **__: object) -> int:
            raise TimedOut(110, "send", Phase.SEND)

        monkeypatch.setattr(type(receiver._core.resources.qp), "send", refuse)
        message = group.recv(timeout=1)
        assert message is not None
        assert bytes(message.payload) == b"payload"
        assert dict(group.stats().dropped) == {"probe: no room for an echo": 1}


def test_hostile_probes_are_not_echoed() -> None:
    """Hostile probes do no harm and a flood of them is not echoed."""
    with (
        open_fabric(Fabric.roce()) as backend,
        open_endpoint(backend, "10.0.0.1") as hostile,
        open_endpoint(backend, "10.0.0.2") as receiver,
    ):
        out, group = hostile.sender(GROUP), receiver.join(GROUP)
        for kind in Kind:
            out.send(Probe(kind, 1, Peer(Gid(os.urandom(16)), 0xFFFFFF)).pack())
        out.send_batch([Probe(Kind.REQUEST, number, Peer(Gid(bytes(16)), 1)).pack() for number in range(60)])
        out.send(b"payload")
        message = group.recv(timeout=1)
        assert message is not None
        assert bytes(message.payload) == b"payload"
        answered = receiver.stats().probes
        assert answered <= 2 * MAX_ECHOES
        assert group.stats().dropped["probe: too many at once"] == 62 - answered


@pytest.mark.parametrize(
    ("source", "src_qp"),
    [
        ("fe80::1", 17),
        ("::", 17),
        ("::ffff:0.0.0.0", 17),
        ("::ffff:127.0.0.1", 17),
        ("::ffff:239.1.2.3", 17),
        ("::ffff:255.255.255.255", 17),
        ("::ffff:10.0.0.1", 0),
        ("::ffff:10.0.0.1", 0xFFFFFF),
    ],
)
def test_probe_without_a_sender_is_counted(source: str, src_qp: int) -> None:
    """A probe from nobody is counted and nothing else happens."""
    fabric = Fabric.roce()
    with open_fabric(fabric) as backend, open_endpoint(backend, "10.0.0.2") as receiver:
        group = receiver.join(GROUP)
        queue_pair = fabric.qps[0]
        ask = Probe(Kind.UNICAST_REQUEST, 1, Peer(Gid(bytes(16)), 1)).pack()
        header = Header(Gid(source), src_qp, group.mgid, 0, group.destination.qkey, 0xFFFF, 0)
        queue_pair.deliver(Burst([ask], len(ask), header, None, 0), 0, 1)
        assert group.recv(timeout=0) is None
        assert dict(group.stats().dropped) == {"probe: the asker's address cannot be answered": 1}
        assert queue_pair.state is QpState.RTS
        group.send(b"usable")
        assert group.recv(timeout=1) is not None
        assert receiver.stats().lost == 0


def test_answers_to_a_question_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcast.endpoint.probes.PendingProbe.max_peers", 3)
    with (
        open_fabric(Fabric.roce()) as backend,
        open_endpoint(backend, "10.0.0.2") as asker,
        ExitStack() as stack,
    ):
        group = asker.join(GROUP)
        echo = Probe(Kind.REPLY, 1, Peer(Gid("::ffff:10.0.0.2"), asker.qp_num)).pack()
        for _ in range(5):
            other = stack.enter_context(open_endpoint(backend, "10.0.0.1"))
            other.sender(GROUP).send(echo)
        with pytest.raises(TimedOut, match="3 of 9 members"):
            group.ready(members=9, timeout=0.01)
