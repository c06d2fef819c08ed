"""A broadcast by multicast beside Open MPI's over TCP, in turn in one job.

python -m benchmarks.collectives                    over a served fabric, and TCP over loopback
python -m benchmarks.collectives --links 8e6        in the lab, over links of so many bits a second

A fabric is served with jumbo frames (MTU 4096), and mpirun starts the ranks, which send over TCP (`--mca btl
tcp,self`) what MPI sends. Each round has one broadcast of either kind, from barrier to barrier. The bytes are
those that leave the root: the payloads that it posts, of all messages; and what its TCP sockets say they have
sent (tcpi_bytes_sent). Neither counts the headers of frames. The CPU time is that of all ranks, without the
process that serves the fabric.

With `--links` the ranks are in a guest, on Soft-RoCE devices on the ends of veth pairs on one bridge, and all
ports have that rate in both directions, and frames of up to 9000 bytes. The TCP of rank n goes over the port
of its RDMA device, too, because rules make the kernel route between its own addresses as between hosts.
Then the bytes of either are those of the root's port, headers of frames included; where fewer bytes than the
object came to the port of another rank, the job fails. What it changes in the guest's network ends with the
guest. `--mca NAME VALUE` gives mpirun a parameter, which may choose another algorithm: `--mca
coll_tuned_use_dynamic_rules 1 --mca coll_tuned_bcast_algorithm 3 --mca
coll_tuned_bcast_algorithm_segmentsize 65536` for a pipeline.
"""

from __future__ import annotations

import argparse
import ctypes
import json
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

ROOT = Path(__file__).parents[1]
_TCP_INFO, _BYTES_SENT = 11, slice(200, 208)
"""The socket option, and where tcpi_bytes_sent is in its answer (linux/tcp.h)."""

_FRAME, _QUEUE, _BURST = 9000, "4m", 0.1
"""Of each port: bytes of the longest frame; bytes that may wait for it, which are more than Soft-RoCE and TCP
let wait, so that no frame is dropped; and for how many seconds it can catch up, because an emulated processor
stands still now and then."""


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


_USERS = 10_000
"""The user of rank 0's sockets, and the number of its table of routes. Open MPI does not bind its sockets, so
that their addresses do not tell whose they are."""

_SECUREBITS, _NO_SETUID_FIXUP = 28, 1 << 2
"""PR_SET_SECUREBITS, by which a process that changes its user keeps its rights (linux/securebits.h)."""


def port(rank: int) -> str:
    """The interface of the rank's RDMA device in the lab."""
    return f"e{rank + 1}"


def counted(rank: int, what: str) -> int:
    """Bytes of the rank's port since it was made, `rx` or `tx`."""
    return int(Path(f"/sys/class/net/{port(rank)}/statistics/{what}_bytes").read_text())


def limit(ranks: int, rate: float) -> None:
    """Give all ports that rate, and have the kernel send over them what goes from one to another."""
    words = [f"link set br0 mtu {_FRAME}"]
    for number in range(1, ranks + 1):
        inside, user = port(number - 1), _USERS + number - 1
        words += [
            *(f"link set {end} mtu {_FRAME}" for end in (inside, f"p{number}")),
            f"rule add pref 10 iif {inside} lookup local",
            f"rule add pref 20 uidrange {user}-{user} to 10.77.0.0/24 lookup {user}",
            f"route add 10.77.0.0/24 dev {inside} src 10.77.0.{number} table {user}",
        ]
        for end in (inside, f"p{number}"):
            shape = f"tbf rate {rate:.0f}bit burst {max(2 * _FRAME, rate / 8 * _BURST):.0f} limit {_QUEUE}"
            subprocess.run(["tc", "qdisc", "add", "dev", end, "root", *shape.split()], check=True)
    words += ["rule add pref 30 lookup local", "rule del pref 0"]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(words), text=True, check=True)
    # Each port answers for its own address alone.
    Path("/proc/sys/net/ipv4/conf/all/arp_ignore").write_text("1")


