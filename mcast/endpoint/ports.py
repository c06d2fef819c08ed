"""The port that an endpoint is on, and the ports to choose from.

Chosen by address, by device, or as the only one.
"""

from __future__ import annotations

import errno as E
import logging
from collections.abc import Iterable, Iterator
from ipaddress import ip_address
from itertools import islice
from typing import NamedTuple

from mcast.api import (
    Backend,
    Destination,
    DeviceInfo,
    McastAddress,
    Phase,
    PortInfo,
    PortState,
    UnusableDevice,
    mcast_error,
)
from mcast.arguments.checks import check_int, check_type
from mcast.wire.addresses import ZERO_GID, Gid, LocalAddress

logger: logging.Logger = logging.getLogger("mcast")


class LocalPort(NamedTuple):
    """A port, and the address on it that an id is bound to."""

    device: DeviceInfo
    port: PortInfo
    address: LocalAddress

    def source(self, destination: Destination) -> Gid:
        """The GID that messages to the destination come from; ZERO_GID if the port's table has none there."""
        return self.port.gids.get(destination.sgid_index, ZERO_GID)


def choose(backend: Backend, bind: LocalAddress | str | None, device: str | None, port_num: int) -> LocalPort:
    """The port to open the endpoint on.

    ValueError, which lists the ports there are, if the arguments fit none or several. McastError, with the
    reason, for an address or a device that the backend leaves out, and for a device without multicast.
    """
    if bind is not None and not isinstance(bind, LocalAddress):
        check_type(bind, str, "bind", "a local IP address, as text or from ipaddress")
    if device is not None:
        check_type(device, str, "device", "the name of a device, as `mcast info` lists them")
    port_num = check_int(port_num, "port_num", 1, 255, "ports are numbered from 1 to 255")
    if bind is not None and device is not None:
        raise ValueError(f"give bind or device, not both: bind is {bind}, device is {device!r}")
    left_out: Iterable[UnusableDevice] = ()
    if bind is not None:
        try:
            address = ip_address(bind)
        except ValueError as error:
            raise ValueError(f"bind: {error}; {_listing(backend)}") from None
        # `_local_ports` would list every port: too slow where each of many ports gets an endpoint.
        with_it = ((d, port) for d in backend.devices() for port in d.ports if address in port.addresses)
        fits = [LocalPort(*found, address) for found in islice(with_it, 1)]
        wanted = f"no port has the address {address}"
        if not fits:
            left_out = (one for one in backend.unusable_devices() if address in one.addresses)
    elif device is not None:
        fits = [p for p in _local_ports(backend) if (p.device.name, p.port.port_num) == (device, port_num)]
        wanted = f"port {port_num} of {device!r} is not there, or has no address"
        if not fits:
            left_out = (one for one in backend.unusable_devices() if one.name == device)
    else:
        fits = _outward([local_port for local_port in _local_ports(backend) if _is_active(local_port)])
        if len({(local_port.device.name, local_port.port.port_num) for local_port in fits}) != 1:
            raise ValueError(f"there is not exactly one active port: give bind=ADDRESS; {_listing(backend)}")
        logger.info("the only active port is %s port %d, %s", fits[0].device.name, *_where(fits[0]))
        if fits[0].address.is_loopback and any(not one.address.is_loopback for one in _local_ports(backend)):
            logger.warning("only loopback is usable, which reaches no other host; %s", _listing(backend))
    for one in left_out:
        raise one.error("open_endpoint", {"bind": bind} if device is None else {"device": device})
    if not fits:
        raise ValueError(f"{wanted}; {_listing(backend)}")
    _require_multicast(fits[0].device)
    return fits[0]


def _is_active(local_port: LocalPort) -> bool:
    return local_port.port.state is PortState.ACTIVE and not local_port.device.why_no_multicast


def _require_multicast(device: DeviceInfo) -> None:
    """Raise the error of a device that no group can be joined on."""
    why = device.why_no_multicast
    if why:
        detail = f"{device.name} has no multicast, for {why}: choose another device"
        raise mcast_error(E.ENOSYS, "open_endpoint", Phase.BIND, {"device": device.name}, detail)


def active(backend: Backend, group: McastAddress | None = None) -> list[LocalPort]:
    """Return each active port that has an address, with its first address.

    With `group`, one of the group's IP version first.

    Of `udp` it is one port, because the interfaces of a host are in networks that may not reach each other.
    Raises ValueError if there is no such port.
    """

    def address_of(port: PortInfo) -> LocalAddress:
        fits = (one for one in port.addresses if group and isinstance(one, type(group.address)))
        return next(fits, port.addresses[0])

    local_ports = [
        LocalPort(device, port, address_of(port))
        for device in backend.devices()
        for port in device.ports
        if port.state is PortState.ACTIVE and port.addresses and not device.why_no_multicast
    ]
    local_ports = _outward(local_ports)
    if not local_ports:
        raise ValueError(f"backend {backend.name!r} has no active port with an address: see `mcast info`")
    return local_ports[:1] if backend.name == "udp" else local_ports


def _outward(local_ports: list[LocalPort]) -> list[LocalPort]:
    """The ports that lead to other hosts, if there are any: loopback is meant where it is named, or alone."""
    return [local_port for local_port in local_ports if not local_port.address.is_loopback] or local_ports


def _where(local_port: LocalPort) -> tuple[int, LocalAddress]:
    return local_port.port.port_num, local_port.address


def _local_ports(backend: Backend) -> Iterator[LocalPort]:
    """Every address of every port. IPv4 comes first, because RoCEv2 has only IPv4 groups (K-JOIN-11)."""
    for device in backend.devices():
        for port in device.ports:
            for address in sorted(port.addresses, key=lambda one: one.version):
                yield LocalPort(device, port, address)


def _listing(backend: Backend) -> str:
    """The addresses that can be given, and the devices that are left out."""
    shown = ", ".join(
        f"{local_port.address} ({local_port.device.name} port {local_port.port.port_num}, "
        f"{local_port.port.state.name}{', no multicast' if local_port.device.why_no_multicast else ''})"
        for local_port in _local_ports(backend)
    )
    left_out = "; ".join(f"{one.name}: {one.detail}: {one.fix}" for one in backend.unusable_devices())
    there = f"there is {shown}" if shown else "no port here has an address"
    return f"{there}; left out: {left_out}" if left_out else there
