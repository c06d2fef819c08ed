"""A test's fabric for several processes, served while the test runs.

Theory of operation. `served` runs the fabric's server (`FabricServer`) in a thread of this process, at a
socket in a temporary directory, and names it in MCAST_SIM, so that this process and the children that it
starts attach to it. The server's thread owns the fabric and the clients; the test's thread owns the list of
the backends that it opened. The two meet only in requests over the socket and in `client_processes`.

At the end `leftovers` names what the test did not close: backends of this process, with the line that opened
them, and other processes that are attached and run. Then `close` closes the former and kills the latter, the
server stops, and MCAST_SIM has its earlier value. A process that has ended and is still attached, because the
server has not read its end yet, is nothing left over.

Deliberately not handled: a process that was never attached, and one in another PID namespace, whose number
is not known here: neither is named or killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mcast.api import Backend, ClientProcess
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.open_objects import Leftover, OpenedAt, opened_at
from mcast.backends.sim.served.attach import VARIABLE, attach
from mcast.backends.sim.served.server import FabricServer, Serving


class SharedRun:
    """The served fabric of one test: where it is, and what this process has opened there."""

    def __init__(self, server: FabricServer, depth: int) -> None:
        self._server, self._depth = server, depth
        self.path: Path = server.path
        self._opened: list[tuple[Backend, OpenedAt]] = []

    def open(self, name: str, **options: object) -> Backend:
        """Attach this process, which is noted; options of a fabric of one's own are ignored."""
        where = {key: value for key, value in options.items() if key in ("host", "bind")}
        backend = attach(name, socket=self.path, **where)  # type: ignore[arg-type]  # `attach` looks
        self._opened.append((backend, opened_at(self._depth)))
        return backend

    def leftovers(self) -> tuple[Leftover, ...]:
        """Return what this process has not closed, and the other processes that still run."""
        own = [
            Leftover(place, f"backend {backend.name} on the shared fabric")
            for backend, place in self._opened
            if not backend.closed
        ]
        others = [
            Leftover((), f"process {guest.pid} ({guest.program}), attached as host {guest.hosts}")
            for guest in self._others()
        ]
        return (*own, *others)

    def close(self) -> None:
        """Close what this process has open, and kill the other processes."""
        for backend, _ in self._opened:
            backend.close()
        for guest in self._others():
            try:
                os.kill(guest.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _others(self) -> list[ClientProcess]:
        """The other processes that are attached and alive; one of another PID namespace has no number."""
        guests = {guest.pid: guest for guest in self._server.client_processes()}
        return [guest for pid, guest in guests.items() if pid > 0 and pid != os.getpid() and _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    """Return True if the process runs: one that has ended may be attached until the server notices."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()  # where its name may be no text
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


@contextmanager
def served(fabric: Fabric, depth: int, say: Callable[[str], None]) -> Iterator[SharedRun]:
    """Inside the `with` the fabric is served, and MCAST_SIM names it to this process and its children."""
    before = os.environ.get(VARIABLE)
    with TemporaryDirectory(prefix="mcast-") as directory, ExitStack() as stack:
        path = Path(directory) / "fabric.sock"
        server = stack.enter_context(Serving(FabricServer(fabric, path, say=say)))
        run = SharedRun(server, depth)
        stack.callback(run.close)
        os.environ[VARIABLE] = str(path)
        try:
            yield run
        finally:
            if before is None:
                os.environ.pop(VARIABLE, None)
            else:
                os.environ[VARIABLE] = before
