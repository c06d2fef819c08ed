"""What recv returns: a leased batch of messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, NamedTuple

from mcast.contract.region import DeviceBytes
from mcast.interrupts import Enterable, uninterrupted
from mcast.wire.addresses import Gid

_WHOLE = uninterrupted()

RECORD_DTYPE: Any = {
    "names": ["offset", "length", "src_qp", "imm", "has_imm", "src_lid", "source", "group", "timestamp"],
    "formats": ["<u8", "<u4", "<u4", "<u4", "u1", "<u2", "(16,)u1", "(16,)u1", "<u8"],
    "offsets": [0, 8, 12, 16, 24, 26, 32, 48, 64],
    "itemsize": 72,
}
"""numpy.frombuffer(batch.records, RECORD_DTYPE) has a column for each: the payload's `offset` into
`batch.memory` and its `length` in bytes, and the other fields of `Message` (`imm` if `has_imm` is 1;
`timestamp` is 0 unless the queue pair has a `timestamp_clock`)."""

_RECORD = Struct("<QIII4xB1xH4x16s16sQ")
"""One row of it."""


class Message(NamedTuple):
    """One received message.

    payload    the bytes sent, without the 40-byte GRH: a read-only view, leased by its batch
    source     the sender's GID, from the GRH
    src_qp     the sender's QP number
    group      the MGID it was sent to
    imm        the 32-bit immediate, or None
    from_self  True when this very QP sent it (same GID and QP number)
    src_lid    the sender's LID on InfiniBand, 0 on Ethernet
    sl         the service level it came with; None where the provider does not say
    path_bits  the low bits of the LID of this port that it came to
    device     where the payload is, if it was received into another device's memory: `payload` is empty then
    timestamp  when it arrived, in nanoseconds of `QueuePair.timestamp_clock`; None without QpInit.timestamps
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


class Batch(Enterable, ABC):
    """Messages in the order of arrival, in receive buffers leased from the QP.

    A buffer goes back to the receive queue at `release()`, at the end of a `with`, or when the batch is
    dropped; until then it is one receive less. Every payload view is released with it: using one
    afterwards raises ValueError, so a view never shows another message's bytes.
    """

    _ended_by = "release"
    _released = False

    def __init__(self) -> None:
        self._views: list[memoryview] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """Payload length in bytes of each message."""

    @property
    def groups(self) -> Sequence[Gid]:
        """MGID that each message was sent to."""
        return [Gid(row[7]) for row in _RECORD.iter_unpack(self.records)]

    @property
    def memory(self) -> memoryview:
        """The read-only memory that the payloads lie in, leased as they are.

        The registered buffer of a `recv_slot`; else the provider's own, or a copy. BufferError where it is
        another device's; `records` has offsets into that.
        """
        return self._keep(memoryview(b"".join(bytes(message.payload) for message in self)))

    @property
    def records(self) -> bytes:
        """A record for each message, laid out as RECORD_DTYPE: columns for numpy, without a loop."""
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

    def _keep(self, view: memoryview) -> memoryview:
        """The view, which ends with the lease."""
        self._views.append(view)
        if self._released:  # also by another thread, since the view was made
            view.release()
            self._require_lease()
        return view

    def _require_lease(self) -> None:
        if self._released:
            raise ValueError("this batch was released: copy a payload with bytes() before that")

    @abstractmethod
    def _message(self, index: int) -> Message:
        """The message at 0 <= index < len, its payload a new view that release() may end."""

    @abstractmethod
    def _release(self) -> None:
        """Give the buffers back to the receive queue; called once, or again after a BufferError."""

    def __getitem__(self, index: int) -> Message:
        self._require_lease()
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"message {index} of a batch of {size}")
        with _WHOLE:  # a view that is not kept here would hold the lease
            message = self._message(index % size)
            self._views.append(message.payload)
            if self._released:
                self._keep(message.payload)
            return message

    def __iter__(self) -> Iterator[Message]:
        return (self[index] for index in range(len(self)))

    @property
    def released(self) -> bool:
        """True after release(): the buffers are back in the receive queue."""
        return self._released

    def release(self) -> None:
        """End the lease. Idempotent.

        Raises BufferError while something else (a numpy array, say) still uses a payload; the buffers
        then stay leased, and a later release() may succeed.
        """
        if self._released:
            return
        with _WHOLE:  # no lock: each step may be taken by two threads
            views = self._views
            try:
                for view in views:
                    view.release()
            except BufferError:
                raise BufferError(
                    "a payload of this batch is still in use by another object: drop it, or copy the payload"
                ) from None
            self._released = True  # who makes a view from here on, finds this
            try:
                self._release()
            except BaseException:
                self._released = False
                raise
            views.clear()

    # A view still exported elsewhere keeps its buffers leased: lost receives, never wrong bytes.
    __del__ = Enterable._drop


class CopiedBatch(Batch):
    """Messages with payloads of their own: nothing is leased."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        super().__init__()
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def lengths(self) -> list[int]:
        return [len(message.payload) for message in self._messages]

    @property
    def groups(self) -> list[Gid]:
        return [message.group for message in self._messages]

    def _message(self, index: int) -> Message:
        message = self._messages[index]
        return message._replace(payload=message.payload[:])

    def _release(self) -> None:
        """Nothing to give back."""

    __del__: Any = staticmethod(tuple)  # does nothing, by C: in a `__del__` of Python Ctrl-C would be lost
