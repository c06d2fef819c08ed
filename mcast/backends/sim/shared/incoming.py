"""The client's side of what a queue pair receives: headers come through a socket, payloads from rings.

What is read from the socket is copied out of the senders' rings at once. A payload that its sender has
overwritten since, because this process was slow, is asked for: the server has kept it.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate

from mcast.api import Message, Phase
from mcast.backends.model.qp import Burst, Header, make_burst
from mcast.backends.sim.lease import Packed, Slices, message_of, messages_of
from mcast.backends.sim.shared import frames, posts
from mcast.backends.sim.shared.connection import Beacon, Connection, Gone, Late, Reply, Unknown, enter
from mcast.backends.sim.shared.rings import MASK, SIZE
from mcast.backends.sim.shared.watch import Waits
from mcast.interrupts import Lock, uninterrupted

MANY = 32
"""Messages of a send that are kept as one piece of memory: fewer are taken one by one more quickly."""


class ServerEnded(Exception):
    """The server tells no more: the queue pair is closed there, or the server has ended."""


class _Here:
    """Messages of a send, as far as no call has taken them; `messages` once one was taken by itself."""

    __slots__ = ("burst", "messages", "own", "start", "stop")

    def __init__(self, burst: Burst, stop: int, own: bool) -> None:
        self.burst, self.start, self.stop, self.own = burst, 0, stop, own
        self.messages: list[Message] | None = None


class Incoming:
    """Messages of the queue pair `number`. `word`: where the ring counts what is given back; 0: nowhere.

    The descriptor `fd` is this object's once it is made. Raises OSError where no descriptor is left. May be
    used from several threads.
    """

    def __init__(self, connection: Connection, number: int, word: int, fd: int) -> None:
        self._connection, self._number, self._word = connection, number, word
        self._given = 0 if connection.memory.ring is None else connection.memory.ring.words[word]
        self._local: deque[_Here] = deque()
        self._looks = False
        self.comes_singly: bool = False
        """Whether the last frame had one message, and that was taken: to look for another one before a sleep
        would take as long as the sleep, in vain."""
        self._frame: bytes | None = None
        """A frame that was read, and whose payloads have not come yet."""
        self._lock = Lock()
        self._whole = uninterrupted(self._lock)
        self._fd = fd
        # While messages are here that no call has taken, or something is to be asked for.
        self._bell = Beacon(lambda: bool(self._local) or self._looks or self._frame is not None)
        self._polled = False
        try:
            self._epoll = select.epoll()
            self._epoll.register(fd, select.EPOLLIN)
            self._epoll.register(self._bell, select.EPOLLIN)
        except BaseException:
            self._bell.close()
            raise

    def descriptor(self) -> int:
        """Readable while messages wait, or the server has something to tell; -1 once this is closed."""
        if self._epoll.closed:
            return -1
        if not self._polled:
            self._bell.listen()
            self._polled = True  # last, for Ctrl-C may come between the two
        return self._epoll.fileno()

    def sleep(self, until: Callable[[list[int]], None]) -> None:
        """Call `until` with what `descriptor` is an epoll over: a sleep on these alone ends sooner."""
        self._bell.listen()
        try:
            until([] if self._epoll.closed else [self._fd, self._bell.fileno()])
        finally:
            self._bell.leave()

    def look_and_sleep(self, waits: Waits, until: Callable[[list[int]], None]) -> None:
        """The same after a look at what the server tells, if that is worth it."""
        waits.until(partial(self.sleep, until), self._fd)

    def take(self, max: int, end: float | None) -> tuple[Slices, set[Header]]:
        """The next messages that are here, and which of their headers are this queue pair's own.

        The caller keeps Ctrl-C away until it has them. Raises ServerEnded; Gone for a server that tells
        nonsense; Late, and then nothing is taken.
        """
        slices: Slices = []
        own: set[Header] = set()
        enter(self._lock, end)
        try:
            while max:
                try:
                    if not self._local and not self._read(end):
                        break
                except (ServerEnded, Gone, Unknown, Late):
                    if not slices:
                        raise
                    break  # what was here is not lost; the next call meets that again
                if not self._local:
                    continue
                here = self._local[0]
                start, stop = here.start, here.stop
                if stop - start > max:
                    here.start = stop = start + max
                else:
                    self._local.popleft()
                max -= stop - start
                slices.append((here.burst, start, stop))
                if here.own:
                    own.add(here.burst.header)
        finally:
            self._bell.show()
            self._lock.release()
        return slices, own

    def take_one(self) -> Message | None:
        """The next message if that is quickly taken; its receive is given back.

        None: ask `take`, for there is none, or another call has the lock, or there is no ring.
        """
        connection = self._connection
        ring, word = connection.memory.ring, self._word
        if not word or ring is None or connection.forked or not self._lock.acquire(False):
            return None
        try:
            if self._epoll.closed:
                return None
            local = self._local
            while True:
                if not local:
                    if (message := self._alone()) is not None:
                        break
                    if self._frame is None or not self._read(None, asks=False):
                        return None
                    continue
                here = local[0]
                if here.messages is None:
                    here.messages = messages_of(here.burst, here.own)
                    continue  # a signal's handler may have taken some
                start = here.start
                message = here.messages[start]
                here.start = start = start + 1
                if start == here.stop:
                    local.popleft()  # first, because a signal is taken after a call
                    if not local:
                        self._bell.show()
                break
            self._given = ring.words[word] = (self._given + 1) & MASK
            return message
        except (ServerEnded, Gone):  # which `take` meets again
            return None
        finally:
            self._lock.release()

    def drop(self) -> int:
        """Forget the messages that have come; how many receives are to be given back."""
        with self._whole:
            count = 0
            if self._epoll.closed:  # by another thread: the descriptor's number may be another's by now
                return count
            while self._local:  # a signal's handler may take some
                here = self._local.popleft()
                count += here.stop - here.start
            with suppress(ServerEnded, ValueError):  # the next call sees what has become of the server
                while (frame := self._next_frame() if self._frame is None else self._frame) is not None:
                    self._frame = None
                    if frame == posts.LOOK:
                        self._looks = True
                    else:
                        count += sum(len(told.lengths) for told in posts.unpack_told(frame)[1])
            self._bell.show()
        return count

    @property
    def has_news(self) -> bool:
        """Whether the server has said, in what was read, that there is something to ask for."""
        return self._looks

    def look(self, end: float | None) -> bool:
        """Whether the server has said, since the last time, that there is something to ask for.

        The caller keeps Ctrl-C away until it has asked.
        """
        enter(self._lock, end)
        try:
            while not self._looks and self._read(end):
                pass
            looks, self._looks = self._looks, False
        finally:
            self._bell.show()
            self._lock.release()
        return looks

    def look_again(self) -> None:
        """What was to be asked for has not come."""
        with self._whole:
            self._looks = True
            self._bell.show()

    def give_back(self, count: int) -> bool:
        """Count receives as given back in the ring; whether there is a ring for that."""
        ring = self._connection.memory.ring
        if ring is None or not self._word:
            return False
        if os.getpid() != self._connection.pid:
            return True  # a fork's copy of a batch gives nothing back
        with self._whole:
            if not self._epoll.closed:
                self._given = ring.words[self._word] = (self._given + count) & MASK
        return True

    def close(self) -> None:
        with self._whole:
            self._epoll.close()
            os.close(self._fd)
            self._bell.close()

    # --- within the lock ---------------------------------------------------------------------

    def _read(self, end: float | None, asks: bool = True) -> bool:
        """Take one frame, if there is one and the server has not said to look; without `asks` only if the
        server need not be asked for a payload.

        Raises ServerEnded, Gone and Late.
        """
        if self._looks or self._epoll.closed:
            return False
        frame = self._next_frame() if self._frame is None else self._frame
        if frame is None:
            return False
        if frame == posts.LOOK:
            self._frame, self._looks = None, True
            return False
        self._frame = frame
        try:
            number, records = posts.unpack_told(frame)
            here = []
            for told in records:
                payloads = self._payloads(told, number, end, asks)
                if payloads is None:
                    return False
                burst = make_burst((payloads, 0, _header(told.header), told.imm, 0, told.at))
                if payloads:
                    here.append(_Here(burst, len(payloads), told.own))
                number += len(payloads)
        except ValueError as error:  # no server of this package tells that
            raise Gone from error
        if self._frame is frame:  # else a signal's handler has taken it
            self._frame = None
            self._local += here
            self.comes_singly = False
        return True

    def _alone(self) -> Message | None:
        """The message of a frame that has no other one, in a ring that is mapped here; else None: `take` may
        have it.
        """
        if self._frame is not None or self._looks:
            return None
        try:
            frame = self._frame = self._next_frame()
            told = None if frame is None else posts.unpack_alone(frame)
            reader = None if told is None else self._connection.memory.known(told.ring)
            if told is not None and reader is not None:
                copied = reader.copy(told.place, told.lengths[0])
                if copied is not None:
                    burst = make_burst(((copied,), 0, _header(told.header), told.imm, 0, told.at))
                    message = message_of(burst, memoryview(copied), told.own)
                    if self._frame is frame:  # else a signal's handler has taken it
                        self._frame = None
                        self.comes_singly = True
                        return message
        except (ServerEnded, ValueError):  # which `take` meets again
            pass
        if self._frame is not None:
            self._bell.show()
        return None

    def _next_frame(self) -> bytes | None:
        try:
            frame = os.read(self._fd, posts.MOST_FRAME)  # a packet; the server has made that not block
        except BlockingIOError:
            return None
        except OSError as error:
            raise ServerEnded from error
        if not frame:
            raise ServerEnded
        return frame

    def _payloads(
        self, told: posts.Told, number: int, end: float | None, asks: bool
    ) -> Sequence[bytes] | None:
        """None: the server would have to be asked for them."""
        lengths, copied = told.lengths, None
        memory = self._connection.memory
        if told.ring:
            reader = memory.known(told.ring)
            if reader is None and asks:
                reader = memory.reader(told.ring, partial(self._ask_ring, told.ring, end))
            copied = None if reader is None else reader.copy(told.place, sum(lengths))
        if copied is None:
            if not asks:
                return None
            copied = self._asked_for(lengths, number, end)
        if len(lengths) >= MANY:
            return Packed(copied, lengths)
        return [copied[end - size : end] for end, size in zip(accumulate(lengths), lengths, strict=True)]

    def _ask_ring(self, ring: int, end: float | None) -> int | None:
        return self._ask(frames.WantRing(qp=self._number, ring=ring), end).descriptor

    def _ask(self, request: frames.AnyRequest, end: float | None) -> Reply:
        return self._connection.ask(request, "recv", Phase.RECV, end=end, owner=self._number)

    def _asked_for(self, lengths: Sequence[int], number: int, end: float | None) -> bytes:
        """The payloads as the server has them, in as many answers as they fit in."""
        if sum(lengths) > SIZE:
            raise ValueError("more than any sender can send at once")
        parts, start = [], 0
        while start < len(lengths):
            stop, size = start, 0
            while stop < len(lengths) and (stop == start or size + lengths[stop] <= frames.MOST_PAYLOAD):
                size += lengths[stop]
                stop += 1
            request = frames.WantPayloads(qp=self._number, first=number + start, count=stop - start)
            tail = self._ask(request, end).tail
            if len(tail) != size:
                raise ValueError(f"{len(tail)} bytes for payloads of {size}")
            parts.append(tail)
            start = stop
        return b"".join(parts)


@lru_cache(maxsize=4096)
def _header(text: bytes) -> Header:
    source, group, src_qp, slid = frames.unpack_header(text)
    return Header(source, src_qp, group, 0, 0, 0, slid)
