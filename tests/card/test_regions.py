"""Registered memory on the card: how it is registered, and what is refused."""

from __future__ import annotations

import errno as E
import gc
import mmap
import os
import typing
import weakref
from collections.abc import Iterator

import pytest

from mcast import cast, open_endpoint
from mcast.api import (
    Closed,
    Destination,
    DeviceRegion,
    InvalidArgument,
    McastError,
    NotSupported,
    Phase,
    QpError,
    QpState,
    QueuePair,
    Region,
    TimedOut,
)
from mcast.backends.rdma.qp import RdmaQueuePair
from mcast.backends.rdma.region import RdmaDeviceRegion, RdmaRegion

from ..waiting import Running
from .card import Access, AsyncEvent, Card, Stage
from .ends import BOUND, GROUP, End
from .provider import CardBackend

SIZE = 3 * 4096
_MAP_NORESERVE = 0x4000


@pytest.fixture
def memory() -> Iterator[int]:
    """The descriptor of a memory that stands for another device's."""
    fd = os.memfd_create("device")
    os.pwrite(fd, bytes(range(256)) * (SIZE // 256), 0)
    yield fd
    os.close(fd)


def lkey_of(region: object) -> int:
    assert isinstance(region, RdmaRegion | RdmaDeviceRegion)
    return region.lkey


@pytest.mark.parametrize("can", [1, 0])
@pytest.mark.parametrize("asked", [True, False])
def test_relaxed_ordering_where_asked_and_possible(
    card: Card, backend: CardBackend, memory: int, can: int, asked: bool
) -> None:
    """A device may write in any order where it is asked and can."""
    card.ethernet(1, has_relaxed_ordering=can)
    end = End(backend)
    written, read = (
        lkey_of(end.qp.register(buffer, relaxed_ordering=asked)) for buffer in (bytearray(64), bytes(64))
    )
    ordering = Access.RELAXED_ORDERING if asked and can else Access(0)
    assert card.access(written) == Access.LOCAL_WRITE | ordering
    assert card.access(read) == ordering
    wanted = Access.RELAXED_ORDERING if asked else Access(0)
    device = end.qp.register_dmabuf(memory, SIZE, relaxed_ordering=asked)
    assert card.access(lkey_of(device)) == wanted
    device = end.qp.register_dmabuf(memory, SIZE, recv_slot=64, relaxed_ordering=asked)
    assert card.access(lkey_of(device)) == Access.LOCAL_WRITE | wanted


def test_own_memory_is_written_in_order(card: Card, backend: CardBackend) -> None:
    """The own memory of a queue pair is written in order."""
    card.ethernet(1)
    region = End(backend).qp.register(b"the next")
    assert card.access(lkey_of(region) - 1) == Access.LOCAL_WRITE


def test_send_waits_until_device_memory_is_read(card: Card, backend: CardBackend, memory: int) -> None:
    """A send waits until the device has read what lies on another."""
    card.ethernet(1)
    end = End(backend)
    to, region = end.join(), end.qp.register_dmabuf(memory, SIZE)
    card.hold(Stage.WIRE, end.qp.qp_num)
    with pytest.raises(TimedOut) as caught:
        end.qp.send(to, [region.at(0, 8)], timeout=0)
    assert caught.value.posted == 1
    card.release(Stage.WIRE, end.qp.qp_num)
    end.qp.flush(BOUND)


def test_a_device_that_takes_no_dmabuf_says_so(card: Card, backend: CardBackend, memory: int) -> None:
    card.ethernet(1, has_dmabuf=0)
    with pytest.raises(NotSupported, match="the device or its driver takes no DMA-BUF: copy") as caught:
        End(backend).qp.register_dmabuf(memory, SIZE)
    assert caught.value.errno == E.EOPNOTSUPP
    assert caught.value.phase is Phase.REGISTER


def test_what_was_deregistered_meanwhile_is_not_sent(card: Card, backend: CardBackend, memory: int) -> None:
    """Another thread closes the region between the check and the post."""
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    qp, region = typing.cast(RdmaQueuePair, end.qp), end.qp.register_dmabuf(memory, SIZE)
    end.qp.send(to, [region.at(0, 8)])
    place, serial = qp._place_of(region.at(0, 8)), qp._handles.get(to)
    region.close()
    with pytest.raises(InvalidArgument):
        qp._post(serial, to.qp_num, to.qkey, [place], None, BOUND)
    with pytest.raises(Closed):
        end.qp.send(to, [region.at(0, 8)])
    assert end.qp.counters.sent == 1


def test_a_descriptor_that_is_none_is_refused(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    qp = End(backend).qp
    fd = os.open("/", os.O_RDONLY)
    os.close(fd)
    with pytest.raises(McastError, match="fd is not open") as caught:
        qp.register_dmabuf(fd, SIZE)
    assert caught.value.errno == E.EBADF


def test_closing_the_queue_pair_ends_its_device_memory(card: Card, backend: CardBackend, memory: int) -> None:
    card.ethernet(1)
    qp: QueuePair = End(backend).qp
    region = qp.register_dmabuf(memory, SIZE)
    qp.close()
    region.close()
    assert [one.kind for one in card.leftovers() if one.kind == "memory region"] == []


@pytest.mark.parametrize("refused", [False, True])
def test_object_is_sent_from_registered_memory(
    card: Card, backend: CardBackend, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    """An object is sent out of its memory if that can be registered."""
    card.ethernet(2)
    data, lent = os.urandom(3 << 20), set[int]()
    caplog.set_level("DEBUG", "mcast")
    with (
        open_endpoint(backend, "10.0.0.1") as endpoint,
        open_endpoint(backend, "10.0.0.2", receive_depth=1024) as other,
        endpoint.join(GROUP) as group,
        other.join(GROUP) as theirs,
    ):
        own = regions(card)
        if refused:
            card.fail("ibv_reg_mr", E.ENOMEM)
        receiving = Running(lambda: next(cast.receive(theirs)))
        with cast.open_session(group, progress=lambda progress: lent.add(regions(card) - own)) as sending:
            sending.wait_for_receivers(1)
            assert sending.send(data).strategy_met
        (got,) = receiving.results()
        assert got.data == data
        assert regions(card) == own
    assert lent == ({0} if refused else {0, 1})
    assert ("what is sent is copied" in caplog.text) == refused


def regions(card: Card) -> int:
    """Return the number of memory regions; one is the queue pair's own."""
    return sum(one.kind == "memory region" for one in card.leftovers())


def receives(end: End, to: Destination) -> bool:
    end.qp.reset()
    end.qp.send_one(to, b"heard")
    message = end.qp.recv_one(BOUND)
    return message is not None and bytes(message.payload) == b"heard"


STEPS = range(1, 5)
"""Changes of state by which a queue pair comes to receive elsewhere."""


@pytest.mark.parametrize("is_reset", [True, False])
@pytest.mark.parametrize("nth", STEPS)
def test_region_that_fails_to_close_stays(card: Card, backend: CardBackend, nth: int, is_reset: bool) -> None:
    """A region that fails to close stays until the next try.

    Before that the program may reset the queue pair, or not.
    """
    card.ethernet(1)
    end = End(backend)
    to, region = end.join(), end.qp.register(bytearray(4096), recv_slot=1024)
    card.fail("ibv_modify_qp", E.EIO, nth)
    with pytest.raises(McastError):
        region.close()
    if is_reset:
        assert receives(end, to)
    region.close()
    assert (regions(card), end.qp.state) == (1, QpState.RTS)
    assert receives(end, to)


@pytest.mark.parametrize("nth", STEPS)
def test_refused_receive_memory_is_deregistered(card: Card, backend: CardBackend, nth: int) -> None:
    """Receive memory that is refused is registered no more."""
    card.ethernet(1)
    end, buffer = End(backend), bytearray(4096)
    to = end.join()
    card.fail("ibv_modify_qp", E.EIO, nth)
    with pytest.raises(McastError):
        end.qp.register(buffer, recv_slot=1024)
    assert (regions(card), end.qp.state) == (1, QpState.RTS)
    assert receives(end, to)
    gc.collect()
    buffer.clear()  # which it refuses while something has a view of it


def test_qp_in_err_reports_err_not_queued_messages(card: Card, backend: CardBackend) -> None:
    """A queue pair in ERR says so and not that messages are queued."""
    card.ethernet(1)
    end = End(backend)
    card.qp_event(end.qp.qp_num, AsyncEvent.QP_FATAL)
    with pytest.raises(QpError, match="the device reported a fatal error of the QP"):
        end.qp.register(bytearray(4096), recv_slot=1024)


@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_region_closed_in_err_keeps_the_reason(card: Card, backend: CardBackend, nth: int) -> None:
    """A region closed in ERR leaves the reason to be told.

    The nth step fails, and the close is tried again.
    """
    card.ethernet(1)
    end = End(backend)
    to, region = end.join(), end.qp.register(bytearray(4096), recv_slot=1024)
    card.qp_event(end.qp.qp_num, AsyncEvent.QP_FATAL)
    if nth:
        card.fail("ibv_modify_qp", E.EIO, nth)
        with pytest.raises(McastError):
            region.close()
    region.close()
    assert (regions(card), end.qp.state) == (1, QpState.ERR)
    for _ in range(2):
        with pytest.raises(QpError, match="the device reported a fatal error of the QP"):
            end.qp.recv(1, BOUND)
    assert receives(end, to)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_receive_memory_may_exceed_32_bits_of_slots(
    card: Card, backend: CardBackend, memory: int, kind: str
) -> None:
    """Receive memory may have more slots than 32 bits count."""
    card.ethernet(1)
    end, size = End(backend), 5 << 30
    to = end.join()
    if kind == "host":
        unused = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        region: Region | DeviceRegion = end.qp.register(mmap.mmap(-1, size, flags=unused), recv_slot=1)
    else:
        os.ftruncate(memory, size)
        region = end.qp.register_dmabuf(memory, size, recv_slot=1)
    assert end.qp.state is QpState.RTS
    region.close()
    assert receives(end, to)


@pytest.mark.parametrize(("slots", "slot"), [(1, 5 << 30), (2, (4 << 30) + 4096)])
def test_a_slot_may_have_more_bytes_than_32_bits_count(
    card: Card, backend: CardBackend, memory: int, slots: int, slot: int
) -> None:
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    os.ftruncate(memory, slots * slot)
    room = mmap.mmap(memory, slots * slot)
    region = end.qp.register(room, recv_slot=slot)
    for number in range(slots):
        end.qp.send_one(to, b"%d" % number)
    with end.qp.recv(slots, BOUND) as batch:
        assert [bytes(one.payload) for one in batch] == [b"%d" % number for number in range(slots)]
    assert [room[number * slot] for number in range(slots)] == [ord("0") + n for n in range(slots)]
    region.close()
    assert receives(end, to)


def test_qp_with_device_memory_is_collected(card: Card, backend: CardBackend, memory: int) -> None:
    """A queue pair that received into a device is not kept.

    It and the region refer to each other; the garbage collector finds that.
    """
    card.ethernet(1)
    end = End(backend)
    end.qp.register_dmabuf(memory, SIZE, recv_slot=64)
    gone = weakref.ref(end.qp)
    end.channel.close()
    backend._channels.clear()
    del end
    gc.collect()
    assert gone() is None


def test_a_refusal_keeps_nothing_of_the_call(card: Card, backend: CardBackend) -> None:
    """No circle is left for the garbage collector: before Python 3.13 a memoryview in one may crash it."""
    card.ethernet(1)
    end = End(backend)
    card.fail("ibv_reg_mr", E.EIO, times=-1)
    memory = bytearray(4096)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(McastError):
            end.qp.register(memory)
        memory.append(0)  # BufferError while a view of it is left
    finally:
        gc.enable()
