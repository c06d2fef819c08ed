"""The batch: the messages that a receive call returns, in memory that the batch leases.

Theory of operation. A batch leases its receives from the queue pair:

    leased    views of payloads may be given out; each is noted in `_views`
    released  by `release` or the end of the `with`: every view is ended first. If another object still uses
              one, BufferError, and the batch stays leased
    ended     its receives can be posted again

The program's threads own the batch, and `_alone` orders them where there is no GIL. `Leases` belongs to the
queue pair: a batch that is released, or dropped without that, appends its `Lease` to `ended`, which wakes
nobody. The queue pair calls `reclaim` before it counts its receives. No Python code runs when a batch is
dropped, because an exception in a finalizer, and with it a Ctrl-C, would be lost.

Deliberately not handled: a view that the program holds for ever. Its receives stay leased, the queue pair has
fewer, and its counters say so.
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, groupby
from struct import Struct
from types import TracebackType
from typing import Any, NamedTuple, Self
from weakref import ref

from mcast.arguments.buffers import FREE_THREADED
from mcast.arguments.checks import check_int, check_type
from mcast.arguments.copies import reduce_with_copies
from mcast.contract.closing import Handle
from mcast.contract.region import DeviceBytes
from mcast.wire.addresses import Gid

RECORD_DTYPE: Any = {
    "names": ["offset", "length", "src_qp", "imm", "has_imm", "src_lid", "source", "group", "timestamp"],
    "formats": ["<u8", "<u4", "<u4", "<u4", "u1", "<u2", "(16,)u1", "(16,)u1", "<u8"],
    "offsets": [0, 8, 12, 16, 24, 26, 32, 48, 64],
    "itemsize": 72,
}
"""The layout of `Batch.records`: `numpy.frombuffer(batch.records, RECORD_DTYPE)` has a column for each field.

`offset` is where the payload begins in `batch.memory`, `length` its length in bytes; the other columns are
the fields of `Message`. `imm` is valid where `has_imm` is 1. `timestamp` is 0 unless the queue pair has a
`timestamp_clock`.
"""

_RECORD = Struct("<QIII4xB1xH4x16s16sQ")
"""One row of `Batch.records`, laid out as RECORD_DTYPE says."""

_PLACE, _REST = Struct("<QI"), Struct("<II4xB1xH4x16s16sQ")
"""The same in two parts: where the payload is, and the fields of the message."""

_SENDER = Struct("<12xI16x16s24x")
"""Of such a row: `src_qp` and `source`."""


class Message(NamedTuple):
    """One received message.

    A pickle or a copy of a message has a payload of its own, which no batch ends.

    payload    the bytes that were sent, without the 40-byte GRH: a read-only view, valid until the batch is
               released
    source     the sender's GID, from the GRH
    src_qp     the sender's queue pair number
    group      the MGID that the message was sent to
    imm        the 32-bit immediate, or None
    from_self  True when the receiving queue pair sent the message itself (same GID and queue pair number)
    src_lid    the sender's LID on InfiniBand, 0 on Ethernet
    sl         the service level of the message; None where the provider does not say
    path_bits  the low bits of the destination LID: which of this port's LIDs the message came to
    device     where the payload is, if the message was received into another device's memory; `payload` is
               empty then
    timestamp  when the message arrived, in nanoseconds of `QueuePair.timestamp_clock`; None without
               QpInit.timestamps
    number     the number that the sender gave the message, if the endpoint has sequence=True; a sender counts
               from 0 in each group. None elsewhere
    """

    payload: memoryview
    source: Gid
    src_qp: int
    group: Gid
    imm: int | None
    from_self: bool
    src_lid: int = 0
    sl: int | None = None
    path_bits: int = 0
    device: DeviceBytes | None = None
    timestamp: int | None = None
    number: int | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return reduce_with_copies(self)


class Series(NamedTuple):
    """Consecutive messages of one sender in a batch, of one length.

    They lie in memory at equal distances.

    memory     from the beginning of the first payload to the end of the last one: a read-only view, valid
               until the batch is released
    step       bytes from the beginning of a payload to that of the next one
    size       bytes of each payload
    messages   how many these are
    source     the sender's GID, from the GRH
    src_qp     the sender's queue pair number
    from_self  True when the receiving queue pair sent them itself
    """

    memory: memoryview
    step: int
    size: int
    messages: int
    source: Gid
    src_qp: int
    from_self: bool

    def __reduce__(self) -> tuple[object, ...]:
        return reduce_with_copies(self)

    def payloads(self) -> Iterator[memoryview]:
        """The payload of each message. A view that is kept keeps the batch's receives from going back."""
        return (self.memory[at * self.step : at * self.step + self.size] for at in range(self.messages))


