"""The MPI job of test_standing_still.py: one rank is stopped for some seconds, wherever it is then.

Each rank prints a line of JSON: its number, what it has raised, how many seconds its longest call took, and
how many a call may take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from signal import SIGSTOP
from time import monotonic
from typing import Any
from unittest.mock import patch

import numpy
from mpi4py import MPI

from mcast.collective import Collective
from mcast.collective.calls import STALL_TIMEOUT
from mcast.collective.root_group import RootReceiver, RootSender

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
PEER_TIMEOUT = 1.0
CALL = 15.0
"""Seconds that a call takes here at most if no rank stands still; some 2 on a machine at rest."""
SPREAD = 1.5
"""The rank is stopped within so many seconds after the collective is begun, or after it is made."""
ROUNDS = 3
"""Number of rounds that the job goes on after the rank has been stopped."""


def stops_itself(seconds: float, after: float | None = None) -> None:
    """Stop this process for so many seconds: now, or so many seconds after now."""
    words = f"sleep {seconds}; kill -CONT {os.getpid()}"
    if after is not None:
        words = f"sleep {after}; kill -STOP {os.getpid()}; {words}"
    subprocess.Popen(["sh", "-c", words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if after is None:
        os.kill(os.getpid(), SIGSTOP)


@contextmanager
def stops_in_a_transfer(seconds: float) -> Iterator[None]:
    """Stop this process when the bytes of a call are on their way, for so many seconds."""
    end: Any = RootSender if RANK == 0 else RootReceiver
    carry = end.broadcast

    def carried(self: object, view: memoryview) -> None:
        stops_itself(seconds)
        carry(self, view)

    with patch.object(end, "broadcast", carried):
        yield


class Watch:
    """The longest of the calls that were made."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._begun = monotonic()

    def next(self) -> None:
        """A call has ended, and another one begins."""
        self.longest = max(self.longest, monotonic() - self._begun)
        self._begun = monotonic()


def goes_round(ranks: Collective, watch: Watch, until: float) -> None:
    """Call one after another; rank 0 says when it is enough."""
    array: Any = numpy.zeros(20_000_000, dtype="u1")
    left = ROUNDS
    while left:
        left -= monotonic() > until
        for root in (0, 1):
            array[0] = left
            ranks.broadcast(array, root)
            watch.next()
            left = int(array[0]) if root == 0 else left
        ranks.allgather(array[: 1000 * RANK])
        watch.next()


def main(where: str, seconds: float, seed: int) -> None:
    random = Random(seed)
    stopped, after, early = random.randrange(SIZE), random.random() * SPREAD, random.random() < 0.25
    bind = "10.254.0.9" if random.random() < 0.2 and RANK == 1 else None  # MPI carries the bytes then
    wait = random.choice((5.0, 30.0))
    if where != "anywhere":
        stopped, bind, wait, after = 2 if where == "receiver" else 0, None, 30.0, 0.0
    COMM.Barrier()
    watch, raised = Watch(), ""
    if stopped == RANK and early and where == "anywhere":
        stops_itself(seconds, after)
    try:
        with (
            Collective(COMM, "udp", bind=bind, peer_timeout=PEER_TIMEOUT, wait=wait) as ranks,
            ExitStack() as stack,
        ):
            watch.next()
            if stopped == RANK and where != "anywhere":
                stack.enter_context(stops_in_a_transfer(seconds))
            elif stopped == RANK and not early:
                stops_itself(seconds, after)
            goes_round(ranks, watch, monotonic() + after)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    watch.next()
    bound = wait + 6 * PEER_TIMEOUT + STALL_TIMEOUT + 2 * CALL + (seconds if stopped == RANK else 0)
    said = {"rank": RANK, "raised": raised, "longest": watch.longest, "bound": bound}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
