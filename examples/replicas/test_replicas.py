"""Trainer and replicas, each in a thread, on the simulated fabric of mcast's pytest plugin."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.util import find_spec
from itertools import count
from threading import Event
from typing import Any

import pytest

import mcast
from mcast.testing.plugin import McastEndpoints
from replicas import GROUP, follow, train, zeros

LIBRARIES = ["numpy", *(["torch"] if find_spec("torch") else [])]
SIZE = 64

pytestmark = pytest.mark.mcast(fabric=["roce", "infiniband"], clock="wall", ports=4)


class Replica:
    """A replica in a thread, until it has seen version `last`."""

    def __init__(self, endpoint: mcast.Endpoint, library: str, last: int) -> None:
        self.endpoint = endpoint
        self.weights = zeros(library, SIZE)
        self.versions: list[int] = []
        self.has_one = Event()
        self._last = last

    def run(self) -> list[int]:
        with self.endpoint.join(GROUP) as group, closing(follow(group, self.weights)) as versions:
            for version in versions:
                assert float(self.weights.min()) == float(self.weights.max()) == version
                self.versions.append(version)
                self.has_one.set()
                if version >= self._last:
                    break
        return self.versions


@pytest.mark.parametrize("library", LIBRARIES)
def test_late_replicas_have_the_newest_version(library: str, mcast_endpoints: McastEndpoints) -> None:
    """One is there from the beginning, and two come after some versions."""
    trainer, *hosts = mcast_endpoints(4, receive_depth=4096)
    first, *late = (Replica(host, library, last=6) for host in hosts)
    weights: Any = zeros(library, SIZE)
    with ThreadPoolExecutor(3) as pool, trainer.join(GROUP) as group:
        running = [pool.submit(first.run)]
        steps = train(group, weights, count(1), 0.2)
        with closing(steps):
            for report in steps:
                if report.version == 3:
                    running += [pool.submit(one.run) for one in late]
                if all(one.done() for one in running) and len(running) == 3:
                    break
        seen = [one.result() for one in running]
    for versions in seen:
        assert versions == sorted(set(versions))
        assert versions[-1] >= 6
    assert min(seen[1] + seen[2]) >= 3, "what is older than the replica"
