"""Rank 0 of an MPI job has the weights, and each rank gets every update of them over RDMA multicast.

    mpirun -n 8 python mpi_weights.py

Where a rank has no RDMA device, MPI carries the bytes, and a warning says why. Without hardware, name the
provider `udp`: `mpirun -n 8 --oversubscribe python mpi_weights.py udp`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy
from mpi4py import MPI

from mcast.collective import Collective


def train(comm: MPI.Comm, backend: str, steps: int = 3) -> list[float]:
    """Return the weights of each rank after the last step."""
    weights: Any = numpy.zeros((64, 256), dtype="f4")
    with Collective(comm, backend) as ranks:
        for step in range(1, steps + 1):
            if ranks.rank == 0:
                weights += step
            ranks.broadcast(weights, root=0)
        mine: Any = numpy.array([weights.mean() + ranks.rank], dtype="f8")
        return [float(numpy.frombuffer(part)[0]) for part in ranks.allgather(mine)]


if __name__ == "__main__":
    found = train(MPI.COMM_WORLD, sys.argv[1] if len(sys.argv) > 1 else "rdma")
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(found)
