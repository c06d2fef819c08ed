"""A driver that reports what cannot be true costs the messages concerned, and nothing else.

No report of it ends in a crash, shows bytes of other messages, or keeps a call for ever.
"""

from __future__ import annotations

import pytest

from mcast import open_endpoint
from mcast.api import (
    CmEventType,
    Destination,
    McastError,
    Message,
    PortState,
    QpError,
    QpState,
    WcStatus,
)

from .card import Card, ethernet_port
from .ends import BOUND, GROUP, End
from .provider import CardBackend

GRH_BYTES = 40
BIG = (1 << 31) - 2
"""The largest number that a lie can say; LIE_ZERO is the next one."""

NO_LENGTH = [0, 1, GRH_BYTES - 1, GRH_BYTES + 1025, 4096, BIG, -1]
"""Lengths with a GRH that no message has where an MTU is 1024."""
NO_RECEIVE = [16, 17, 1 << 20, BIG, -1]
"""Numbers of receives that a queue with 16 of them has not."""


@pytest.fixture
def end(card: Card, backend: CardBackend) -> End:
    card.ethernet(1)
    return End(backend)


def bodies(end: End, count: int) -> list[bytes]:
    """The payloads of that many messages, received by one call each."""
    messages = [end.qp.recv_one(BOUND) for _ in range(count)]
    return [bytes(one.payload) for one in messages if one is not None]


def receives(end: End, to: Destination) -> bool:
    end.qp.send_one(to, b"heard")
    return bodies(end, 1) == [b"heard"]


# --- receives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", NO_LENGTH)
@pytest.mark.parametrize("call", ["recv", "recv_one"])
@pytest.mark.parametrize("slot", [None, 1024])
def test_a_length_that_no_message_has(card: Card, end: End, length: int, call: str, slot: int | None) -> None:
    """The message is dropped and counted, its receive is posted again; those around it arrive."""
    if slot:
        end.qp.register(bytearray(16 * slot), recv_slot=slot)
    to = end.join()
    card.lie("recv_byte_len", length, nth=2)
    end.qp.send(to, [b"first", b"secret", b"third"])
    if call == "recv":
        with end.qp.recv(timeout=BOUND) as batch:
            found = [bytes(one.payload) for one in batch]
    else:
        found = bodies(end, 2)
    assert found == [b"first", b"third"]
    counters = end.qp.counters
    assert (counters.dropped_invalid, counters.received, counters.recv_free) == (1, 2, 16)
    assert end.qp.state is QpState.RTS
    for _ in range(20):
        assert receives(end, to)


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_lies_alone_are_no_message(card: Card, end: End, timeout: float) -> None:
    """A receive that finds nothing but lies ends when its time is over, and not before."""
    to = end.join()
    card.lie("recv_byte_len", 3, times=-1)
    for _ in range(4):
        end.qp.send(to, [b"x"] * 16)
        assert end.qp.recv_one(timeout) is None
    card.fail_no_more()
    counters = end.qp.counters
    assert (counters.dropped_invalid, counters.recv_free) == (64, 16)
    assert receives(end, to)


def test_a_message_behind_many_lies_wakes_who_waits(card: Card, backend: CardBackend) -> None:
    """More lies than one poll takes come before it."""
    card.ethernet(1)
    end = End(backend, max_send_wr=128, max_recv_wr=128)
    to = end.join()
    card.lie("recv_byte_len", 3, times=100)
    end.qp.send(to, [b"x"] * 100 + [b"heard"])
    assert bodies(end, 1) == [b"heard"]


@pytest.mark.parametrize("stamped", [False, True])
@pytest.mark.parametrize("number", NO_RECEIVE)
def test_a_receive_that_was_not_posted(card: Card, backend: CardBackend, number: int, stamped: bool) -> None:
    """Nobody knows then which memory the device writes to: the queue pair is in ERR until it is reset."""
    card.ethernet(1)
    end = End(backend, timestamps=stamped)
    to = end.join()
    card.lie("recv_wr_id", number, nth=2)
    end.qp.send(to, [b"first", b"lost", b"third"])
    assert bodies(end, 2) == [b"first", b"third"]
    with pytest.raises(QpError, match="a completion that cannot be true: update driver"):
        end.qp.recv_one(BOUND)
    counters = end.qp.counters
    assert (counters.dropped_invalid, end.qp.state) == (1, QpState.ERR)
    end.qp.reset()
    assert end.qp.counters.recv_free == 16
    assert receives(end, to)


