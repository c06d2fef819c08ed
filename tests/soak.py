"""Everything at once on a served fabric, for as long as wanted: `make soak MINUTES=60`.

Programs join and leave, talk, cast objects and are killed, while the SM restarts, links are cut and messages
are lost. At the end memory must be what it was early in the run, and no descriptor more open than before it,
both in the server and in this process, which is a client many times over.
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
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mcast import McastError, cast, open_endpoint
from mcast.backends.sim.shared.attach import VARIABLE, attach

GROUPS = tuple(f"239.1.1.{number}" for number in range(1, 9))
FAULTS = ("restart-sm", "cut ib1 until=200ms", "drop 5% until=300ms", "delay 2ms until=200ms")
BOUND = 30.0
"""The longest that one call of an actor may take, in seconds."""
SAMPLES = 50
SLACK = 1.1, 8 << 20
"""How much more memory the last fifth of the run may show than the second fifth: a factor, and bytes."""
VICTIM = """
import itertools, mcast
with mcast.open_endpoint("sim", "10.0.0.8") as endpoint, endpoint.join("239.1.1.8") as group:
    print("joined", flush=True)
    for number in itertools.count():
        group.send(b"%d" % number)
        group.recv(timeout=0.001)
"""


class Soak:
    """What the actors share: when to end, what they did, and what went wrong."""

    def __init__(self, seed: int) -> None:
        self.over = threading.Event()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.random = random.Random(seed)

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
        with open_endpoint("sim", "10.0.0.3") as endpoint:
            for group in self.random.sample(GROUPS, 3):
                endpoint.join(group, timeout=BOUND)

    def talks(self) -> None:
        with (
            open_endpoint("sim", "10.0.0.1", sequence=True) as sender,
            open_endpoint("sim", "10.0.0.2", sequence=True) as receiver,
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

        def receive(address: str) -> None:
            try:
                with open_endpoint("sim", address) as end, end.join(GROUPS[1], timeout=BOUND) as group:
                    for one in cast.receive(group, timeout=BOUND):
                        taken.append(bytes(one.data or b""))
                        return
            except McastError as error:
                self.done[f"receives: {type(error).__name__}"] += 1

        receivers = [threading.Thread(target=receive, args=(f"10.0.0.{number}",)) for number in (5, 6)]
        for one in receivers:
            one.start()
        try:
            with open_endpoint("sim", "10.0.0.4") as end, end.join(GROUPS[1], timeout=BOUND) as group:
                cast.send(group, data, receivers=2, timeout=BOUND)
        finally:
            for one in receivers:
                one.join()
        for copy in taken:
            if hashlib.sha256(copy).digest() != hashlib.sha256(data).digest():
                raise AssertionError(f"an object of {len(data)} bytes came as {len(copy)} others")
        self.done["copies"] += len(taken)

    def kills(self) -> None:
        with subprocess.Popen([sys.executable, "-c", VICTIM], stdout=subprocess.PIPE) as victim:
            assert victim.stdout is not None
            victim.stdout.readline()  # joined, or ended by a fault
            victim.send_signal(signal.SIGKILL)

    def faults(self, steps: itertools.cycle[str]) -> None:
        with attach("sim", socket=None, host="all") as fabric:
            fabric.control(next(steps).split())
        self.over.wait(0.5)


class Sample(NamedTuple):
    """What the server and this process have: bytes in memory, and open descriptors."""

    server: tuple[int, int]
    here: tuple[int, int]


def look(pid: int) -> tuple[int, int]:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def judge(before: Sample, samples: Sequence[Sample], after: Sample) -> list[str]:
    """What has grown."""
    fifth = max(1, len(samples) // 5)
    factor, extra = SLACK
    found = []
    for name in Sample._fields:
        early = max(getattr(one, name)[0] for one in samples[fifth : 2 * fifth] or samples)
        late = max(getattr(one, name)[0] for one in samples[-fifth:])
        if late > early * factor + extra:
            found.append(f"{name}: {late:,} bytes in memory at the end, {early:,} early in the run")
        fds, first = getattr(after, name)[1], getattr(before, name)[1]
        if fds > first:
            found.append(f"{name}: {fds} descriptors after the run, {first} before")
    return found


def soak(minutes: float, seed: int) -> int:
    said = logging.getLogger("mcast")
    before = said.level
    said.setLevel(logging.ERROR)  # each loss of a membership would be a line
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
                return _run(server.pid, minutes, Soak(seed))
            finally:
                server.send_signal(signal.SIGTERM)  # a background shell has SIGINT ignored
                reader.join()
                del os.environ[VARIABLE]
                said.setLevel(before)


def _run(pid: int, minutes: float, shared: Soak) -> int:
    def sample() -> Sample:
        gc.collect()
        return Sample(look(pid), look(os.getpid()))

    warm = Soak(0)  # what is made once, of which descriptors may stay
    warm.joins()
    before, samples = sample(), list[Sample]()
    steps = itertools.cycle(FAULTS)
    turns = {name: getattr(shared, name) for name in ("joins", "talks", "casts", "kills")}
    threads = [shared.act(name, turn) for name, turn in turns.items()]
    threads.append(shared.act("faults", lambda: shared.faults(steps)))
    end = time.monotonic() + minutes * 60
    while time.monotonic() < end and not shared.over.wait(minutes * 60 / SAMPLES):
        samples.append(sample())
        memory = ", ".join(f"{one[0] / 1e6:.1f} MB {one[1]} fds" for one in samples[-1])
        print(f"{len(samples):3}  {memory}  {dict(shared.done)}", flush=True)
    shared.over.set()
    for thread in threads:
        thread.join()
    gone = time.monotonic() + BOUND
    while (after := sample()).server[1] > before.server[1] and time.monotonic() < gone:
        time.sleep(0.1)  # the server notices the end of its clients by itself
    idle = [name for name in (*turns, "faults") if not shared.done[name]]
    wrong = shared.wrong + judge(before, samples or [after], after) + [f"{name}: never once" for name in idle]
    print(*wrong or [f"soak: flat after {minutes:g} minutes"], sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sys.exit(soak(given.minutes, given.seed))
