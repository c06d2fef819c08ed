"""A provider that implements one send hook and one receive hook has every way to send and to receive."""

from __future__ import annotations

import errno as E
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mcast.api import (
    Batch,
    CopiedBatch,
    Destination,
    DeviceBytes,
    Gid,
    HeaderBodyBatch,
    McastError,
    Message,
    MessageTooLarge,
    QpCounters,
    QpError,
    QpState,
    QpType,
    QueuePair,
)

MTU, DEPTH = 256, 8
HERE, GROUP = Gid("fe80::1"), Gid("ff0e::1")
TO = Destination(gid=GROUP)


class Loop(QueuePair):
    """The least that a provider needs: what is sent arrives here."""

    qp_num, qp_type, state = 17, QpType.UD, QpState.RTS
    max_message_size = MTU
    attachments: Mapping[Gid, int] = {}

    def __init__(self) -> None:
        self._depth = DEPTH  # as CmId.create_qp does
        self.queue: deque[Message] = deque()

    def _send(
        self,
        destination: Destination,
        payloads: Sequence[bytes | memoryview | DeviceBytes],
        imm: int | None,
        timeout: float | None,
    ) -> None:
        for one in payloads:
            payload = memoryview(bytes(one))
            self.queue.append(Message(payload, HERE, self.qp_num, destination.gid, imm, from_self=True))

    def _recv(self, max: int, timeout: float | None, events: bool) -> Batch:
        return CopiedBatch([self.queue.popleft() for _ in range(min(max, len(self.queue)))])

    @property
    def counters(self) -> QpCounters:
        return QpCounters(0, 0, 0, 0, 0, DEPTH - len(self.queue), 0)

    def fileno(self) -> int:
        raise NotImplementedError

    def _modify(self, state: QpState) -> None:
        self.state = state

    def _attach_mcast(self, gid: Gid, lid: int) -> None: ...

    def _detach_mcast(self, gid: Gid, lid: int) -> None: ...

    def _close(self) -> None:
        self._closed = True


@pytest.fixture
def qp() -> Loop:
    return Loop()


def received(qp: Loop) -> list[bytes]:
    with qp.recv(DEPTH, 0) as batch:
        return [bytes(one.payload) for one in batch]


def rows(*of: bytes) -> memoryview:
    return memoryview(b"".join(of)).cast("B", (len(of), len(of[0])))


@pytest.mark.parametrize(
    ("batch", "payloads"),
    [
        ([b"one", bytearray(b"two"), memoryview(b"three")], [b"one", b"two", b"three"]),
        (rows(b"one", b"two"), [b"one", b"two"]),
        (HeaderBodyBatch(rows(b"1", b"2"), rows(b"one", b"two")), [b"1one", b"2two"]),
    ],
    ids=["list", "rows", "two parts"],
)
def test_every_batch_reaches_the_send_hook(qp: Loop, batch: Any, payloads: list[bytes]) -> None:
    assert qp.send(TO, batch, 7) == len(payloads)
    assert {one.imm for one in qp.queue} == {7}
    assert received(qp) == payloads


@pytest.mark.parametrize("payload", [b"one", bytearray(b"one")])
def test_a_single_message_reaches_both_hooks(qp: Loop, payload: Any) -> None:
    qp.send_one(TO, payload)
    message = qp.recv_one(0)
    assert message is not None
    assert bytes(message.payload) == b"one"
    assert qp.recv_one(0) is None


def test_guards_come_before_the_hook(qp: Loop) -> None:
    with pytest.raises(MessageTooLarge):
        qp.send(TO, [b"one", bytes(MTU + 1)])
    with pytest.raises(MessageTooLarge):
        qp.send_one(TO, bytes(MTU + 1))
    assert not qp.queue


def test_what_lies_in_a_region_is_sent(qp: Loop) -> None:
    memory = bytearray(b"one two")
    with qp.register(memory, constant=True) as region:
        assert region.buffer == memory
        qp.send(TO, [region.buffer[:3], memory[4:]])
    assert received(qp) == [b"one", b"two"]
    assert region.closed


