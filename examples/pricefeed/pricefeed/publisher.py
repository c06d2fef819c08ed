"""The publisher: it sends each change once, says its version now and then, and the whole book when asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mcast import aio
from pricefeed.background import background
from pricefeed.wire import FEED, REPAIR, BadMessage, Heartbeat, Request, Update, decode, encode, snapshot


class Publisher:
    """The book and its version; made by `open_publisher`. Counts what it was asked, answered and refused."""

    def __init__(self, feed: aio.Sender, repair: aio.Membership, room: int, heartbeat: float) -> None:
        self.prices: dict[str, int] = {}
        self.version = 0
        self.asked = self.answered = self.refused = 0
        self._feed, self._repair, self._room, self._heartbeat = feed, repair, room, heartbeat
        self._wanted = asyncio.Event()

    async def publish(self, symbol: str, price: int) -> None:
        """Change one price, and tell."""
        payload = encode(Update(self.version + 1, symbol, price))
        self.version += 1
        self.prices[symbol] = price
        await self._feed.send(payload)

    async def beat(self) -> None:
        """Say the version over and over: a lost last update would not be missed otherwise."""
        while True:
            await asyncio.sleep(self._heartbeat)
            await self._feed.send(encode(Heartbeat(self.version)))

    async def listen(self) -> None:
        """Hear what subscribers ask for."""
        async for message in self._repair:
            try:
                request = decode(message.payload)
            except BadMessage:
                self.refused += 1
                continue
            if isinstance(request, Request):
                self.asked += 1
                self._wanted.set()

    async def answer(self) -> None:
        """Send the book to everybody, because many miss the same message, and one answer serves them all."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self.answered += 1
            parts = snapshot(self.version, self.prices, self._room)
            await self._feed.send_batch([encode(part) for part in parts])
            await asyncio.sleep(self._heartbeat)


@asynccontextmanager
async def open_publisher(
    backend: str, bind: str | None = None, heartbeat: float = 0.1
) -> AsyncIterator[Publisher]:
    """A publisher that serves until the end of the `with`."""
    async with (
        aio.open_endpoint(backend, bind, sequence=True) as endpoint,
        endpoint.sender(FEED) as feed,
        endpoint.join(REPAIR) as repair,
    ):
        publisher = Publisher(feed, repair, feed.max_message_size, heartbeat)
        async with background(publisher.beat, publisher.listen, publisher.answer):
            yield publisher
