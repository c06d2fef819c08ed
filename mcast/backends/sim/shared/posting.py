"""The server's side of what a client sends without a question: its ring, and the destinations it may name."""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from mcast.api import Destination
from mcast.backends.sim.shared import frames, posts
from mcast.backends.sim.shared.rings import WORDS, Outbox, Page, RingPayloads
from mcast.backends.sim.shared.watch import ServerWatch

MOST_DESTINATIONS = 1024
"""Of one client, that may be posted to by their number; sends to more are requests."""
BURST = 64
"""Posts of one client that are read before the others have their turn; so many at most are one send."""
ROOM = 8192
"""Bytes of a pipe of posts, or a page where that is more: so far a client may get ahead of the server, which
waits for nobody."""


OnePost = tuple[bytes, int, int]
"""A post of one message: head, place and length."""


class Posted(NamedTuple):
    """What a client has posted."""

    qp: int
    to: Destination
    place: int
    lengths: Sequence[int]
    imm: int | None


class PostRun:
    """Posts of one message each that begin with the same `head`, and lie one after the other: one send.

    To carry out a send takes as long for many messages as for one. A message has `most` bytes, and ends at
    `stop`, at most; there are `BURST` messages at most.
    """

    __slots__ = ("_end", "_head", "_most", "_stop", "lengths", "place", "qp", "to")

    def __init__(
        self, head: bytes, qp: int, to: Destination, place: int, length: int, stop: int, most: int
    ) -> None:
        self._head, self._end, self._stop, self._most = head, place + length, stop, most
        self.qp: int = qp
        self.to: Destination = to
        self.place: int = place
        self.lengths: list[int] = [length]

    def take(self, posted: Iterator[OnePost]) -> OnePost | None:
        """Take the posts that go on with the run; the first one that does not, None if all do."""
        head, end, stop, most, lengths = self._head, self._end, self._stop, self._most, self.lengths
        other = None
        for post in posted:
            begins, place, length = post
            fits = place == end and length <= most and end + length <= stop and begins == head
            if not fits or len(lengths) == BURST:
                other = post
                break
            end += length
            lengths.append(length)
        self._end = end
        return other


class PostPipe:
    """A pipe that a client writes its posts of one message into: they are read many at a time.

    `theirs` goes to the client, and can be read, too. So the client's writing raises no SIGPIPE when the
    server has ended, and the server sees no end of the pipe before that of the session. Raises OSError where
    no descriptor is left.
    """

    ours: int
    theirs: int
    most: int
    """Posts that a client can write before it has to wait for the server."""

    def __init__(self) -> None:
        self.ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.most = fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, ROOM) // posts.ONE
            self.theirs = os.open(f"/proc/self/fd/{theirs}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except BaseException:
            os.close(self.ours)
            raise
        finally:
            os.close(theirs)

    def read(self, most: int) -> Iterator[OnePost]:
        """So many posts at most. Raises ValueError for what is none."""
        try:
            found = os.read(self.ours, most * posts.ONE)
        except BlockingIOError:
            return iter(())
        if len(found) % posts.ONE:
            raise ValueError("a post is cut short")
        return posts.iter_ones(found)

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


class Posting:
    """`ring` is the descriptor that the client came with, this object's from now on; None: it posts nothing.

    Raises ValueError, OSError for a descriptor of something else.
    """

    def __init__(self, ring: int | None, page: Page) -> None:
        self._page = page
        self._outbox = None if ring is None else Outbox(ring, page)
        self._free_words = deque(range(1, WORDS) if self._outbox is not None else ())
        """The one that was freed last comes last: a thread of the client may still count there."""
        self._slots: dict[Destination, int] = {}
        self._destinations: list[Destination] = []
        self._routes: dict[bytes, tuple[int, Destination]] = {}
        """What the heads of posts of one message mean; for ever, for no number is used again."""
        self.pipe: PostPipe | None = None
        """What such posts come by, once the client has sent something."""

    def sent(self, to: Destination) -> frames.Sent:
        """A request to send there was carried out: how the next one may be posted."""
        slot = self._slots.get(to)
        if slot is None and self._outbox is not None and len(self._destinations) < MOST_DESTINATIONS:
            slot = self._slots[to] = len(self._destinations)
            self._destinations.append(to)
        return frames.Sent(slot, self._page.words[0])

    def take(self, frame: memoryview) -> Posted:
        """What the frame posts. Raises ValueError for what no client posts."""
        qp, slot, imm, place, lengths = posts.unpack_post(frame)
        if self._outbox is None or slot >= len(self._destinations):
            raise ValueError("a post without a ring, or to a destination that was not told")
        return Posted(qp, self._destinations[slot], place, lengths, imm)

    def open_pipe(self, watch: ServerWatch, posted: Callable[[], object]) -> int | None:
        """The client's end of a pipe, the first time; None where there is none, and posts come by the socket.

        `posted` is called whenever posts lie in it.
        """
        if self.pipe is not None or self._outbox is None:
            return None
        try:
            pipe = PostPipe()
        except OSError:  # no descriptor is left
            return None
        try:
            watch.add(pipe.ours, posted)
        except OSError:
            pipe.close()
            return None
        self.pipe = pipe
        return pipe.theirs

    def route(self, head: bytes) -> tuple[int, Destination] | None:
        """Queue pair and destination of a post of one message, which begins so; None: it is like any other.

        Raises ValueError as `take` does.
        """
        route = self._routes.get(head)
        if route is None:
            posted = self.take(memoryview(posts.pack_one(head, 0, 0)))
            if posted.imm is not None or len(self._routes) >= MOST_DESTINATIONS:
                return None
            route = self._routes[head] = posted.qp, posted.to
        return route

    def stop(self, place: int, length: int) -> int:
        """Where a message there and those after it end at most. Raises ValueError as `payloads` does."""
        assert self._outbox is not None
        return self._outbox.check(place, length)[1]

    def payloads(self, place: int, lengths: Sequence[int]) -> RingPayloads:
        """The messages of a post. Raises ValueError for where the client may not write."""
        assert self._outbox is not None
        return self._outbox.take(place, lengths)

    def make_room(self) -> int:
        """How far the client may write now. Raises ValueError where it has no ring."""
        if self._outbox is None:
            raise ValueError("there is no ring to make room in")
        return self._outbox.make_room()

    def take_word(self) -> tuple[int, Callable[[], int] | None]:
        """A word of the ring that counts the receives of a queue pair, and what reads it; 0: none is left."""
        if self._outbox is None or not self._free_words:
            return 0, None
        word = self._free_words.popleft()
        return word, partial(self._outbox.words.__getitem__, word)

    def free_word(self, word: int) -> None:
        """The queue pair is gone."""
        if word:
            self._free_words.append(word)

    def leave(self, watch: ServerWatch) -> None:
        """The client has left."""
        if self._outbox is not None:
            self._outbox.leave()
        pipe, self.pipe = self.pipe, None
        if pipe is not None:
            watch.remove(pipe.ours)
            pipe.close()
