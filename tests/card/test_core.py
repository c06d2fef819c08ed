"""The C core on a card that fails: each path from open to close leaves nothing behind."""

from __future__ import annotations

import errno as E
import mmap
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

import pytest

from mcast.api import CmEventType, McastError, Phase, QpInit, UnavailableReason

from ..waiting import until
from .card import NO_EVENT, Card, ethernet_port
from .ends import BOUND, GROUP, OTHER, End
from .provider import CardBackend


def use(backend: CardBackend) -> None:
    """All that the provider does with the libraries, once; everything it made is closed."""
    channel = backend.event_channel()
    try:
        cm_id = channel.create_id()
        cm_id.resolve_addr(GROUP, "10.0.0.1", BOUND)
        event = channel.get_event(BOUND)
        assert event is not None
        event.check()
        qp = cm_id.create_qp(QpInit(max_send_wr=16, max_recv_wr=16))
        cm_id.join_multicast(GROUP)
        event = channel.get_event(BOUND)
        assert event is not None
        ud = event.check().ud
        assert ud is not None
        with qp.register(bytearray(4096)):
            qp.send(ud.destination, [b"one", b"two"])
        with qp.recv(2, BOUND) as batch:
            assert len(batch) == 2
        cm_id.leave_multicast(GROUP)
        qp.attach_mcast(ud.destination.gid, 0)
        qp.detach_mcast(ud.destination.gid, 0)
        qp.reset()
        qp.close()
        cm_id.destroy()
    finally:
        channel.close()


CALLS = (
    "ibv_query_port",
    "ibv_query_gid",
    "ibv_alloc_pd",
    "ibv_reg_mr",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_create_qp",
    "ibv_modify_qp",
    "ibv_attach_mcast",
    "ibv_detach_mcast",
    "ibv_create_ah",
    "ibv_post_send",
    "ibv_post_recv",
    "rdma_create_event_channel",
    "rdma_create_id",
    "rdma_resolve_addr",
    "rdma_create_qp",
    "rdma_init_qp_attr",
    "rdma_join_multicast",
    "rdma_leave_multicast",
    "rdma_get_cm_event",
)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_leaves_nothing(card: Card, call: str) -> None:
    """Each of its calls in turn: the first, the second, and so on."""
    found = {}
    for nth in count():
        card.reset()
        card.ethernet(1)
        if nth:
            card.fail(call, E.ENOMEM, nth)
        with CardBackend(card) as backend, suppress(McastError):
            use(backend)
        if not nth:
            times = card.count(call)
            assert times
        if card.reports() or card.leftovers():
            found[nth] = card.reports() + card.leftovers()
        if nth == times:
            break
    card.reset()
    assert found == {}


@pytest.mark.parametrize("call", ["ibv_open_device", "ibv_query_device", "ibv_query_port"])
def test_device_removed_while_listing_hides_no_other(card: Card, backend: CardBackend, call: str) -> None:
    """A device that goes while all are listed hides no other."""
    first, _ = card.ethernet(2)
    card.stall(call)
    with ThreadPoolExecutor(1) as pool:
        listed = pool.submit(backend.devices)
        until(lambda: card.stalled(call))
        card.remove(first, disassociated=True)
        card.go_on(call)
        assert [device.name for device in listed.result(BOUND)] == ["card1"]


def test_a_device_that_cannot_be_asked_is_left_out(card: Card, backend: CardBackend) -> None:
    """The others work."""
    card.ethernet(2)
    card.fail("ibv_query_port", E.EIO)
    assert [device.name for device in backend.devices()] == ["card1"]
    card.fail("ibv_open_device", E.EIO)
    (left_out,) = backend.unusable_devices()
    assert (left_out.name, left_out.reason, left_out.errno) == ("card0", UnavailableReason.BROKEN, E.EIO)
    assert [device.name for device in backend.devices()] == ["card0", "card1"]


