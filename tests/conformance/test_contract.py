"""Rules of the contract beyond the five documents: values, errors, leases, buffers, descriptors, closing."""

from __future__ import annotations

import array
import asyncio
import ctypes
import errno as E
import os
import pickle
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from ipaddress import IPv4Address
from struct import Struct
from typing import Any

import pytest

from mcast.api import (
    GRH_BYTES,
    RECORD_DTYPE,
    Batch,
    Capability,
    Closed,
    CmEventType,
    Destination,
    Feature,
    HeaderBodyBatch,
    InvalidArgument,
    JoinAttrEx,
    McastError,
    Message,
    MessageTooLarge,
    Phase,
    QpError,
    QpInit,
    QpState,
    QueuePair,
    Testbed,
    UdParam,
    mcast_error,
)
from mcast.conformance.helpers import (
    BOUND,
    Application,
    eventually,
    fact,
    needs,
    new_group,
    numbered,
    port_info,
    raw_address,
    readable,
)
from mcast.wire.addresses import Gid, McastAddress, Mgid

# --- values and errors -----------------------------------------------------

GID = Gid("ff0e::1")


def attr(**fields: Any) -> JoinAttrEx:
    return JoinAttrEx(**fields)


def to(**fields: Any) -> Destination:
    return Destination(**fields)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: attr(comp_mask=1, addr="239.1.1.1"), ("comp_mask", "1", "ADDRESS | JOIN_FLAGS (3)")),
        (lambda: attr(comp_mask=7, addr="239.1.1.1"), ("comp_mask", "7", "ADDRESS | JOIN_FLAGS (3)")),
        (
            lambda: attr(join_flags=2, addr="239.1.1.1"),
            ("join_flags", "2", "FULLMEMBER (0), SENDONLY_FULLMEMBER (1)"),
        ),
        (lambda: JoinAttrEx.send_only("10.0.0.1"), ("address", "10.0.0.1", "224.0.0.0/4, ff00::/8")),
        (lambda: McastAddress.of("0.0.0.0"), ("address", "zero", "224.0.0.0/4, ff00::/8")),
        (lambda: McastAddress.of("239.1.1.1:70000"), ("port", "70000", "65535")),
        (lambda: McastAddress.of("239.1.1.1:"), ("239.1.1.1:", "port", "65535")),
        (lambda: McastAddress.of("239.1.1.1:\u0665"), ("239.1.1.1:\u0665", "port", "65535")),
        (lambda: McastAddress.of("239.1.1.1:" + "9" * 5000), ("239.1.1.1:999", "5010 characters")),
        (lambda: McastAddress.of("[ff0e::1"), ("[ff0e::1", "[IPv6 group]:port")),
        (lambda: McastAddress.of("[ff0e::1]5000"), ("[ff0e::1]5000", "[IPv6 group]:port")),
        (lambda: McastAddress.of("[239.1.1.1]:5"), ("[239.1.1.1]:5", "[IPv6 group]:port")),
        (lambda: McastAddress.of("[ff0e::1]:"), ("[ff0e::1]:", "port", "65535")),
        (lambda: McastAddress.of("group"), ("address", "group", "IPv4 or IPv6")),
        (lambda: McastAddress.of("ff02::1%eth0"), ("address", "eth0", "leave out")),
        (lambda: Mgid("fe80::1"), ("fe80::1", "begins with ff")),
        (lambda: Gid("fe80::x"), ("fe80::x", "IPv6 address")),
        (lambda: Gid("fe80::1%eth0"), ("fe80::1%eth0", "names an interface")),
        (lambda: Gid(None), ("16 bytes", "NoneType")),  # type: ignore[arg-type]
        (lambda: QpInit(max_send_wr=0), ("max_send_wr", "input_value=0", "greater than or equal to 1")),
        (lambda: QpInit(max_recv_wr=0), ("max_recv_wr", "input_value=0", "greater than or equal to 1")),
        (lambda: QpInit(max_recv_size=-1), ("max_recv_size", "-1", "greater than or equal to 0")),
        (lambda: Destination(gid=GID, qp_num=1 << 24), ("qp_num", "16777216", "16777215")),
        (lambda: Destination(gid=GID, qkey=-1), ("qkey", "-1", "greater than or equal to 0")),
        (lambda: Destination(gid=GID, dlid=1 << 16), ("dlid", "65536", "65535")),
        (lambda: Destination(gid=GID, sl=16), ("sl", "16", "15")),
        (lambda: Destination(gid=GID, port_num=0), ("port_num", "0", "greater than or equal to 1")),
        (lambda: to(gid="somewhere"), ("gid", "somewhere", "IPv6 address")),
        (lambda: to(gid=GID, flags=1), ("flags", "1", "not permitted")),
    ],
)
def test_wrong_value_names_field_and_allowed_values(
    make: Callable[[], object], names: tuple[str, ...]
) -> None:
    """A wrong value is refused with field value and what is allowed."""
    with pytest.raises(ValueError) as caught:
        make()
    for name in names:
        assert name in str(caught.value)


NO_TIMES: dict[Any, type[Exception]] = {
    float("nan"): ValueError,
    Decimal("nan"): ValueError,
    "soon": TypeError,
    "1": TypeError,
    "": TypeError,
    1j: TypeError,
}


def test_a_timeout_is_a_number_of_seconds(bed: Testbed) -> None:
    """Refused before anything is done, whether or not the call would have waited."""
    peer = Application(bed)
    to = peer.join(new_group())
    other = bed.backend.event_channel().create_id()
    calls: dict[str, Callable[[Any], object]] = {
        "resolve_addr": lambda timeout: other.resolve_addr("239.1.2.3", peer.port, timeout),
        "get_event": peer.channel.get_event,
        "send": lambda timeout: peer.qp.send(to, [b"x"], timeout=timeout),
        "send_one": lambda timeout: peer.qp.send_one(to, b"x", timeout=timeout),
        "flush": peer.qp.flush,
        "recv": lambda timeout: peer.qp.recv(timeout=timeout),
        "recv_one": peer.qp.recv_one,
    }
    for there in (False, True):
        for name, call in calls.items():
            for timeout, kind in NO_TIMES.items():
                with pytest.raises(Exception) as caught:
                    call(timeout)
                assert type(caught.value) is kind, (name, there)
                assert str(caught.value) == f"timeout is {timeout!r}: give a number of seconds", (name, there)
        if not there:
            peer.send(to, b"the only one")
    assert peer.receive(1) == [b"the only one"]
    assert peer.qp.recv_one(0) is None
    other.resolve_addr("239.1.2.3", peer.port, Fraction(BOUND))  # type: ignore[arg-type]


