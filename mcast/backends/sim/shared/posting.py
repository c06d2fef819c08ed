"""The server's side of what a client sends without a question: its ring, and the destinations it may name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from mcast.api import Destination
from mcast.backends.sim.shared import frames, posts
from mcast.backends.sim.shared.rings import WORDS, Outbox, Page, RingPayloads

MOST_DESTINATIONS = 1024
"""Of one client, that may be posted to by their number; sends to more are requests."""


class Posted(NamedTuple):
    """What a client has posted. `longest` is in bytes; `goes_on` if the next post may belong to the same
    send."""

    qp: int
    to: Destination
    place: int
    lengths: Sequence[int]
    imm: int | None
    longest: int
    goes_on: bool


class PostedRun:
    """Posts of one message each to the same destination, which lie one after the other: one send.

    To carry out a send takes as long for many messages as for one. `longest`: bytes of a message at most.
    """

    def __init__(self, posted: Posted, head: bytes, stop: int, longest: int) -> None:
        self.posted: Posted = posted
        self.lengths: list[int] = list(posted.lengths)
        self._head, self._stop, self._longest = head, stop, longest
        self._end = posted.place + posted.lengths[0]

    def goes_on(self, frame: memoryview) -> bool:
        """Whether the post of `posts.ONE` bytes is the next one, and now a part of this."""
        head, place, length = posts.unpack_one(frame)
        end = place + length
        if place != self._end or length > self._longest or end > self._stop or head != self._head:
            return False
        self._end = end
        self.lengths.append(length)
        return True


class Posting:
    """`ring` is the descriptor that the client came with, this object's from now on; None: it posts nothing.

    Raises ValueError, OSError for a descriptor of something else.
    """

    def __init__(self, ring: int | None, page: Page) -> None:
        self._page = page
        self._outbox = None if ring is None else Outbox(ring, page)
        self._free_words = list(range(WORDS - 1, 0, -1)) if self._outbox is not None else []
        self._slots: dict[Destination, int] = {}
        self._destinations: list[Destination] = []
        self._routes: dict[bytes, tuple[int, Destination]] = {}
        """What the heads of posts of one message mean; for ever, for no number is used again."""

    def sent(self, to: Destination) -> frames.Sent:
        """A request to send there was carried out: how the next one may be posted."""
        slot = self._slots.get(to)
        if slot is None and self._outbox is not None and len(self._destinations) < MOST_DESTINATIONS:
            slot = self._slots[to] = len(self._destinations)
            self._destinations.append(to)
        return frames.Sent(slot, self._page.words[0])

    def take(self, frame: memoryview) -> Posted:
        """What the frame posts. Raises ValueError for what no client posts."""
        is_one = len(frame) == posts.ONE
        if is_one:
            head, place, length = posts.unpack_one(frame)
            if (route := self._routes.get(head)) is not None:
                return Posted(*route, place, (length,), None, length, True)
        qp, slot, imm, place, lengths = posts.unpack_post(frame)
        if self._outbox is None or slot >= len(self._destinations):
            raise ValueError("a post without a ring, or to a destination that was not told")
        to = self._destinations[slot]
        if is_one and imm is None and len(self._routes) < MOST_DESTINATIONS:
            self._routes[head] = qp, to
        return Posted(qp, to, place, lengths, imm, max(lengths, default=0), is_one)

    def payloads(self, posted: Posted) -> RingPayloads:
        """The messages of a post. Raises ValueError for where the client may not write."""
        assert self._outbox is not None
        return self._outbox.take(posted.place, posted.lengths)

    def run(self, posted: Posted, frame: memoryview, longest: int) -> PostedRun:
        """What begins with a post of one message. Raises ValueError as `payloads` does."""
        assert self._outbox is not None
        self._outbox.check(posted.place, posted.lengths[0])
        return PostedRun(posted, posts.unpack_one(frame)[0], self._outbox.stop(posted.place), longest)

    def make_room(self) -> int:
        """How far the client may write now. Raises ValueError where it has no ring."""
        if self._outbox is None:
            raise ValueError("there is no ring to make room in")
        return self._outbox.make_room()

    def take_word(self) -> tuple[int, Callable[[], int] | None]:
        """A word of the ring that counts the receives of a queue pair, and what reads it; 0: none is left."""
        if self._outbox is None or not self._free_words:
            return 0, None
        word = self._free_words.pop()
        return word, partial(self._outbox.words.__getitem__, word)

    def free_word(self, word: int) -> None:
        """The queue pair is gone."""
        if word:
            self._free_words.append(word)

    def leave(self) -> None:
        """The client has left."""
        if self._outbox is not None:
            self._outbox.leave()
