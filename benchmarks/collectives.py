"""A broadcast by multicast beside Open MPI's over TCP, in turn in one job: python -m benchmarks.collectives

A fabric is served with jumbo frames (MTU 4096), and mpirun starts the ranks, which send over TCP (`--mca btl
tcp,self`) what MPI sends. Each round has one broadcast of either kind, from barrier to barrier. The bytes are
those that leave the root: the payloads that it posts, of all messages; and what its TCP sockets say they have
sent (tcpi_bytes_sent). Neither counts the headers of frames. The CPU time is that of all ranks, without the
process that serves the fabric.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.ratios import write

_TCP_INFO, _BYTES_SENT = 11, slice(200, 208)
"""The socket option, and where tcpi_bytes_sent is in its answer (linux/tcp.h)."""


class Cost(NamedTuple):
    """Seconds, bytes that left the root, and seconds of CPU of all ranks."""

    seconds: float
    sent: int
    cpu: float


def sent_by_tcp() -> int:
    """Bytes that the TCP sockets of this process have sent."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if entry.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        info = one.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
                        total += int.from_bytes(info[_BYTES_SENT], sys.byteorder)
    return total


def cost(comm: Any, call: Callable[[], object], sent: Callable[[], int]) -> Cost:
    """What one call on all ranks costs."""
    comm.Barrier()
    bytes_before, cpu, start = sent(), time.process_time(), time.perf_counter()
    call()
    comm.Barrier()
    spent, used = time.perf_counter() - start, time.process_time() - cpu
    return Cost(spent, sent() - bytes_before, sum(comm.allgather(used)))


def rank(size: int, rounds: int, keep: Path | None) -> None:
    """One rank of the job; rank 0 is the root, and prints."""
    import numpy
    from mpi4py import MPI

    from mcast.collective import Collective

    comm = MPI.COMM_WORLD
    data: Any = numpy.random.default_rng(1).integers(0, 256, size, "u1")
    buffer: Any = data.copy() if comm.rank == 0 else numpy.zeros_like(data)
    found: list[tuple[Cost, Cost]] = []
    with Collective(comm, "sim") as ranks:
        endpoint = ranks.endpoint
        if endpoint is None:
            raise RuntimeError(ranks.reason)

        def ours() -> None:
            ranks.broadcast(buffer, 0)

        def sent() -> int:
            return endpoint.stats().sent_bytes

        def peer() -> None:
            comm.Bcast(buffer, 0)

        for turn in range(rounds + 1):
            both = []
            for call, count in ((ours, sent), (peer, sent_by_tcp)):
                if comm.rank:
                    buffer[:] = 0
                both.append(cost(comm, call, count))
                if not all(comm.allgather(bool((buffer == data).all()))):
                    raise RuntimeError("a rank has other bytes than the root")
            if turn:  # the first warms both up
                found.append((both[0], both[1]))
    if comm.rank == 0:
        show(size, comm.size, found, keep)


def show(size: int, ranks: int, found: list[tuple[Cost, Cost]], keep: Path | None) -> None:
    print(f"{size / 1e6:g} MB from one rank to {ranks - 1}, median of {len(found)} rounds (least to most)\n")
    print(f"{'':26}{'multicast':>12}{'MPI, TCP':>12}  ratio")
    ratios = {}
    rows: dict[str, Callable[[Cost], float]] = {
        "seconds": lambda one: one.seconds,
        "bytes at the root / object": lambda one: one.sent / size,
        "CPU seconds, all ranks": lambda one: one.cpu,
    }
    for name, of in rows.items():
        mine, theirs = (median(map(of, costs)) for costs in zip(*found, strict=True))
        each = sorted(of(a) / of(b) for a, b in found)
        print(f"{name:26}{mine:12.4f}{theirs:12.4f}  {median(each):.3f} ({each[0]:.3f} to {each[-1]:.3f})")
        ratios[f"collectives/{name.partition(' ')[0].lower()}"] = median(each)
    if keep is not None:
        write(keep, ratios)


def serve(path: Path, ranks: int) -> None:
    """Serve a fabric until the input ends."""
    from mcast.backends.sim import Fabric
    from mcast.backends.sim.shared.server import FabricServer, Serving

    with Serving(FabricServer(Fabric.roce(ports=ranks, mtu=4096, clock="wall"), path)):
        print("!", flush=True)
        sys.stdin.read()


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--role", choices=("serve", "rank"))
    words.add_argument("--socket", type=Path)
    words.add_argument("--ranks", type=int, default=8)
    words.add_argument("--size", type=int, default=64_000_000, help="bytes")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--keep", type=Path, help="write the ratios there, as benchmarks/ratios.py reads them")
    asked = words.parse_args()
    if asked.role == "serve":
        serve(asked.socket, asked.ranks)
        return
    if asked.role == "rank":
        rank(asked.size, asked.rounds, asked.keep)
        return
    me = [sys.executable, "-m", "benchmarks.collectives", *sys.argv[1:]]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl", "tcp,self"]
    with TemporaryDirectory(prefix="mcast-") as folder:
        path = str(Path(folder, "fabric.sock"))
        with subprocess.Popen(
            [*me, "--role", "serve", "--socket", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            server.stdout.readline()
            try:
                environment = os.environ | {"MCAST_SIM": path}
                job = [*mpirun, "-n", str(asked.ranks), *me, "--role", "rank"]
                raise SystemExit(subprocess.run(job, env=environment).returncode)
            finally:
                assert server.stdin is not None
                server.stdin.close()


if __name__ == "__main__":
    main()
