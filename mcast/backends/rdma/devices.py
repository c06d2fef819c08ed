"""Devices and ports as values."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from mcast.api import DeviceInfo, Gid, LinkLayer, McastError, PortInfo, PortState
from mcast.backends.rdma.native import Context, Native
from mcast.backends.rdma.net import ipoib
from mcast.interrupts import uninterrupted
from mcast.wire.addresses import needs_interface

SYSFS = Path("/sys/class/infiniband")


class _Netdevs:
    """The network interfaces of this host, for one look at all its devices."""

    def __init__(self, native: Native) -> None:
        self.addresses: dict[str, list[IPv4Address | IPv6Address]] = {}
        for netdev, packed in native.netdev_addresses():
            address = ip_address(packed)
            if not needs_interface(address):  # an id cannot be bound to such a one
                self.addresses.setdefault(netdev, []).append(address)

    @cached_property
    def port_gids(self) -> dict[str, Gid]:
        """Those of IPoIB; read only on a host with InfiniBand."""
        return ipoib.port_gids()


def read_devices(native: Native) -> tuple[DeviceInfo, ...]:
    """Every device of this host, asked now."""
    host = _Netdevs(native)
    found = (_read_if_there(native, name, host) for name in native.device_names())
    return tuple(device for device in found if device is not None)


def read_counters(device: str, port: int) -> dict[str, int]:
    """The port's counters as sysfs has them, standard ones and the driver's own."""
    base = SYSFS / device / "ports" / str(port)
    counters = {}
    for path in sorted([*base.glob("counters/*"), *base.glob("hw_counters/*")]):
        with suppress(OSError, ValueError):  # `lifespan` is a setting; some may not be read
            counters[path.name] = int(path.read_text())
    counters.pop("lifespan", None)
    return counters


def _read_if_there(native: Native, name: str, host: _Netdevs) -> DeviceInfo | None:
    """None for a device that has gone since it was listed."""
    try:
        return _read_device(native, name, host)
    except McastError:
        if name in native.device_names():
            raise
        return None


def _read_device(native: Native, name: str, host: _Netdevs) -> DeviceInfo:
    with uninterrupted():
        context = native.open_device(name)
        try:
            device = native.query_device(context)
            gids = native.query_gids(context)
            vectors = native.comp_vectors(context)
            ports = [
                _read_port(native, context, name, port, [one[1:] for one in gids if one[0] == port], host)
                for port in range(1, device.ports + 1)
            ]
        finally:
            native.close_device(context)
    return DeviceInfo(
        name=name,
        node_guid=device.node_guid,
        max_mcast_grp=device.max_mcast_grp,
        max_mcast_qp_attach=device.max_mcast_qp_attach,
        max_qp_wr=device.max_qp_wr,
        ports=tuple(ports),
        num_comp_vectors=vectors,
    )


def _read_port(
    native: Native,
    context: Context,
    device: str,
    port: int,
    gids: list[tuple[int, int, bytes]],
    host: _Netdevs,
) -> PortInfo:
    attr = native.query_port(context, port)
    values = {index: Gid(gid) for index, _, gid in gids}
    if attr.is_ethernet:
        netdevs = _netdevs(device, {ifindex for _, ifindex, _ in gids})
    else:
        here = set(values.values())
        netdevs = [netdev for netdev, gid in host.port_gids.items() if gid in here]
    return PortInfo(
        port_num=port,
        state=PortState(attr.state),
        link_layer=LinkLayer.ETHERNET if attr.is_ethernet else LinkLayer.INFINIBAND,
        active_mtu=attr.active_mtu,
        rate=attr.rate,
        lid=attr.lid,
        gids=values,
        addresses=tuple(address for netdev in netdevs for address in host.addresses.get(netdev, [])),
    )


def link_layer_of(device: str, port: int) -> LinkLayer | None:
    """The link layer of a port, from sysfs; None once the device is gone."""
    try:
        return LinkLayer((SYSFS / device / "ports" / str(port) / "link_layer").read_text().strip())
    except (OSError, ValueError):
        return None


def netdevs_of(device: str, port: PortInfo) -> tuple[str, ...]:
    """Interfaces that the GIDs of an Ethernet port belong to, as sysfs has them."""
    folder = SYSFS / device / "ports" / str(port.port_num) / "gid_attrs" / "ndevs"
    names = dict[str, None]()
    for index in sorted(port.gids):  # of the thousand entries that a port may have
        with suppress(OSError):  # the GID is gone meanwhile
            names[os.fsdecode((folder / str(index)).read_bytes().strip())] = None
    return tuple(names)


def _netdevs(device: str, ifindexes: set[int]) -> list[str]:
    """The interfaces of an Ethernet port: those that its GIDs belong to, or else all of its device."""
    names = []
    for ifindex in sorted(ifindexes - {0}):
        with suppress(OSError):  # it went away meanwhile
            names.append(socket.if_indextoname(ifindex))
    net = SYSFS / device / "device" / "net"
    return names or (sorted(path.name for path in net.iterdir()) if net.is_dir() else [])
