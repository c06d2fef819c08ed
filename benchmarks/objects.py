"""Objects to several processes beside TCP to each of them, in turn in one run: python -m benchmarks.objects

A fabric is served with jumbo frames (MTU 4096). One process sends an object of random bytes by `mcast.cast`,
and others receive it into memory of their own; then the same process sends the same bytes over a TCP
connection to each of them, on loopback. A round has one of either. The time of the object is the sender's,
until each receiver has said that it has the whole, verified; that of TCP until each has answered by a byte.
The CPU time is that of all ends; that of the process that serves the fabric is printed beside it.
`--profile FOLDER` writes what cProfile sees in each process.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mcast
from benchmarks.ratios import write
from mcast import cast

GROUP = "239.1.1.1"
DEPTH = 4096
"""Receives of a receiver: 16 MiB in jumbo frames."""


class Cost(NamedTuple):
    """Seconds; bytes a second at each receiver; seconds of CPU of the ends, and of what carries the bytes."""

    seconds: float
    rate: float
    cpu: float
    server: float
    repairs: int


def says(*words: object) -> None:
    print(*words, flush=True)


@contextmanager
def profiled(folder: Path | None, role: str) -> Iterator[None]:
    """Write what the block does into the folder, if there is one."""
    profile = cProfile.Profile()
    with nullcontext() if folder is None else profile:
        yield
    if folder is not None:
        profile.dump_stats(folder / f"{role}.{os.getpid()}.prof")


def serve(path: Path, folder: Path | None) -> None:
    """Serve a fabric until the input ends; a line asks for the CPU time."""
    from mcast.backends.sim import Fabric
    from mcast.backends.sim.served.server import FabricServer, Serving

    with Serving(FabricServer(Fabric.roce(ports=16, mtu=4096, clock="wall"), path)):
        says("!")
        while sys.stdin.readline():
            says(time.process_time())


def receive(size: int, port: int, folder: Path | None) -> None:
    """Receive the objects into a buffer, and after each one as many bytes by TCP."""
    buffer = bytearray(size)
    with (
        profiled(folder, "receiver"),
        socket.create_connection(("127.0.0.1", port)) as peer,
        mcast.open_endpoint("sim", receive_depth=DEPTH) as endpoint,
        endpoint.join(GROUP) as group,
    ):
        for _ in cast.receive(group, buffer, one_session=True, peer_timeout=600.0):
            peer.send(b"%20f" % time.process_time())
            left = memoryview(buffer)
            while left:
                left = left[peer.recv_into(left) :]
            peer.send(b"%20f" % time.process_time())


def send(size: int, receivers: int, rounds: int, port: socket.socket, server: Any) -> list[tuple[Cost, Cost]]:
    """Send the objects; what each round has cost."""

    def served() -> float:
        server.stdin.write("\n")
        server.stdin.flush()
        return float(server.stdout.readline())

    data = os.urandom(size)
    found: list[tuple[Cost, Cost]] = []
    with (
        ExitStack() as stack,
        mcast.open_endpoint("sim", receive_depth=DEPTH) as endpoint,
        endpoint.join(GROUP) as group,
        cast.open_session(group, peer_timeout=600.0) as session,
    ):
        peers = [stack.enter_context(port.accept()[0]) for _ in range(receivers)]
        session.wait_for_receivers(receivers, 600.0)
        before, here, there = [0.0] * receivers, time.process_time(), served()

        def cost(begun: float, repairs: int) -> Cost:
            nonlocal before, here, there
            used = [float(peer.recv(20, socket.MSG_WAITALL)) for peer in peers]
            seconds = time.perf_counter() - begun
            now, served_now = time.process_time(), served()
            cpu = now - here + sum(used) - sum(before)
            server, before, here, there = served_now - there, used, now, served_now
            return Cost(seconds, size / seconds, cpu, server, repairs)

        for turn in range(rounds + 1):
            begun = time.perf_counter()
            report = session.send(data)
            if not report.strategy_met:
                raise RuntimeError(f"not all have the object: {report.receivers}")
            ours = cost(begun, report.repairs)
            begun = time.perf_counter()
            for peer in peers:
                peer.sendall(data)
            theirs = cost(begun, 0)
            if turn:  # the first warms both up, and has the receivers' start in its CPU time
                found.append((ours, theirs))
    return found


def show(size: int, receivers: int, found: list[tuple[Cost, Cost]], keep: Path | None) -> None:
    print(f"{size / 1e6:g} MB to {receivers} receivers, median of {len(found)} rounds (least to most)\n")
    print(f"{'':28}{'objects':>12}{'TCP':>12}  ratio")
    rows: dict[str, Callable[[Cost], float]] = {
        "seconds": lambda one: one.seconds,
        "MB/s at each receiver": lambda one: one.rate / 1e6,
        "CPU seconds of the ends": lambda one: one.cpu,
    }
    ratios = {}
    for name, of in rows.items():
        mine, theirs = (median(map(of, costs)) for costs in zip(*found, strict=True))
        each = sorted(of(a) / of(b) for a, b in found)
        print(f"{name:28}{mine:12.3f}{theirs:12.3f}  {median(each):.3f} ({each[0]:.3f} to {each[-1]:.3f})")
        ratios[f"objects/{name.partition(' ')[0].lower()}/{receivers}"] = median(each)
    served = median(one.server for one, _ in found)
    print(f"{'CPU seconds of the server':28}{served:12.3f}")
    print(f"{'repairs, most':28}{max(one.repairs for one, _ in found):12}")
    if keep is not None:
        write(keep, ratios)


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--role", choices=("serve", "receive"))
    words.add_argument("--socket", type=Path)
    words.add_argument("--port", type=int)
    words.add_argument("--receivers", type=int, default=3)
    words.add_argument("--size", type=lambda text: int(float(text)), default=64_000_000, help="bytes")
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--profile", type=Path, help="write profiles into that folder")
    words.add_argument("--keep", type=Path, help="write the ratios there, as benchmarks/ratios.py reads them")
    asked = words.parse_args()
    if asked.role == "serve":
        serve(asked.socket, asked.profile)
        return
    if asked.role == "receive":
        receive(asked.size, asked.port, asked.profile)
        return
    me = [sys.executable, "-m", "benchmarks.objects", *sys.argv[1:]]
    with TemporaryDirectory(prefix="mcast-") as folder, ExitStack() as stack:
        path = str(Path(folder, "fabric.sock"))
        os.environ["MCAST_SIM"] = path
        server = stack.enter_context(
            subprocess.Popen(
                [*me, "--role", "serve", "--socket", path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert server.stdin is not None
        assert server.stdout is not None
        stack.callback(server.stdin.close)
        server.stdout.readline()
        port = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        each = [*me, "--role", "receive", "--port", str(port.getsockname()[1])]
        for _ in range(asked.receivers):
            stack.enter_context(subprocess.Popen(each))
        with profiled(asked.profile, "sender"):
            found = send(asked.size, asked.receivers, asked.rounds, port, server)
        show(asked.size, asked.receivers, found, asked.keep)


if __name__ == "__main__":
    main()
