"""Counters of an endpoint and its groups, over several calls of each kind."""

from __future__ import annotations

import pytest

from mcast import open_endpoint
from mcast.api import Backend

GROUP = "239.1.2.3"
BOUND = 60.0


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "numbered"])
def test_counts_add_up_over_calls(backend: Backend, sequence: bool) -> None:
    """Single messages and batches, sent and received, in both figures of each kind."""
    with (
        open_endpoint(backend, "10.0.0.1", sequence=sequence) as sender,
        open_endpoint(backend, "10.0.0.2", sequence=sequence) as receiver,
        receiver.join(GROUP) as group,
        sender.sender(GROUP) as out,
    ):
        for _ in range(2):
            out.send(b"1")
            out.send_batch([b"22", b"333"])
        sent = out.stats()
        assert (sent.sent, sent.sent_bytes, sent.sent_batches) == (6, 12, 4)
        for _ in range(2):
            assert group.recv(timeout=BOUND) is not None
        left = 4
        while left:
            with group.recv_batch(max=2, timeout=BOUND) as batch:
                left -= len(batch)
        for found in (group.stats(), receiver.stats()):
            assert (found.received, found.received_bytes) == (6, 12)
