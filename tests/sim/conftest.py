"""Served fabrics, and who is attached to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mcast import Endpoint, open_endpoint
from mcast.backends.sim import Fabric
from mcast.backends.sim.served.attach import attach
from mcast.backends.sim.served.client import ServedBackend
from mcast.backends.sim.served.server import FabricServer, Serving

from .served import End, end


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fabric.sock"


@pytest.fixture
def fabric() -> Fabric:
    """Of three hosts; a file may have one of its own."""
    return Fabric.roce(ports=3, clock="wall")


@pytest.fixture
def server(fabric: Fabric, path: Path) -> Iterator[FabricServer]:
    """In this process."""
    with Serving(FabricServer(fabric, path)) as server:
        yield server


@pytest.fixture
def named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that name no fabric find this one."""
    monkeypatch.setenv("MCAST_SIM", str(path))


@pytest.fixture
def onlooker(server: FabricServer) -> Iterator[ServedBackend]:
    with attach("sim", socket=server.path, host="all") as backend:
        yield backend


@pytest.fixture
def pair(server: FabricServer) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Endpoints on the first two hosts."""
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(open_endpoint("sim", address, options={"socket": server.path}))
            for address in ("10.0.0.1", "10.0.0.2")
        )
        yield one, other


@pytest.fixture
def depth() -> int:
    """Receives of the receiver; a file may have its own."""
    return 512


@pytest.fixture
def receiver(server: FabricServer, path: Path, depth: int) -> Iterator[End]:
    with end(path, depth=depth) as made:
        yield made


@pytest.fixture
def sender(receiver: End, path: Path) -> Iterator[End]:
    with end(path, sends=True) as made:
        made.send(b"first")
        assert receiver.take(1) == [b"first"]
        yield made
