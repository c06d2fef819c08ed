"""The suite's test bed on a served fabric: evidence from the server's tables, calls of a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mcast.api import Testbed
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.served.client import ServedBackend
from mcast.backends.sim.testbed import SimTestbed


@contextmanager
def served_testbed(make: Callable[..., Fabric]) -> Iterator[Testbed]:
    """A fresh fabric for one test, served by a thread of this process, and a client on all its hosts."""
    from mcast.backends.sim.served.server import FabricServer, Serving  # programs that attach need it not

    with TemporaryDirectory(prefix="mcast-") as directory:
        path = Path(directory) / "fabric.sock"
        fabric = make(ports=5, clock="wall")
        with Serving(FabricServer(fabric, path)), ServedBackend(path, "all") as backend:
            yield SimTestbed(fabric, backend)