def test_messages_arrive_in_receive_memory(qp: Loop) -> None:
    memory = bytearray(2 * MTU)
    with qp.register(memory, recv_slot=MTU):
        qp.send(TO, [b"one", b"two", b"three"])
        with qp.recv(DEPTH, 0) as batch:
            assert [bytes(one.payload) for one in batch] == [b"one", b"two"]
            offsets = memoryview(batch.records).cast("Q")[::9].tolist()
            assert sorted(offsets) == [0, MTU]
            for at, one in zip(offsets, batch, strict=True):
                memory[at] = 0xFF
                assert one.payload[0] == batch.memory[at] == 0xFF, "a view, and no copy"
            with pytest.raises(McastError, match="are leased: release a batch first") as caught:
                qp.recv(1, 0)
            assert caught.value.errno == E.ENOBUFS
        assert received(qp) == [b"three"]
        assert received(qp) == []
    qp.send(TO, [b"in its own memory"])
    assert received(qp) == [b"in its own memory"]
    assert b"own" not in memory


def test_a_slice_of_a_payload_keeps_its_slot(qp: Loop) -> None:
    with qp.register(bytearray(MTU), recv_slot=MTU):
        qp.send(TO, [b"one", b"two"])
        batch = qp.recv(1, 0)
        kept = batch[0].payload[1:]
        for _ in range(2):
            with pytest.raises(BufferError):
                batch.release()
        assert bytes(kept) == b"ne"
        kept.release()
        batch.release()
        assert received(qp) == [b"two"]


def test_leased_messages_outlive_their_region(qp: Loop) -> None:
    region = qp.register(bytearray(MTU), recv_slot=MTU)
    qp.send(TO, [b"one", b"two"])
    with qp.recv(1, 0) as batch:
        region.close()
        assert received(qp) == [b"two"]
        assert bytes(batch[0].payload) == b"one"


def test_an_older_region_ends_without_the_newer(qp: Loop) -> None:
    old, new = bytearray(MTU), bytearray(MTU)
    older = qp.register(old, recv_slot=MTU)
    with qp.register(new, recv_slot=MTU):
        older.close()
        qp.send(TO, [b"one"])
        assert received(qp) == [b"one"]
    assert new.startswith(b"one")


def test_receive_memory_begins_while_nothing_is_there(qp: Loop) -> None:
    qp.send(TO, [b"one"])
    with pytest.raises(McastError, match="messages are queued or leased") as caught:
        qp.register(bytearray(MTU), recv_slot=MTU)
    assert caught.value.errno == E.EBUSY
    assert received(qp) == [b"one"]
    qp.modify(QpState.ERR)
    with pytest.raises(QpError):
        qp.register(bytearray(MTU), recv_slot=MTU)
    qp.modify(QpState.RTS)
    qp.register(bytearray(MTU), recv_slot=MTU)
    qp.send(TO, [b"one"])
    with qp.recv(1, 0), pytest.raises(McastError) as caught:
        qp.register(bytearray(MTU), recv_slot=MTU)
    assert caught.value.errno == E.EBUSY


def test_a_slot_has_room_for_the_largest_message(qp: Loop) -> None:
    with pytest.raises(McastError, match=f"room for the largest, {MTU}") as caught:
        qp.register(bytearray(MTU), recv_slot=MTU - 1)
    assert caught.value.errno == E.EINVAL


def test_a_message_that_outgrew_its_slot_is_named(qp: Loop) -> None:
    memory = bytearray(2 * MTU)
    with qp.register(memory, recv_slot=MTU):
        qp.max_message_size = 2 * MTU
        qp.send(TO, [b"x" * (MTU + 1)])
        with pytest.raises(McastError, match=f"a message of {MTU + 1} bytes was lost") as caught:
            qp.recv(1, 0)
        assert caught.value.errno == E.EMSGSIZE
        assert not any(memory)
        qp.send(TO, [b"one", b"two"])
        assert received(qp) == [b"one", b"two"], "no slot was lost"
