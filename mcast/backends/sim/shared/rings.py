"""Memory that processes share: a ring with one writer, and what its readers check before they believe it.

A client writes the payloads that it sends into a ring of its own, a memory file which it gives to the server
when it attaches. The server gives the file to those who have a message from there, and each copies its
payloads out. The file is sealed: nobody can shrink it under a reader, and only its maker's mapping can be
written. What lies in it may change at any time, so a word is read once, and then checked.

A place is counted in bytes since the ring was made. The writer writes below `limit`, which it notes in the
file before it writes there: what lies more than the ring's size below `limit` is overwritten.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload
from weakref import ref

from mcast.api import Headed

SIZE = 16 << 20
"""Bytes of payloads in a ring; its memory is taken as it is written."""
WORDS = 1024
"""Of 8 bytes, before the payloads: `limit`, and of each queue pair how many receives were given back."""
HEAD = 8 * WORDS
ROOM = SIZE // 2
"""Bytes that a writer may write at least before it has to ask again."""
MOST_POSTED = ROOM // 4
"""Bytes that a writer may write at once: there is room for them wherever the ring ends."""

MOST_LIVE = 4096
"""Sends that somebody still waits for in a ring; of more, the older ones are copied out."""

MASK = (1 << 64) - 1
_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1: no other mapping can be written; `fcntl` has no name for it."""
_NEEDED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def make(nbytes: int) -> tuple[int, mmap.mmap]:
    """A sealed memory file, and the one mapping that can be written. Raises OSError where there is none."""
    fd = os.memfd_create("mcast-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        mapped = mmap.mmap(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _NEEDED | _FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd, mapped


def view(fd: int, nbytes: int) -> mmap.mmap:
    """A mapping of somebody else's file. Raises ValueError, OSError for what could fail under a reader."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _NEEDED != _NEEDED or os.fstat(fd).st_size != nbytes:
        raise ValueError("this is no ring: its size may change")
    return mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ)


def _nbytes(payload: bytes | memoryview | Headed) -> int:
    return payload.nbytes if type(payload) is Headed else len(payload)


class RingReader:
    """Somebody else's ring."""

    def __init__(self, fd: int) -> None:
        self._mapped = view(fd, HEAD + SIZE)
        self.words: memoryview[int] = memoryview(self._mapped)[:HEAD].cast("Q")

    def copy(self, place: int, count: int) -> bytes | None:
        """`count` bytes from there on; None if they were, or may have been, overwritten meanwhile.

        Raises ValueError for a place that no message can have.
        """
        start = place % SIZE
        if not 0 <= count <= SIZE - start:
            raise ValueError(f"a ring of {SIZE} bytes has no {count} bytes at {start}")
        start += HEAD
        copied = self._mapped[start : start + count]
        return copied if self.words[0] - SIZE <= place else None


class RingWriter:
    """One's own ring. The caller has a lock."""

    fd: int

    def __init__(self) -> None:
        self.fd, self._mapped = make(HEAD + SIZE)
        self.words: memoryview[int] = memoryview(self._mapped)[:HEAD].cast("Q")
        self._head = 0
        self.allow(SIZE)

    def allow(self, limit: int) -> None:
        """The server has said how far may be written."""
        self._limit = self.words[0] = limit

    def put(self, payload: bytes | memoryview | Headed) -> int | None:
        """The place where the bytes lie now; None where there is no room for them."""
        count = payload.nbytes if type(payload) is Headed else len(payload)
        place = self._head
        start = place % SIZE
        if count > SIZE - start:  # it lies in one piece
            place += SIZE - start
            start = 0
        if place + count > self._limit:
            return None
        self._head = place + count  # first, for a signal's handler may send, too
        start += HEAD
        if type(payload) is Headed:
            payload.into(self._mapped, start)
        else:
            self._mapped[start : start + count] = payload
        return place

    def take_back(self, place: int, payload: bytes | memoryview | Headed) -> None:
        """The server was not told of the bytes there. It makes room only behind what it knows of."""
        if self._head == place + _nbytes(payload):
            self._head = place

    def forget_descriptor(self) -> None:
        """The server has it; the mapping is what is written to."""
        fd = self.fd
        self.fd = -1
        if fd >= 0:
            os.close(fd)


class Outbox:
    """The server's side of a client's ring: which of its messages somebody may still read.

    The descriptor is this object's. Raises ValueError, OSError for a file that is no ring.
    """

    def __init__(self, fd: int, page: Page) -> None:
        self._page = page
        self.fd: int = fd
        self._reader = RingReader(fd)
        self.number: int = page.open()
        self.words: memoryview[int] = self._reader.words
        self._head = 0
        self._kept_from = 0
        self._live: deque[ref[RingPayloads]] = deque()

    def take(self, place: int, lengths: Sequence[int]) -> RingPayloads:
        """The messages that the client has put there. Raises ValueError for where it may not write."""
        end, _ = self.check(place, sum(lengths))
        self._head = max(self._head, end)
        payloads = RingPayloads(self, place, lengths)
        self.note(payloads, end)
        return payloads

    def check(self, place: int, count: int) -> tuple[int, int]:
        """Where so many bytes end, and where they could end at most: they lie in one piece, below what may be
        written. Raises ValueError for where the client may not write them.
        """
        end, kept_from = place + count, self._kept_from
        stop = min(place - place % SIZE, kept_from) + SIZE
        if not kept_from <= place <= end <= stop:
            raise ValueError(f"messages at {place} to {end} of a ring that is kept from {kept_from}")
        return end, stop

    def note(self, payloads: RingPayloads, end: int) -> None:
        """Somebody has these, up to `end`, and may read them later."""
        if payloads.place == end:
            payloads.copy_out()
            return
        live = self._live
        while live and live[0]() is None:
            live.popleft()
        if len(live) >= MOST_LIVE:
            live = self._live = deque(one for one in live if one() is not None)
            while len(live) > MOST_LIVE // 2:
                self._copy_out_first()
        live.append(ref(payloads))

    def make_room(self) -> int:
        """How far the client may write now: what somebody still waits for there is copied out of its way."""
        self._kept_from = max(self._kept_from, self._head - SIZE + ROOM)
        kept: deque[ref[RingPayloads]] = deque()
        for one in self._live:
            if (payloads := one()) is not None:
                if payloads.place < self._kept_from:
                    payloads.copy_out()
                else:
                    kept.append(one)
        self._live = kept
        return self._kept_from + SIZE

    def _copy_out_first(self) -> None:
        payloads = self._live.popleft()()
        if payloads is not None:
            payloads.copy_out()

    def leave(self) -> None:
        """The client has left: what somebody still waits for is copied out, and the ring is nobody's."""
        while self._live:
            self._copy_out_first()
        self._page.end(self.number)

    def read(self, place: int, count: int) -> bytes:
        """Bytes that the client cannot overwrite without breaking the rule, to its own harm alone."""
        return self._reader.copy(place, count) or bytes(count)

    def __del__(self) -> None:
        os.close(self.fd)


class RingPayloads(Sequence[bytes]):
    """The payloads of one send: in the sender's ring, or copied out. Each look makes a copy.

    A slice is of the same kind: a queue pair that keeps a part of a send keeps no more than that in memory.
    """

    __slots__ = ("__weakref__", "_copied", "_outbox", "_starts", "lengths", "place")

    def __init__(self, outbox: Outbox | None, place: int, lengths: Sequence[int]) -> None:
        self._outbox = outbox
        self.place: int = place
        self.lengths: Sequence[int] = lengths
        self._starts: list[int] | None = None
        self._copied: bytes | None = None

    @property
    def outbox(self) -> Outbox | None:
        """Where they lie; None once they are copied out."""
        return self._outbox

    def place_of(self, index: int) -> int:
        """Where payload `index` begins in the ring."""
        return self.place + (self._start(index) if index else 0)

    def copy_out(self) -> None:
        """Copy all of them, so that the ring may be written there."""
        if self._outbox is not None:
            self._copied = self._outbox.read(self.place, sum(self.lengths))
            self._outbox = None

    def _start(self, index: int) -> int:
        if self._starts is None:
            self._starts = list(accumulate(self.lengths, initial=0))
        return self._starts[index]

    def _part(self, start: int, stop: int) -> RingPayloads:
        begin, end = self._start(start), self._start(stop)
        part = RingPayloads(self._outbox, self.place + begin, self.lengths[start:stop])
        if self._outbox is not None:
            self._outbox.note(part, self.place + end)
        else:
            assert self._copied is not None
            part._copied = self._copied[begin:end]
        return part

    def _bytes(self, index: int) -> bytes:
        start, length = self._start(index), self.lengths[index]
        if self._outbox is not None:
            return self._outbox.read(self.place + start, length)
        assert self._copied is not None
        return self._copied[start : start + length]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> RingPayloads: ...
    def __getitem__(self, index: int | slice) -> bytes | RingPayloads:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self.lengths))
            if step != 1:
                raise ValueError("messages come one after the other")
            return self._part(start, max(start, stop))
        return self._bytes(range(len(self.lengths))[index])

    def __iter__(self) -> Iterator[bytes]:
        return (self._bytes(index) for index in range(len(self.lengths)))


