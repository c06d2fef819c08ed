"""The recipe of a trainer and its replicas: identical after each update, for the same bytes however many."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from random import Random
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP
from time import monotonic
from typing import Any, TypeVar

import numpy
import pytest

import mcast
from mcast import cast
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.trace.events import Send
from tests.waiting import BOUND, until

GROUP = "239.1.2.3"
SHAPE = (256, 512)
VERSIONS = 3


def replica(fabric: Fabric, host: int, last: int) -> dict[int | None, Any]:
    """Run a replica until it has version `last`; return its weights of each version."""
    found: dict[int | None, Any] = {}
    weights: Any = numpy.zeros(SHAPE, "f4")
    with (
        open_fabric(fabric, host=host) as backend,
        mcast.open_endpoint(backend, receive_depth=4096) as endpoint,
        endpoint.join(GROUP) as group,
        closing(cast.receive(group, into=weights.data, latest=True)) as versions,
    ):
        for update in versions:
            found[update.offered.version] = weights.copy()
            if update.offered.version == last:
                break
    return found


def train(replicas: int) -> int:
    """Publish some versions, and compare what the replicas have; return the bytes that the trainer sent."""
    fabric = Fabric.roce(ports=1 + replicas, mtu=4096, clock="wall", trace=True)
    random = numpy.random.default_rng(1)
    sent: dict[int | None, Any] = {}
    with (
        ThreadPoolExecutor(replicas) as pool,
        open_fabric(fabric, host=0) as backend,
        mcast.open_endpoint(backend, receive_depth=4096) as endpoint,
        endpoint.join(GROUP) as group,
        cast.open_session(group) as session,
    ):
        ends = [pool.submit(replica, fabric, host, VERSIONS - 1) for host in range(1, 1 + replicas)]
        session.wait_for_receivers(replicas, BOUND)
        for version in range(VERSIONS):
            weights: Any = random.random(SHAPE, "f4")
            report = session.publish(weights, version=version, strategy=cast.deadline(BOUND))
            assert [(version, one.reason) for one in report.receivers if not one.complete] == []
            sent[version] = weights
        for end in ends:
            found = end.result(BOUND)
            assert [*found] == [*sent]
            assert all((weights == sent[version]).all() for version, weights in found.items())
    events = (event for _, event in fabric.trace or () if isinstance(event, Send) and event.port == "roce0")
    return sum(len(payload) for event in events for payload in event.payloads)


PERIOD = 0.5
"""Seconds from one version to the next, of replicas that are processes."""
SIZE = 512
"""Rows and columns of their weights."""
PROGRAM = Path(__file__).parents[3] / "examples" / "replicas" / "replicas.py"


class Process:
    """A replica or a trainer that is a process; `lines` are what it has printed."""

    def __init__(self, role: str, backend: str, address: str) -> None:
        words = [sys.executable, str(PROGRAM), role, address, "--backend", backend]
        words += ["--period", str(PERIOD), "--size", str(SIZE)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.address = address
        self.lines: list[str] = []
        self.stopped = self.interrupted = False
        self._reads = threading.Thread(target=self._read)
        self._reads.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip() for line in self.process.stdout)

    def signal(self, number: int) -> None:
        """Send a signal; a process that is stopped continues first, unless it is killed."""
        if self.stopped and number in (SIGINT, SIGCONT):
            self.process.send_signal(SIGCONT)
        self.stopped, self.interrupted = number == SIGSTOP, number == SIGINT
        if number != SIGCONT:
            self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reads.join()
        self.process.stdout.close()  # type: ignore[union-attr]


class Replica(Process):
    """A replica that prints of each version the number, and the least and the largest weight."""

    def __init__(self, backend: str, address: str) -> None:
        super().__init__("replica", backend, address)

    @property
    def versions(self) -> list[int]:
        """Versions that it has had. Fails for a mixed one."""
        versions = []
        for line in [*self.lines]:
            if not re.fullmatch(r"\d+ \S+ \S+", line):
                assert self.interrupted or "Traceback" not in line, self.lines
                continue  # a warning, or what Ctrl-C makes Python print
            version, least, most = line.split()
            assert int(version) == float(least) == float(most), f"a mixed version: {line}"
            versions.append(int(version))
        return versions

    def check(self, trainers: int) -> int:
        """Return the number of its versions. Fails if one is no newer, but for the first of a new trainer."""
        versions = self.versions
        assert sum(before >= after for before, after in pairwise(versions)) < trainers, versions
        return len(versions)


ProcessT = TypeVar("ProcessT", bound=Process)


def run(backend: str, addresses: list[str], seconds: float, replicas: int = 4) -> Counter[str]:
    """Let replicas come, go, hang and be killed, and the trainer be restarted; return how often each was.

    In the end all replicas have new versions. Fails otherwise, and for a version that took too long.
    """
    random, done = Random(1), Counter[str]()
    there: list[Replica] = []
    ended: list[Process] = []
    with ExitStack() as stack:
        trainer: Process

        def starts(process: ProcessT) -> ProcessT:
            stack.callback(process.end)
            return process

        def comes() -> None:
            if len(there) < replicas:
                taken = {one.address for one in there}
                free = [address for address in addresses[1:] if address not in taken] or addresses[:1]
                there.append(starts(Replica(backend, free[0])))

        def ends(process: Process, number: int) -> None:
            process.signal(number)
            process.process.wait(BOUND)
            process.end()
            ended.append(process)

        def leaves(number: int) -> None:
            replica = there.pop(random.randrange(len(there)))
            ends(replica, number)
            done["versions"] += replica.check(1 + done["trainer killed"])

        def hangs() -> None:
            random.choice(there).signal(SIGSTOP)

        def continues() -> None:
            for one in there:
                if one.stopped:
                    one.signal(SIGCONT)

        def restarts() -> None:
            nonlocal trainer
            ends(trainer, SIGKILL)
            trainer = starts(Process("train", backend, addresses[0]))

        acts: dict[str, Callable[[], object]] = {
            "started": comes,
            "interrupted": lambda: leaves(SIGINT),
            "killed": lambda: leaves(SIGKILL),
            "stopped": hangs,
            "continued": continues,
            "trainer killed": restarts,
        }
        trainer = starts(Process("train", backend, addresses[0]))
        for _ in range(3):
            comes()
        end = monotonic() + seconds
        while monotonic() < end:
            pause = monotonic() + 2 * PERIOD * random.random()
            until(lambda: monotonic() > pause)  # noqa: B023  (called at once)
            act = random.choices([*acts], [4, 2, 3, 4, 3, 1])[0]
            if there or acts[act] is comes:
                acts[act]()
                done[act] += 1
        continues()
        comes()
        for _ in range(2):  # versions that have begun since
            seen = [len(one.lines) for one in there]
            until(lambda: all(len(one.lines) > before for one, before in zip(there, seen, strict=True)))  # noqa: B023
        newest = max(one.versions[-1] for one in there)
        until(lambda: all(one.versions[-1] >= newest for one in there))
        done["versions"] += sum(one.check(1 + done["trainer killed"]) for one in there)
        for process in [trainer, *(one for one in ended if not isinstance(one, Replica))]:
            for line in [*process.lines]:
                taken_seconds = re.fullmatch(r"version \d+: \d+ replicas in (\S+) s, without: .*", line)
                assert taken_seconds or "Traceback" not in line, process.lines
                assert not taken_seconds or float(taken_seconds[1]) < PERIOD + 1, "longer than it may take"
    return done


def test_replicas_may_come_go_hang_and_be_killed(own_network: None, long: bool) -> None:
    """Those that live have new versions in the end, each only whole ones, and no version takes too long."""
    done = run("udp", ["127.0.0.1"], 60.0 if long else 8.0)
    assert done["versions"] > 5


def test_bytes_sent_do_not_grow_with_replicas() -> None:
    """The trainer sends as many bytes to eight replicas as to one."""
    one, eight = train(1), train(8)
    assert one == pytest.approx(eight, rel=0.005)
    assert 1 < eight / (VERSIONS * SHAPE[0] * SHAPE[1] * 4) < 1.02