def test_leased_receive_is_not_received_again(card: Card, end: End) -> None:
    """A receive that is leased is not received again."""
    to = end.join()
    end.qp.send_one(to, b"leased")
    with end.qp.recv(timeout=BOUND) as batch:
        card.lie("recv_wr_id", 0)
        end.qp.send_one(to, b"again")
        with pytest.raises(QpError, match="cannot be true"):
            end.qp.recv_one(BOUND)
        assert bytes(batch[0].payload) == b"leased"


@pytest.mark.parametrize("count", [2, 33, 1000, BIG])
@pytest.mark.parametrize("call", ["recv", "recv_one"])
def test_more_completions_than_were_asked_for(card: Card, end: End, count: int, call: str) -> None:
    to = end.join()
    assert receives(end, to)
    card.lie("poll_count", 1000 if call == "recv" and count < 1000 else count, times=-1)
    with pytest.raises(QpError, match="cannot be true"):
        end.qp.recv(1, BOUND) if call == "recv" else end.qp.recv_one(BOUND)
    card.fail_no_more()
    end.qp.reset()
    assert receives(end, to)


@pytest.mark.parametrize("count", [-1, -1000, -BIG])
def test_a_poll_that_fails_in_an_unknown_way(card: Card, end: End, count: int) -> None:
    to = end.join()
    card.lie("poll_count", count, times=-1)
    with pytest.raises(QpError):
        end.qp.recv_one(BOUND)
    card.fail_no_more()
    end.qp.reset()
    assert receives(end, to)


@pytest.mark.parametrize("status", [22, 99, 255, BIG])
def test_a_status_without_a_name(card: Card, end: End, status: int) -> None:
    to = end.join()
    card.fail("recv_completion", status)
    end.qp.send_one(to, b"lost")
    with pytest.raises(QpError) as caught:
        end.qp.recv_one(BOUND)
    assert caught.value.status is WcStatus.UNKNOWN
    end.qp.reset()
    assert receives(end, to)


def test_fields_keep_to_the_bits_that_a_header_has(card: Card, end: End) -> None:
    end.join()
    card.inject(end.qp.qp_num, b"x", src_qp=0xFFFFFFFF, imm=0xFFFFFFFF, slid=0xFFFF, sl=0xFF, path_bits=0xFF)
    message = end.qp.recv_one(BOUND)
    assert isinstance(message, Message)
    assert (message.src_qp, message.imm, message.sl, message.path_bits) == (0xFFFFFF, 0xFFFFFFFF, 15, 127)


