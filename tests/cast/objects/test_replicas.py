"""The recipe of a trainer and its replicas: identical after each update, for the same bytes however many."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy
import pytest

import mcast
from examples.replicas import follow, let_in, publish
from mcast import cast
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.trace.events import Send

GROUP = "239.1.2.3"
BOUND = 60.0
"""Seconds; the longest that anything may take, never a delay."""
SHAPE = (256, 512)
UPDATES = 3


def replica(fabric: Fabric, host: int, updates: int) -> list[tuple[str, Any]]:
    """What a replica has after each of so many updates."""
    found: list[tuple[str, Any]] = []
    before: Any = None
    with (
        open_fabric(fabric, host=host) as backend,
        mcast.open_endpoint(backend, receive_depth=4096) as endpoint,
        endpoint.join(GROUP) as group,
        closing(follow(group, SHAPE)) as updated,  # type: ignore[type-var]  # a generator
    ):
        while len(found) < updates:
            name, weights = next(updated)
            assert before is None or (before == found[-1][1]).all()  # an update spares the one before
            before = weights
            found.append((name, weights.copy()))
    return found


def train(replicas: int, late: int) -> int:
    """Send some updates, and compare what the replicas have; the bytes that have left the trainer's port."""
    fabric = Fabric.roce(ports=1 + replicas, mtu=4096, clock="wall", trace=True)
    random = numpy.random.default_rng(1)
    sent: list[tuple[str, Any]] = []
    with (
        ThreadPoolExecutor(replicas) as pool,
        open_fabric(fabric, host=0) as backend,
        mcast.open_endpoint(backend, receive_depth=4096) as endpoint,
        endpoint.join(GROUP) as group,
        cast.open_session(group) as session,
    ):

        def start(hosts: range, updates: int) -> list[Future[list[tuple[str, Any]]]]:
            return [pool.submit(replica, fabric, host, updates) for host in hosts]

        ends = start(range(1, 1 + replicas - late), UPDATES)
        session.gather(replicas - late, BOUND)
        for version in range(UPDATES):
            weights: Any = random.random(SHAPE, "f4")
            report = publish(session, weights, version, BOUND)
            assert [(version, one.why) for one in report.receivers if not one.whole] == []
            sent.append((report.name, weights))
            if not version:
                ends += start(range(1 + replicas - late, 1 + replicas), UPDATES - 1)
                while session.receivers < replicas:
                    let_in(session, 0.01)
        for host, end in enumerate(ends):
            found = end.result(BOUND)
            expected = sent[host >= replicas - late :]
            assert [name for name, _ in found] == [name for name, _ in expected]
            assert all((got == was).all() for (_, got), (_, was) in zip(found, expected, strict=True))
    events = (event for _, event in fabric.trace or () if isinstance(event, Send) and event.port == "roce0")
    return sum(len(payload) for event in events for payload in event.payloads)


def test_the_bytes_that_leave_the_trainer_are_the_same_for_one_replica_and_eight() -> None:
    one, eight = train(1, late=0), train(8, late=3)
    assert one == pytest.approx(eight, rel=0.005)
    assert 1 < eight / (UPDATES * SHAPE[0] * SHAPE[1] * 4) < 1.02
