"""Devices and ports as values; each device is judged by itself, and what keeps one out hides no other."""

from __future__ import annotations

import errno as E
import os
import socket
from contextlib import suppress
from functools import cached_property
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from mcast.api import (
    DeviceInfo,
    Gid,
    LinkLayer,
    McastError,
    Phase,
    PortInfo,
    PortState,
    UnavailableReason,
    UnusableDevice,
    mcast_error,
)
from mcast.backends.rdma.drivers import is_newer
from mcast.backends.rdma.kernel_devices import (
    OF_THE_PROCESS,
    SYSFS,
    KernelDevice,
    kernel_devices,
    why_closed,
)
from mcast.backends.rdma.native import Context, Native
from mcast.backends.rdma.net import ipoib
from mcast.wire.addresses import needs_interface

_MAX_LOOKS = 3
"""Devices may come, go or be renamed during a survey; then it is done again, but not for ever."""
_INSPECT = "look at `ibv_devinfo -v` and `dmesg`"


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


class Survey(NamedTuple):
    """The devices of this host: those that can be used, and those that cannot, with the reasons."""

    usable: tuple[DeviceInfo, ...]
    unusable: tuple[UnusableDevice, ...]


def read_devices(native: Native) -> tuple[DeviceInfo, ...]:
    """Every usable device of this host, asked now."""
    return survey(native).usable


def survey(native: Native) -> Survey:
    """Judge every device of this host, now.

    A device that libibverbs does not list is judged by what the kernel knows of it.
    """
    known = _known()
    for _ in range(_MAX_LOOKS):
        before, (usable, unusable, is_complete) = known, _judge_all(native, known)
        if is_complete or (known := _known()) == before:
            break
    return Survey(tuple(usable), tuple(unusable))


def _known() -> dict[str, KernelDevice]:
    try:
        return kernel_devices()
    except OSError as error:
        raise mcast_error(error.errno or E.EIO, "devices", Phase.OPEN) from error


def _judge_all(
    native: Native, known: dict[str, KernelDevice]
) -> tuple[list[DeviceInfo], list[UnusableDevice], bool]:
    """The usable devices, the others, and True if all are usable."""
    host = _Netdevs(native)
    listed = native.device_names()
    usable, unusable = list[DeviceInfo](), list[UnusableDevice]()
    names = dict.fromkeys((*listed, *known))
    old_names = [name for name in listed if name not in known]
    for name in names:
        if not name.isprintable():  # bytes that are no text can be no part of a value
            shown = repr(os.fsencode(name))[2:-1]
            fix = f"rename it: rdma dev set $'{shown}' name NAME"
            about_it = UnavailableReason.BROKEN, "its name is not text", fix, E.ENODEV
            unusable.append(UnusableDevice(shown, *about_it, _addresses_in_sysfs(name, host)))
            continue
        about = known.get(name)
        unusable_device = _why_unusable(name, about, name in listed, host)
        if (
            unusable_device is not None
            and unusable_device.reason is UnavailableReason.NO_PROVIDER
            and old_names
        ):
            # libibverbs keeps the name that a device had when this process listed it first
            detail = f"renamed since this process has listed it: libibverbs lists {', '.join(old_names)}"
            fix = "start the process again"
            unusable_device = unusable_device._replace(
                reason=UnavailableReason.BROKEN, detail=detail, fix=fix
            )
        if unusable_device is not None:
            unusable.append(unusable_device)
            continue
        try:
            usable.append(_read_device(native, name, host, about))
        except McastError as error:
            if error.errno in OF_THE_PROCESS:
                raise
            if name in native.device_names():  # else it has gone since it was listed
                about_it = (
                    UnavailableReason.BROKEN,
                    str(error).splitlines()[0],
                    _INSPECT,
                    error.errno or E.EIO,
                )
                unusable.append(UnusableDevice(name, *about_it, _addresses_in_sysfs(name, host)))
    return usable, unusable, len(usable) == len(names)


def no_multicast(name: str) -> str:
    """Reason why the driver of a device has no multicast; "" if it has, as far as is known."""
    about = kernel_devices().get(name)
    return "" if about is None or about.driver is None else about.driver.no_multicast