def test_an_endpoint_shows_what_was_lost(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    with open_endpoint(backend, "10.0.0.1") as endpoint, endpoint.join(GROUP) as group:
        card.lie("recv_byte_len", 3)
        group.send(b"lost")
        group.send(b"heard")
        message = group.recv(timeout=BOUND)
        assert message is not None
        assert bytes(message.payload) == b"heard"
        assert endpoint.stats().dropped["invalid completion"] == 1


# --- sends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [16, 1 << 20, BIG, -1, -BIG])
def test_a_send_that_was_not_posted(card: Card, end: End, number: int) -> None:
    """Else the sends under way would count as complete, and their memory as free."""
    to = end.join()
    card.lie("send_wr_id", number)
    end.qp.send_one(to, b"x")
    with pytest.raises(QpError, match="cannot be true"):
        end.qp.flush(BOUND)
    card.fail_no_more()
    end.qp.reset()
    assert receives(end, to)
    end.qp.flush(BOUND)


@pytest.mark.parametrize("count", [33, 1000, BIG, -BIG])
def test_more_sends_complete_than_were_asked_for(card: Card, end: End, count: int) -> None:
    to = end.join()
    card.lie("poll_count", count, times=-1)
    with pytest.raises(QpError):
        end.qp.send_one(to, b"x")
    card.fail_no_more()
    end.qp.reset()
    assert receives(end, to)


def test_completions_without_end_do_not_keep_a_reset(card: Card, end: End) -> None:
    to = end.join()
    card.lie("poll_count", 32, times=-1)
    end.qp.reset()
    card.fail_no_more()
    end.qp.reset()
    assert receives(end, to)


# --- devices and ports -----------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "size"), [(0, 256), (6, 4096), (200, 4096), (0xFFFFFFFF, 4096)])
def test_an_mtu_that_does_not_exist(card: Card, backend: CardBackend, code: int, size: int) -> None:
    """It counts as the nearest that does."""
    card.add(ethernet_port("10.0.0.1", active_mtu=code, max_mtu=code), name=b"card0", guid=1)
    assert backend.devices()[0].ports[0].active_mtu == size
    assert End(backend).qp.max_message_size == size


@pytest.mark.parametrize("state", [6, 255, 0xFFFFFFFF])
def test_a_port_state_that_does_not_exist(card: Card, backend: CardBackend, state: int) -> None:
    card.add(ethernet_port("10.0.0.1", state=state), name=b"card0", guid=1)
    assert backend.devices()[0].ports[0].state is PortState.NOP


@pytest.mark.parametrize("size", [-1, -BIG, BIG])
def test_a_gid_table_that_has_no_such_size(card: Card, backend: CardBackend, size: int) -> None:
    card.ethernet(1, has_gid_table=0)
    card.lie("gid_tbl_len", size, times=-1)
    assert backend.devices()[0].ports[0].port_num == 1


@pytest.mark.parametrize("count", [2001, BIG])
def test_more_gids_than_there_was_room_for(card: Card, backend: CardBackend, count: int) -> None:
    card.ethernet(1)
    card.lie("gid_table_count", count, times=-1)
    assert [str(gid) for gid in backend.devices()[0].ports[0].gids.values()] == ["::ffff:10.0.0.1"]


def test_limits_below_zero_are_none(card: Card, backend: CardBackend) -> None:
    card.ethernet(1, max_qp_wr=0xFFFFFFFF, max_mcast_grp=0xFFFFFFFF, max_mcast_qp_attach=0x80000000)
    device = backend.devices()[0]
    assert (device.max_qp_wr, device.max_mcast_grp, device.max_mcast_qp_attach) == (0, 0, 0)


@pytest.mark.parametrize("state", [7, 255, BIG, -1])
def test_a_queue_pair_state_that_does_not_exist(card: Card, end: End, state: int) -> None:
    to = end.join()
    card.lie("qp_state", state)
    with pytest.raises(McastError, match="a state that no queue pair has"):
        _ = end.qp.state
    assert end.qp.state is QpState.RTS
    assert receives(end, to)


# --- events ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [20, 99, BIG, -BIG])
def test_an_event_without_a_name(card: Card, end: End, kind: int) -> None:
    card.event(kind)
    event = end.channel.get_event(BOUND)
    assert event is not None
    assert event.type is CmEventType.UNKNOWN


@pytest.mark.parametrize("status", [-(1 << 31), -99999, BIG])
def test_a_status_of_an_event_that_is_no_errno(card: Card, end: End, status: int) -> None:
    end.join()
    card.event(CmEventType.MULTICAST_ERROR, status)
    event = end.channel.get_event(BOUND)
    assert event is not None
    with pytest.raises(McastError):
        event.check()


def test_an_address_of_an_event_keeps_to_its_bits(card: Card, backend: CardBackend) -> None:
    """A wrong one would make the event itself unreadable, after it was taken."""
    card.add(ethernet_port("10.0.0.1", group_sl=0xFF, group_flow_label=0xFFFFFFFF), name=b"card0", guid=1)
    destination = End(backend).join()
    assert (destination.sl, destination.flow_label) == (15, 0xFFFFF)