def test_a_timeout_below_0_does_not_wait(bed: Testbed) -> None:
    peer = Application(bed)
    below: list[Any] = [-1, -(10**400), float("-inf"), Decimal(-1)]
    for timeout in below:
        assert peer.channel.get_event(timeout) is None
        assert peer.qp.recv_one(timeout) is None
        assert not peer.qp.recv(timeout=timeout)


def test_values_do_not_change(bed: Testbed) -> None:
    peer = Application(bed)
    destination = peer.join(new_group())
    for value, field in ((destination, "qkey"), (bed.backend.devices()[0], "name"), (QpInit(), "qp_type")):
        with pytest.raises(ValueError, match="frozen"):
            setattr(value, field, 1)


@pytest.mark.parametrize(
    ("errno", "builtin"),
    [
        (E.EINVAL, ValueError),
        (E.EOPNOTSUPP, OSError),
        (E.ETIMEDOUT, TimeoutError),
        (E.EACCES, PermissionError),
        (E.ENETRESET, ConnectionResetError),
        (E.ENOMEM, OSError),
        (E.EDOM, OSError),
    ],
)
def test_errors_are_of_the_families_that_people_catch(errno: int, builtin: type[Exception]) -> None:
    error = mcast_error(errno, "join_multicast", Phase.JOIN, {"addr": "239.1.1.1"})
    assert isinstance(error, McastError)
    assert isinstance(error, builtin)
    assert (error.errno, error.call, error.arguments["addr"]) == (errno, "join_multicast", "239.1.1.1")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


@fact("K-FABRIC-1")
def test_an_errno_without_a_name_reads_well() -> None:
    text = str(mcast_error(524, "join_multicast", Phase.JOIN, {"addr": "ff0e::1"}))
    assert text.startswith("join_multicast(addr=ff0e::1): ENOTSUPP: Not supported")
    assert "IPv4 group" in text


def test_error_names_call_causes_and_next_step(bed: Testbed) -> None:
    """An error names call arguments causes and next step."""
    with pytest.raises(McastError) as caught:
        Application(bed).id.leave_multicast("239.9.9.9")
    error = caught.value
    assert str(error.arguments["addr"]) == "239.9.9.9"
    assert error.causes
    for cause in error.causes:
        assert f"likely: {cause.why} -> {cause.next_step}" in str(error)


# --- events and descriptors ------------------------------------------------


def test_a_join_event_carries_ud_parameters_and_its_id(bed: Testbed) -> None:
    peer = Application(bed)
    peer.id.join_multicast(new_group())
    event = peer.event()
    assert event.check() is event
    assert isinstance(event.ud, UdParam)
    assert event.ud.qp_num == event.ud.destination.qp_num == 0xFFFFFF
    assert event.ud.qkey == event.ud.destination.qkey
    assert event.ud.destination.gid.is_multicast


@needs(Capability.IGMP)  # on InfiniBand the SA maps a unicast address to a group like any other
def test_failed_join_event_raises_its_errno(bed: Testbed) -> None:
    """A failed join event raises its errno when checked."""
    peer = Application(bed)
    peer.id.join_multicast(raw_address(IPv4Address("10.9.9.9")))
    event = peer.event(CmEventType.MULTICAST_ERROR, -1)
    with pytest.raises(InvalidArgument) as caught:
        event.check()
    assert (caught.value.errno, caught.value.phase) == (event.errno, Phase.JOIN)


def test_get_event_keeps_to_its_timeout(bed: Testbed) -> None:
    channel = bed.backend.event_channel()
    assert channel.get_event(0) is None
    assert channel.get_event(0.01) is None


def test_descriptor_is_readable_while_an_event_waits(bed: Testbed) -> None:
    """The descriptor is readable exactly while an event waits."""
    peer, other = Application(bed), Application(bed)
    assert not readable(peer.channel)
    os.fstat(peer.channel.fileno())
    for _ in range(2):
        peer.id.join_multicast(new_group())
    eventually(bed, lambda: readable(peer.channel))
    assert not readable(other.channel)
    peer.event()
    eventually(bed, lambda: readable(peer.channel))
    peer.event()
    assert not readable(peer.channel)


def test_asyncio_sleeps_on_the_descriptor(bed: Testbed) -> None:
    peer, context = Application(bed), object()

    async def joined() -> object:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        loop.add_reader(peer.channel.fileno(), woken.set)
        peer.id.join_multicast(new_group(), context)
        await asyncio.wait_for(woken.wait(), BOUND)
        loop.remove_reader(peer.channel.fileno())
        event = peer.channel.get_event(0)
        return event and event.context

    assert asyncio.run(joined()) is context


def test_events_of_a_channel_are_in_order(bed: Testbed) -> None:
    """Events of one channel come in order each with its id."""
    channel = bed.backend.event_channel()
    peers = [Application(bed, index % len(bed.ports), channel=channel) for index in range(6)]
    for peer in peers:
        peer.id.join_multicast(new_group(), peer)
        assert peer.event().context is peer


def test_a_channel_is_shared_by_threads(bed: Testbed) -> None:
    channel, start = bed.backend.event_channel(), threading.Barrier(4)

    def join_and_leave(number: int) -> None:
        id_ = channel.create_id()
        id_.bind_addr(bed.ports[number % len(bed.ports)])
        id_.create_qp()
        start.wait(BOUND)
        for group in [new_group() for _ in range(10)]:
            id_.join_multicast(group, (number, group))
        start.wait(BOUND)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(join_and_leave, number) for number in range(4)]:
            done.result(BOUND)
    contexts = set()
    for _ in range(40):
        event = channel.get_event(BOUND)
        assert event is not None
        contexts.add(event.check().context)
    assert len(contexts) == 40


