"""Networks of each kind, simulated and of cards made of memory: for tests that both shall pass."""

from __future__ import annotations

import errno as E
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from mcast.api import Backend, CmEventType, PortEvent, WcStatus
from mcast.backends.model.qp import Qp
from mcast.backends.net import hostnet
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Refuse, Requests
from mcast.backends.sim.served.client import ServedBackend
from mcast.backends.sim.served.server import FabricServer, Serving
from mcast.backends.sim.testbed import SimObserver
from mcast.wire.mcmember import SaMethod, SaStatus

from .card.card import NO_EVENT, AsyncEvent, Card, ethernet_port
from .card.provider import CardBackend
from .own_network import needs_namespaces, private_network
from .waiting import BOUND, until

if TYPE_CHECKING:
    from mcast.backends.udp.backend import UdpBackend

KINDS = ("roce", "infiniband", "card-roce", "card-infiniband")
SHARED = ("shared-roce", "shared-infiniband")
UDP = pytest.param("udp-roce", marks=needs_namespaces)
_ENETRESET = -102
IFF_RUNNING = 0x40


class Network(ABC):
    """Ports 0, 1, 2 at 10.0.0.1, 10.0.0.2, 10.0.0.3, and what may befall them, on some of the kinds."""

    is_infiniband: bool

    @abstractmethod
    def open(self) -> Backend:
        """Another backend on all of its ports."""

    @abstractmethod
    def leftovers(self) -> tuple[str, ...]:
        """Return the objects left of the backends; nothing, once all are closed."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds itself."""

    @abstractmethod
    def set_link(self, port: int, up: bool) -> None:
        """The port's link goes down or up, and the kernel does what it does then."""

    @abstractmethod
    def set_address(self, port: int, present: bool) -> None:
        """The port loses its address, and the GID that goes with it; or gets it back."""

    def fail_over(self, port: int) -> None:
        """The bond below the port takes its other link: ADDR_CHANGE."""
        raise NotImplementedError

    @abstractmethod
    def touch_gids(self, port: int) -> None:
        """A GID of the port changes that nobody uses."""

    def end_memberships(self, port: int) -> None:
        """InfiniBand: the SM forgets the port's memberships, and the kernel says so."""
        raise NotImplementedError

    def refusing_joins(self, port: int) -> AbstractContextManager[None]:
        """InfiniBand: no join of the port succeeds."""
        raise NotImplementedError

    def fail_joins(self, port: int, times: int, error: int) -> AbstractContextManager[None]:
        """InfiniBand: so many joins of the port fail, with ETIMEDOUT or EINVAL, and the next succeeds."""
        raise NotImplementedError

    def removed_while_joining(self, port: int) -> AbstractContextManager[None]:
        """InfiniBand: the port's device goes while a join has no answer."""
        raise NotImplementedError

    @abstractmethod
    def remove_device(self, port: int) -> None:
        """The port's device goes."""

    @abstractmethod
    def restore_device(self, port: int) -> None:
        """The removed device comes back."""

    @abstractmethod
    def move(self, port: int) -> None:
        """The port has another address than before, and nobody is told."""

    @abstractmethod
    def fail_qp(self, qp_num: int) -> None:
        """The queue pair falls into ERR."""

    def overrun(self, qp_num: int) -> None:
        """The completion queue of the queue pair's receives is lost."""
        raise NotImplementedError


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
            self.fabric.core.queue_pairs.notify_port(self.fabric.ports[port], PortEvent.GID_CHANGE)

    def end_memberships(self, port: int) -> None:
        self.fabric.change_lid(self.fabric.ports[port])

    def refusing_joins(self, port: int) -> AbstractContextManager[None]:
        return self._answering(port, None, E.EINVAL)

    def fail_joins(self, port: int, times: int, error: int) -> AbstractContextManager[None]:
        return self._answering(port, range(1, times + 1), error)

    @contextmanager
    def _answering(self, port: int, nth: Collection[int] | None, error: int) -> Iterator[None]:
        joins = Requests(method=SaMethod.SET, port=self.fabric.ports[port].name, nth=nth)
        verdict = Drop() if error == E.ETIMEDOUT else Refuse(SaStatus.NO_RESOURCES)
        with self.fabric.rules.when(joins, verdict):
            yield

    @contextmanager
    def removed_while_joining(self, port: int) -> Iterator[None]:
        clock = self.fabric.clock
        clock.call_later(1_000_000, lambda: clock.defer(lambda: self.remove_device(port)))
        with self._answering(port, None, E.ETIMEDOUT):
            yield

    def remove_device(self, port: int) -> None:
        self.fabric.remove_device(self.fabric.ports[port])

    def restore_device(self, port: int) -> None:
        self.fabric.restore_device(self.fabric.ports[port])

    def move(self, port: int) -> None:
        self.fabric.set_ipv4(self.fabric.ports[port], None)

    def fail_qp(self, qp_num: int) -> None:
        self.fabric.fail_qp(self._qp(qp_num), WcStatus.LOC_QP_OP_ERR)

    def overrun(self, qp_num: int) -> None:
        self.fabric.overrun_cq(self._qp(qp_num))

    def _qp(self, qp_num: int) -> Qp:
        return next(qp for qp in self.fabric.qps if qp.number == qp_num)


