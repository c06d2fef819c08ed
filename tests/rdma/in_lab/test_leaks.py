"""Thousands of cycles leave no file descriptor, no RDMA object and no memory behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import mcast
from mcast.api import JoinAttrEx
from mcast.backends.rdma.net.netlink import rdma_objects
from mcast.contract.testbed import Testbed

JOINS, OPENS = 10_000, 1_000
IN_SMALL = 20
"""The part of these cycles that is run without --long: it shows what grows by a CQ or a slab each time."""
GROWTH_ALLOWED = 2 << 20
"""Bytes: the allocator's own unrest. In all cycles, one kept batch record each would be far above."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def grows_by(cycle: Callable[[], None], times: int) -> tuple[int, int]:
    """(file descriptors, bytes) that `times` cycles leave, after a tenth of them as warm-up."""
    for _ in range(times // 10):
        cycle()
    gc.collect()
    before = files(), resident()
    for _ in range(times - times // 10):
        cycle()
    gc.collect()
    return files() - before[0], resident() - before[1]


def test_joins_and_leaves(lab_bed: Testbed, long: bool) -> None:
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

    fds, grown = grows_by(cycle, JOINS if long else JOINS // IN_SMALL)
    assert fds == 0
    assert grown < GROWTH_ALLOWED
    assert qp.attachments == {}
    assert rdma_objects() == objects


def test_opens_and_closes(lab_bed: Testbed, long: bool) -> None:
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

    fds, grown = grows_by(cycle, OPENS if long else OPENS // IN_SMALL)
    assert fds == 0
    assert grown < GROWTH_ALLOWED
    assert rdma_objects() == objects