# --- sending: buffers, batches, immediates ---------------------------------


def buffers() -> Iterator[Any]:
    """One of every kind of buffer, 8 bytes each, all with the bytes 0 to 7."""
    data = bytes(range(8))
    yield from (data, bytearray(data), memoryview(data), memoryview(b"x" + data)[1:])
    yield from (array.array("I", data), (ctypes.c_ubyte * 8)(*data), memoryview(data).cast("H", (2, 2)))
    yield pickle.PickleBuffer(data)
    if find_spec("numpy"):
        import numpy as np

        yield np.frombuffer(data, np.uint16).reshape(2, 2)


def test_any_buffer_is_a_message(bed: Testbed) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    batch = list(buffers())
    assert sender.qp.send(outward, batch) == len(batch)
    assert sender.qp.send(outward, iter(batch)) == len(batch)
    assert receiver.receive(2 * len(batch)) == [bytes(range(8))] * (2 * len(batch))


@pytest.mark.parametrize("size", [0, 8, 1000])
def test_the_rows_of_a_view_are_messages(bed: Testbed, size: int) -> None:
    """A slice of the rows is a batch, too, and none is looked at when the call has returned."""
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    rows = [bytes((number,)) * size for number in range(12)]
    memory = (ctypes.c_ubyte * size * 12).from_buffer(bytearray(b"".join(rows)) or bytearray(1))
    view = memoryview(memory)
    for start, stop in ((0, 1), (1, 10), (10, 12), (12, 12)):
        assert sender.qp.send(outward, view[start:stop], 7) == stop - start
    ctypes.memset(memory, 255, size * 12)
    received: list[bytes] = []
    while len(received) < 12:
        with receiver.qp.recv(12, BOUND) as batch:
            assert {message.imm for message in batch} == {7}
            received += [bytes(message.payload) for message in batch]
    assert received == rows
    assert sender.qp.counters.sent == 12


@pytest.mark.parametrize("bodies", ["own memory", "registered", "constant"])
@pytest.mark.parametrize("size", [8, 1000])
def test_messages_may_lie_in_two_parts(bed: Testbed, size: int, bodies: str) -> None:
    """Heads may be reused when the call has returned, and so may bodies in memory that is not constant."""
    sender, outward, receiver = pair(bed)
    heads, memory = bytearray(bytes(range(12 * 6))), bytearray()
    for number in range(12):
        memory += bytes((number,)) * size
    wanted = [bytes(heads[at * 6 : at * 6 + 6] + memory[at * size : (at + 1) * size]) for at in range(12)]
    batch = HeaderBodyBatch(memoryview(heads).cast("B", (12, 6)), memoryview(memory).cast("B", (12, size)))
    assert [*batch] == wanted
    with ExitStack() as held:
        if bodies != "own memory":
            held.enter_context(sender.qp.register(memory, constant=bodies == "constant"))
        for start, stop in ((0, 1), (1, 12)):
            assert sender.qp.send(outward, batch[start:stop], 7) == stop - start
        heads[:] = bytes(len(heads))
        if bodies != "constant":
            memory[:] = bytes(len(memory))
        messages = arrived(held, receiver, 12)
        assert [(bytes(message.payload), message.imm) for message in messages] == [(one, 7) for one in wanted]
    assert sender.qp.counters.sent == 12
    memory[:] = bytes(len(memory))
    sender.qp.send(outward, batch[:1])
    assert receiver.receive(1) == [bytes(6 + size)], "the region is closed"
    rest = batch[12:]  # of a batch that is posted whole
    assert (len(rest), rest.nbytes, [*rest], len(rest.joined())) == (0, 0, [], 0)
    assert sender.qp.send(outward, rest) == 0


def test_parts_that_make_no_messages_are_refused(bed: Testbed) -> None:
    peer = Application(bed)
    outward, limit = peer.join(new_group()), peer.qp.max_message_size
    with pytest.raises(MessageTooLarge) as caught:
        peer.qp.send(outward, HeaderBodyBatch(rows(2, 8), rows(2, limit - 7)))
    assert (caught.value.size, caught.value.limit) == (limit + 1, limit)
    for heads, bodies in (
        (rows(2, 8), rows(3, 8)),
        (rows(4, 8)[::2], rows(2, 8)),
        (rows(2, 8), rows(2, 8)[:0]),
    ):
        with pytest.raises(ValueError, match=r"heads"):
            HeaderBodyBatch(heads, bodies)
    with pytest.raises(ValueError, match=r"constant=True contradicts recv_slot"):
        peer.qp.register(bytearray(4096), recv_slot=1024, constant=True)
    batch: Any = HeaderBodyBatch(rows(2, 8), rows(2, 8))
    with pytest.raises(AttributeError):  # a provider relies on what was checked
        batch.heads = rows(1, 8)
    assert peer.qp.counters.sent == 0


def rows(count: int, size: int) -> memoryview:
    return memoryview(bytes(count * size)).cast("B", (count, size))


def test_what_are_no_rows_of_messages_is_refused(bed: Testbed) -> None:
    peer = Application(bed)
    outward, limit = peer.join(new_group()), peer.qp.max_message_size
    with pytest.raises(MessageTooLarge) as caught:
        peer.qp.send(outward, memoryview(bytes(2 * limit + 2)).cast("B", (2, limit + 1)))
    assert (caught.value.size, caught.value.limit) == (limit + 1, limit)
    eight = memoryview(bytes(8))
    for view in (eight, eight.cast("B", (2, 2, 2))):
        with pytest.raises(TypeError):
            peer.qp.send(outward, view)
    with pytest.raises(TypeError, match="the rows of this memoryview do not follow one another"):
        peer.qp.send(outward, eight.cast("B", (4, 2))[::2])
    assert peer.qp.counters.sent == 0


def test_a_buffer_may_be_reused_when_send_returns(bed: Testbed) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    buffer = bytearray(b"before")
    sender.qp.send_one(outward, buffer)
    buffer[:] = b"after and longer"  # would raise while somebody still held the buffer
    assert receiver.receive(1) == [b"before"]


