"""Measured facts about messages; see `mcast.conformance.facts`."""

from __future__ import annotations

import errno as E
from contextlib import AbstractContextManager

import pytest

from mcast.api import Capability, Feature, InvalidArgument, McastError, QpError, QpInit, QpState, Testbed
from mcast.conformance.helpers import BOUND, Application, fact, needs, new_group, numbered, port_at


@fact("K-DATA-1", "K-DEVICE-8")
def test_members_on_all_ports_get_every_message_and_others_none(bed: Testbed) -> None:
    group, sender, outsider = new_group(), Application(bed, 0), Application(bed, 0)
    outward = sender.join(group)
    members = [Application(bed, index) for index in range(1, len(bed.ports)) for _ in range(2)]
    for member in members:
        member.join(group)
    sender.send(outward, *numbered(10))
    for member in (sender, *members):
        assert member.receive_until_marker(by=sender) == [*numbered(10)]
    assert outsider.receive_until_marker(by=sender) == []


@fact("K-DATA-2")
def test_a_full_member_and_its_neighbours_hear_what_it_sends(bed: Testbed) -> None:
    group, sender, neighbour = new_group(), Application(bed), Application(bed)
    outward = sender.join(group)
    neighbour.join(group)
    sender.send(outward, *numbered(10))
    assert sender.receive_until_marker(by=sender) == [*numbered(10)]
    assert neighbour.receive_until_marker(by=sender) == [*numbered(10)]


@fact("K-DATA-5")
def test_a_wrong_qkey_is_sent_and_not_received(bed: Testbed) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    sender.send(outward.model_copy(update={"qkey": outward.qkey ^ 1}), *numbered(5))
    assert sender.qp.counters.sent == 5
    assert receiver.receive_until_marker(by=sender) == []
    assert (sender.qp.state, receiver.qp.state) == (QpState.RTS, QpState.RTS)


@fact("K-DATA-5")
@needs(Feature.QKEY_VIOLATIONS)
def test_a_wrong_qkey_is_counted_for_each_message_and_attached_qp(bed: Testbed) -> None:
    group, sender, receivers = new_group(), Application(bed, 0), [Application(bed, 1), Application(bed, 1)]
    outward = sender.join(group, send_only=True)
    for receiver in receivers:
        receiver.join(group)
    before = bed.observer.qkey_violations(receivers[0].port)
    sender.send(outward.model_copy(update={"qkey": outward.qkey ^ 1}), *numbered(5))
    for receiver in receivers:
        assert receiver.receive_until_marker(by=sender) == []
    assert bed.observer.qkey_violations(receivers[0].port) - before == 5 * len(receivers)


@fact("K-DATA-7")
def test_a_message_too_long_for_the_receive_is_never_delivered(bed: Testbed) -> None:
    group, sender, witness = new_group(), Application(bed, 0), Application(bed, 1)
    receiver = Application(bed, 1, QpInit(max_recv_size=64))
    outward = sender.join(group, send_only=True)
    for peer in (receiver, witness):
        peer.join(group)
    sender.send(outward, b"y" * 64)
    assert receiver.receive(1) == [b"y" * 64]
    sender.send(outward, b"x" * 65)
    assert witness.receive_until_marker(by=sender) == [b"y" * 64, b"x" * 65]
    if receiver.qp.state is QpState.ERR:  # one kernel puts the QP into ERR, the next drops in silence
        with pytest.raises(QpError):
            receiver.qp.recv(1, BOUND)
        receiver.qp.reset()
    sender.send(outward, b"z" * 64)
    assert receiver.receive_until_marker(by=sender) == [b"z" * 64]


@fact("K-DATA-8")
def test_an_empty_receive_queue_loses_messages_in_silence(bed: Testbed) -> None:
    group, sender, witness = new_group(), Application(bed, 0), Application(bed, 1)
    receiver = Application(bed, 1, QpInit(max_recv_wr=4))
    outward = sender.join(group, send_only=True)
    for peer in (receiver, witness):
        peer.join(group)
    sender.send(outward, *numbered(6))
    assert witness.receive_until_marker(by=sender) == [*numbered(6)]
    assert receiver.receive(4) == [*numbered(4)]
    sender.send(outward, b"later")
    assert receiver.receive(1) == [b"later"]
    assert receiver.qp.state is QpState.RTS


@fact("K-DATA-26")
@needs(Feature.MIXED_MTU, Feature.SECOND_PORT)
def test_a_port_drops_what_its_mtu_is_too_small_for(bed: Testbed) -> None:
    """The join, the send and its completion succeed, and the other messages of the batch arrive."""
    with bed.largest_mtu(port_at(bed, 0)):
        group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
        outward = sender.join(group)
        receiver.join(group)
        large = bytes(sender.qp.max_message_size)
        assert len(large) > receiver.qp.max_message_size
        before = bed.observer.oversized(receiver.port)
        sender.send(outward, b"before", large, b"after")
        assert sender.receive(3) == [b"before", large, b"after"]
        assert receiver.receive_until_marker(by=sender) == [b"before", b"after"]
        assert (sender.qp.state, receiver.qp.state) == (QpState.RTS, QpState.RTS)
        assert bed.observer.oversized(receiver.port) > before


@fact("K-DATA-14")
def test_receives_are_used_first_in_first_out(bed: Testbed) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1, QpInit(max_recv_wr=3))
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    for start in range(0, 12, 2):
        payloads = numbered(12)[start : start + 2]
        sender.send(outward, *payloads)
        assert receiver.receive(2) == [*payloads]


BROKEN_PORTS = [
    pytest.param("link_down", marks=[fact("K-DATA-16"), needs(Feature.LINK)]),
    pytest.param("without_address", marks=[fact("K-DATA-17"), needs(Feature.ADDRESS_REMOVAL)]),
]


@needs(Capability.IGMP)
@pytest.mark.parametrize("harm", BROKEN_PORTS)
def test_a_send_from_a_broken_port_puts_the_qp_into_err(bed: Testbed, harm: str) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group)
    receiver.join(group)
    sender.send(outward, b"before")
    assert sender.receive(1) == [b"before"]
    broken: AbstractContextManager[None] = getattr(bed, harm)(sender.port)
    with broken, pytest.raises(QpError):
        sender.send(outward, b"into the void")
    with pytest.raises(McastError):
        sender.qp.send_one(outward, b"the port is well again, the QP is not")
    assert sender.qp.state is QpState.ERR
    assert receiver.receive(1) == [b"before"]


@fact("K-DATA-21")
@needs(Capability.IGMP)
@pytest.mark.parametrize(
    ("change", "errno"),
    [({"is_global": False}, E.EINVAL), ({"port_num": 2}, E.EINVAL), ({"sgid_index": 200}, E.ENODATA)],
    ids=["not-global", "port-2", "empty-sgid"],
)
def test_a_destination_that_is_not_of_the_port_is_refused(
    bed: Testbed, change: dict[str, object], errno: int
) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    with pytest.raises(McastError) as caught:
        sender.qp.send_one(outward.model_copy(update=change), b"nowhere")
    assert caught.value.errno == errno
    sender.send(outward, b"somewhere")
    assert receiver.receive_until_marker(by=sender) == [b"somewhere"]


@fact("K-DATA-22")
def test_an_id_has_one_qp(bed: Testbed) -> None:
    peer = Application(bed)
    first = peer.qp
    with pytest.raises(InvalidArgument):
        peer.id.create_qp()
    assert peer.id.qp is first
