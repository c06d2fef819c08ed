"""The speed of a served fabric beside its peers, in turn in the same run: python -m benchmarks.served

Every role is a process of its own: one sends, 1 or 8 receive, and of the served fabric a third one serves. A
window of messages is sent, and each receiver says by a byte that it has all of it: so nothing is lost, and a
round is some windows. A ratio is of the rates in one round; the median of the rounds counts, least and most
are printed beside it. The CPU time of all the processes is printed, too: on a machine that does other
work, it says more than a rate. Peers: UDP multicast sockets on loopback, ZeroMQ's PUB and SUB over ipc where
pyzmq is installed, and a ping-pong over Unix sockets through a third process.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.ratios import write
from mcast import Backend, Destination, open_backend
from mcast.api import JoinAttrEx, QpInit, QueuePair

GROUP, BACK = "239.1.1.1", "239.1.1.2"
WINDOW = 256
"""Messages that are under way at most."""
BATCH = 64
ROUNDS = 7
SECONDS = 0.4
"""Of one peer in one round."""


# --- the roles: what a process does ------------------------------------------------------------


def say(what: bytes) -> None:
    os.write(1, what)


def serve(path: str) -> None:
    """Serve a fabric until the input ends."""
    from mcast.backends.sim import Fabric
    from mcast.backends.sim.served.server import FabricServer, Serving

    with Serving(FabricServer(Fabric.roce(ports=16, clock="wall"), Path(path))):
        say(b"!")
        while line := os.read(0, 1):
            if line == b"c":  # what it has used until now
                say(f"{time.process_time():.6f} {len(list(Path('/proc/self/fd').iterdir()))}\n".encode())


def joined(backend: Backend, group: str = GROUP, sends: bool = False) -> tuple[QueuePair, Destination]:
    """A queue pair that receives from the group, or one that sends to it."""
    channel = backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr(backend.devices()[0].ports[0].addresses[0])
    qp = cm_id.create_qp(QpInit(max_recv_wr=2 * WINDOW))
    cm_id.join_multicast_ex(JoinAttrEx.send_only(group) if sends else JoinAttrEx.full_member(group))
    event = channel.get_event(10)
    assert event is not None
    ud = event.check().ud
    assert ud is not None
    return qp, ud.destination


def receive_sim(path: str, batch: bool) -> None:
    with open_backend("sim", socket=path) as backend:
        qp, _ = joined(backend)
        say(b"!")
        while True:
            left = WINDOW
            while left:
                if batch:
                    with qp.recv(left) as got:
                        left -= len(got)
                else:
                    assert qp.recv_one() is not None
                    left -= 1
            say(b".")


def udp_receiver(port: int) -> socket.socket:
    receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for option in (socket.SO_RCVBUF, 33):  # 33: SO_RCVBUFFORCE, which only root may
        try:
            receiver.setsockopt(socket.SOL_SOCKET, option, 8 << 20)
        except PermissionError:
            pass
    receiver.bind((GROUP, port))
    membership = struct.pack("4s4s", socket.inet_aton(GROUP), socket.inet_aton("127.0.0.1"))
    receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
    return receiver


def receive_udp(port: str, batch: bool) -> None:
    with udp_receiver(int(port)) as receiver:
        say(b"!")
        while True:
            for _ in range(WINDOW):
                receiver.recv(2048)
            say(b".")


def receive_zmq(path: str, batch: bool) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.SUB) as receiver:
        receiver.set_hwm(0)
        receiver.connect(f"ipc://{path}")
        receiver.subscribe(b"")
        receiver.recv()  # the sender repeats this one until all have it
        say(b"!")
        while receiver.recv() == b"?":
            pass
        for _ in range(WINDOW - 1):
            receiver.recv()
        while True:
            say(b".")
            for _ in range(WINDOW):
                receiver.recv()


def echo_sim(path: str, batch: bool) -> None:
    with open_backend("sim", socket=path) as backend:
        qp, _ = joined(backend)
        out, destination = joined(backend, BACK, sends=True)
        say(b"!")
        while (message := qp.recv_one()) is not None:
            out.send_one(destination, message.payload)


def echo_unix(path: str, batch: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as here:
        here.connect(path)
        say(b"!")
        while payload := here.recv(2048):
            here.send(payload)


def relay_unix(path: str, batch: bool) -> None:
    """Between two: what one sends, the other gets."""
    import select

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(2)
        say(b"!")
        one, other = listener.accept()[0], listener.accept()[0]
        to = {one.fileno(): (one, other), other.fileno(): (other, one)}
        with select.epoll() as epoll:
            for fd in to:
                epoll.register(fd, select.EPOLLIN)
            while True:
                for fd, _ in epoll.poll():
                    source, target = to[fd]
                    payload = source.recv(2048)
                    if not payload:
                        return
                    target.send(payload)


def guest(path: str, batch: bool) -> None:
    """Attach and leave so often, and say what CPU time that took here."""
    times = 50
    with open_backend("sim", socket=path) as backend:
        backend.devices()
    start = time.process_time()
    for _ in range(times):
        with open_backend("sim", socket=path) as backend:
            backend.devices()
    say(f"{(time.process_time() - start) / times:.6f}\n".encode())


def member(path: str, batch: bool) -> None:
    """Join, get and send a message, and end without a word."""
    with open_backend("sim", socket=path) as backend:
        qp, destination = joined(backend)
        qp.send_one(destination, bytes(64))
        say(b"!")
        os._exit(0)


ROLES: dict[str, Callable[[str, bool], None]] = {
    "sim": receive_sim,
    "udp": receive_udp,
    "zmq": receive_zmq,
    "echo-sim": echo_sim,
    "echo-unix": echo_unix,
    "relay-unix": relay_unix,
    "guest": guest,
    "member": member,
    "serve": lambda path, batch: serve(path),
}


# --- the run ---------------------------------------------------------------------------------------


@contextmanager
def started(
    role: str, where: str, batch: bool = False, ready: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.served",
        "--role",
        role,
        where,
        *(["--batch"] if batch else []),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if ready and os.read(process.stdout.fileno(), 1) != b"!":
            raise RuntimeError(f"{role} does not start")
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_all(receivers: list[subprocess.Popen[bytes]]) -> None:
    """Each has all of a window."""
    for receiver in receivers:
        assert receiver.stdout is not None
        if os.read(receiver.stdout.fileno(), 1) != b".":
            raise RuntimeError("a receiver has ended")


class Rate(NamedTuple):
    """Operations in a second, and the microseconds of CPU that one takes in all processes."""

    per_second: float
    cpu: float


class Work(NamedTuple):
    """A window, and the processes that take part besides this one."""

    do: Callable[[], None]
    pids: list[int]


def rate(work: Work, operations: int) -> Rate:
    pids, times = [os.getpid(), *work.pids], 0
    used, start = sum(map(cpu_ns, pids)), time.perf_counter()
    while (spent := time.perf_counter() - start) < SECONDS:
        work.do()
        times += 1
    done = times * operations
    return Rate(done / spent, (sum(map(cpu_ns, pids)) - used) / done / 1000)


def cpu_ns(pid: int) -> int:
    """Of all threads of a process, until now."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)


