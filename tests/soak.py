"""Everything at once on one fabric, for as long as wanted: `make soak MINUTES=60`.

Programs join and leave, talk, cast objects and are killed, while the SM restarts, links are cut and messages
are lost. The fabric is a served one, or the InfiniBand of the lab's guest, in which this runs. At the end
memory must be what it was early in the run, and no descriptor more open than before it: in this process,
which is a client many times over, and in the fabric, which is the server or the guest's kernel.

With `--replicas` it is the example of replicas on `udp`: processes come, go, hang and are killed, the trainer
included, and each replica that lives has only whole versions, and the newest one in the end.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mcast import McastError, cast, open_endpoint
from mcast.backends.net.netlink import rdma_objects
from mcast.backends.rdma import PROVIDER
from mcast.backends.rdma.infiniband_bed import InfinibandTestbed
from mcast.backends.sim.served.attach import VARIABLE, attach

from .cast.io.test_replicas import run as run_replicas
from .own_network import private_network
from .surroundings import become_known

GROUPS = tuple(f"239.1.1.{number}" for number in range(1, 9))
BOUND = 30.0
"""The longest that one call of an actor may take, in seconds."""
SAMPLES = 50
SLACK = 1.1, 8 << 20
"""Growth that is allowed from the second fifth of the run to the last: a factor, and bytes."""
VICTIM = """
import itertools, sys, mcast
with mcast.open_endpoint(*sys.argv[1:]) as endpoint, endpoint.join("239.1.1.8") as group:
    print("joined", flush=True)
    for number in itertools.count():
        group.send(b"%d" % number)
        group.recv(timeout=0.001)
