"""`python -m pricefeed publish|subscribe --backend NAME --bind ADDRESS`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from random import Random

from pricefeed.publisher import open_publisher
from pricefeed.subscriber import open_subscriber

SYMBOLS = ("ACME", "BOLT", "CORK")


async def publish(backend: str, bind: str | None, changes: int) -> None:
    """Send random prices, a hundred a second."""
    random = Random(0)
    async with open_publisher(backend, bind) as publisher:
        for _ in range(changes):
            await publisher.publish(random.choice(SYMBOLS), random.randrange(1000, 2000))
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)  # for those who have missed something


async def subscribe(backend: str, bind: str | None, changes: int) -> None:
    """Print the book as it changes, until it has seen so many changes."""
    async with open_subscriber(backend, bind) as subscriber:
        while (seen := subscriber.book.version) < changes:
            book = await subscriber.until(lambda book: book.version > seen)
            prices = (f"{name} {price / 100:.2f}" for name, price in sorted(book.prices.items()))
            print(book.version, *prices, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="pricefeed", description=__doc__)
    parser.add_argument("role", choices=("publish", "subscribe"))
    parser.add_argument("--backend", default="rdma", help="a name of `mcast info` (default: rdma)")
    parser.add_argument("--bind", help="the local address")
    parser.add_argument("--changes", type=int, default=1000, help="stop after so many (default: 1000)")
    given = parser.parse_args(arguments)
    run = {"publish": publish, "subscribe": subscribe}[given.role]
    asyncio.run(run(given.backend, given.bind, given.changes))


if __name__ == "__main__":
    main()