class SharedNetwork(SimNetwork):
    """A served fabric; the server is a thread of this process."""

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self._folder = TemporaryDirectory(prefix="mcast-")
        self._path = Path(self._folder.name, "fabric.sock")
        self._serving = Serving(FabricServer(fabric, self._path))
        self.server = self._serving.__enter__()
        self._opened: list[ServedBackend] = []

    def open(self) -> Backend:
        self._opened = [backend for backend in self._opened if not backend.closed]
        self._opened.append(ServedBackend(self._path, "all"))
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

    def end_memberships(self, port: int) -> None:
        self.card.event(CmEventType.MULTICAST_ERROR, _ENETRESET, f"10.0.0.{port + 1}")

    @contextmanager
    def refusing_joins(self, port: int) -> Iterator[None]:
        """On every port."""
        self.card.fail("rdma_join_multicast", E.EINVAL, times=-1)
        yield
        self.card.fail_no_more()

    @contextmanager
    def fail_joins(self, port: int, times: int, error: int) -> Iterator[None]:
        """On whatever port they come."""
        for nth in range(1, times + 1):
            self.card.answer_join(CmEventType.MULTICAST_ERROR, -error, nth)
        yield

    @contextmanager
    def removed_while_joining(self, port: int) -> Iterator[None]:
        before = self.card.count("rdma_join_multicast")
        self.card.answer_join(NO_EVENT)

        def remove() -> None:
            until(lambda: self.card.count("rdma_join_multicast") > before)
            self.remove_device(port)

        removing = threading.Thread(target=remove)
        removing.start()
        yield
        removing.join()

    def remove_device(self, port: int) -> None:
        self.card.remove(self._devices[port])

    def restore_device(self, port: int) -> None:
        self._devices[port] = self.card.restore(self._devices[port])

    def move(self, port: int) -> None:
        moved = ethernet_port(f"10.0.1.{port + 1}")
        self.card.set_port(self._devices[port], gids=moved.gids, addresses=moved.addresses)

    def fail_qp(self, qp_num: int) -> None:
        self.card.qp_event(qp_num, AsyncEvent.QP_FATAL)

    def overrun(self, qp_num: int) -> None:
        self.card.cq_event(qp_num, receives=True)


class UdpNetwork(Network):
    """Interfaces on a bridge, in a network namespace that the calling thread is in until `close`."""

    is_infiniband = False

    def __init__(self) -> None:
        self._addresses = [f"10.0.0.{port + 1}" for port in range(3)]
        self._touched: set[int] = set()
        self._opened: list[UdpBackend] = []
        with ExitStack() as stack:
            stack.enter_context(private_network())
            ip("link add br0 type bridge mcast_snooping 0", "link set br0 up")
            # Senders and receivers are addresses of one host.
            for name, value in (("rp_filter", "0"), ("accept_local", "1")):
                Path(f"/proc/sys/net/ipv4/conf/all/{name}").write_text(value)
            for port in range(3):
                self._plug(port)
            self._until_up(0, 1, 2)
            self._stack = stack.pop_all()

    def _plug(self, port: int) -> None:
        ip(
            f"link add u{port} type veth peer name p{port}",
            f"link set p{port} addrgenmode none",
            f"link set p{port} master br0 up",
            f"addr add {self._addresses[port]}/16 dev u{port}",
            f"link set u{port} addrgenmode none",
            f"link set u{port} up",
        )
        Path(f"/proc/sys/net/ipv4/conf/u{port}/rp_filter").write_text("0")

    def _until_up(self, *ports: int) -> None:
        from mcast.backends.udp import _native

        names = {f"{end}{port}" for port in ports for end in "up"}
        until(lambda: names <= {name for name, _, flags, *_ in _native.interfaces() if flags & IFF_RUNNING})

    def open(self) -> Backend:
        from mcast.backends.udp.backend import UdpBackend  # whose extension is not built everywhere

        self._opened.append(UdpBackend())
        return self._opened[-1]

    def leftovers(self) -> tuple[str, ...]:
        found = hostnet.igmp_memberships()
        return tuple(f"{name} in {group}" for name in found if name[0] == "u" for group in found[name])

    def close(self) -> None:
        self._stack.close()

    def set_link(self, port: int, up: bool) -> None:
        ip(f"link set u{port} {'up' if up else 'down'}")
        if up:
            self._until_up(port)

    def set_address(self, port: int, present: bool) -> None:
        ip(f"addr {'add' if present else 'del'} {self._addresses[port]}/16 dev u{port}")

    def touch_gids(self, port: int) -> None:
        for backend in (one for one in self._opened if not one.closed):
            backend.devices()  # sees what was before: an address that comes and goes meanwhile is no change
        ip(f"addr {'del' if port in self._touched else 'add'} 10.9.9.{port + 1}/32 dev u{port}")
        self._touched ^= {port}

    def remove_device(self, port: int) -> None:
        ip(f"link del u{port}")

    def restore_device(self, port: int) -> None:
        self._plug(port)
        self._until_up(port)

    def move(self, port: int) -> None:
        self._addresses[port] = f"10.0.1.{port + 1}"

    def fail_qp(self, qp_num: int) -> None:
        for backend in self._opened:
            with backend._guard.lock:
                for qp in list(backend.network.queue_pairs.paths):
                    if qp.number == qp_num:
                        qp.fail(WcStatus.LOC_QP_OP_ERR)


def ip(*lines: str) -> None:
    """Run lines of ip(8)."""
    command = [hostnet.program("ip"), "-batch", "-"]
    subprocess.run(command, input="\n".join(lines), check=True, capture_output=True, text=True, timeout=BOUND)


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
    if provider == "udp":
        return UdpNetwork()
    if provider == "shared":
        return SharedNetwork(getattr(Fabric, layer)(ports=3, **options | {"clock": "wall"}))
    if provider:
        return CardNetwork(layer, request.getfixturevalue("card"), **(fields or {}))
    return SimNetwork(getattr(Fabric, layer)(ports=3, **options))