class Page:
    """What the server tells all clients without being asked: words that it alone can write.

    Word 0 changes with everything that a send depends on. The words after it name the rings whose clients are
    attached.
    """

    WORDS = 1024
    fd: int

    def __init__(self) -> None:
        self.fd, self._mapped = make(8 * self.WORDS)
        self.words: memoryview[int] = memoryview(self._mapped).cast("Q")
        self._made = 0

    def change(self) -> None:
        """A send may now end otherwise than the last one."""
        self.words[0] = (self.words[0] + 1) & MASK

    def open(self) -> int:
        """A number for a ring, which no ring had before. Raises ValueError when all words are taken."""
        self._made += 1
        word = next((word for word in range(1, self.WORDS) if not self.words[word]), None)
        if word is None:
            raise ValueError("there are as many rings as there can be")
        number = self._made * self.WORDS + word
        self.words[word] = number
        return number

    def end(self, number: int) -> None:
        """The client has left: nothing new will lie in its ring."""
        self.words[number % self.WORDS] = 0

    def close(self) -> None:
        self.words.release()
        self._mapped.close()
        os.close(self.fd)


class PageReader:
    """The server's page, as a client sees it. Raises ValueError, OSError for a file that is none."""

    def __init__(self, fd: int) -> None:
        self._mapped = view(fd, 8 * Page.WORDS)
        self.words: memoryview[int] = memoryview(self._mapped).cast("Q")

    def is_open(self, number: int) -> bool:
        """Whether the ring's client is attached."""
        return self.words[number % Page.WORDS] == number
