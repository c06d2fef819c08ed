"""Messages out of another device's memory: on the simulator and on a card of memory, it is a memfd."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typing_extensions import Buffer

from mcast.api import (
    RECORD_DTYPE,
    Backend,
    Batch,
    Closed,
    DeviceBytes,
    McastError,
    MessageTooLarge,
    NotSupported,
    Phase,
)

from ..card.ends import BOUND, End

PAGE = 4096
CONTENT = b"".join(number.to_bytes(4) for number in range(PAGE))
"""Four pages, no four bytes of which are like others."""


class Member(End):
    """A queue pair in the group."""

    def __init__(self, backend: Backend, address: str) -> None:
        super().__init__(backend, address, max_send_wr=128, max_recv_wr=512)
        self.to = self.join()

    def received(self, count: int) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < count:
            with self.qp.recv(count, BOUND) as batch:
                assert len(batch)
                found += [bytes(message.payload) for message in batch]
        return found


@pytest.fixture
def sender(backend: Backend) -> Member:
    return Member(backend, "10.0.0.1")


@pytest.fixture
def receiver(backend: Backend) -> Member:
    return Member(backend, "10.0.0.2")


@pytest.fixture
def device() -> Iterator[int]:
    fd = os.memfd_create("device")
    os.pwrite(fd, CONTENT, 0)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("offset", [0, 8, PAGE, PAGE + 1000])
def test_parts_of_it_are_sent_by_their_place(
    sender: Member, receiver: Member, device: int, offset: int
) -> None:
    region = sender.qp.register_dmabuf(device, len(CONTENT) - offset, offset)
    assert region.nbytes == len(CONTENT) - offset
    short, long, last = region.at(4, 16), region.at(100, 1000), region.at(region.nbytes - 8, 8)
    assert [len(part) for part in (short, long, last)] == [16, 1000, 8]
    mixed: list[Buffer | DeviceBytes] = [short, b"of the host", long, bytearray(600), last, region.at(0, 0)]
    assert sender.qp.send(sender.to, mixed) == 6
    inside = CONTENT[offset:]
    assert receiver.received(6) == [
        inside[4:20],
        b"of the host",
        inside[100:1100],
        bytes(600),
        CONTENT[-8:],
        b"",
    ]
    os.pwrite(device, b"changed", offset + 4)  # it is sent from there, and no copy of it
    sender.qp.send_one(sender.to, short)
    assert receiver.received(1) == [b"changed" + inside[11:20]]
    region.close()


def test_the_descriptor_may_be_closed_at_once(sender: Member, receiver: Member) -> None:
    fd = os.memfd_create("device")
    os.pwrite(fd, CONTENT, 0)
    region = sender.qp.register_dmabuf(fd, PAGE)
    os.close(fd)
    sender.qp.send_one(sender.to, region.at(0, 512))
    assert receiver.received(1) == [CONTENT[:512]]


def test_the_cpu_has_no_view_of_it(sender: Member, device: int) -> None:
    part = sender.qp.register_dmabuf(device, PAGE).at(0, 8)
    with pytest.raises(
        BufferError, match="in the memory of another device, of which the CPU has no view: copy"
    ):
        bytes(part)
    with pytest.raises(TypeError):
        memoryview(part)  # type: ignore[arg-type]


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 4), (0, PAGE + 1), (PAGE, 1), (0, -1)])
def test_a_part_is_inside(sender: Member, device: int, offset: int, nbytes: int) -> None:
    region = sender.qp.register_dmabuf(device, PAGE)
    with pytest.raises(
        ValueError, match=f"{nbytes} bytes from {offset} on are not inside a region of {PAGE}"
    ):
        region.at(offset, nbytes)


def test_guard_g_mtu_holds(sender: Member, device: int) -> None:
    region = sender.qp.register_dmabuf(device, len(CONTENT))
    limit = sender.qp.max_message_size
    for send in (
        lambda: sender.qp.send(sender.to, [b"fits", region.at(0, limit + 1)]),
        lambda: sender.qp.send_one(sender.to, region.at(0, limit + 1)),
    ):
        with pytest.raises(MessageTooLarge):
            send()
    assert sender.qp.counters.sent == 0


def test_one_part_is_no_batch(sender: Member, device: int) -> None:
    part = sender.qp.register_dmabuf(device, PAGE).at(0, 4)
    with pytest.raises(TypeError, match="not one DeviceBytes: use send_one"):
        sender.qp.send(sender.to, part)  # type: ignore[arg-type]


def test_memory_of_another_queue_pair_is_refused(sender: Member, receiver: Member, device: int) -> None:
    region = receiver.qp.register_dmabuf(device, PAGE)
    with pytest.raises(ValueError, match="not registered with this queue pair: call its register_dmabuf"):
        sender.qp.send(sender.to, [region.at(0, 4)])


def test_a_closed_region_is_sent_from_no_more(sender: Member, device: int) -> None:
    with sender.qp.register_dmabuf(device, PAGE) as region:
        part: DeviceBytes = region.at(0, 4)
    assert region.closed
    with pytest.raises(Closed):
        sender.qp.send(sender.to, [part])
    sender.qp.close()
    with pytest.raises(Closed):
        sender.qp.register_dmabuf(device, PAGE)


@pytest.mark.parametrize(("name", "value"), [("fd", -1), ("nbytes", 0), ("offset", -1)])
def test_what_cannot_be_is_refused_in_words(sender: Member, name: str, value: int) -> None:
    usual: dict[str, Any] = {"fd": 0, "nbytes": 1, "offset": 0}
    with pytest.raises(ValueError, match=f"{name} is {value}: "):
        sender.qp.register_dmabuf(**(usual | {name: value}))


@pytest.mark.parametrize("slot", [0, -1, PAGE + 1])
def test_a_slot_is_inside(sender: Member, device: int, slot: int) -> None:
    with pytest.raises(
        ValueError, match=f"recv_slot is {slot}: it needs at least one slot, the memory has {PAGE}"
    ):
        sender.qp.register_dmabuf(device, PAGE, recv_slot=slot)


def test_what_cannot_be_mapped_is_refused(sender: Member) -> None:
    reading, writing = os.pipe()
    with pytest.raises(McastError) as caught:
        sender.qp.register_dmabuf(reading, PAGE)
    assert caught.value.phase is Phase.REGISTER
    os.close(reading)
    os.close(writing)


# --- receiving into it -------------------------------------------------------------------------------

SLOT = 1024


def device_parts(batch: Batch) -> list[DeviceBytes]:
    found = [message.device for message in batch]
    assert None not in found
    return [part for part in found if part is not None]


@pytest.mark.parametrize("offset", [0, PAGE + 64])
def test_messages_are_received_into_device_memory(
    sender: Member, receiver: Member, device: int, offset: int
) -> None:
    """Messages are received into it and their place is told."""
    region = receiver.qp.register_dmabuf(device, 2 * PAGE, offset, recv_slot=SLOT)
    assert receiver.qp.counters.recv_free == 8
    for turn in range(3):  # slots are used again
        sent = [bytes([turn, number]) * (100 * number + 1) for number in range(5)]
        sender.qp.send(sender.to, sent, imm=turn)
        got = 0
        while got < len(sent):
            with receiver.qp.recv(8, BOUND) as batch:
                assert len(batch)
                assert list(batch.lengths) == [len(one) for one in sent[got : got + len(batch)]]
                rows = np.frombuffer(batch.records, RECORD_DTYPE)
                for message, part, row in zip(batch, device_parts(batch), rows, strict=True):
                    assert (part.region, part.offset % SLOT) == (region, 0)
                    assert (part.offset, part.nbytes) == (row["offset"], row["length"])
                    assert os.pread(device, part.nbytes, offset + part.offset) == sent[got]
                    assert (bytes(message.payload), message.imm, message.src_qp) == (
                        b"",
                        turn,
                        sender.qp.qp_num,
                    )
                    got += 1
                with pytest.raises(BufferError, match="in the memory of another device"):
                    _ = batch.memory
                assert batch[0].device == device_parts(batch)[0]
        assert receiver.qp.counters.recv_free == 8
    assert os.pread(device, offset, 0) == CONTENT[:offset]


def test_what_was_received_can_be_sent_on_from_there(sender: Member, receiver: Member, device: int) -> None:
    receiver.qp.register_dmabuf(device, PAGE, recv_slot=SLOT)
    sender.qp.send_one(sender.to, b"to be passed on")
    with receiver.qp.recv(1, BOUND) as batch:
        assert sender.received(1) == [b"to be passed on"]  # its own
        receiver.qp.send(receiver.to, device_parts(batch))
        assert sender.received(1) == [b"to be passed on"]


def test_one_message_cannot_be_copied_out_of_it(sender: Member, receiver: Member, device: int) -> None:
    region = receiver.qp.register_dmabuf(device, PAGE, recv_slot=SLOT)
    sender.qp.send(sender.to, [b"first", b"second"])
    for timeout in (0, 0.0, None):
        with pytest.raises(NotSupported, match="cannot be copied out of it: use recv"):
            receiver.qp.recv_one(timeout)
    got: list[int] = []
    while len(got) < 2:
        with receiver.qp.recv(2, BOUND) as batch:
            got += batch.lengths
    assert got == [5, 6]
    region.close()
    sender.qp.send_one(sender.to, b"in host memory again")
    message = receiver.qp.recv_one(BOUND)
    assert message is not None
    assert (bytes(message.payload), message.device) == (b"in host memory again", None)


def test_memory_of_the_host_takes_its_place(sender: Member, receiver: Member, device: int) -> None:
    receiver.qp.register_dmabuf(device, PAGE, recv_slot=SLOT)
    memory = bytearray(4 * SLOT)
    with receiver.qp.register(memory, recv_slot=SLOT):
        sender.qp.send_one(sender.to, b"on the host")
        message = receiver.qp.recv_one(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"on the host"
        assert b"on the host" in memory
    assert os.pread(device, PAGE, 0) == CONTENT[:PAGE]


def test_lease_outlives_region_and_queue_pair(sender: Member, receiver: Member, device: int) -> None:
    """A lease outlives the region and the queue pair."""
    region = receiver.qp.register_dmabuf(device, PAGE, recv_slot=SLOT)
    sender.qp.send_one(sender.to, b"leased")
    batch = receiver.qp.recv(1, BOUND)
    with pytest.raises(McastError):  # EBUSY: a message is leased
        receiver.qp.register_dmabuf(device, PAGE, recv_slot=SLOT)
    receiver.qp.close()
    region.close()
    (part,) = device_parts(batch)
    assert part.nbytes == 6
    batch.release()
    with pytest.raises(ValueError):
        _ = batch.memory
