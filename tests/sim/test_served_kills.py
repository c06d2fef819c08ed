"""Clients that are killed at random moments, under load: nothing of them is left on a served fabric."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from mcast import open_endpoint
from mcast.backends.sim import Fabric
from mcast.backends.sim.served.server import FabricServer, Serving
from mcast.backends.sim.testbed import SimObserver

from ..waiting import descriptors, until

AT_ONCE = 8 if os.environ.get("MCAST_TESTS") == "long" else 4
"""Clients that are alive at the same time."""

BYTES_OF_A_CLIENT = 64
"""At most so much may the server's memory grow for each: what is kept of one takes hundreds."""

KILLS = """
import os, select, signal, sys, time
from random import Random
import mcast
from mcast.api import McastError, QpInit
mcast.open_backend("sim", socket=sys.argv[1], host="all").close()  # what is imported late is there
random = Random(int(sys.argv[3]))
GROUPS = [f"239.7.7.{number}" for number in range(8)]

def load(seed, ready):
    random = Random(seed)
    with mcast.open_backend("sim", socket=sys.argv[1], host=random.randrange(4)) as backend:
        (device,) = backend.devices()
        os.write(ready, b"!")
        while True:
            with backend.event_channel() as channel:
                cm_id = channel.create_id()
                cm_id.bind_addr(device.ports[0].addresses[0])
                qp = cm_id.create_qp(QpInit(max_recv_wr=64))
                for group in random.sample(GROUPS, 3):
                    cm_id.join_multicast(group)
                    event = channel.get_event(1)
                    if event is not None and event.ud is not None:
                        qp.send(event.ud.destination, [bytes(random.randrange(1000))] * 16)
                        qp.recv(timeout=0)
                if random.random() < 0.5:
                    qp.recv(timeout=0.01).release()
                if random.random() < 0.5:
                    cm_id.leave_multicast(group)

left, alive = int(sys.argv[2]), {}
print("ready", flush=True)
sys.stdin.readline()
while left or alive:
    while left and len(alive) < AT_ONCE:
        left -= 1
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                load(left, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        assert os.read(ours, 1), "a client ended by itself"
        os.close(ours)
        alive[pid] = time.monotonic() + random.random() ** 3 / 10
    pid, end = random.choice(list(alive.items()))
    time.sleep(max(0.0, end - time.monotonic()))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), status
    del alive[pid]
print("over", flush=True)
""".replace("AT_ONCE", str(AT_ONCE))
"""A process that makes clients, each a fork that attaches for itself, and kills them."""


def tables(fabric: Fabric) -> dict[str, object]:
    """Return the size of each table that clients fill."""
    parts, clients = fabric.core, {} if fabric.core.subnet is None else fabric.core.subnet.clients
    return {
        "leftovers": sorted(SimObserver(fabric).leftovers()),
        "ids": sum(len(port.ids) for port in fabric.ports),
        "snooping": {str(group): sorted(ports) for group, ports in parts.igmp.snooping.items()},
        "reports": dict(parts.igmp.reports),
        "groups": [] if fabric.sa is None else len(list(fabric.sa.groups)),
        "members": sum(len(client.memberships) for client in clients.values()),
        "held": len(parts.wire._held),
    }


def memory() -> int:
    """Return the memory allocated, without caches, of which there is never more than so much."""
    for module in [module for name, module in sys.modules.items() if name.startswith("mcast.")]:
        for one in vars(module).values():
            if isinstance(one, functools._lru_cache_wrapper):
                one.cache_clear()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def grown_by(work: Callable[[], None], most: int) -> int:
    """The bytes that are allocated after `work` and were not before; of a second time if they are more than
    `most`.

    A table of the interpreter's own, that of the interned strings say, may become twice as large meanwhile,
    by megabytes; never two times in a row.
    """

    def growth() -> int:
        used = memory()
        work()
        return memory() - used

    grown = growth()
    return grown if grown < most else growth()


