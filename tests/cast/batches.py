"""Received batches, made without a network."""

from __future__ import annotations

from mcast.api import Batch, CopiedBatch, Message
from mcast.wire.addresses import Gid

GROUP = Gid("ff0e::ffff:239.1.1.1")


def batch_of(*messages: tuple[bytes, str]) -> Batch:
    """Return a batch of these messages, each with the IPv4 address of its sender."""
    return CopiedBatch(
        [
            Message(memoryview(message), Gid(f"::ffff:{address}"), 7, GROUP, None, False)
            for message, address in messages
        ]
    )
