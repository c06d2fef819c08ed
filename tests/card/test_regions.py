"""Registered memory on the card: how it is registered, and what is refused."""

from __future__ import annotations

import errno as E
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from mcast.api import Closed, InvalidArgument, McastError, NotSupported, Phase, QueuePair, TimedOut
from mcast.backends.rdma.qp import RdmaQueuePair
from mcast.backends.rdma.region import RdmaDeviceRegion, RdmaRegion

from .card import Access, Card, Stage
from .ends import BOUND, End
from .provider import CardBackend

SIZE = 3 * 4096


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
def test_a_device_may_write_in_any_order_where_it_is_asked_and_can(
    card: Card, backend: CardBackend, memory: int, can: int, asked: bool
) -> None:
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


def test_the_own_memory_of_a_queue_pair_is_written_in_order(card: Card, backend: CardBackend) -> None:
    card.ethernet(1)
    region = End(backend).qp.register(b"the next")
    assert card.access(lkey_of(region) - 1) == Access.LOCAL_WRITE


def test_a_send_waits_until_the_device_has_read_what_lies_on_another(
    card: Card, backend: CardBackend, memory: int
) -> None:
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


def test_a_library_without_dmabuf_says_which_to_take(
    card: Card, backend: CardBackend, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.ethernet(1)
    qp = cast(RdmaQueuePair, End(backend).qp)
    lacking = SimpleNamespace(mcast_register_dmabuf=lambda *_: -E.ENOSYS, mcast_has_dmabuf=lambda: 0)
    monkeypatch.setattr(qp.native, "_lib", lacking)
    with pytest.raises(NotSupported, match="upgrade rdma-core to 34 or newer"):
        qp.register_dmabuf(memory, SIZE)
    monkeypatch.undo()


def test_what_was_deregistered_meanwhile_is_not_sent(card: Card, backend: CardBackend, memory: int) -> None:
    """As another thread's close, between the look at the region and the post."""
    card.ethernet(1)
    end = End(backend)
    to = end.join()
    qp, region = cast(RdmaQueuePair, end.qp), end.qp.register_dmabuf(memory, SIZE)
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