@pytest.mark.parametrize("kind", ["roce", "infiniband"])
def test_killed_clients_leave_nothing(tmp_path: Path, kind: str, long: bool) -> None:
    """Clients that are killed under load leave nothing.

    A thousand on each fabric with --long. Two bystanders lose no message.
    """
    path, wanted = tmp_path / "fabric.sock", 1000 if long else 12
    bound = wanted * BYTES_OF_A_CLIENT + 131_072
    fabric = (
        Fabric.roce(ports=4, clock="wall") if kind == "roce" else Fabric.infiniband(ports=4, clock="wall")
    )
    with (
        Serving(FabricServer(fabric, path)) as server,
        open_endpoint("sim", options={"socket": path}) as one,
        open_endpoint("sim", options={"socket": path}) as other,
        one.join("239.1.1.1") as here,
        other.join("239.1.1.1") as there,
    ):
        lost = sent = 0

        def kill(clients: int, seed: int) -> None:
            nonlocal lost, sent
            command = [sys.executable, "-c", KILLS, str(path), str(clients), str(seed)]
            with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                process.stdin.write("go on\n")
                process.stdin.flush()
                while process.poll() is None:
                    there.send(b"%d" % sent)
                    message = here.recv(30)
                    there.recv(0)  # so that its own copies do not wait in its receives
                    lost += message is None or bytes(message.payload) != b"%d" % sent
                    sent += 1
                assert process.stdout.read() == "over\n"
                assert process.returncode == 0
            until(lambda: len(server.clients) == 2)

        tracemalloc.start()
        try:
            kill(2 * AT_ONCE, 1)  # what is made once is there
            opened = descriptors()
            before = tables(fabric)
            grown = grown_by(lambda: kill(wanted, 2), bound)
        finally:
            tracemalloc.stop()
        assert tables(fabric) == before
        until(lambda: descriptors() <= opened)
        print(f"{kind}: {wanted} killed, {grown} bytes more, {sent} messages between the bystanders")
        assert grown < bound
        assert (lost, sent > wanted) == (0, True)


COMES_AND_GOES = """
import os, sys
import mcast
mcast.open_backend("sim", socket=sys.argv[1], host="all").close()  # what is imported late is there
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    pid = os.fork()
    if not pid:
        status = 1
        try:
            endpoint = mcast.open_endpoint("sim", options={"socket": sys.argv[1]})
            group = endpoint.join(f"239.8.{number >> 8}.{number & 255}")
            group.send(b"here")
            assert bytes(endpoint.recv().payload) == b"here"
            if number % 2:
                group.leave()
                endpoint.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0, number
"""
"""Processes one after the other, each a fork that attaches for itself; every other one leaves all open."""


@pytest.mark.parametrize("kind", ["roce", "infiniband"])
def test_processes_one_after_the_other_leave_nothing(tmp_path: Path, kind: str, long: bool) -> None:
    """A thousand on each fabric with --long."""
    path, wanted = tmp_path / "fabric.sock", 1000 if long else 8
    bound = wanted * BYTES_OF_A_CLIENT + 131_072
    fabric = (
        Fabric.roce(ports=4, clock="wall") if kind == "roce" else Fabric.infiniband(ports=4, clock="wall")
    )
    with Serving(FabricServer(fabric, path)) as server:

        def come_and_go(first: int, last: int) -> None:
            command = [sys.executable, "-c", COMES_AND_GOES, str(path), str(first), str(last)]
            subprocess.run(command, check=True)
            until(lambda: not server.clients)

        tracemalloc.start()
        try:
            come_and_go(0, 2 * AT_ONCE)  # what is made once is there
            opened = descriptors()
            before = tables(fabric)
            grown = grown_by(lambda: come_and_go(2 * AT_ONCE, 2 * AT_ONCE + wanted), bound)
        finally:
            tracemalloc.stop()
        assert tables(fabric) == before
        until(lambda: descriptors() <= opened)
        print(f"{kind}: {wanted} came and went, {grown} bytes more")
        assert grown < bound
