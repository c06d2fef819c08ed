"""The server's side of what a client sends without a question: its ring, and the destinations it may name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from mcast.api import Destination
from mcast.backends.sim.shared import frames, posts
from mcast.backends.sim.shared.rings import WORDS, Outbox, Page, RingPayloads

MOST_DESTINATIONS = 1024
"""Of one client, that may be posted to by their number; sends to more are requests."""


class Posted(NamedTuple):
    """What a client has posted. `longest` is in bytes."""

    qp: int
    to: Destination
    payloads: RingPayloads
    imm: int | None
    longest: int


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
        payloads = self._outbox.take(place, lengths)
        return Posted(qp, self._destinations[slot], payloads, imm, max(lengths, default=0))

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