@pytest.mark.parametrize(
    "batch",
    [b"one", bytearray(b"one"), memoryview(b"one"), "text", ["text"], [7], [memoryview(b"stride")[::2]]],
    ids=["bytes", "bytearray", "memoryview", "str", "str-message", "int-message", "strided"],
)
def test_what_is_no_batch_of_buffers_is_refused(bed: Testbed, batch: Any) -> None:
    peer = Application(bed)
    outward = peer.join(new_group())
    with pytest.raises(TypeError):
        peer.qp.send(outward, batch)
    assert peer.receive_until_marker(by=peer) == []


def test_an_empty_batch_sends_nothing(bed: Testbed) -> None:
    peer = Application(bed)
    assert peer.qp.send(peer.join(new_group()), []) == 0
    assert peer.qp.counters.sent == 0


class Index:
    """A whole number of another library, as numpy's are."""

    def __index__(self) -> int:
        return 7


def test_an_immediate_of_another_type_is_the_number(bed: Testbed) -> None:
    """Try each way to send: none may go without the immediate."""
    sender, outward, receiver = pair(bed)
    seven: Any = Index()
    batches: tuple[Any, ...] = ([b"x", b"y"], rows(2, 8), HeaderBodyBatch(rows(2, 8), rows(2, 8)))
    for batch in batches:
        sender.qp.send(outward, batch, seven)
    sender.qp.send_one(outward, b"alone", seven)
    with ExitStack() as held:
        found = [message.imm for message in arrived(held, receiver, 7)]
    assert [(type(imm), imm) for imm in found] == [(int, 7)] * 7


@fact("K-DATA-9")
def test_immediates_and_empty_messages_arrive(bed: Testbed) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    for imm in (None, 0, 0x01020304, 0xFFFFFFFF):
        sender.qp.send(outward, [b"", b"payload"], imm)
        for payload in (b"", b"payload"):
            message = receiver.qp.recv_one(BOUND)
            assert message is not None
            assert (bytes(message.payload), message.imm) == (payload, imm)
    for imm in (-1, 1 << 32):
        with pytest.raises(ValueError, match="32 bits"):
            sender.qp.send(outward, [b""], imm)


@fact("K-DATA-14")
def test_batches_keep_the_order_and_the_maximum(bed: Testbed) -> None:
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    sent = numbered(100)
    for start in range(0, 100, 20):
        sender.send(outward, *sent[start : start + 20])
    received: list[bytes] = []
    while len(received) < 100:
        with receiver.qp.recv(7, BOUND) as batch:
            assert 1 <= len(batch) <= 7
            payloads = [bytes(message.payload) for message in batch]
            assert list(batch.lengths) == [*map(len, payloads)]
            assert list(batch.groups) == [message.group for message in batch]
            assert bytes(batch[-1].payload) == payloads[-1]
            assert bytes(batch[0].payload) == payloads[0]
            for index in (len(batch), -len(batch) - 1):
                with pytest.raises(IndexError):
                    batch[index]
            received += payloads
    assert received == [*sent]
    with pytest.raises(ValueError):
        receiver.qp.recv(0)


def test_batch_counts_messages_of_a_queue_pair(bed: Testbed) -> None:
    """A batch says how many messages a queue pair sent."""
    group, receiver = new_group(), Application(bed, 1)
    receiver.join(group)
    senders, known = [Application(bed, 0), Application(bed, 0)], []
    for sender, count in zip(senders, (3, 1), strict=True):
        outward = sender.join(group, send_only=True)
        known.append((port_info(bed, sender.port).gids[outward.sgid_index], sender.qp.qp_num))
        sender.qp.send(outward, [b"x"] * count)
    counted = [0, 0]
    while sum(counted) < 4:
        with receiver.qp.recv(4, BOUND) as batch:
            found = [batch.count_from(*one) for one in known]
            assert sum(found) == len(batch) > 0
            assert batch.count_from(outward.gid, senders[0].qp.qp_num) == 0
            counted = [*map(sum, zip(counted, found, strict=True))]
    assert counted == [3, 1]
    assert receiver.qp.recv(1, 0).count_from(*known[0]) == 0


def test_series_group_equal_messages_in_order(bed: Testbed) -> None:
    """Messages that are alike come together and in order."""
    group, receiver = new_group(), Application(bed, 1)
    receiver.join(group)
    senders = [Application(bed, 0), Application(bed, 0)]
    ends = [(sender.qp, sender.join(group, send_only=True)) for sender in senders]
    bursts = [[b"a%d" % place for place in range(5)], [b"", b""], [b"longer"], [b"b1", b"", b"b2", b"b3"]]
    for turn, burst in enumerate(bursts * 2):
        qp, outward = ends[turn % 2]
        qp.send(outward, burst)
    left = 2 * sum(map(len, bursts))
    while left:
        with receiver.qp.recv(min(left, 4), BOUND) as batch:
            seen = [(bytes(one.payload), one.source, one.src_qp, one.from_self) for one in batch]
            came = [*batch.series()]
            assert [
                (bytes(payload), one.source, one.src_qp, one.from_self)
                for one in came
                for payload in one.payloads()
            ] == seen
            for one in came:
                assert one.memory.readonly
                assert one.messages * one.size <= len(one.memory) or one.step < one.size
                assert len(one.memory) == (one.messages - 1) * one.step + one.size
            left -= len(batch)
        with pytest.raises(ValueError, match="released"):
            bytes(came[0].memory)
    assert [*receiver.qp.recv(1, 0).series()] == []


def one_and_two(bed: Testbed) -> Batch:
    """A batch of two messages."""
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    sender.send(outward, b"one", b"two")
    return receiver.qp.recv(2, BOUND)


def test_slice_of_a_series_keeps_the_receives(bed: Testbed) -> None:
    """A part of a series that is in use keeps the receives."""
    batch = one_and_two(bed)
    kept = [part for one in batch.series() for part in one.payloads()]
    with pytest.raises(BufferError, match="still in use"):
        batch.release()
    assert bytes(kept[0]) == b"one"
    kept.clear()
    batch.release()
    with pytest.raises(ValueError, match="released"):
        next(iter(batch.series()))