def _why_unusable(
    name: str, about: KernelDevice | None, listed: bool, host: _Netdevs
) -> UnusableDevice | None:
    """Return the first reason why libibverbs cannot use a device; None if none is known."""

    def left_out(
        reason: UnavailableReason, detail: str, fix: str, errno: int | None = E.ENODEV
    ) -> UnusableDevice:
        return UnusableDevice(name, reason, detail, fix, errno or E.EIO, _addresses_in_sysfs(name, host))

    if about is None:
        return None
    if not about.here:
        fix = f"rdma system set netns shared; or, where the device is: rdma dev set {name} netns NAME"
        return left_out(
            UnavailableReason.OTHER_NAMESPACE, "not in this network namespace (rdma system: exclusive)", fix
        )
    file = about.file
    if file is None:
        detail = "ib_uverbs has made no device file"
        return None if listed else left_out(UnavailableReason.NO_DEVICE_FILE, detail, "modprobe ib_uverbs")
    closed = why_closed(
        file
    )  # before libibverbs, which would wait 5 s for udev to make it (util/open_cdev.c)
    if closed is None:
        driver = f" for the driver {about.driver.name}" if about.driver else ""
        detail, fix = f"no provider in libibverbs{driver}", "apt-get install ibverbs-providers"
        return None if listed else left_out(UnavailableReason.NO_PROVIDER, detail, fix)
    if closed.errno in OF_THE_PROCESS:
        raise mcast_error(closed.errno or E.EIO, "open_device", Phase.OPEN, {"device": name})
    if closed.errno == E.ENOENT:
        fix = f"give the container the file: docker --device={file}"
        return left_out(UnavailableReason.NO_DEVICE_FILE, f"there is no device file {file}", fix)
    detail = f"cannot open {file}: {closed.strerror}"
    if closed.errno in (E.EACCES, E.EPERM):
        fix = f"give the process read and write access to {file} (docker: --device={file})"
        return left_out(UnavailableReason.NO_PERMISSION, detail, fix, closed.errno)
    return left_out(UnavailableReason.BROKEN, detail, _INSPECT, closed.errno)


def read_port_counters(device: str, port: int) -> dict[str, int]:
    """The port's counters as sysfs has them, standard ones and the driver's own."""
    base = SYSFS / device / "ports" / str(port)
    counters = {}
    for path in (*_paths(base, "counters/*"), *_paths(base, "hw_counters/*")):
        with suppress(OSError, ValueError):  # `lifespan` is a setting; some may not be read
            counters[path.name] = int(path.read_text())
    counters.pop("lifespan", None)
    return counters


def _read_device(native: Native, name: str, host: _Netdevs, about: KernelDevice | None) -> DeviceInfo:
    ref = native.device_ref()
    try:
        context = native.open_device(name, ref)
        device = native.query_device(context)
        gids = native.query_gids(context)
        vectors = native.comp_vectors(context)
        ports = [
            _read_port(native, context, name, port, [one[1:] for one in gids if one[0] == port], host)
            for port in range(1, device.ports + 1)
        ]
    finally:
        native.close_device(ref)
    driver = None if about is None else about.driver
    return DeviceInfo(
        name=name,
        node_guid=device.node_guid,
        max_mcast_grp=device.max_mcast_grp,
        max_mcast_qp_attach=device.max_mcast_qp_attach,
        max_qp_wr=device.max_qp_wr,
        ports=tuple(ports),
        num_comp_vectors=vectors,
        driver="" if driver is None else driver.name,
        # a newer provider may have it: that is tried
        no_multicast="" if driver is None or is_newer(native.verbs_library()) else driver.no_multicast,
    )


def _addresses_in_sysfs(device: str, host: _Netdevs) -> tuple[IPv4Address | IPv6Address, ...]:
    """The addresses of the interfaces of a device that cannot be asked."""
    home = SYSFS / device
    netdevs = {path.name for path in _paths(home, "device/net/*")}
    # Soft-RoCE names its interface as its parent
    for file in (home / "parent", *_paths(home, "ports/*/gid_attrs/ndevs/*")):
        with suppress(OSError):
            netdevs.add(os.fsdecode(file.read_bytes().strip()))
    gids = set()
    for file in _paths(home, "ports/*/gids/0"):
        with suppress(OSError, ValueError):
            gids.add(Gid(file.read_text().strip()))
    netdevs |= {netdev for netdev, gid in host.port_gids.items() if gid in gids}
    return tuple(address for netdev in sorted(netdevs) for address in host.addresses.get(netdev, []))


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
        try:
            names.append(socket.if_indextoname(ifindex))
        except OSError as error:  # it went away meanwhile
            if error.errno in OF_THE_PROCESS:
                raise mcast_error(error.errno, "devices", Phase.OPEN) from error
    return names or [path.name for path in _paths(SYSFS / device, "device/net/*")]


def _paths(folder: Path, pattern: str) -> list[Path]:
    """The paths in sysfs; none if the device goes meanwhile, or the folder may not be read."""
    with suppress(OSError):
        return sorted(folder.glob(pattern))
    return []