class Batch(Handle, ABC):
    """Messages in the order of arrival, in receive buffers leased from the queue pair.

    Leased means: the device does not write to the buffers. They go back to the receive queue at `release()`
    or at the end of a `with`; those of a batch that is dropped at the next call of the queue pair, unless a
    payload is in use by another object. Until then the queue has as many receives less. Releasing the batch
    also releases every payload view: using a view afterwards raises ValueError, so a view never shows the
    bytes of another message.
    """

    _instead = "copy its messages, or their payloads with bytes()"
    _released = False
    _alone: AbstractContextManager[Any] = nullcontext()
    """Where views are made and ended. Between threads, the GIL makes each such step whole, or this lock."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []
        if FREE_THREADED:
            self._alone = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        try:
            self.release()
        except BufferError:
            if kind is None:  # else the traceback may be what uses a payload
                raise

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """The payload length of each message, in bytes."""

    @property
    def groups(self) -> Sequence[Gid]:
        """The MGID that each message was sent to."""
        if not (records := self.records):
            return []
        eights = memoryview(records).cast("Q")
        if eights[6:-9:9] == eights[15::9] and eights[7:-9:9] == eights[16::9]:  # each is that of the next
            return [Gid(records[48:64])] * len(self)
        return [Gid(row[7]) for row in _RECORD.iter_unpack(records)]

    @property
    def numbers(self) -> Sequence[int] | None:
        """The number of each message (`Message.number`); None where messages have no numbers."""
        return None

    def series(self) -> Iterator[Series]:
        """The messages in order, those together that are alike: for programs that look at many at once.

        There is no `Message` for each, so a program that takes many at once saves most of the time that those
        take. Raises BufferError where the payloads lie in another device's memory.
        """
        memory = self.memory
        for at, count, begin, step, size, is_new in self._stretches():
            if is_new:
                one = self[at]
            with self._alone:
                view = self._keep(memory[begin : begin + (count - 1) * step + size])
            yield Series(view, step, size, count, one.source, one.src_qp, one.from_self)

    def _stretches(self) -> Iterable[tuple[int, int, int, int, int, bool]]:
        """Yield the runs of messages that `series` groups.

        Each is the index of the first message, the number of messages, the offset of the first payload in
        `memory`, `step` and `size`; and True if the sender is another one than before.
        """
        rows = memoryview(self.records)
        fours, eights = rows.cast("I"), rows.cast("Q")
        offsets: list[int] = eights[::9].tolist()
        sizes: list[int] = fours[2::18].tolist()
        senders = [*_SENDER.iter_unpack(rows)]
        at, before = 0, None
        for (size, sender), alike in groupby(zip(sizes, senders, strict=True)):
            stop = at + len([*alike])
            while at < stop:
                step, end = _stretch(offsets, at, stop, size)
                yield at, end - at, offsets[at], step, size, sender != before
                at, before = end, sender

    def count_from(self, source: Gid, src_qp: int) -> int:
        """Return the number of messages from the queue pair `src_qp` of the port with the GID `source`.

        If all are, this costs some nanoseconds for each message.
        """
        check_type(source, bytes, "source", "a Gid, such as Message.source")
        return self._count_from(source, check_int(src_qp, "src_qp", 0, 0xFFFFFFFF, "it numbers a queue pair"))

    def _count_from(self, source: Gid, src_qp: int) -> int:
        if not (records := self.records):
            return 0
        if _has_one_sender(memoryview(records)):
            return len(self) if _SENDER.unpack_from(records) == (src_qp, source) else 0
        return [*_SENDER.iter_unpack(records)].count((src_qp, source))

    @property
    def memory(self) -> memoryview:
        """The read-only memory that the payloads lie in; the view ends with the batch's lease.

        That is the registered buffer of a `recv_slot`, or else the provider's own memory or a copy.
        BufferError where the payloads lie in another device's memory, because the CPU has no view of that;
        `records` has their offsets.
        """
        with self._alone:
            return self._keep(memoryview(b"".join(bytes(message.payload) for message in self)))

    @property
    def records(self) -> bytes:
        """Return one record of 72 bytes for each message, laid out as RECORD_DTYPE.

        Columns for numpy, without a loop.
        """
        return self._records(accumulate(self.lengths, initial=0))

    def _records(self, offsets: Iterable[int]) -> bytes:
        """The records of messages whose payloads start at `offsets` in `memory`."""
        return b"".join(
            _RECORD.pack(
                offset,
                length,
                message.src_qp,
                message.imm or 0,
                message.imm is not None,
                message.src_lid,
                message.source,
                message.group,
                message.timestamp or 0,
            )
            for offset, length, message in zip(offsets, self.lengths, self, strict=False)
        )

    @staticmethod
    def _records_of(message: Message, places: Iterable[tuple[int, int]]) -> bytes:
        """Return the records of messages that differ in offset and length alone."""
        imm = message.imm
        fields = message.src_qp, imm or 0, imm is not None, message.src_lid, message.source, message.group
        rest = _REST.pack(*fields, message.timestamp or 0)
        return b"".join([_PLACE.pack(*place) + rest for place in places])

    def _keep(self, view: memoryview) -> memoryview:
        """Note a view that has to end with the lease, and return it. The caller is in `_alone`."""
        self._views.append(view)
        if self._released:  # another thread may have released the batch since the view was made
            view.release()
            self._require_lease()
        return view

    def _require_lease(self) -> None:
        if self._released:
            raise ValueError("this batch was released: copy a payload with bytes() before that")

    @abstractmethod
    def _message(self, index: int) -> Message:
        """The message at 0 <= index < len.

        The payload must be a new view, because release() ends that view.
        """

    @abstractmethod
    def _release(self) -> None:
        """Give the buffers back to the receive queue. Called once, and once more after each BufferError.

        A BufferError, which has no text, says that another object still uses the memory of a payload.
        """

    def __getitem__(self, index: int) -> Message:
        self._require_lease()
        size, index = len(self), operator.index(index)
        if not -size <= index < size:
            raise IndexError(f"message {index} of a batch of {size}")
        with self._alone:
            message = self._message(index % size)
            self._keep(message.payload)
            return message

    def __iter__(self) -> Iterator[Message]:
        return (self[index] for index in range(len(self)))

    @property
    def released(self) -> bool:
        """True after release(): the buffers are back in the receive queue."""
        return self._released

    def release(self) -> None:
        """Give the buffers back to the receive queue, and end every payload view. Idempotent.

        Raises BufferError while another object (a numpy array, say) still uses a payload. The buffers then
        stay leased, and a later release() may succeed.
        """
        if self._released:
            return
        try:
            if FREE_THREADED:
                with self._alone:
                    self._end()
            else:
                self._end()
        except BufferError:
            raise BufferError(
                "a payload of this batch, or a slice of one, is still in use by another object: "
                "drop that object, or copy the payload with bytes() first"
            ) from None

    def _end(self) -> None:
        """End the views, and give the buffers back.

        With a GIL two threads may do any of these steps twice without harm.
        """
        views = self._views
        for view in views:
            view.release()
        self._released = True  # a thread that makes a view from here on releases it itself
        try:
            self._release()
        except BaseException:
            self._released = False
            raise
        views.clear()


class Lease(ref[Batch]):
    """The receives of one batch, until they are posted again.

    count      how many they are
    on_end     called when they are posted again
    views      the views of payloads that were given out, in a list that may grow
    exporters  what counts these views, and can be released when they are not in use; a list, too
    """

    __slots__ = ("count", "exporters", "on_end", "views")

    count: int
    on_end: Callable[[], object] | None
    views: Sequence[memoryview]
    exporters: Sequence[memoryview]


class Leases:
    """The leases of a queue pair's batches.

    When a batch is released or dropped, its lease is appended to `ended`, and the queue pair looks there
    before it counts its receives. No Python code runs when a batch is dropped: an exception in a finalizer,
    and with it a Ctrl-C, would be lost. `on_release` is called when a batch was released.
    """

    def __init__(self, on_release: Callable[[], object] | None = None) -> None:
        self.on_release: Callable[[], object] | None = on_release
        self.ended: list[Lease] = []  # a deque takes 600 bytes, and there are many queue pairs
        self._note_end = self.ended.append
        self._running: set[Lease] = set()

    def add(
        self,
        batch: Batch,
        count: int,
        on_end: Callable[[], object] | None,
        views: list[memoryview],
        exporters: list[memoryview],
    ) -> Lease:
        """Register a new batch."""
        lease = Lease(batch, self._note_end)
        lease.count, lease.on_end, lease.views, lease.exporters = count, on_end, views, exporters
        self._running.add(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """Mark the batch as released, and with it every view and exporter."""
        # A thread that makes a view just now is refused: its frames must not keep the receives.
        # The lists would stay until the queue pair looks at `ended`, too.
        lease.views = lease.exporters = ()
        self._note_end(lease)
        if self.on_release is not None:
            self.on_release()

    def reclaim(self) -> int:
        """Return the number of receives to post again.

        Those of batches that have ended since the last call, and whose memory nobody uses.
        """
        found, ended, running = 0, self.ended, self._running
        for _ in range(len(ended)):
            try:
                lease = ended.pop()
            except IndexError:
                break  # another thread has it
            if lease not in running:
                continue  # of a batch that was released, and then dropped
            try:
                for view in lease.views:
                    view.release()
                for exporter in lease.exporters:
                    exporter.release()
            except BufferError:
                ended.insert(0, lease)
                continue
            running.discard(lease)
            if lease.on_end is not None:
                lease.on_end()
            found += lease.count
        return found


def _has_one_sender(rows: memoryview) -> bool:
    """Return True if one queue pair has sent all messages of these records."""
    # As integers, once of four bytes and twice of eight: is each what it is in the next row?
    fours, eights = rows.cast("I"), rows.cast("Q")
    return (
        fours[3:-18:18] == fours[21::18]
        and eights[4:-9:9] == eights[13::9]
        and eights[5:-9:9] == eights[14::9]
    )


def _stretch(offsets: list[int], at: int, stop: int, size: int) -> tuple[int, int]:
    """The distance of the messages from `at` on, and the place before which it is the same."""
    end, step = at + 1, size
    if end < stop and (apart := offsets[end] - offsets[at]) >= max(size, 1):
        step = apart
        if offsets[at:stop] == [*range(offsets[at], offsets[at] + (stop - at) * step, step)]:
            return step, stop
        while end < stop and offsets[end] - offsets[end - 1] == step:
            end += 1
    return step, end


class CopiedBatch(Batch):
    """A batch whose payloads are copies: no receive buffer is leased."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        super().__init__()
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def lengths(self) -> list[int]:
        """Return the payload length of each message, in bytes."""
        return [len(message.payload) for message in self._messages]

    @property
    def groups(self) -> list[Gid]:
        """Return the destination GID of each message."""
        return [message.group for message in self._messages]

    @property
    def numbers(self) -> list[int] | None:
        """Return the number of each message; None where one has none."""
        numbers = [message.number for message in self._messages if message.number is not None]
        return numbers if len(numbers) == len(self._messages) else None

    def _message(self, index: int) -> Message:
        message = self._messages[index]
        return message._replace(payload=message.payload[:])

    def _release(self) -> None:
        """Do nothing, because no receive buffer is leased."""