def test_refused_release_keeps_the_batch_readable(bed: Testbed) -> None:
    """A batch whose release was refused is read as before."""
    batch = one_and_two(bed)
    offsets = [int.from_bytes(batch.records[at : at + 8], "little") for at in (0, RECORD.size)]

    def read() -> list[list[bytes]]:
        memory = batch.memory
        return [
            [bytes(memory[offset : offset + 3]) for offset in offsets],
            [bytes(one.payload) for one in batch],
            [bytes(batch[place].payload) for place in range(2)],
            [bytes(part) for one in batch.series() for part in one.payloads()],
        ]

    before = read()
    kept = [part for one in batch.series() for part in one.payloads()]
    for _ in range(2):
        with pytest.raises(BufferError, match="still in use"):
            batch.release()
        assert read() == before == [[b"one", b"two"]] * 4
    kept.clear()
    batch.release()


RECORD = Struct("<QIII4xBxH4x16s16sQ")
"""RECORD_DTYPE once more: offset, length, src_qp, imm, has_imm, src_lid, source, group, timestamp."""


@pytest.mark.parametrize("registered", [False, True], ids=["own memory", "registered memory"])
def test_a_batch_is_also_columns_and_one_memory(bed: Testbed, registered: bool) -> None:
    assert RECORD_DTYPE["itemsize"] == RECORD.size
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1)
    room = bytearray(8 * 128)
    if registered:
        receiver.qp.register(room, recv_slot=128)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    sent = [b"", b"one", b"t" * 100]
    sender.qp.send(outward, sent, 0xFFFFFFFF)
    sender.qp.send(outward, [b"without"])
    sent.append(b"without")
    while sent:
        with receiver.qp.recv(len(sent), BOUND) as batch:
            rows = list(RECORD.iter_unpack(batch.records))
            memory = batch.memory
            assert memory.readonly
            assert len(rows) == len(batch) > 0
            for message, row in zip(batch, rows, strict=True):
                offset, length, src_qp, imm, has_imm, src_lid, source, to, timestamp = row
                expected = sent.pop(0)
                assert bytes(memory[offset : offset + length]) == bytes(message.payload) == expected
                if registered:
                    assert room[offset : offset + length] == expected
                    assert offset % 128 == 0
                assert (src_qp, src_lid) == (message.src_qp, message.src_lid)
                assert (Gid(source), Gid(to)) == (message.source, message.group)
                assert (imm if has_imm else None) == message.imm
                assert (timestamp, message.timestamp) == (0, None)
        with pytest.raises(ValueError):
            memory[0:1]


def test_batch_may_exceed_the_send_queue(bed: Testbed) -> None:
    """More messages than the send queue holds go in one batch."""
    group, sender, receiver = new_group(), Application(bed, 0, QpInit(max_send_wr=4)), Application(bed, 1)
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    sender.send(outward, *numbered(50))
    assert receiver.receive(50) == [*numbered(50)]


