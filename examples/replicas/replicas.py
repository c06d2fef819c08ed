"""One trainer publishes its weights; any number of replicas hold the newest version, whole.

    python replicas.py replica 10.0.0.2       # on as many hosts as you like, whenever you like
    python replicas.py train 10.0.0.1

A version leaves the trainer's port once, however many replicas there are. A replica that starts late, hangs
or is restarted gets the newest version when it is there again. One that is too slow, or dead, costs the
others at most an eighth of the time from one version to the next.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterable
from contextlib import suppress
from itertools import count
from typing import Any

import numpy

import mcast
from mcast import cast

GROUP = "239.1.2.3"
PERIOD = 3.0
"""Seconds from one version to the next."""


def train(
    group: mcast.Membership, weights: Any, versions: Iterable[int] = count(1), seconds: float = PERIOD
) -> Generator[cast.ObjectReport]:
    """Publish the weights after each step of the training; yield the report of each version."""
    with cast.open_session(group, peer_timeout=seconds) as session:
        for version in versions:
            weights += 1  # a step of the training
            report = session.publish(weights, version=version, strategy=cast.deadline(seconds))
            yield report
            session.wait_for_receivers(timeout=max(0.0, seconds - report.seconds))  # late ones get it here


def follow(group: mcast.Membership, weights: Any, seconds: float = PERIOD) -> Generator[int]:
    """Keep the newest version in `weights`; yield its number whenever there is a newer one."""
    memory = weights.numpy() if hasattr(weights, "numpy") else weights  # of a tensor: the same memory
    for update in cast.receive(group, into=memory, latest=True, peer_timeout=4 * seconds):
        assert update.offered.version is not None
        yield update.offered.version


def zeros(library: str, size: int) -> Any:
    """Return new weights: an array of numpy, or a tensor of torch on the CPU."""
    if library == "torch":
        import torch

        return torch.zeros(size, size, dtype=torch.float32)
    return numpy.zeros((size, size), "f4")


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold the newest weights on many replicas.")
    parser.add_argument("role", choices=["train", "replica"])
    parser.add_argument("address", help="of this host's port")
    parser.add_argument("--backend", default="rdma", help="rdma, udp or sim")
    parser.add_argument("--library", choices=["numpy", "torch"], default="numpy")
    parser.add_argument("--period", type=float, default=PERIOD, help="seconds from one version to the next")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the weights")
    options = parser.parse_args()
    weights = zeros(options.library, options.size)
    with (
        suppress(KeyboardInterrupt),  # Ctrl-C ends it: the others are notified
        mcast.open_endpoint(options.backend, options.address, receive_depth=4096) as ep,
        ep.join(GROUP) as group,
    ):
        if options.role == "replica":
            for version in follow(group, weights, options.period):
                print(version, float(weights.min()), float(weights.max()), flush=True)
            return
        for report in train(group, weights, seconds=options.period):
            late = [one.name for one in report.receivers if not one.complete]
            has = sum(one.complete for one in report.receivers)
            print(
                f"version {report.version}: {has} replicas in {report.seconds:.3f} s, without: {late}",
                flush=True,
            )


if __name__ == "__main__":
    main()
