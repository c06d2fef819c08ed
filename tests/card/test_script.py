"""The scripted card, seen through the provider: times, orders, failures, link layers, headers."""

from __future__ import annotations

import errno as E
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

from mcast import RECORD_DTYPE
from mcast.api import (
    CmEventType,
    Destination,
    Gid,
    McastError,
    MessageTooLarge,
    PortEvent,
    QpError,
    QpState,
    WcStatus,
)

from ..waiting import until
from .card import AsyncEvent, Blocking, Card, Grh, Stage, ethernet_port, infiniband_port
from .ends import BOUND, GROUP, End
from .provider import CardBackend


def payload(end: End, timeout: float = BOUND) -> bytes | None:
    message = end.qp.recv_one(timeout)
    return None if message is None else bytes(message.payload)


# --- what comes when ---


def test_a_send_is_complete_when_the_test_says_so(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    card.hold(Stage.SEND)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(end.qp.send, to, [b"1"], None, BOUND)
        assert payload(end) == b"1"
        until(lambda: card.qp(end.qp.qp_num).kept[Stage.SEND] == 1)
        card.delay(Stage.SEND, 0)
        assert card.release(Stage.SEND, end.qp.qp_num) == 1
        assert sent.result(BOUND) == 1


def test_a_message_arrives_when_the_test_says_so(card: Card, backend: CardBackend) -> None:
    card.ethernet(2)
    out, into = End(backend), End(backend, "10.0.0.2")
    to = into.join()
    card.hold(Stage.RECV, into.qp.qp_num)
    out.qp.send(to, [b"1", b"2", b"3"])
    assert payload(into, 0) is None
    assert card.release(Stage.RECV, into.qp.qp_num, index=1) == 3
    assert payload(into) == b"2"
    card.release_all()
    assert [payload(into), payload(into)] == [b"1", b"3"]


def test_a_delay_is_kept_though_all_sleep(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    card.delay(Stage.WIRE, 1000)
    card.delay(Stage.RECV, 1000)
    assert end.qp.send(to, [b"1", b"2"]) == 2
    assert [payload(end), payload(end)] == [b"1", b"2"]


def test_a_call_stands_still(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend)
    card.stall("ibv_query_qp")
    with ThreadPoolExecutor(1) as pool:
        state = pool.submit(lambda: end.qp.state)
        until(lambda: card.stalled("ibv_query_qp"))
        assert not state.done()
        card.go_on("ibv_query_qp")
        assert state.result(BOUND) is QpState.RTS


# --- what fails ---


@pytest.mark.parametrize("completion", ["send", "recv"])
def test_a_completion_fails(card: Card, backend: CardBackend, completion: str) -> None:
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    card.fail(f"{completion}_completion", WcStatus.LOC_PROT_ERR)

    def use() -> None:
        end.qp.send(to, [b"x"])
        end.qp.recv(1, BOUND)

    with pytest.raises(QpError) as caught:
        use()
    assert caught.value.status is WcStatus.LOC_PROT_ERR
    assert end.qp.state is QpState.ERR
    end.qp.reset()
    end.qp.send(to, [b"again"])
    assert payload(end) == b"again"


def test_a_post_takes_a_part_of_its_chain(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    card.fail("ibv_post_send", E.ENOMEM, take=2)
    with pytest.raises(McastError):
        end.qp.send(to, [b"1", b"2", b"3"])
    assert [payload(end), payload(end), payload(end, 0)] == [b"1", b"2", None]


def test_a_receive_that_fails_to_be_posted(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    free = card.qp(end.qp.qp_num).receives
    end.qp.send(to, [b"x"])
    card.fail("ibv_post_recv", E.ENOMEM)
    batch = end.qp.recv(1, BOUND)
    batch.release()
    assert card.qp(end.qp.qp_num).receives == free - 1


# --- events ---


def test_the_queue_pair_of_a_fatal_event_is_in_err(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend)
    end.join()
    card.qp_event(end.qp.qp_num, AsyncEvent.QP_FATAL)
    assert end.qp.state is QpState.ERR
    with pytest.raises(QpError, match=r"a fatal error of the QP \(QP_FATAL\)"):
        end.qp.recv(1, BOUND)


def test_fatal_event_before_a_reset_ends_with_it(card: Card, backend: CardBackend) -> None:
    """A fatal event ends the life before a reset not the one after."""
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    card.qp_event(end.qp.qp_num, AsyncEvent.QP_FATAL)
    for state in (QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS):
        end.qp.modify(state)
    end.qp.send(to, [b"heard"])
    assert payload(end) == b"heard"
    assert end.qp.state is QpState.RTS


def test_fatal_event_during_a_reset_ends_with_it(card: Card, backend: CardBackend) -> None:
    """A fatal event that comes during a reset does not end the life after."""
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    card.stall("ibv_modify_qp")
    with ThreadPoolExecutor(1) as pool:
        reset = pool.submit(end.qp.reset)
        until(lambda: card.stalled("ibv_modify_qp"))
        card.qp_event(end.qp.qp_num, AsyncEvent.QP_FATAL)
        card.go_on("ibv_modify_qp")
        reset.result(BOUND)
    assert end.qp.port_events() == ()
    end.qp.send(to, [b"heard"])
    assert payload(end) == b"heard"


def test_qp_gets_events_of_its_own_port(card: Card, backend: CardBackend) -> None:
    """A queue pair is told of its own port of the device."""
    device = card.add(ethernet_port("10.0.0.1"), ethernet_port("10.0.0.2"), name=b"card0")
    first, second = End(backend), End(backend, "10.0.0.2")
    card.port_event(device, PortEvent.ERR, port=2)
    assert first.qp.port_events() == ()
    assert second.qp.port_events() == (PortEvent.ERR,)


def test_a_port_that_is_down_sends_nothing(card: Card, backend: CardBackend) -> None:
    (device, _) = card.ethernet(2)
    out, into = End(backend), End(backend, "10.0.0.2")
    to = into.join()
    card.port_event(device, PortEvent.ERR)
    out.qp.send(to, [b"lost"])
    card.port_event(device, PortEvent.ACTIVE)
    out.qp.send(to, [b"heard"])
    assert payload(into) == b"heard"


def test_a_removed_device_lets_go_and_comes_back(card: Card, backend: CardBackend) -> None:
    (device,) = card.ethernet(1)
    end = End(backend)
    end.join()
    card.remove(device)
    event = end.channel.get_event(BOUND)
    assert event is not None
    assert event.type is CmEventType.DEVICE_REMOVAL
    assert backend.devices() == ()
    end.channel.close()
    assert card.leftovers() == ()
    card.restore(device)
    assert [one.name for one in backend.devices()] == ["card0"]
    End(backend).join()


# --- InfiniBand and Ethernet ---


def test_groups_on_infiniband_have_what_the_port_says(card: Card, backend: CardBackend) -> None:
    (device, _) = card.infiniband(2)
    card.set_port(device, group_sl=3, group_hop_limit=5, group_flow_label=0x12345, group_qkey=0x1234)
    end, other = End(backend), End(backend, "10.0.0.2")
    to = end.join()
    assert (to.sl, to.hop_limit, to.flow_label, to.qkey) == (3, 5, 0x12345, 0x1234)
    assert to.dlid >= 0xC000
    assert to.gid == Gid("ff12:4001:ffff::f01:203")
    assert other.join().dlid == to.dlid
    (port,) = (device.ports[0] for device in backend.devices() if device.name == "card0")
    assert (port.lid, port.gids[0]) == (1, Gid("fe80::1"))


def test_partitions_keep_apart(card: Card, backend: CardBackend) -> None:
    first, second = card.infiniband(2)
    into, out = End(backend), End(backend, "10.0.0.2")
    to = into.join()
    for pkey, heard in ((0x7FFF, True), (0x8001, False), (0xFFFF, True)):
        pkeys = card.port(second).pkeys
        pkeys[0] = pkey
        card.set_port(second, pkeys=pkeys)
        out.qp.send(to, [b"%d" % pkey])
        assert payload(into, 0) == (b"%d" % pkey if heard else None)
    out.qp.send(to.model_copy(update={"qkey": 7}), [b"x"])
    assert payload(into, 0) is None
    assert card.port(first).qkey_violations == 1


def test_messages_longer_than_the_groups_mtu_vanish(card: Card, backend: CardBackend) -> None:
    card.infiniband(1, max_inline=0)
    card.set_port(0, group_mtu=1)  # of 256 bytes; the port's is of 2048
    end = End(backend)
    to = end.join()
    end.qp.send(to, [bytes(256), bytes(257)])
    assert [payload(end), payload(end, 0)] == [bytes(256), None]
    with pytest.raises(MessageTooLarge):
        end.qp.send(to, [bytes(2049)])


@pytest.mark.parametrize("layer", ["roce", "infiniband"])
def test_a_message_is_answered_by_unicast(card: Card, backend: CardBackend, layer: str) -> None:
    card.network(layer, ports=2)
    one, other = End(backend), End(backend, "10.0.0.2")
    to = other.join()
    one.qp.send(to, [b"question"])
    message = other.qp.recv_one(BOUND)
    assert message is not None
    assert (message.source, message.src_qp) == (backend.devices()[0].ports[0].gids[0], one.qp.qp_num)
    assert (message.group, message.src_lid) == (to.gid, 1 if layer == "infiniband" else 0)
    other.qp.send(to.reply_to(message), [b"answer"])
    assert payload(one) == b"answer"
    assert payload(other, 0) is None


@pytest.mark.parametrize(
    ("layer", "form", "is_read"),
    [
        ("roce", Grh.AUTO, True),
        ("roce", Grh.IPV4, True),
        ("roce", Grh.IPV6, True),
        ("roce", Grh.IPV4_JUNK, True),
        ("infiniband", Grh.AUTO, True),
        ("infiniband", Grh.NONE, False),
    ],
)
def test_headers_of_each_form(card: Card, backend: CardBackend, layer: str, form: Grh, is_read: bool) -> None:
    card.network(layer, ports=1)
    card.set_port(0, grh=form)
    end = End(backend)
    to = end.join()
    end.qp.send(to, [b"text"])
    message = end.qp.recv_one(BOUND)
    assert message is not None
    assert bytes(message.payload) == b"text"
    source = backend.devices()[0].ports[0].gids[0]
    assert (message.source, message.group) == ((source, to.gid) if is_read else (Gid(bytes(16)),) * 2)
    assert message.from_self is is_read


def test_ipv6_source_may_look_like_ipv4(card: Card, backend: CardBackend) -> None:
    """An IPv6 header may have a source that looks like the start of an IPv4 header."""
    card.add(ethernet_port("69.0.0.1"), name=b"card0")  # 69 is 0x45: version 4, five words
    card.set_port(0, grh=Grh.IPV6)
    end = End(backend, "69.0.0.1")
    to = end.join()
    end.qp.send(to, [b"text"])
    message = end.qp.recv_one(BOUND)
    assert message is not None
    assert (message.source, message.group) == (backend.devices()[0].ports[0].gids[0], to.gid)


def test_a_message_from_anybody(card: Card, backend: CardBackend) -> None:
    card.add(infiniband_port("10.0.0.1", lid=4, lmc=2), name=b"card0")
    end = End(backend)
    assert card.inject(end.qp.qp_num, b"x" * 100, src_qp=77, imm=5, slid=9, sl=2, path_bits=3)
    message = end.qp.recv_one(BOUND)
    assert message is not None
    assert (len(message.payload), message.src_qp, message.imm, message.src_lid) == (100, 77, 5, 9)
    for _ in range(16):
        assert card.inject(end.qp.qp_num, b"")
    assert not card.inject(end.qp.qp_num, b"")
    assert card.qp(end.qp.qp_num).dropped == 1


def test_a_message_says_nothing_of_the_one_before(card: Card, backend: CardBackend) -> None:
    """Records are used again; what a completion does not say is zero in them."""
    card.add(infiniband_port("10.0.0.1", lid=4), name=b"card0")
    end = End(backend)
    said: dict[str, Any] = {"grh": bytes(range(1, 41)), "imm": 5, "slid": 9}
    nothing = Gid(bytes(16))
    for fields, expected in (said, (5, 9, False)), ({}, (None, 0, True)):
        assert card.inject(end.qp.qp_num, b"x", **fields)
        with end.qp.recv(8, BOUND) as batch:
            (message,) = batch
            assert (message.imm, message.src_lid, message.source == nothing) == expected
            assert (message.group == nothing) is (message.source == nothing)
            assert numpy.frombuffer(batch.records, RECORD_DTYPE)["imm"] == [message.imm or 0]
        del batch, message  # only then are its records free


@pytest.mark.parametrize(
    ("blocking", "heard"), [(Blocking.HONOURED, False), (Blocking.IGNORED, True), (Blocking.REFUSED, None)]
)
def test_loopback(card: Card, backend: CardBackend, blocking: Blocking, heard: bool | None) -> None:
    card.ethernet(1, block_loopback=blocking)
    if heard is None:
        with pytest.raises(McastError):
            End(backend, block_loopback=True)
        return
    end, other = End(backend, block_loopback=True), End(backend)
    to: Destination = end.join()
    other.join(GROUP)
    end.qp.send(to, [b"mine"])
    assert payload(other) == b"mine"
    assert payload(end, 0) == (b"mine" if heard else None)