@fact("K-DATA-2", "K-DATA-10", "K-DATA-12")
def test_a_message_names_source_group_and_whether_it_is_ones_own(bed: Testbed) -> None:
    group = new_group()
    sender, neighbour, far = Application(bed, 0), Application(bed, 0), Application(bed, 1)
    outward = sender.join(group)
    for peer in (neighbour, far):
        peer.join(group)
    source = port_info(bed, sender.port).gids[outward.sgid_index]
    sender.send(outward, b"who am I")
    for peer in (sender, neighbour, far):
        message = peer.qp.recv_one(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"who am I"
        assert (message.source, message.src_qp) == (source, sender.qp.qp_num)
        assert (message.group, message.from_self) == (outward.gid, peer is sender)
        assert message.imm is None


@fact("K-DATA-13")
def test_a_reply_goes_to_the_source_of_a_message_alone(bed: Testbed) -> None:
    group, bystander, asker, answerer = (
        new_group(),
        Application(bed, 0),
        Application(bed, 0),
        Application(bed, 1),
    )
    outward, back = asker.join(group, send_only=True), answerer.join(group)
    bystander.join(group)
    asker.send(outward, b"question")
    question = answerer.qp.recv_one(BOUND)
    assert question is not None
    assert question.src_lid == port_info(bed, asker.port).lid
    answerer.send(back.reply_to(question), b"answer")
    assert asker.receive_until_marker(by=answerer) == [b"answer"]
    assert bystander.receive_until_marker(by=answerer) == [b"question"]
    assert answerer.receive_until_marker(by=answerer) == []


# --- receiving: leases -----------------------------------------------------


def received(peer: Application) -> Batch:
    """A batch of one message."""
    batch = peer.qp.recv(1, BOUND)
    assert len(batch) == 1
    return batch


def arrived(held: ExitStack, peer: Application, count: int) -> list[Message]:
    """`count` messages, in as many batches as they come in; all of these are leased until `held` ends."""
    messages: list[Message] = []
    while len(messages) < count:
        batch = held.enter_context(peer.qp.recv(count - len(messages), BOUND))
        assert len(batch), f"{len(messages)} of {count} came"
        messages += batch
    return messages


def pair(bed: Testbed, init: QpInit | None = None) -> tuple[Application, Destination, Application]:
    """A sender, where it sends to, and a receiver of that."""
    group, sender, receiver = new_group(), Application(bed, 0), Application(bed, 1, init or QpInit())
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    return sender, outward, receiver


def test_recv_returns_empty_after_the_timeout(bed: Testbed) -> None:
    """Recv returns an empty batch when nothing comes in time."""
    _, _, receiver = pair(bed)
    for timeout in (0, 0.01):
        with receiver.qp.recv(1, timeout) as batch:
            assert len(batch) == 0
            assert list(batch) == []
    assert receiver.qp.recv_one(0) is None


def test_a_view_used_after_release_raises(bed: Testbed) -> None:
    sender, outward, receiver = pair(bed)
    sender.send(outward, *numbered(3))
    batch = receiver.qp.recv(3, BOUND)
    views = [batch[0].payload, *(message.payload for message in batch)]
    assert all(view.readonly for view in views)
    batch.release()
    batch.release()
    for view in views:
        with pytest.raises(ValueError):
            bytes(view)
    with pytest.raises(ValueError):
        batch[0]
    with pytest.raises(ValueError):
        list(batch)


def test_end_of_with_releases_and_recv_one_copies(bed: Testbed) -> None:
    """The end of a with releases and recv one copies."""
    sender, outward, receiver = pair(bed)
    sender.send(outward, *numbered(2))
    with received(receiver) as batch:
        view = batch[0].payload
    with pytest.raises(ValueError):
        bytes(view)
    message = receiver.qp.recv_one(BOUND)
    assert message is not None
    sender.send(outward, b"overwritten?")
    assert receiver.receive(1) == [b"overwritten?"]
    assert bytes(message.payload) == numbered(2)[1]


def test_release_is_refused_while_a_payload_is_used(bed: Testbed) -> None:
    """Release is refused while something else uses a payload."""
    sender, outward, receiver = pair(bed)
    sender.send(outward, b"in use")
    batch = received(receiver)
    free = receiver.qp.counters.recv_free
    with in_use(batch[0].payload) as user:
        with pytest.raises(BufferError):
            batch.release()
        assert bytes(user) == b"in use"
        assert receiver.qp.counters.recv_free == free
    batch.release()
    assert receiver.qp.counters.recv_free == free + 1


@contextmanager
def in_use(view: memoryview) -> Iterator[pickle.PickleBuffer]:
    """Another object that uses the view; it lets go of it whatever happens."""
    user = pickle.PickleBuffer(view)
    try:
        yield user
    finally:
        user.release()


DERIVED: dict[str, Callable[[memoryview], Any]] = {
    "slice": lambda view: view[:5],
    "view": memoryview,
    "cast": lambda view: view.cast("c"),
}
if find_spec("numpy"):
    import numpy as np

    DERIVED["array"] = lambda view: np.frombuffer(view, np.uint8)


@pytest.mark.parametrize("in_slots", [False, True], ids=["own memory", "slots"])
@pytest.mark.parametrize("of_memory", [False, True], ids=["payload", "memory"])
@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_view_never_shows_another_message(
    bed: Testbed, derive: Callable[[memoryview], Any], of_memory: bool, in_slots: bool
) -> None:
    """An object made of a payload never shows another message."""
    sender, outward, receiver = pair(bed, QpInit(max_recv_wr=1))
    size = GRH_BYTES + 64
    if in_slots:
        receiver.qp.register(bytearray(size), recv_slot=size)
    sender.send(outward, b"first message")
    batch = received(receiver)
    made = derive(batch.memory if of_memory else batch[0].payload)
    before = bytes(made)
    with pytest.raises(BufferError):
        batch.release()
    assert receiver.qp.counters.recv_free == 0
    assert bytes(made) == before
    with pytest.raises(BufferError):
        batch.release()
    assert bytes(batch[0].payload) == b"first message"
    del made
    batch.release()
    assert receiver.qp.counters.recv_free == 1
    sender.send(outward, b"second message")
    assert receiver.receive(1) == [b"second message"]


@fact("K-DATA-8")
def test_a_held_batch_starves_the_queue_and_release_restores_it(bed: Testbed) -> None:
    group, sender, witness = new_group(), Application(bed, 0), Application(bed, 1)
    receiver = Application(bed, 1, QpInit(max_recv_wr=4))
    outward = sender.join(group, send_only=True)
    for peer in (receiver, witness):
        peer.join(group)
    assert receiver.qp.counters.recv_free == 4
    sender.send(outward, *numbered(4))
    held = ExitStack()
    messages = arrived(held, receiver, 4)
    assert receiver.qp.counters.recv_free == 0
    sender.send(outward, *numbered(3, "lost"))
    # All have reached the port.
    assert witness.receive_until_marker(by=sender) == [*numbered(4), *numbered(3, "lost")]
    assert [bytes(message.payload) for message in messages] == [*numbered(4)]
    held.close()
    sender.send(outward, b"later")
    assert receiver.receive(1) == [b"later"]
    counters = receiver.qp.counters
    assert (counters.recv_free, counters.recv_low_water) == (4, 0)


def test_a_dropped_batch_is_released(bed: Testbed) -> None:
    sender, outward, receiver = pair(bed, QpInit(max_recv_wr=2))
    for _ in range(3):
        sender.send(outward, *numbered(1))
        view = received(receiver)[0].payload
        assert receiver.qp.counters.recv_free == 2
        with pytest.raises(ValueError):
            bytes(view)


# --- counters --------------------------------------------------------------


def test_counters_count(bed: Testbed) -> None:
    sender, outward, receiver = pair(bed, QpInit(max_recv_wr=16))
    assert receiver.qp.counters[:2] == (0, 0)
    sender.send(outward, *numbered(10))
    with ExitStack() as held:
        arrived(held, receiver, 10)
        assert receiver.qp.counters.recv_free == 6
    assert sender.qp.counters.sent == 10
    counters = receiver.qp.counters
    assert (counters.received, counters.recv_free, counters.recv_low_water) == (10, 16, 6)


@needs(Feature.DROP_COUNTERS)
def test_every_reason_to_drop_has_a_counter(bed: Testbed) -> None:
    sender, outward, receiver = pair(bed, QpInit(max_recv_wr=4, max_recv_size=64))
    sender.send(outward.model_copy(update={"qkey": outward.qkey ^ 1}), *numbered(2))
    sender.send(outward, *numbered(4))
    held = ExitStack()
    arrived(held, receiver, 4)
    sender.send(outward, *numbered(3))
    eventually(bed, lambda: receiver.qp.counters.dropped_no_receive == 3)
    held.close()
    sender.send(outward, b"x" * 65)
    eventually(bed, lambda: receiver.qp.counters.dropped_too_long == 1)
    counters = receiver.qp.counters
    assert (counters.dropped_no_receive, counters.dropped_qkey, counters.received) == (3, 2, 4)


# --- registered memory -----------------------------------------------------


def test_registered_memory_is_sent_from(bed: Testbed) -> None:
    sender, outward, receiver = pair(bed)
    memory = bytearray(b"0123456789abcdef")
    with sender.qp.register(memory) as region:
        assert bytes(region.buffer) == memory
        view = memoryview(memory)
        assert sender.qp.send(outward, [view[4:8], view[8:16], region.buffer[:2], b"foreign"]) == 4
        assert receiver.receive(4) == [b"4567", b"89abcdef", b"01", b"foreign"]
        view[:4] = b"wxyz"
        sender.qp.send_one(outward, view[:4])
        assert receiver.receive(1) == [b"wxyz"]
        view.release()
    assert region.closed
    sender.qp.send_one(outward, memory)
    assert receiver.receive(1) == [bytes(memory)]


def test_receive_slots_put_the_payloads_into_the_users_memory(bed: Testbed) -> None:
    sender, outward, receiver = pair(bed)
    size = GRH_BYTES + 64
    memory = bytearray(4 * size)
    with receiver.qp.register(memory, recv_slot=size):
        assert receiver.qp.counters.recv_free == 4
        for payloads in (numbered(4, "round one"), numbered(4, "round two")):
            sender.send(outward, *payloads)
            with ExitStack() as held:
                messages = arrived(held, receiver, 4)
                assert [bytes(message.payload) for message in messages] == [*payloads]
                places = [memory.index(payload) for payload in payloads]
                assert sorted(place // size for place in places) == [0, 1, 2, 3]
                for message, place in zip(messages, places, strict=True):
                    memory[place] = 0xFF  # the payload is a view, no copy
                    assert message.payload[0] == 0xFF
    sender.send(outward, b"back in its own memory")
    assert receiver.receive(1) == [b"back in its own memory"]
    assert b"back in its own memory" not in memory


@pytest.mark.parametrize(
    ("buffer", "slot"),
    [(b"read-only" * 20, 64), (bytearray(256), 0), (bytearray(256), 257), (bytearray(256), -1)],
)
def test_wrong_receive_memory_is_refused(bed: Testbed, buffer: Any, slot: int) -> None:
    peer = Application(bed)
    error, says = (TypeError, "is read-only") if slot == 64 else (ValueError, "recv_slot")
    with pytest.raises(error, match=says):
        peer.qp.register(buffer, recv_slot=slot)


@pytest.mark.parametrize("lid", [-1, 0x10000])
def test_a_lid_has_16_bits(bed: Testbed, lid: int) -> None:
    qp = Application(bed).qp
    for call in (qp.attach_mcast, qp.detach_mcast):
        with pytest.raises(ValueError, match="a LID has 16 bits"):
            call(Gid("ff0e::1"), lid)


# --- QP states -------------------------------------------------------------


@fact("K-DATA-25")
def test_a_qp_is_made_ready_and_its_states_have_an_order(bed: Testbed) -> None:
    qp = Application(bed).qp
    states = [qp.state]
    qp.modify(QpState.RESET)
    for wrong in (QpState.RTR, QpState.RTS, QpState.SQD):
        with pytest.raises(InvalidArgument):
            qp.modify(wrong)
        states.append(qp.state)
    way = [QpState.INIT, QpState.RTR, QpState.RTS, QpState.SQD, QpState.RTS, QpState.ERR]
    for state in way:
        eventually(bed, partial(_takes, qp, state))
        states.append(qp.state)
    qp.reset()
    assert states == [QpState.RTS, *[QpState.RESET] * 3, *way]
    assert qp.state is QpState.RTS


def _takes(qp: QueuePair, state: QpState) -> bool:
    try:
        qp.modify(state)
    except InvalidArgument:
        return False
    return True


@pytest.mark.parametrize("steps", [(QpState.RESET,), (QpState.RESET, QpState.INIT)])
def test_a_qp_that_is_not_ready_does_not_send(bed: Testbed, steps: tuple[QpState, ...]) -> None:
    sender, outward, receiver = pair(bed)
    for state in steps:
        sender.qp.modify(state)
    with pytest.raises(InvalidArgument):
        sender.qp.send_one(outward, b"too early")
    sender.qp.reset()
    assert receiver.receive_until_marker(by=sender) == []


def test_a_qp_in_err_says_so_and_reset_brings_it_back(bed: Testbed) -> None:
    sender, outward, receiver = pair(bed)
    sender.send(outward, b"before")
    assert receiver.receive_until_marker(by=sender) == [b"before"]
    for peer in (sender, receiver):
        peer.qp.modify(QpState.ERR)
    with pytest.raises(QpError) as caught:
        receiver.qp.recv(1, BOUND)
    assert caught.value.errno == E.EIO
    with pytest.raises(QpError):
        sender.qp.send_one(outward, b"in ERR")
    for peer in (sender, receiver):
        peer.qp.reset()
    sender.send(outward, b"after")
    assert receiver.receive(1) == [b"after"]


def test_messages_before_a_failure_are_read_first(bed: Testbed) -> None:
    """Messages received before a failure are read first."""
    group, sender, receiver, witness = (
        new_group(),
        Application(bed, 0),
        Application(bed, 1),
        Application(bed, 1),
    )
    outward = sender.join(group, send_only=True)
    for peer in (receiver, witness):
        peer.join(group)
    sender.send(outward, *numbered(5))
    assert witness.receive_until_marker(by=sender) == [*numbered(5)]
    receiver.qp.modify(QpState.ERR)
    assert receiver.receive(5) == [*numbered(5)]
    with pytest.raises(QpError):
        receiver.qp.recv(1, BOUND)


def test_receive_memory_is_refused_in_err(bed: Testbed) -> None:
    """Receive memory is refused in ERR until a reset."""
    receiver, memory = Application(bed, 1), bytearray(4 * 4096)
    receiver.qp.modify(QpState.ERR)
    for _ in range(2):
        with pytest.raises(QpError):
            receiver.qp.register(memory, recv_slot=4096)
        with pytest.raises(QpError):
            receiver.qp.recv(1, BOUND)
    assert receiver.qp.state is QpState.ERR
    receiver.qp.reset()
    receiver.qp.register(memory, recv_slot=4096).close()


def test_a_reset_drops_what_nobody_has_received(bed: Testbed) -> None:
    sender, outward, receiver = pair(bed)
    before = receiver.qp.counters.recv_free
    sender.send(outward, b"before")
    assert select.select([receiver.qp.fileno()], [], [], BOUND)[0], "it has come"
    receiver.qp.reset()
    with receiver.qp.recv(1, 0) as batch:
        assert not batch
    sender.send(outward, b"after")
    assert receiver.receive(1) == [b"after"]
    assert receiver.qp.counters.recv_free == before


WAYS: list[list[QpState]] = [
    [QpState.RESET],
    [QpState.RESET, QpState.INIT],
    [QpState.RESET, QpState.INIT, QpState.RTR],
    [],
    [QpState.SQD],
    [QpState.ERR],
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[-1].name if way else "RTS")
def test_closed_receive_region_keeps_the_state(bed: Testbed, way: list[QpState]) -> None:
    """A region of receive memory that is closed leaves the state as it is."""
    sender, outward, receiver = pair(bed)
    memory = bytearray(4 * 4096)
    region = receiver.qp.register(memory, recv_slot=4096)
    for state in way:
        receiver.qp.modify(state)
    before = receiver.qp.state
    region.close()
    assert receiver.qp.state is before
    if before is QpState.ERR:
        with pytest.raises(QpError):
            receiver.qp.recv(1, BOUND)
    receiver.qp.reset()
    sender.send(outward, b"in its own memory")
    assert receiver.receive(1) == [b"in its own memory"]
    assert not any(memory)


# --- closing ---------------------------------------------------------------

Call = Callable[[Application], object]
ID_CALLS: tuple[Call, ...] = (
    lambda p: p.id.bind_addr(p.port),
    lambda p: p.id.resolve_addr("239.1.1.1", p.port),
    lambda p: p.id.create_qp(),
    lambda p: p.id.join_multicast("239.1.1.1"),
    lambda p: p.id.join_multicast_ex(JoinAttrEx.send_only("239.1.1.1")),
    lambda p: p.id.leave_multicast("239.1.1.1"),
)
CHANNEL_CALLS: tuple[Call, ...] = (
    lambda p: p.channel.create_id(),
    lambda p: p.channel.get_event(0),
    lambda p: p.channel.fileno(),
)
BACKEND_CALLS: tuple[Call, ...] = (
    lambda p: p.bed.backend.devices(),
    lambda p: p.bed.backend.event_channel(),
)


def qp_calls(peer: Application) -> tuple[Call, ...]:
    """The calls of the peer's QP, which its id forgets when it is closed."""
    qp = peer.qp
    return (
        lambda _: qp.modify(QpState.ERR),
        lambda _: qp.attach_mcast("ff0e::1", 0xC001),
        lambda _: qp.detach_mcast("ff0e::1", 0xC001),
        lambda _: qp.send(Destination(gid=GID), [b""]),
        lambda _: qp.recv(1, 0),
        lambda _: qp.register(bytearray(8)),
        lambda _: qp.state,
        lambda _: qp.max_message_size,
    )


@pytest.mark.parametrize("what", ["qp", "id", "channel", "backend"])
def test_a_closed_object_says_so(bed: Testbed, what: str) -> None:
    peer = Application(bed)
    mgid = peer.join(new_group()).gid
    qp, calls = peer.qp, qp_calls(peer)
    match what:
        case "qp":
            close: Callable[[], None] = peer.qp.close
        case "id":
            close, calls = peer.id.destroy, calls + ID_CALLS
        case "channel":
            close, calls = peer.channel.close, calls + ID_CALLS + CHANNEL_CALLS
        case _:
            close, calls = peer.bed.backend.close, calls + ID_CALLS + CHANNEL_CALLS + BACKEND_CALLS
    close()
    close()
    assert qp.closed
    for call in calls:
        with pytest.raises(Closed) as caught:
            call(peer)
        assert caught.value.errno == E.EBADF
    if what in {"id", "channel"}:
        eventually(bed, lambda: mgid not in bed.observer.port_memberships(peer.port))


def test_a_with_closes(bed: Testbed) -> None:
    with bed.backend.event_channel() as channel:
        with channel.create_id() as id_:
            id_.bind_addr(bed.ports[0])
            with id_.create_qp() as qp:
                assert id_.qp is qp
            ended = [qp.closed, id_.qp is None]
        ended.append(id_.closed)
    assert [*ended, channel.closed] == [True] * 4


def test_closing_the_backend_frees_all(bed: Testbed) -> None:
    """Closing the backend frees what is still in use."""
    sender, outward, receiver = pair(bed)
    sender.send(outward, *numbered(3))
    held, queued = ExitStack(), Application(bed, 2)
    view = arrived(held, receiver, 2)[0].payload
    queued.id.join_multicast(new_group())
    eventually(bed, lambda: readable(queued.channel))
    Application(bed, 2).id.join_multicast(new_group())
    bed.backend.close()
    assert bed.observer.leftovers() == ()
    try:
        assert bytes(view) == numbered(3)[0]
    except ValueError:
        pass
    held.close()


def test_qps_have_numbers_of_their_own(bed: Testbed) -> None:
    numbers = [Application(bed).qp.qp_num for _ in range(8)]
    assert len(set(numbers)) == 8
    assert all(1 < number < 1 << 24 for number in numbers)


def test_devices_tell_ports_addresses_and_limits(bed: Testbed) -> None:
    infos = [port_info(bed, port) for port in bed.ports]
    assert len({tuple(info.gids.values()) for info in infos}) == len(infos)
    for device in bed.backend.devices():
        assert device.max_qp_wr > 0
        assert device.ports
    for peer in (Application(bed, index) for index in range(len(bed.ports))):
        (device,) = (device for device in bed.backend.devices() if device.name == peer.id.device)
        assert device.max_mcast_grp > 0
        assert device.max_mcast_qp_attach > 0
        assert any(peer.port in port.addresses for port in device.ports)
