"""The port that an endpoint is on: chosen by address, by device, or as the only one; and the ports to choose
from."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import islice
from typing import NamedTuple

from mcast.api import Backend, Destination, DeviceInfo, McastAddress, PortInfo, PortState
from mcast.wire.addresses import ZERO_GID, Gid, LocalAddress

logger: logging.Logger = logging.getLogger("mcast")


class Place(NamedTuple):
    """A port, and the address on it that an id is bound to."""

    device: DeviceInfo
    port: PortInfo
    address: LocalAddress

    def source(self, destination: Destination) -> Gid:
        """The GID that messages to the destination come from; ZERO_GID if the port's table has none there."""
        return self.port.gids.get(destination.sgid_index, ZERO_GID)


def choose(backend: Backend, bind: LocalAddress | str | None, device: str | None, port_num: int) -> Place:
    """The port to open the endpoint on.

    ValueError, which lists the ports there are, if the arguments fit none or several.
    """
    if bind is not None and device is not None:
        raise ValueError(f"give bind or device, not both: bind is {bind}, device is {device!r}")
    if bind is not None:
        try:
            address = ip_address(bind)
        except ValueError as error:
            raise ValueError(f"bind: {error}; {_listing(list(_places(backend)))}") from None
        # `_places` would list every port: too slow where each of many ports gets an endpoint.
        with_it = ((d, port) for d in backend.devices() for port in d.ports if address in port.addresses)
        fits = [Place(*found, address) for found in islice(with_it, 1)]
        wanted = f"no port has the address {address}"
    elif device is not None:
        fits = [p for p in _places(backend) if (p.device.name, p.port.port_num) == (device, port_num)]
        wanted = f"port {port_num} of {device!r} is not there, or has no address"
    else:
        places = list(_places(backend))
        fits = [place for place in places if place.port.state is PortState.ACTIVE]
        if len({(place.device.name, place.port.port_num) for place in fits}) != 1:
            raise ValueError(f"several ports could be meant, or none: give bind=ADDRESS; {_listing(places)}")
        logger.info("the only active port is %s port %d, %s", fits[0].device.name, *_where(fits[0]))
    if not fits:
        raise ValueError(f"{wanted}; {_listing(list(_places(backend)))}")
    return fits[0]


def active(backend: Backend, group: McastAddress | None = None) -> list[Place]:
    """Each active port that has an address, with its first address; with `group`, one of the group's IP
    version first.

    Raises ValueError if there is no such port.
    """

    def address_of(port: PortInfo) -> LocalAddress:
        fits = (one for one in port.addresses if group and isinstance(one, type(group.address)))
        return next(fits, port.addresses[0])

    places = [
        Place(device, port, address_of(port))
        for device in backend.devices()
        for port in device.ports
        if port.state is PortState.ACTIVE and port.addresses
    ]
    if not places:
        raise ValueError(f"backend {backend.name!r} has no active port with an address: see `mcast info`")
    return places


def _where(place: Place) -> tuple[int, LocalAddress]:
    return place.port.port_num, place.address


def _places(backend: Backend) -> Iterator[Place]:
    """Every address of every port. IPv4 comes first, because RoCEv2 has only IPv4 groups (K-JOIN-11)."""
    for device in backend.devices():
        for port in device.ports:
            for address in sorted(port.addresses, key=lambda one: one.version):
                yield Place(device, port, address)


def _listing(places: list[Place]) -> str:
    shown = ", ".join(
        f"{place.address} ({place.device.name} port {place.port.port_num}, {place.port.state.name})"
        for place in places
    )
    return f"there is {shown}" if shown else "no port here has an address"
