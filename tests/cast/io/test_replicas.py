"""The recipe of a trainer and its replicas: identical after each update, for the same bytes however many."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP
from time import monotonic
from typing import Any

import numpy
import pytest

import mcast
from examples.replicas import SHAPE as REPLICA_SHAPE
from examples.replicas import follow, publish
from mcast import cast
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.trace.events import Send

GROUP = "239.1.2.3"
BOUND = 60.0
"""Seconds; the longest that anything may take, never a delay."""
SHAPE = (256, 512)
UPDATES = 3


def replica(fabric: Fabric, host: int, updates: int) -> list[tuple[str, Any]]:
    """Run a replica; return its weights after each update."""
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
        session.wait_for_receivers(replicas - late, BOUND)
        for version in range(UPDATES):
            weights: Any = random.random(SHAPE, "f4")
            report = publish(session, weights, version, BOUND)
            assert [(version, one.reason) for one in report.receivers if not one.complete] == []
            sent.append((report.name, weights))
            if not version:
                ends += start(range(1 + replicas - late, 1 + replicas), UPDATES - 1)
                session.wait_for_receivers(replicas, BOUND)
        for host, end in enumerate(ends):
            found = end.result(BOUND)
            expected = sent[host >= replicas - late :]
            assert [name for name, _ in found] == [name for name, _ in expected]
            assert all((got == was).all() for (_, got), (_, was) in zip(found, expected, strict=True))
    events = (event for _, event in fabric.trace or () if isinstance(event, Send) and event.port == "roce0")
    return sum(len(payload) for event in events for payload in event.payloads)


PERIOD = 0.5
"""Seconds from one update to the next, of replicas that are processes."""
PROGRAM = Path(__file__).parents[3] / "examples" / "replicas.py"


class Process:
    """A replica that is a process. Of each update it prints the number, and the least and largest weight."""

    def __init__(self) -> None:
        words = [sys.executable, str(PROGRAM), "replica", "127.0.0.1", "udp", str(PERIOD)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.updates: list[int] = []
        self.wrong: list[str] = []
        self.stopped = False
        self._reads = threading.Thread(target=self._read)
        self._reads.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            _, version, least, most = line.split()
            if not float(version) == float(least) == float(most) or int(version) <= max(
                self.updates, default=0
            ):
                self.wrong.append(line)
            self.updates.append(int(version))

    def signal(self, number: int) -> None:
        """Send a signal; one that is stopped goes on first, unless it is killed."""
        if self.stopped and number in (SIGINT, SIGCONT):
            self.process.send_signal(SIGCONT)
        self.stopped = number == SIGSTOP
        if number != SIGCONT:
            self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reads.join()
        self.process.stdout.close()  # type: ignore[union-attr]


def test_replicas_may_come_go_hang_and_be_killed(own_network: None, long: bool) -> None:
    """Those that live have new updates in the end, each only whole ones, and no update takes too long."""
    random, lasts = Random(1), 3600.0 if long else 12.0
    there: list[Process] = []
    took: list[float] = []
    with (
        ExitStack() as stack,
        mcast.open_endpoint("udp", "127.0.0.1", receive_depth=4096) as endpoint,
        endpoint.join(GROUP) as group,
        cast.open_session(group, peer_timeout=2.0) as session,
    ):

        def comes() -> None:
            if len(there) < 4:
                there.append(Process())
                stack.callback(there[-1].end)

        def leaves(number: int) -> None:
            gone = there.pop(random.randrange(len(there)))
            gone.signal(number)
            gone.process.wait(BOUND)
            gone.end()
            assert gone.wrong == []

        def hangs() -> None:
            random.choice(there).signal(SIGSTOP)

        def goes_on() -> None:
            for one in there:
                if one.stopped:
                    one.signal(SIGCONT)

        weights: Any = numpy.zeros(REPLICA_SHAPE, "f4")

        def update(version: int) -> None:
            weights.fill(version)
            report = publish(session, weights, version, 4 * PERIOD)
            took.append(report.seconds)
            session.wait_for_receivers(timeout=max(0.0, PERIOD - report.seconds))

        for _ in range(3):
            comes()
        session.wait_for_receivers(3, BOUND)
        version, end = 0, monotonic() + lasts
        while monotonic() < end:
            version += 1
            update(version)
            act = random.choice(
                [comes, comes, lambda: leaves(SIGINT), lambda: leaves(SIGKILL), hangs, goes_on]
            )
            if there or act is comes:
                act()
        goes_on()
        comes()
        last, end = version, monotonic() + BOUND
        while not all(max(one.updates, default=0) > last for one in there):
            assert monotonic() < end, [one.updates[-3:] for one in there]
            version += 1
            update(version)
        assert [one.wrong for one in there if one.wrong] == []
        assert max(took) < 4 * PERIOD + 1
    assert version > 5


def test_bytes_sent_do_not_grow_with_replicas() -> None:
    """The trainer sends as many bytes to eight replicas as to one."""
    one, eight = train(1, late=0), train(8, late=3)
    assert one == pytest.approx(eight, rel=0.005)
    assert 1 < eight / (UPDATES * SHAPE[0] * SHAPE[1] * 4) < 1.02
