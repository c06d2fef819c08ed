"""A subscriber's copy of the publisher's book. Pure: no clock and no network."""

from __future__ import annotations

from pricefeed.wire import Heartbeat, Message, Part, Update


class Book:
    """`prices` as of `version`; `newest` is the version that the publisher is known to have.

    Messages may be lost, doubled, late and in any order: `prices` is always exactly one version of the
    publisher's book, and `behind` says whether it is an old one.
    """

    def __init__(self) -> None:
        self.prices: dict[str, int] = {}
        self.version = self.newest = 0
        self._early: dict[int, Update] = {}
        self._parts: dict[int, Part] = {}

    @property
    def behind(self) -> bool:
        return self.version < self.newest

    def take(self, message: Message) -> None:
        """Learn from a message; one that brings nothing new changes nothing."""
        if isinstance(message, Update | Heartbeat | Part):
            self.newest = max(self.newest, message.version)
        if isinstance(message, Update):
            self._early[message.version] = message
        elif isinstance(message, Part) and message.version > self.version:
            self._collect(message)
        self._early = {v: update for v, update in self._early.items() if v > self.version}
        while update := self._early.pop(self.version + 1, None):
            self.prices[update.symbol] = update.price
            self.version = update.version

    def _collect(self, part: Part) -> None:
        """Keep the parts of one snapshot, the newest; with all of them, the book is theirs."""
        held = next(iter(self._parts.values()), part)
        if part.version < held.version:
            return
        if (part.version, part.parts) != (held.version, held.parts):
            self._parts.clear()
        self._parts[part.part] = part
        if len(self._parts) == part.parts:
            self.prices = {name: price for one in self._parts.values() for name, price in one.prices.items()}
            self.version = part.version
            self._parts.clear()