class Peers:
    """Senders and their receivers, which stay for all rounds."""

    def __init__(self, stack: ExitStack, directory: Path, path: str, server: int) -> None:
        self.stack, self.directory, self.path, self.server = stack, directory, path, server
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return str(self.directory / f"{self.count}")

    def all(self, role: str, where: str, receivers: int, batch: bool) -> list[subprocess.Popen[bytes]]:
        enter = self.stack.enter_context
        return [enter(started(role, where, batch)) for _ in range(receivers)]

    def sim(self, receivers: int, size: int, batch: bool) -> Work:
        backend = self.stack.enter_context(open_backend("sim", socket=self.path))
        qp, destination = joined(backend, sends=True)
        there = self.all("sim", self.path, receivers, batch)
        payload, payloads = bytes(size), [bytes(size)] * BATCH

        def window() -> None:
            if batch:
                for _ in range(WINDOW // BATCH):
                    qp.send(destination, payloads)
            else:
                for _ in range(WINDOW):
                    qp.send_one(destination, payload)
            wait_all(there)

        return Work(window, [self.server, *pids_of(there)])

    def udp(self, receivers: int, size: int, batch: bool) -> Work:
        self.count += 1
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        there = self.all("udp", str(port), receivers, batch)
        sender = self.stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        target, payload = (GROUP, port), bytes(size)

        def window() -> None:
            for _ in range(WINDOW):
                sender.sendto(payload, target)
            wait_all(there)

        return Work(window, pids_of(there))

    def zmq(self, receivers: int, size: int, batch: bool) -> Work:
        import zmq

        where, payload = self.name(), bytes(size)
        context: Any = self.stack.enter_context(zmq.Context())
        sender: Any = self.stack.enter_context(context.socket(zmq.PUB))
        sender.set_hwm(0)
        sender.bind(f"ipc://{where}")
        there = [self.stack.enter_context(started("zmq", where, ready=False)) for _ in range(receivers)]
        for one in there:
            assert one.stdout is not None
            os.set_blocking(one.stdout.fileno(), False)
            while one.stdout.read(1) != b"!":
                sender.send(b"?")
                time.sleep(0.01)
            os.set_blocking(one.stdout.fileno(), True)

        def window() -> None:
            for _ in range(WINDOW):
                sender.send(payload)
            wait_all(there)

        return Work(window, pids_of(there))

    def trip_sim(self, size: int) -> Work:
        backend = self.stack.enter_context(open_backend("sim", socket=self.path))
        qp, destination = joined(backend, sends=True)
        back, _ = joined(backend, BACK)
        there = self.all("echo-sim", self.path, 1, False)
        payload = bytes(size)

        def trip() -> None:
            qp.send_one(destination, payload)
            assert back.recv_one(10) is not None

        return Work(trip, [self.server, *pids_of(there)])

    def trip_unix(self, size: int) -> Work:
        where, payload = self.name(), bytes(size)
        there = self.all("relay-unix", where, 1, False)
        here = self.stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        here.connect(where)
        there += self.all("echo-unix", where, 1, False)

        def trip() -> None:
            here.send(payload)
            here.recv(2048)

        return Work(trip, pids_of(there))


def pids_of(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    return [process.pid for process in processes]


def compare(name: str, ours: Work, peer: Work, operations: int, rounds: int) -> dict[str, float]:
    """Both in turn; print both rates and their ratio, and give the ratio."""
    for work in (ours, peer):
        work.do()
    both = [(rate(ours, operations), rate(peer, operations)) for _ in range(rounds)]
    ratios = sorted(mine.per_second / other.per_second for mine, other in both)
    cpu = sorted(other.cpu / mine.cpu for mine, other in both)
    mine, other = (Rate(*map(median, zip(*rates, strict=True))) for rates in zip(*both, strict=True))
    spread = f"{median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    times = f"{mine.cpu:7.2f} {other.cpu:7.2f} us {median(cpu):5.2f}"
    print(f"{name:20} {mine.per_second:10,.0f}/s {other.per_second:10,.0f}/s  {spread:22} {times}")
    sys.stdout.flush()
    return {f"served/{name}": median(ratios), f"served/{name}/cpu": median(cpu)}


def measure(chosen: str, rounds: int, guests: int) -> dict[str, float]:
    found: dict[str, float] = {}
    cases = [
        ("1-1/single/64", 1, 64, False, "udp"),
        ("1-1/single/1024", 1, 1024, False, "udp"),
        ("1-1/batch/1024", 1, 1024, True, "udp"),
        ("1-8/batch/1024/udp", 8, 1024, True, "udp"),
        ("1-8/batch/1024/zmq", 8, 1024, True, "zmq"),
    ]
    for name, receivers, size, batch, peer in cases:
        if chosen in name and (peer != "zmq" or find_spec("zmq")):
            with peers() as (make, _):
                ours, theirs = make.sim(receivers, size, batch), getattr(make, peer)(receivers, size, batch)
                found |= compare(name, ours, theirs, WINDOW * receivers, rounds)
    if chosen in "round-trip/64":
        with peers() as (make, _):
            found |= compare("round-trip/64", make.trip_sim(64), make.trip_unix(64), 1, rounds)
    if chosen in "attach":
        with peers() as (make, server):
            attach(make, server, guests)
    return found


@contextmanager
def peers() -> Iterator[tuple[Peers, subprocess.Popen[bytes]]]:
    with TemporaryDirectory(prefix="mcast-") as directory, ExitStack() as stack:
        path = str(Path(directory, "fabric.sock"))
        server = stack.enter_context(started("serve", path))
        yield Peers(stack, Path(directory), path, server.pid), server


def used(server: subprocess.Popen[bytes]) -> tuple[float, int]:
    """Seconds of CPU of the server, and its open descriptors."""
    assert server.stdin is not None
    assert server.stdout is not None
    os.write(server.stdin.fileno(), b"c")
    seconds, descriptors = server.stdout.readline().split()
    return float(seconds), int(descriptors)


def attach(make: Peers, server: subprocess.Popen[bytes], guests: int) -> None:
    """Measure the cost of attaching on both sides, and the memory that many processes leave behind."""
    before = used(server)
    with started("guest", make.path, ready=False) as one:
        assert one.stdout is not None
        here = float(one.stdout.readline())
    after = used(server)
    there = (after[0] - before[0]) / 51
    print(f"attach and leave: {1000 * (here + there):.2f} ms of CPU, {1000 * here:.2f} of them the client's")
    start = used(server)
    for _ in range(guests):
        with started("member", make.path):
            pass
    end = used(server)
    print(f"{guests} processes one after the other: descriptors {start[1]} before, {end[1]} after;", end=" ")
    print(f"{1000 * (end[0] - start[0]) / max(guests, 1):.2f} ms of the server's CPU each")


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--role", nargs=1)
    words.add_argument("--batch", action="store_true")
    words.add_argument("--rounds", type=int, default=ROUNDS)
    words.add_argument("--guests", type=int, default=1000)
    words.add_argument("--keep", type=Path, help="write the ratios there, as benchmarks/ratios.py reads them")
    words.add_argument("what", nargs="?", default="", help="a part of a name; of a role, where")
    asked = words.parse_args()
    if asked.role:
        ROLES[asked.role[0]](asked.what, asked.batch)
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(f"{'':20} {'served':>12} {'peer':>12}  {'ratio':22} CPU of one: served, peer, ratio")
    found = measure(asked.what, asked.rounds, asked.guests)
    if asked.keep is not None:
        write(asked.keep, found)


if __name__ == "__main__":
    main()