def test_a_lack_of_descriptors_leaves_no_device_out(card: Card, backend: CardBackend) -> None:
    """It says nothing about the device, and ends with the call."""
    card.ethernet(2)
    card.fail("ibv_open_device", E.EMFILE)
    with pytest.raises(McastError) as caught:
        backend.devices()
    assert caught.value.errno == E.EMFILE


def test_refusal_is_reported_though_the_pd_stays(card: Card, backend: CardBackend) -> None:
    """Why a queue pair was refused is told though its protection domain stays."""
    card.ethernet(1)
    cm_id = backend.event_channel().create_id()
    cm_id.bind_addr("10.0.0.1")
    card.fail("ibv_create_qp", E.EPERM, times=-1)
    card.fail("ibv_dealloc_pd", E.EBUSY)
    with pytest.raises(McastError) as caught:
        cm_id.create_qp(QpInit())
    assert (caught.value.call, caught.value.errno) == ("create_qp", E.EPERM)


SAYS_SO: dict[str, Callable[[End], object]] = {
    "ibv_query_port": lambda end: end.qp.max_message_size,
    "ibv_query_qp": lambda end: end.qp.state,
    "ibv_modify_qp": lambda end: end.qp.reset(),
    "ibv_attach_mcast": lambda end: end.qp.attach_mcast("ff0e::1", 0),
    "ibv_post_send": lambda end: end.qp.send_one(end.join(), b"x"),
    "ibv_post_recv": lambda end: end.qp.reset(),
    "ibv_destroy_qp": lambda end: end.qp.close(),
    "ibv_destroy_cq": lambda end: end.qp.close(),
    "ibv_destroy_comp_channel": lambda end: end.qp.close(),
}


@pytest.mark.parametrize("sign", [1, -1], ids=["returns the errno", "returns -1 and sets errno"])
@pytest.mark.parametrize("call", SAYS_SO)
def test_what_a_driver_fails_with_is_raised(card: Card, backend: CardBackend, call: str, sign: int) -> None:
    """libibverbs promises the errno (AT-2); some drivers return -1 and set it: no errno, and no state."""
    card.ethernet(1)
    end = End(backend)
    card.fail(call, sign * E.EPERM)
    with pytest.raises(McastError) as caught:
        SAYS_SO[call](end)
    assert caught.value.errno == E.EPERM


