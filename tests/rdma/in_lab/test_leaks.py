"""Thousands of cycles leave no file descriptor, no RDMA object and no memory behind."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import mcast
from mcast.api import JoinAttrEx, Testbed
from mcast.backends.net.netlink import rdma_objects

from ...waiting import descriptors

JOINS, OPENS = 500, 50
"""The cycles of one turn: they show what grows by a CQ or a slab each time. A short run opens half as often,
because an emulated open takes long."""
ROUNDS = 20
"""Number of rounds of --long. Each is a test of its own, so that a slow guest has something to report."""
GROWTH_ALLOWED = 2 << 20
"""Bytes: the allocator's own unrest. One batch record kept by each cycle would be far above in all turns."""


def resident() -> int:
    """Return the memory in use, without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("turn", range(ROUNDS if metafunc.config.getoption("--long") else 1))


class Growth:
    """Growth of memory in all rounds, and of descriptors in each, which has a device of its own."""

    def __init__(self) -> None:
        self._before: int | None = None

    def by(self, cycle: Callable[[], None], times: int) -> tuple[int, int]:
        """(file descriptors left by this round, bytes left since a warm-up of a tenth of its cycles)."""
        if self._before is None:
            for _ in range(times // 10):
                cycle()
            self._before = resident()
        opened = descriptors()
        for _ in range(times):
            cycle()
        return len(descriptors() - opened), resident() - self._before


JOINING, OPENING = Growth(), Growth()


def test_joins_and_leaves(lab_bed: Testbed, turn: int) -> None:
    channel = lab_bed.backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr(lab_bed.ports[0])
    qp = cm_id.create_qp()
    objects = rdma_objects()

    def cycle() -> None:
        cm_id.join_multicast_ex(JoinAttrEx.full_member("239.77.2.1"))
        event = channel.get_event(10)
        assert event is not None
        event.check()
        cm_id.leave_multicast("239.77.2.1")

    fds, grown = JOINING.by(cycle, JOINS)
    assert fds == 0
    assert grown < GROWTH_ALLOWED
    assert qp.attachments == {}
    assert rdma_objects() == objects


def test_opens_and_closes(lab_bed: Testbed, turn: int, long: bool) -> None:
    port, *_ = lab_bed.ports
    objects = rdma_objects()

    def cycle() -> None:
        with mcast.open_backend("rdma") as backend:
            channel = backend.event_channel()
            cm_id = channel.create_id()
            cm_id.bind_addr(port)
            qp = cm_id.create_qp()
            cm_id.join_multicast("239.77.2.2")
            event = channel.get_event(10)
            assert event is not None
            ud = event.check().ud
            assert ud is not None
            qp.send(ud.destination, [b"to myself"] * 4)
            held = qp.recv(4, 10)
            cm_id.join_multicast("239.77.2.3")  # its event stays queued
        assert bytes(held[0].payload) == b"to myself"

    fds, grown = OPENING.by(cycle, OPENS if long else OPENS // 2)
    assert fds == 0
    assert grown < GROWTH_ALLOWED
    assert rdma_objects() == objects
