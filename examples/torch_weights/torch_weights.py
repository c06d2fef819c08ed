"""Rank 0 of a PyTorch job has the weights, and each rank gets every update of them over RDMA multicast.

    torchrun --nproc-per-node 8 torch_weights.py

Where a rank has no RDMA device, gloo carries the bytes, and a warning says why. Without hardware, multicast
goes over UDP sockets: `torchrun --nproc-per-node 8 torch_weights.py udp`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from mcast.collective import Collective


def train(group: Any, backend: str, steps: int = 3) -> list[float]:
    """Return what each rank has made of the weights in the last step."""
    weights = torch.zeros(64, 256, dtype=torch.bfloat16)
    with Collective(group, backend) as ranks:
        for step in range(1, steps + 1):
            if ranks.rank == 0:
                weights += step
            ranks.broadcast(weights, root=0)
        found = torch.empty(ranks.size)
        ranks.allgather(weights.mean(dtype=torch.float32) + ranks.rank, found)
        return [float(one) for one in found]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    means = train(dist.group.WORLD, sys.argv[1] if len(sys.argv) > 1 else "rdma")
    if dist.get_rank() == 0:
        print(means)
    dist.destroy_process_group()
