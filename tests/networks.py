"""Networks of each kind, simulated and of cards made of memory: for tests that both shall pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from mcast.api import Backend, CmEventType, PortEvent
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.shared import frames
from mcast.backends.sim.shared.client import SharedBackend
from mcast.backends.sim.shared.server import FabricServer, Serving
from mcast.backends.sim.testbed import SimObserver

from .card.card import Card
from .card.provider import CardBackend
from .waiting import until

KINDS = ("roce", "infiniband", "card-roce", "card-infiniband")
SHARED = ("shared-roce", "shared-infiniband")
_ENETRESET = -102


class Network(ABC):
    """Ports 0, 1, 2 at 10.0.0.1, 10.0.0.2, 10.0.0.3, and what may befall them."""

    is_infiniband: bool

    @abstractmethod
    def open(self) -> Backend:
        """Another backend on all of its ports."""

    @abstractmethod
    def leftovers(self) -> tuple[str, ...]:
        """What is left of the backends; nothing, once all are closed."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds itself."""

    @abstractmethod
    def set_link(self, port: int, up: bool) -> None:
        """The port's link goes down or up, and the kernel does what it does then."""

    @abstractmethod
    def set_address(self, port: int, present: bool) -> None:
        """The port loses its address, and the GID that goes with it; or gets it back."""

    @abstractmethod
    def fail_over(self, port: int) -> None:
        """The bond below the port takes its other link: ADDR_CHANGE."""

    @abstractmethod
    def touch_gids(self, port: int) -> None:
        """A GID of the port changes that nobody uses."""


class SimNetwork(Network):
    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.is_infiniband = fabric, fabric.sa is not None

    def open(self) -> Backend:
        return open_fabric(self.fabric)

    def leftovers(self) -> tuple[str, ...]:
        return SimObserver(self.fabric).leftovers()

    def close(self) -> None:
        self.fabric.close()

    def set_link(self, port: int, up: bool) -> None:
        self.fabric.set_link(self.fabric.ports[port], up)

    def set_address(self, port: int, present: bool) -> None:
        at = self.fabric.ports[port]
        if not present:
            self._addresses = at.interfaces[0].ipv4
        self.fabric.set_ipv4(at, self._addresses if present else None)

    def fail_over(self, port: int) -> None:
        self.fabric.bond_failover(self.fabric.ports[port])

    def touch_gids(self, port: int) -> None:
        with self.fabric.clock:
            self.fabric.parts.queue_pairs.tell(self.fabric.ports[port], PortEvent.GID_CHANGE)


class SharedNetwork(SimNetwork):
    """A served fabric; the server is a thread of this process."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self._folder = TemporaryDirectory(prefix="mcast-")
        self._path = Path(self._folder.name, "fabric.sock")
        self._serving = Serving(FabricServer(fabric, self._path))
        self.server = self._serving.__enter__()
        self._opened: list[SharedBackend] = []

    def open(self) -> Backend:
        self._opened = [backend for backend in self._opened if not backend.closed]
        self._opened.append(SharedBackend(self._path, frames.AttachTo(host="all")))
        return self._opened[-1]

    def leftovers(self) -> tuple[str, ...]:
        """Once the server has seen which clients have gone."""
        until(lambda: len(self.server.clients) == sum(not backend.closed for backend in self._opened))
        return super().leftovers()

    def close(self) -> None:
        self._serving.__exit__()
        self._folder.cleanup()


class CardNetwork(Network):
    def __init__(self, layer: str, card: Card, **fields: Any) -> None:
        self.card, self.is_infiniband = card, layer == "infiniband"
        self._devices = card.network(layer, 3, **fields)

    def open(self) -> Backend:
        return CardBackend(self.card)

    def leftovers(self) -> tuple[str, ...]:
        return tuple(f"{one.kind} {one.number}" for one in self.card.leftovers())

    def close(self) -> None:
        pass

    def set_link(self, port: int, up: bool) -> None:
        self.card.port_event(self._devices[port], PortEvent.ACTIVE if up else PortEvent.ERR)
        if self.is_infiniband and not up:
            self.card.event(CmEventType.MULTICAST_ERROR, _ENETRESET, f"10.0.0.{port + 1}")

    def set_address(self, port: int, present: bool) -> None:
        device = self._devices[port]
        if not present:
            self._before = self.card.port(device)
        gone = type(self._before.gids)()
        gids, addresses = (self._before.gids, self._before.addresses) if present else (gone, gone)
        self.card.set_port(device, gids=gids, addresses=addresses)
        self.card.port_event(device, PortEvent.GID_CHANGE)

    def fail_over(self, port: int) -> None:
        self.card.event(CmEventType.ADDR_CHANGE, 0, f"10.0.0.{port + 1}")

    def touch_gids(self, port: int) -> None:
        self.card.port_event(self._devices[port], PortEvent.GID_CHANGE)


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """A network of each kind; nothing may be left of its backends at the end."""
    made = network_of(request, clock="wall")
    yield made
    assert made.leftovers() == ()
    made.close()


@pytest.fixture
def backend(network: Network) -> Iterator[Backend]:
    with network.open() as opened:
        yield opened


def network_of(
    request: pytest.FixtureRequest, fields: Mapping[str, Any] | None = None, **options: Any
) -> Network:
    """The network that a fixture's parameter names: a fabric with `options`, or cards with `fields`."""
    provider, _, layer = request.param.rpartition("-")
    if provider == "shared":
        return SharedNetwork(getattr(Fabric, layer)(ports=3, **options | {"clock": "wall"}))
    if provider:
        return CardNetwork(layer, request.getfixturevalue("card"), **(fields or {}))
    return SimNetwork(getattr(Fabric, layer)(ports=3, **options))