def test_enomem_names_the_memory_needed(
    card: Card, backend: CardBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host without memory says how much a queue pair needs."""

    def full(*arguments: object, **named: object) -> None:
        raise OSError(E.ENOMEM, os.strerror(E.ENOMEM))

    card.ethernet(1)
    with monkeypatch.context() as host:
        host.setattr(mmap, "mmap", full)
        with pytest.raises(McastError) as caught:
            End(backend, max_recv_size=1000)
    assert (caught.value.errno, caught.value.phase) == (E.ENOMEM, Phase.CREATE_QP)
    assert re.search(r"the host has no \d{5,} bytes for the messages", str(caught.value))
    assert "ask for fewer or smaller messages: max_recv_wr" in str(caught.value)
    End(backend)


@pytest.mark.parametrize(
    ("speed", "width", "rate"),
    [(1, 1, 2.5), (32, 2, 103.125), (64, 2, 212.5), (128, 2, 425.0), (256, 2, 850.0), (256, 4, 1700.0)],
)
def test_the_rate_of_a_port(card: Card, backend: CardBackend, speed: int, width: int, rate: float) -> None:
    """enum ib_port_speed and ib_port_width of Linux; XDR (256) has no room in the field of old."""
    card.add(ethernet_port("10.0.0.1", active_speed=speed, active_width=width), name=b"card0", guid=1)
    assert backend.devices()[0].ports[0].rate == rate


DESTROYS = (
    "ibv_dealloc_pd",
    "ibv_dereg_mr",
    "ibv_destroy_comp_channel",
    "ibv_destroy_cq",
    "ibv_destroy_qp",
    "ibv_destroy_ah",
    "rdma_destroy_id",
)


@pytest.mark.parametrize("call", DESTROYS)
def test_failed_destroy_leaves_only_its_object(card: Card, call: str) -> None:
    """A destroy that fails leaves only what it was for.

    As a device that is gone answers: EIO. What is in use by what is left cannot go either.
    """
    found = {}
    for nth in count():
        card.reset()
        card.ethernet(1)
        if nth:
            card.fail(call, E.EIO, nth)
        with suppress(McastError), CardBackend(card) as backend:
            use(backend)
        if not nth:
            times = card.count(call)
            assert times
        left = [one for one in card.leftovers() if not one.excused]
        if card.reports() or left:
            found[nth] = [*card.reports(), *left]
        if nth == times:
            break
    card.reset()
    assert found == {}


@pytest.mark.parametrize("layer", [Card.ethernet, Card.infiniband])
def test_all_is_well_on_each_link_layer(
    card: Card, backend: CardBackend, layer: Callable[[Card, int], list[int]]
) -> None:
    layer(card, 1)
    end = End(backend)
    end.join()
    end.join(OTHER)
    assert [qp.attachments for qp in card.qps()] == [2]
    backend.close()
    assert card.leftovers() == ()


@pytest.mark.parametrize(
    ("event", "status", "error"),
    [
        (CmEventType.MULTICAST_ERROR, -E.ETIMEDOUT, E.ETIMEDOUT),
        (CmEventType.MULTICAST_ERROR, -E.EINVAL, E.EINVAL),
        (CmEventType.MULTICAST_ERROR, -E.ENODEV, E.ENODEV),
    ],
)
def test_a_join_that_is_refused(
    card: Card, backend: CardBackend, event: CmEventType, status: int, error: int
) -> None:
    card.ethernet(1)
    end = End(backend)
    card.answer_join(event, status)
    end.id.join_multicast(GROUP)
    found = end.channel.get_event(BOUND)
    assert found is not None
    assert (found.type, found.errno) == (event, error)
    backend.close()
    assert card.leftovers() == ()


def test_a_join_that_is_never_answered(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend)
    card.answer_join(NO_EVENT)
    end.id.join_multicast(GROUP)
    assert end.channel.get_event(0) is None
    end.id.leave_multicast(GROUP)
    backend.close()
    assert card.leftovers() == ()


@pytest.mark.parametrize("kind", [kind for kind in CmEventType if kind >= 0])
def test_an_event_of_each_type_is_a_value(card: Card, backend: CardBackend, kind: CmEventType) -> None:
    card.ethernet(2)
    end, other = End(backend), End(backend, "10.0.0.2")
    end.join()
    assert card.event(kind, 0, "10.0.0.1") == 1
    event = end.channel.get_event(BOUND)
    assert event is not None
    assert (event.type, event.id) == (kind, end.id)
    assert other.channel.get_event(0) is None


@pytest.mark.parametrize(
    ("number", "name"),
    [(16, "ADDRINFO_RESOLVED"), (17, "ADDRINFO_ERROR"), (18, "USER"), (19, "INTERNAL"), (20, "UNKNOWN")],
)
def test_events_of_newer_libraries(card: Card, backend: CardBackend, number: int, name: str) -> None:
    """rdma-core 60 added four events; a number that comes later is UNKNOWN, and no error."""
    card.ethernet(1)
    end = End(backend)
    assert card.event(number) == 1
    event = end.channel.get_event(BOUND)
    assert event is not None
    assert (event.type.name, event.status) == (name, 0)


def test_a_failed_addrinfo_raises(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    end = End(backend)
    card.event(CmEventType.ADDRINFO_ERROR)
    event = end.channel.get_event(BOUND)
    assert event is not None
    with pytest.raises(McastError, match="ADDRINFO_ERROR"):
        event.check()