def as_host(rank: int) -> None:
    """Give the sockets that this process makes from now on to a user whose routes begin at its port."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SECUREBITS, _NO_SETUID_FIXUP):
        raise OSError(ctypes.get_errno(), "prctl")
    libc.setfsuid(_USERS + rank)


def dropped() -> int:
    """Packets that the ports have dropped."""
    found = subprocess.run(["tc", "-s", "-j", "qdisc"], capture_output=True, text=True, check=True)
    return sum(one["drops"] for one in json.loads(found.stdout) if one["kind"] == "tbf")


def by_clocks() -> tuple[float, float]:
    """Seconds by the guest's hardware clock, which is the host's, and by the kernel's, which a guest that was
    booted on a busy host may have running several times too fast."""
    return float(Path("/sys/class/rtc/rtc0/since_epoch").read_text()), time.monotonic()


def cost(comm: Any, call: Callable[[], object], sent: Callable[[], int]) -> Cost:
    """Cost of one call on all ranks."""
    comm.Barrier()
    bytes_before, cpu, start = sent(), time.process_time(), time.perf_counter()
    call()
    comm.Barrier()
    spent, used = time.perf_counter() - start, time.process_time() - cpu
    return Cost(spent, sent() - bytes_before, sum(comm.allgather(used)))


def rank(size: int, rounds: int, keep: Path | None, rate: float) -> None:
    """One rank of the job; rank 0 is the root, and prints."""
    number = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if rate:
        os.environ.update(OMPI_MCA_btl_tcp_if_include=port(number))
        as_host(number)
    import numpy
    from mpi4py import MPI

    from mcast.collective import Collective

    comm = MPI.COMM_WORLD
    data: Any = numpy.random.default_rng(1).integers(0, 256, size, "u1")
    buffer: Any = data.copy() if comm.rank == 0 else numpy.zeros_like(data)
    found: list[tuple[Cost, Cost]] = []
    how = ("rdma", f"10.77.0.{number + 1}") if rate else ("sim", None)
    with Collective(comm, how[0], bind=how[1]) as ranks:
        endpoint = ranks.endpoint
        if endpoint is None:
            raise RuntimeError(ranks.reason)

        def ours() -> None:
            ranks.broadcast(buffer, 0)

        def sent() -> int:
            return endpoint.stats().sent_bytes

        def peer() -> None:
            comm.Bcast(buffer, 0)

        def sent_by_port() -> int:
            return counted(number, "tx")

        counts = (sent_by_port, sent_by_port) if rate else (sent, sent_by_tcp)
        begun = by_clocks() if rate and not number else (0.0, 0.0)
        for turn in range(rounds + 1):
            both = []
            for call, count in zip((ours, peer), counts, strict=True):
                if comm.rank:
                    buffer[:] = 0
                came = counted(number, "rx") if rate else 0
                both.append(cost(comm, call, count))
                if not all(comm.allgather(bool((buffer == data).all()))):
                    raise RuntimeError("a rank has other bytes than the root")
                if rate and comm.rank and counted(number, "rx") - came < size:
                    raise RuntimeError(f"the bytes did not come over {port(number)}")
            if comm.rank == 0:
                seconds = ", ".join(f"{one.seconds:.4f}" for one in both)
                print(f"round {turn}: {seconds} s", file=sys.stderr, flush=True)
            if turn or not rounds:  # the first warms both up
                found.append((both[0], both[1]))
    if comm.rank == 0:
        show(size, comm.size, found, keep, "links" if rate else "collectives")
        if rate:
            true, measured = (now - then for now, then in zip(by_clocks(), begun, strict=True))
            print(f"\nthe object alone takes {8 * size / rate:.4f} s on a link; {dropped()} packets dropped")
            print(f"a second of these was {true / measured:.2f} s of the host's")


def show(size: int, ranks: int, found: list[tuple[Cost, Cost]], keep: Path | None, kind: str) -> None:
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
        ratios[f"{kind}/{name.partition(' ')[0].lower()}"] = median(each)
    if keep is not None:
        write(keep, ratios)


def serve(path: Path, ranks: int) -> None:
    """Serve a fabric until the input ends."""
    from mcast.backends.sim import Fabric
    from mcast.backends.sim.served.server import FabricServer, Serving

    with Serving(FabricServer(Fabric.roce(ports=ranks, mtu=4096, clock="wall"), path)):
        print("!", flush=True)
        sys.stdin.read()


def in_lab(asked: argparse.Namespace, me: list[str]) -> int:
    """Boot the lab, and run the job there."""
    memory = 1024 + asked.size * asked.ranks * 5 // 2 // 2**20
    lab = [sys.executable, "-m", "mcast", "lab", "run", "--ports", str(asked.ranks), "--memory", f"{memory}M"]
    if asked.keep is not None:
        path = asked.keep.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        lab, me = [*lab, "--share", str(path.parent)], [*me, "--keep", str(path)]
    return subprocess.run([*lab, "--", *me, "--role", "links"], cwd=ROOT).returncode


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--role", choices=("serve", "links", "rank"))
    words.add_argument("--socket", type=Path)
    words.add_argument("--ranks", type=int, default=8)
    words.add_argument("--size", type=int, default=64_000_000, help="bytes")
    words.add_argument("--rounds", type=int, default=5, help="0: one, cold")
    words.add_argument("--links", type=float, default=0.0, metavar="RATE", help="in the lab; bits a second")
    words.add_argument("--mca", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    words.add_argument("--keep", type=Path, help="write the ratios there, as benchmarks/ratios.py reads them")
    asked = words.parse_args()
    if asked.role == "serve":
        serve(asked.socket, asked.ranks)
        return
    if asked.role == "rank":
        rank(asked.size, asked.rounds, asked.keep, asked.links)
        return
    me = [sys.executable, "-m", "benchmarks.collectives", *sys.argv[1:]]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl", "tcp,self"]
    mpirun += [word for pair in asked.mca for word in ("--mca", *pair)]
    job = ["-n", str(asked.ranks), *me, "--role", "rank"]
    if asked.role == "links":
        if "RDMA_LAB" not in os.environ:
            raise SystemExit("this role changes the routes of its host: it is for the lab alone")
        limit(asked.ranks, asked.links)
        raise SystemExit(subprocess.run([*mpirun, "--mca", "oob_tcp_if_include", "lo", *job]).returncode)
    if asked.links:
        raise SystemExit(in_lab(asked, me))
    with TemporaryDirectory(prefix="mcast-") as folder:
        path = str(Path(folder, "fabric.sock"))
        with subprocess.Popen(
            [*me, "--role", "serve", "--socket", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            server.stdout.readline()
            try:
                environment = os.environ | {"MCAST_SIM": path}
                raise SystemExit(subprocess.run([*mpirun, *job], env=environment).returncode)
            finally:
                assert server.stdin is not None
                server.stdin.close()


if __name__ == "__main__":
    main()
