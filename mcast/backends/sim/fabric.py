"""A simulated fabric as programs use it: made from options, and told which faults happen.

Its parts are in `core`. Here they get a clock, and each call is a change under the clock's guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from random import Random
from typing import Concatenate, Final, ParamSpec

from mcast.api import LinkLayer, Phase, PortEvent
from mcast.arguments.options import accepts_options
from mcast.backends.model.port import Interface, Port
from mcast.backends.model.qp import Qp
from mcast.backends.sim.clock import CLOCKS, Clock
from mcast.backends.sim.core.fabric import FabricCore
from mcast.backends.sim.core.options import InfinibandOptions, Options, RoceOptions, check
from mcast.backends.sim.core.port import FabricPort
from mcast.backends.sim.core.sa import SubnetAdmin
from mcast.backends.sim.faults import incidents
from mcast.backends.sim.faults.rules import Rules
from mcast.backends.sim.trace.events import Trace

P = ParamSpec("P")


def _one_call(function: Callable[Concatenate[FabricCore, P], None]) -> Callable[Concatenate[Fabric, P], None]:
    """Run the fault as one change of the fabric."""

    @wraps(function)
    def locked(fabric: Fabric, /, *args: P.args, **kwargs: P.kwargs) -> None:
        call = function.__name__
        fabric.clock.guard.run(call, Phase.EVENT, function, fabric.core, *args, **kwargs)

    return locked


def _set_ipv4(core: FabricCore, port: Port, address: IPv4Address | None) -> None:
    core.hosts.set_ipv4(port, address)
    core.topology_changed()
    if not port.is_infiniband:
        core.queue_pairs.notify_port(port, PortEvent.GID_CHANGE)


class Fabric:
    """Hosts with ports, joined by switches.

    Make one with `Fabric.roce` or `Fabric.infiniband`, whose options are those of `RoceOptions` and
    `InfinibandOptions`.

    ports       the ports, by index
    rules       faults of single messages and SA requests; see `mcast.backends.sim.faults`
    clock       the time, and the guard of the fabric
    trace       what has happened, if the option `trace` asks for it
    random      the random numbers of rules
    core        the state machines that the fabric is made of
    watch       called with each backend, channel, id, queue pair and batch that is opened (`OpenObjects`)
    """

    # Faults of a port, a switch, the SM or a queue pair: one method for each.
    set_link: Final = _one_call(incidents.set_link)
    remove_device: Final = _one_call(incidents.remove_device)
    restore_device: Final = _one_call(incidents.restore_device)
    bond_failover: Final = _one_call(incidents.bond_failover)
    cut_cable: Final = _one_call(incidents.cut_cable)
    repair_cable: Final = _one_call(incidents.repair_cable)
    restart_sm: Final = _one_call(incidents.restart_sm)
    change_lid: Final = _one_call(incidents.change_lid)
    set_pkeys: Final = _one_call(incidents.set_pkeys)
    program_late: Final = _one_call(incidents.program_late)
    stop_querier: Final = _one_call(incidents.stop_querier)
    start_querier: Final = _one_call(incidents.start_querier)
    overrun_cq: Final = _one_call(incidents.overrun_cq)
    fail_qp: Final = _one_call(incidents.fail_qp)

    def __init__(self, options: Options) -> None:
        check("clock", options.clock, CLOCKS)
        self.clock: Clock = CLOCKS[options.clock]()
        self.core: FabricCore = FabricCore(options, self.clock)
        self.rules: Rules = self.core.rules
        self.random: Random = self.core.random
        self.trace: Trace | None = self.core.log.trace
        self.ports: list[FabricPort] = self.core.topology.ports
        self.watch: Callable[..., None] | None = None

    @classmethod
    @accepts_options(RoceOptions)
    def roce(cls, options: RoceOptions) -> Fabric:
        """A RoCEv2 fabric: switches with IGMP snooping and a querier. Raises ValueError for a bad option."""
        return cls(options)

    @classmethod
    @accepts_options(InfinibandOptions)
    def infiniband(cls, options: InfinibandOptions) -> Fabric:
        """Make an InfiniBand fabric with its SA. Raises ValueError for a bad option."""
        return cls(options)

    def close(self) -> None:
        """Stop the fabric: nothing that is still scheduled happens any more."""
        self.clock.guard.close(self.clock.close)

    def abort(self) -> None:
        """Forget all objects, memberships and tables: a change was interrupted, and nothing can rely on them.

        Called under the guard.
        """
        self.clock.close()
        self.core.clear()

    @property
    def link_layer(self) -> LinkLayer:
        """The link layer of all ports."""
        return self.core.options.link_layer

    @property
    def hosts(self) -> frozenset[int]:
        """The numbers of the hosts."""
        return self.core.topology.hosts

    @property
    def switches(self) -> int:
        """Number of switches."""
        return self.core.topology.switches

    @property
    def qps(self) -> tuple[Qp, ...]:
        """The QPs that exist, by number."""
        return tuple(self.core.queue_pairs)

    @property
    def sa(self) -> SubnetAdmin | None:
        """The SA of an InfiniBand fabric."""
        return None if self.core.subnet is None else self.core.subnet.sa

    def port_of(self, address: IPv4Address | IPv6Address) -> FabricPort:
        """The port that has the address. Raises KeyError."""
        return self.core.hosts.port_of(address)

    def add_route(self, host: int, network: IPv4Network, interface: Interface) -> None:
        """The host sends `network` out of that interface."""
        route = host, network, interface
        self.clock.guard.run("add_route", Phase.EVENT, self.core.hosts.add_route, *route)

    def remove_route(self, host: int, network: IPv4Network, interface: Interface) -> None:
        """Undo `add_route`."""
        route = host, network, interface
        self.clock.guard.run("remove_route", Phase.EVENT, self.core.hosts.remove_route, *route)

    def set_ipv4(self, port: Port, address: IPv4Address | None) -> None:
        """Give the port's default interface another IPv4 address, or take its address away (None).

        Raises ValueError for an address that another port has.
        """
        self.clock.guard.run("set_ipv4", Phase.EVENT, _set_ipv4, self.core, port, address)

    @contextmanager
    def starved(self, qp: Qp) -> Iterator[None]:
        """Leave the queue pair without a free receive inside the `with`.

        Messages to it are lost in silence, and only its counter `no_receive` counts them. Messages after the
        `with` arrive again (K-DATA-8).
        """
        run = self.clock.guard.run
        feed = run("starved", Phase.EVENT, incidents.starve, self.core, qp)
        try:
            yield
        finally:
            run("starved", Phase.EVENT, feed)
