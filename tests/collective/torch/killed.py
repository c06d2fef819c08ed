"""The torchrun job of test_ranks.py in which a rank is killed in the middle of a broadcast.

Each other rank prints a line of JSON: what it has raised, after how many seconds, and the bound of the call.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from time import monotonic
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from mcast.collective import Collective
from mcast.collective.calls import STALL_TIMEOUT
from mcast.collective.root_group import RootReceiver, RootSender

PEER_TIMEOUT = 2.0


def killed(self: object, view: memoryview) -> None:
    """Die while the bytes are on their way."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(victim: int, where: str) -> None:
    # torchrun ends the other ranks when one dies, so that they would say nothing
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    bind = "10.254.0.9" if rank == 1 and where == "gloo" else None
    ranks = Collective(group, "udp", peer_timeout=PEER_TIMEOUT, bind=bind)
    assert bool(ranks.reason) == (where == "gloo"), ranks.reason
    tensor = torch.zeros(4 << 20)
    ranks.broadcast(tensor)
    dist.barrier()
    if rank == victim:
        end: Any = RootSender if rank == 0 else RootReceiver
        if where != "multicast":
            os.kill(os.getpid(), signal.SIGKILL)
        patch.object(end, "carry", killed).start()
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