"""


class TestFabric(ABC):
    """A fabric of eight ports, of an SM, and of faults."""

    provider: str
    network: str
    """First part of the addresses of its ports."""
    pause: float
    """Seconds between two faults, in which programs come to something."""
    faults: Sequence[Callable[[], object]]
    """Faults to cause in turn; each ends by itself."""

    @abstractmethod
    def usage(self) -> tuple[int, int]:
        """Bytes in memory, and what is open, of the fabric itself."""

    def left(self) -> Sequence[str]:
        """Return what ended programs left on the fabric, in words."""
        return ()


class ServedFabric(TestFabric):
    """The fabric that the process `pid` serves at the socket of MCAST_SIM."""

    provider, network, pause = "sim", "10.0.0", 0.5
    STEPS = ("restart-sm", "link-down ib1 until=200ms", "drop 5% until=300ms", "delay 2ms until=200ms")

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.faults = [partial(self._control, step.split()) for step in self.STEPS]

    def _control(self, words: Sequence[str]) -> None:
        with attach("sim", socket=None, host="all") as fabric:
            fabric.control(words)

    def usage(self) -> tuple[int, int]:
        return of_process(self._pid)


class LabFabric(TestFabric):
    """The lab's InfiniBand: `mcast lab run --fabric infiniband --ports 8`."""

    provider, network, pause = "rdma", "10.77.0", 20.0
    SOFTIB = Path("/sys/kernel/debug/softib")

    def __init__(self, bed: InfinibandTestbed) -> None:
        self._bed = bed
        self.faults = [
            bed.restart_sm,
            self._cut,
            lambda: self._for_a_while("drop", "softib2", "20", "0"),
            lambda: self._for_a_while("tables", "switch0", "200", "0"),
        ]

    def _cut(self) -> None:
        with self._bed.link_down(self._bed.ports[1]):
            pass

    def _for_a_while(self, file: str, where: str, worse: str, well: str) -> None:
        (self.SOFTIB / file).write_text(f"{where} {worse}\n")
        try:
            time.sleep(self.pause)
        finally:
            (self.SOFTIB / file).write_text(f"{where} {well}\n")

    def usage(self) -> tuple[int, int]:
        """Of the whole guest, and the kernel's RDMA objects."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (one.partition(":") for one in lines)}
        objects = sum(count for (_, kind), count in rdma_objects().items() if kind != "ctx")
        return (kilobytes["MemTotal"] - kilobytes["MemAvailable"]) << 10, objects

    def left(self) -> Sequence[str]:
        return self._bed.observer.leftovers()


class Soak:
    """State that the actors share: where they are, when to end, what they did, and what went wrong."""

    def __init__(self, fabric: TestFabric, seed: int) -> None:
        self.fabric = fabric
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.random = random.Random(seed)

    def where(self, number: int) -> tuple[str, str]:
        """Return the arguments that open an endpoint on that port."""
        return self.fabric.provider, f"{self.fabric.network}.{number}"

    def act(self, name: str, turn: Callable[[], object]) -> threading.Thread:
        """Take turns in a thread until the end; errors of the contract are what faults lead to."""

        def run() -> None:
            while not self.over.is_set():
                try:
                    turn()
                    self.done[name] += 1
                except McastError as error:
                    self.done[f"{name}: {type(error).__name__}"] += 1
                except Exception as error:  # told at the end, which is red then
                    self.wrong.append(f"{name}: {error!r}")
                    self.over.set()

        thread = threading.Thread(target=run, name=name)
        thread.start()
        return thread

    def joins(self) -> None:
        with open_endpoint(*self.where(3)) as endpoint:
            for group in self.random.sample(GROUPS, 3):
                endpoint.join(group, timeout=BOUND)

    def talks(self) -> None:
        with (
            open_endpoint(*self.where(1), sequence=True) as sender,
            open_endpoint(*self.where(2), sequence=True) as receiver,
            receiver.join(GROUPS[0], timeout=BOUND) as member,
            sender.sender(GROUPS[0], timeout=BOUND) as group,
        ):
            for _ in range(200):
                group.send_batch([bytes(200)] * 32, timeout=BOUND)
                while member.recv(timeout=0.005) is not None:
                    self.done["messages"] += 1

    def casts(self) -> None:
        data = self.random.randbytes(1 << 18)
        taken: list[bytes] = []

        def receive(number: int) -> None:
            try:
                with open_endpoint(*self.where(number)) as end, end.join(GROUPS[1], timeout=BOUND) as group:
                    for one in cast.receive(group, timeout=BOUND):
                        taken.append(bytes(one.data or b""))
                        return
            except McastError as error:
                self.done[f"receives: {type(error).__name__}"] += 1

        receivers = [threading.Thread(target=receive, args=(number,)) for number in (5, 6)]
        for one in receivers:
            one.start()
        try:
            with open_endpoint(*self.where(4)) as end, end.join(GROUPS[1], timeout=BOUND) as group:
                cast.send(group, data, receivers=2, timeout=BOUND)
        finally:
            for one in receivers:
                one.join()
        for copy in taken:
            if hashlib.sha256(copy).digest() != hashlib.sha256(data).digest():
                raise AssertionError(f"an object of {len(data)} bytes came as {len(copy)} others")
        self.done["copies"] += len(taken)

    def kills(self) -> None:
        command = [sys.executable, "-c", VICTIM, *self.where(8)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
            assert victim.stdout is not None
            victim.stdout.readline()  # joined, or ended by a fault
            victim.send_signal(signal.SIGKILL)

    def faults(self, steps: Iterator[Callable[[], object]]) -> None:
        next(steps)()
        self.over.wait(self.fabric.pause)


class Sample(NamedTuple):
    """Usage of the fabric and of this process: bytes in memory, and open descriptors or objects."""

    fabric: tuple[int, int]
    here: tuple[int, int]


def of_process(pid: int) -> tuple[int, int]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def judge(before: Sample, samples: Sequence[Sample], after: Sample) -> list[str]:
    """Return the growth. The minimum of some samples counts, because a moment's use is no growth."""
    fifth = max(1, len(samples) // 5)
    factor, extra = SLACK
    found = []
    for name in Sample._fields:
        early = min(getattr(one, name)[0] for one in samples[fifth : 2 * fifth] or samples)
        late = min(getattr(one, name)[0] for one in samples[-fifth:])
        if late > early * factor + extra:
            found.append(f"{name}: {late:,} bytes in memory at the end, {early:,} early in the run")
        fds, first = getattr(after, name)[1], getattr(before, name)[1]
        if fds > first:
            found.append(f"{name}: {fds} open after the run, {first} before")
    return found


@contextmanager
def served() -> Iterator[TestFabric]:
    """A fabric that a process of its own serves."""
    with tempfile.TemporaryDirectory(prefix="mcast-soak-") as folder:
        os.environ[VARIABLE] = f"{folder}/fabric.sock"
        command = [str(Path(sys.executable).with_name("mcast")), "sim", "serve", "--fabric", "infiniband"]
        with subprocess.Popen(
            [*command, "--ports", "10", "--socket", os.environ[VARIABLE]], stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            print(server.stdout.readline(), server.stdout.readline(), end="", flush=True)
            reader = threading.Thread(target=lambda: [None for _ in server.stdout or ()])
            reader.start()
            try:
                yield ServedFabric(server.pid)
            finally:
                server.send_signal(signal.SIGTERM)  # a background shell has SIGINT ignored
                reader.join()
                del os.environ[VARIABLE]


@contextmanager
def guest() -> Iterator[TestFabric]:
    """The fabric of the guest that this runs in."""
    with PROVIDER.testbed() as bed:
        assert isinstance(bed, InfinibandTestbed)
        yield LabFabric(bed)


def soak(fabric: TestFabric, minutes: float, seed: int) -> int:
    said = logging.getLogger("mcast")
    before = said.level
    said.setLevel(logging.ERROR)  # each loss of a membership would be a line
    try:
        return _run(fabric, minutes, Soak(fabric, seed))
    finally:
        said.setLevel(before)


def _run(fabric: TestFabric, minutes: float, shared: Soak) -> int:
    def sample() -> Sample:
        gc.collect()
        return Sample(fabric.usage(), of_process(os.getpid()))

    turns = {name: getattr(shared, name) for name in ("joins", "talks", "casts", "kills")}
    for turn in turns.values():  # what is made once, of which descriptors may stay
        turn()
    before, samples = sample(), list[Sample]()
    steps = itertools.cycle(fabric.faults)
    threads = [shared.act(name, turn) for name, turn in turns.items()]
    threads.append(shared.act("faults", lambda: shared.faults(steps)))
    end = time.monotonic() + minutes * 60
    while time.monotonic() < end and not shared.over.wait(minutes * 60 / SAMPLES):
        samples.append(sample())
        memory = ", ".join(f"{one[0] / 1e6:.1f} MB {one[1]} open" for one in samples[-1])
        print(f"{len(samples):3}  {memory}  {dict(shared.done)}", flush=True)
    shared.over.set()
    for thread in threads:
        thread.join()
    gone = time.monotonic() + BOUND
    while (after := sample()).fabric[1] > before.fabric[1] and time.monotonic() < gone:
        time.sleep(0.1)  # the fabric notices the end of its clients by itself
    idle = [f"{name}: never once" for name in (*turns, "faults") if not shared.done[name]]
    wrong = [*shared.wrong, *judge(before, samples or [after], after), *idle, *fabric.left()]
    print(*wrong or [f"soak: flat after {minutes:g} minutes"], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guest", action="store_true", help="on the InfiniBand of this guest of the lab")
    parser.add_argument("--replicas", action="store_true", help="replicas of the example, on udp")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.replicas:
        become_known()  # a background job of a shell has SIGINT ignored, and so would its replicas
        with private_network():
            print("soak:", dict(run_replicas("udp", ["127.0.0.1"], given.minutes * 60)))
        sys.exit(0)
    with guest() if given.guest else served() as fabric:
        status = soak(fabric, given.minutes, given.seed)
    sys.exit(status)
