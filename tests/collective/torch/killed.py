"""The torchrun job of test_ranks.py in which a rank is killed in the middle of a broadcast.

Each other rank prints a line of JSON: what it has raised, after how many seconds, and the bound of the call.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from threading import Thread
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from mcast.collective import Collective
from mcast.collective.calls import STALL_TIMEOUT

PEER_TIMEOUT = 2.0
TENSOR = 16 << 20
"""Bytes that are broadcast, which takes two seconds."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_amid(carried: Callable[[], int]) -> None:
    """Die when a quarter of the bytes is on its way."""
    begun = carried()
    while carried() < begun + TENSOR // 4:
        sleep(0.001)
    die()


def main(victim: int, where: str) -> None:
    # torchrun ends the other ranks when one dies, so that they would say nothing
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    tensor: Any = torch.zeros(TENSOR, dtype=torch.uint8)
    bind = "10.254.0.9" if rank == 1 and where == "gloo" else None
    ranks = Collective(group, "udp", bind=bind, peer_timeout=PEER_TIMEOUT, rate=TENSOR / 2)
    assert bool(ranks.reason) == (where == "gloo"), ranks.reason
    ranks.broadcast(tensor[:1000])
    dist.barrier()
    if rank == victim and ranks.endpoint and where == "transfer":
        stats = ranks.endpoint.stats
        Thread(target=die_amid, args=[lambda: stats().sent_bytes + stats().received_bytes]).start()
    elif rank == victim:
        die()
    begun, raised = monotonic(), ""
    try:
        with ranks:
            ranks.broadcast(tensor)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    took, bound = monotonic() - begun, 8 * PEER_TIMEOUT + STALL_TIMEOUT
    sys.stdout.write(json.dumps({"rank": rank, "raised": raised, "took": took, "bound": bound}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
