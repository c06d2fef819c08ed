"""Promises of the contract that the simulator and the real provider keep alike, here on the card."""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from mcast.api import AlreadyJoined, Backend, Closed, CmEventType, Destination, McastError, Message
from mcast.arguments.seconds import MAX_SECONDS, check_seconds
from mcast.wire.addresses import Gid, Mgid

from ..card.ends import BOUND, GROUP, End
from ..networks import CardNetwork, Network

GROUP_ON_INFINIBAND = "ff12:4001:ffff::f01:203"
FOREVER = (1e10, 1e18, 10**30, inf)
"""Seconds; more than any clock below counts."""


@pytest.fixture
def end(backend: Backend) -> End:
    return End(backend)


def ends_when(call: Callable[[], Any], cause: Callable[[], Any]) -> Any:
    """Return the result of the call, which waits until the cause is there."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    cause()
    thread.join(BOUND)
    assert found
    return found[0]


# --- guard G-JOIN ------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["infiniband", "card-infiniband"], indirect=True)
def test_two_addresses_of_one_mgid_are_one_group(end: End) -> None:
    """The leave of either would detach the queue pair for both."""
    mgid = Mgid(end.join().gid)
    assert mgid == Gid(GROUP_ON_INFINIBAND)
    with pytest.raises(AlreadyJoined) as caught:
        end.id.join_multicast(mgid)
    assert caught.value.call == "join_multicast"
    end.id.leave_multicast(GROUP)
    end.id.join_multicast(mgid)
    with pytest.raises(AlreadyJoined):
        end.id.join_multicast(GROUP)


@pytest.mark.parametrize("network", ["roce", "card-roce"], indirect=True)
def test_on_ethernet_every_address_is_a_group(end: End) -> None:
    end.join()
    end.id.join_multicast("224.1.2.3")


# --- time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("long", FOREVER)
def test_a_timeout_may_be_as_long_as_one_likes(end: End, long: float) -> None:
    to = end.join()
    assert ends_when(lambda: end.qp.recv_one(long), lambda: end.qp.send(to, [b"x"], None, long)) is not None
    end.qp.flush(long)
    event = ends_when(lambda: end.channel.get_event(long), lambda: end.id.join_multicast("239.1.2.4"))
    assert event.type is CmEventType.MULTICAST_JOIN


@pytest.mark.parametrize("long", FOREVER)
def test_a_resolution_may_last_as_long_as_one_likes(backend: Backend, long: float) -> None:
    with backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.resolve_addr(GROUP, "10.0.0.1", long)
        event = channel.get_event(BOUND)
        assert event is not None
        assert event.type is CmEventType.ADDR_RESOLVED


# --- memory -------------------------------------------------------------------------------------------


def test_negative_and_huge_timeouts() -> None:
    """A timeout below 0 is refused, and one beyond all clocks is the longest."""
    below: list[float] = [-1, -(10**400), -inf]
    assert [check_seconds(one) for one in (*below, 10**400)] == [0.0, 0.0, 0.0, MAX_SECONDS]


def test_older_receive_memory_ends_first(end: End) -> None:
    """An older receive memory ends without the newer."""
    old, new = bytearray(2048), bytearray(2048)
    older = end.qp.register(old, recv_slot=256)
    newer = end.qp.register(new, recv_slot=256)
    older.close()
    to = end.join()
    end.qp.send(to, [b"for the newer"])
    with end.qp.recv(1, BOUND) as batch:
        assert [bytes(message.payload) for message in batch] == [b"for the newer"]
    assert b"for the newer" in new
    newer.close()
    end.qp.send(to, [b"for its own"])
    with end.qp.recv(1, BOUND) as batch:
        assert [bytes(message.payload) for message in batch] == [b"for its own"]
    assert b"for its own" not in new


def test_a_number_of_messages_that_is_none_takes_none(end: End) -> None:
    to = end.join()
    end.qp.send(to, [b"1", b"2", b"3", b"4"])
    with pytest.raises(TypeError):
        end.qp.recv(2.5, BOUND)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        end.qp.send(to, [b"x"], imm=1.5)  # type: ignore[arg-type]
    found: list[bytes] = []
    while len(found) < 4:
        with end.qp.recv(4, BOUND) as batch:
            found += [bytes(message.payload) for message in batch]
    assert found == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("payload", [b"1", bytearray(b"1")])
def test_the_immediate_goes_with_one_of_any_kind(end: End, payload: bytes | bytearray) -> None:
    end.qp.send_one(end.join(), payload, imm=7)
    message = end.qp.recv_one(BOUND)
    assert message is not None
    assert (bytes(message.payload), message.imm) == (b"1", 7)


# --- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "src_qp", "src_lid", "answered"),
    [
        ("::ffff:10.0.0.2", 17, 0, True),
        ("fe80::2", 17, 0, False),
        ("::ffff:0.0.0.0", 17, 0, False),
        ("ff0e::ffff:239.1.1.1", 17, 0, False),
        ("::", 17, 2, True),
        ("::", 17, 0, False),
        ("::", 17, 0xC000, False),
        ("::ffff:10.0.0.2", 1, 0, False),
        ("::ffff:10.0.0.2", 0xFFFFFF, 0, False),
    ],
)
def test_only_addresses_of_the_groups_kind_answer(
    source: str, src_qp: int, src_lid: int, answered: bool
) -> None:
    """Only an address like the groups own is answered."""
    to = Destination(gid=Gid("::ffff:239.1.1.1"))
    message = Message(memoryview(b""), Gid(source), src_qp, to.gid, None, False, src_lid)
    assert to.can_reply_to(message) is answered


def test_loopback_is_answered_on_loopback_alone() -> None:
    """A message from a network that names 127.0.0.1 as its sender is forged."""
    to = Destination(gid=Gid("::ffff:239.1.1.1"))
    for source, there in (("::ffff:127.0.0.1", True), ("::ffff:10.0.0.2", False)):
        message = Message(memoryview(b""), Gid(source), 17, to.gid, None, False)
        assert [to.can_reply_to(message, on_loopback) for on_loopback in (True, False)] == [there, not there]


@pytest.mark.parametrize("network", ["card-roce", "card-infiniband"], indirect=True)
def test_a_message_without_a_grh_is_answered_by_lid(network: Network, backend: Backend) -> None:
    assert isinstance(network, CardNetwork)
    one, other = End(backend), End(backend, "10.0.0.2")
    to = one.join()
    assert network.card.inject(one.qp.qp_num, b"?", src_qp=other.qp.qp_num, slid=2)
    message = one.qp.recv_one(BOUND)
    assert message is not None
    assert to.can_reply_to(message) is network.is_infiniband
    if network.is_infiniband:
        assert not to.reply_to(message).is_global
        one.qp.send(to.reply_to(message), [b"!"])
        answer = other.qp.recv_one(BOUND)
        assert answer is not None
        assert bytes(answer.payload) == b"!"
    else:
        words = "^the message has neither a GRH nor a LID of its sender: it cannot be answered$"
        with pytest.raises(ValueError, match=words):
            to.reply_to(message)


def test_leave_error_names_the_link_layer(end: End) -> None:
    """An error of a leave says what kind of port it was."""
    end.join()
    with pytest.raises(McastError) as caught:
        end.id.leave_multicast("239.9.9.9")
    assert caught.value.link_layer is end.id.link_layer is not None


def test_what_is_closed_names_the_call(backend: Backend, end: End) -> None:
    address = end.join().gid
    end.id.close()
    backend.close()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("port_events", end.qp.port_events),
        ("recv", lambda: end.qp.recv_one(0)),
        ("register", lambda: end.qp.register(bytearray(9))),
        ("leave_multicast", lambda: end.id.leave_multicast(Mgid(address))),
        ("groups", backend.groups),
        ("devices", backend.devices),
    ]
    for name, call in calls:
        with pytest.raises(Closed) as caught:
            call()
        assert caught.value.call == name
