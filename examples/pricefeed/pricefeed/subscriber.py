"""A subscriber: it follows the feed, notices what it has missed, and asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import mcast
from mcast import aio
from pricefeed.background import background
from pricefeed.book import Book
from pricefeed.wire import FEED, REPAIR, BadMessage, Request, decode, encode


class Subscriber:
    """A book that follows the publisher's; made by `open_subscriber`.

    asked    requests for the whole book
    refused  messages that are none of the feed's
    outages  seconds that the fabric was without our membership, one number for each time
    """

    def __init__(
        self, endpoint: aio.Endpoint, feed: aio.Membership, repair: aio.Sender, retry_interval: float
    ) -> None:
        self.book = Book()
        self.asked = self.refused = 0
        self.outages: list[float] = []
        self._endpoint, self._feed, self._repair = endpoint, feed, repair
        self._retry_interval, self._random = retry_interval, Random()
        self._changed = asyncio.Condition()

    @property
    def stats(self) -> mcast.EndpointStats:
        """Counters of the endpoint; `gaps` by the sequence numbers that mcast adds to messages."""
        return self._endpoint.stats()

    async def until(self, wanted: Callable[[Book], bool]) -> Book:
        """Wait until the book is as wanted."""
        async with self._changed:
            await self._changed.wait_for(lambda: wanted(self.book))
            return self.book

    async def follow(self) -> None:
        """Read the feed into the book."""
        async for message in self._feed:
            try:
                self.book.take(decode(message.payload))
            except BadMessage:
                self.refused += 1
            await self._notify()

    async def repair(self) -> None:
        """While behind, ask for the whole book; not at once, because another subscriber may ask before."""
        while True:
            await self.until(lambda book: book.behind)
            await asyncio.sleep(self._random.uniform(0.5, 1) * self._retry_interval)
            if self.book.behind:
                self.asked += 1
                await self._repair.send(encode(Request(self.book.version)))
                await asyncio.sleep(self._retry_interval)

    async def watch(self) -> None:
        """Note how long the membership was lost, for example because the SM failed over; mcast joins again.

        Messages sent meanwhile are repaired like any other loss, once a heartbeat says that there were some.
        """
        while True:
            event = await self._endpoint.next_event(timeout=None)
            if isinstance(event, mcast.Rejoined):
                self.outages.append(event.outage)
                await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@asynccontextmanager
async def open_subscriber(
    backend: str, bind: str | None = None, retry_interval: float = 0.1
) -> AsyncIterator[Subscriber]:
    """A subscriber that follows the feed until the end of the `with`."""
    async with (
        aio.open_endpoint(backend, bind, sequence=True) as endpoint,
        endpoint.join(FEED) as feed,
        endpoint.sender(REPAIR) as repair,
    ):
        subscriber = Subscriber(endpoint, feed, repair, retry_interval)
        async with background(subscriber.follow, subscriber.repair, subscriber.watch):
            yield subscriber
