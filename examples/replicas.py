"""One trainer sends its weights to any number of replicas, which are identical after each update.

    python replicas.py replica 10.0.0.2       # on as many hosts as you like, whenever you like
    python replicas.py train 10.0.0.1

An update leaves the trainer's port once, however many replicas there are. A replica that starts late is let
in between two updates, and has the next one. One that dies, hangs or is too slow is named in the report, and
costs the others at most an eighth of the time from one update to the next. One that goes on after the trainer
has given it up comes back by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy

import mcast
from mcast import cast

GROUP = "239.1.2.3"
SHAPE = (1024, 1024)
PERIOD = 3.0
"""Seconds from one update to the next."""


def publish(
    session: cast.ObjectSession, weights: Any, version: int, seconds: float = PERIOD
) -> cast.ObjectReport:
    """Send the weights to all replicas that are there; give those up that do not have them in time."""
    return session.send(weights, name=f"version {version}", strategy=cast.deadline(seconds))


def follow(
    group: mcast.Membership, shape: tuple[int, ...], seconds: float = PERIOD
) -> Iterator[tuple[str, Any]]:
    """The name and the weights of each update, which stay as they are until the update after the next.

    An update goes into the array that is not in use, so that a replica never works with half of one. Where
    nothing comes for some periods, perhaps the trainer has given this replica up: it receives anew then.
    """
    arrays = [numpy.zeros(shape, "f4"), numpy.zeros(shape, "f4")]
    while True:
        for update in cast.receive(group, into=lambda offered: arrays[0].data, timeout=4 * seconds):
            arrays.reverse()
            yield update.offered.name, arrays[1]


def main(role: str, address: str, backend: str = "rdma", period: str = str(PERIOD)) -> None:
    seconds = float(period)
    with mcast.open_endpoint(backend, address, receive_depth=4096) as ep, ep.join(GROUP) as group:
        if role == "replica":
            for name, weights in follow(group, SHAPE, seconds):
                print(name, weights.min(), weights.max(), flush=True)
            return
        weights = numpy.zeros(SHAPE, "f4")
        with cast.open_session(group) as session:
            session.wait_for_receivers(1)
            for version in range(1, sys.maxsize):
                weights += 1
                report = publish(session, weights, version, seconds)
                late = [account.name for account in report.receivers if not account.complete]
                print(f"{report.name}: {session.receivers} replicas, {report.seconds:.3f} s, without: {late}")
                session.wait_for_receivers(timeout=max(0.0, seconds - report.seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
