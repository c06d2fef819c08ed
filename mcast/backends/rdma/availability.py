"""Checks if the real stack can run here. `judge` decides from the facts that `gather` collects.

One usable device is enough. The others are left out, each with its reason (`devices.survey`).
"""

from __future__ import annotations

import errno as E
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from mcast.api import (
    DeviceInfo,
    McastError,
    PortInfo,
    PortState,
    QpInit,
    Status,
    UnavailableReason,
    UnusableDevice,
)
from mcast.backends.net.extension import how_to_build
from mcast.backends.rdma import memlock, native, slab
from mcast.backends.rdma.devices import survey
from mcast.backends.rdma.kernel_devices import DEVICE_FILES, OF_THE_PROCESS, why_closed

_ROCE_MAX_MTU = 4096
_MORE_FILES = "close files that the process does not need, or raise its limit: ulimit -n"

FIXES = {
    UnavailableReason.NOT_BUILT: how_to_build(
        "install the headers and build it again: apt-get install gcc librdmacm-dev libibverbs-dev && "
        "in a clone: MCAST_RDMA=1 pip install --force-reinstall --no-deps ."
    ),
    UnavailableReason.BROKEN: (
        "install mcast again for this interpreter, in a clone: pip install --force-reinstall --no-deps ."
    ),
    UnavailableReason.NO_LIBRARY: (
        "apt-get install rdma-core ibverbs-providers librdmacm1, or name the files in MCAST_LIBRDMACM and "
        "MCAST_LIBIBVERBS"
    ),
    UnavailableReason.NO_DEVICE: (
        "load the driver of your card, use `mcast lab run`, or make a device in software: "
        "rdma link add rxe0 type rxe netdev eth0"
    ),
    UnavailableReason.NO_PERMISSION: (
        "give the process read and write access to /dev/infiniband (docker: --device=/dev/infiniband)"
    ),
    UnavailableReason.MEMLOCK: memlock.FIX,
    UnavailableReason.PORT_DOWN: "bring a link up: ip link set DEV up, then look at `rdma link`",
    UnavailableReason.NO_ADDRESS: "give a port an address: ip addr add 10.0.0.1/24 dev DEV",
}
"""Reason -> the one line that repairs it."""


class Facts(NamedTuple):
    """Facts about this host.

    `missing`   the extension or library that is missing, and how loading it failed
    `failed`    why the devices could not be listed, "" if they could; `failed_fix` repairs that
    `absent`    the device file of the connection manager if it does not exist, else ""
    `barred`    why this process cannot open that file, "" if it can
    `memlock`   how many bytes this process may lock, None without limit
    `needed`    how many bytes one queue pair locks
    `devices`   the devices that can be used
    `unusable`  those that cannot
    """

    missing: tuple[UnavailableReason, str] | None = None
    failed: str = ""
    failed_fix: str = "look at `ibv_devinfo -v` and `dmesg`"
    absent: str = ""
    barred: str = ""
    memlock: int | None = None
    needed: int = 0
    devices: tuple[DeviceInfo, ...] = ()
    unusable: tuple[UnusableDevice, ...] = ()


def judge(facts: Facts) -> Status:
    """The first thing that is wrong, in the order in which they have to be repaired."""
    failures = (requirement(facts) for requirement in REQUIREMENTS.values())
    status = next((status for status in failures if status is not None), Status(True, _usable(facts)))
    return status._replace(unusable=facts.unusable)


def _missing(facts: Facts) -> Status | None:
    return _no(*facts.missing) if facts.missing else None


def _unreadable(facts: Facts) -> Status | None:
    return _no(UnavailableReason.BROKEN, facts.failed, facts.failed_fix) if facts.failed else None


def _no_device(facts: Facts) -> Status | None:
    if facts.devices or facts.unusable:
        return None
    return _no(UnavailableReason.NO_DEVICE, "the kernel has no RDMA device")


def _no_file(facts: Facts) -> Status | None:
    fix = "modprobe -a rdma_ucm ib_uverbs (docker: --device=/dev/infiniband)"
    return _no(UnavailableReason.NO_DEVICE, f"no {facts.absent}", fix) if facts.absent else None


def _no_permission(facts: Facts) -> Status | None:
    """The process has to be able to open this file; it need not be root (K-DATA-24)."""
    return _no(UnavailableReason.NO_PERMISSION, facts.barred) if facts.barred else None


def _memlock_too_small(facts: Facts) -> Status | None:
    if facts.memlock is None or facts.memlock >= facts.needed:
        return None
    return _no(UnavailableReason.MEMLOCK, f"the limit is {facts.memlock} bytes, one QP needs {facts.needed}")


def _none_usable(facts: Facts) -> Status | None:
    if facts.devices or not facts.unusable:
        return None
    first = facts.unusable[0]
    return _no(first.reason, describe_unusable(facts.unusable), first.fix)


def describe_unusable(unusable: tuple[UnusableDevice, ...]) -> str:
    """Return the reason for each unusable device; devices with the same reason are listed together."""
    alike = groupby(unusable, key=lambda one: one.detail)
    return "; ".join(f"{', '.join(one.name for one in some)}: {detail}" for detail, some in alike)


def _all_down(facts: Facts) -> Status | None:
    states = (f"{name}/{port.port_num} is {port.state.name}" for name, port in _ports(facts))
    return None if _up(facts) else _no(UnavailableReason.PORT_DOWN, ", ".join(states))


def _no_address(facts: Facts) -> Status | None:
    names = ", ".join(name for name, _ in _up(facts))
    detail = f"no interface of {names} has an IP address"
    return None if _usable(facts) else _no(UnavailableReason.NO_ADDRESS, detail)


REQUIREMENTS: dict[str, Callable[[Facts], Status | None]] = {
    "libraries": _missing,
    "verbs": _unreadable,
    "device": _no_device,
    "modules": _no_file,
    "files": _no_permission,
    "memlock": _memlock_too_small,
    "usable": _none_usable,
    "link": _all_down,
    "address": _no_address,
}
"""Requirements, in the order of repair: each function returns the failure, or None."""


def _ports(facts: Facts) -> list[tuple[str, PortInfo]]:
    return [(device.name, port) for device in facts.devices for port in device.ports]


def _up(facts: Facts) -> list[tuple[str, PortInfo]]:
    return [(name, port) for name, port in _ports(facts) if port.state == PortState.ACTIVE]


def _usable(facts: Facts) -> str:
    """The ports that can be bound to, and their addresses."""
    return ", ".join(
        f"{name} ({', '.join(map(str, port.addresses))})" for name, port in _up(facts) if port.addresses
    )


def _no(reason: UnavailableReason, detail: str, fix: str = "") -> Status:
    return Status(False, detail, reason, fix or FIXES[reason])


def gather() -> Facts:
    """Look at this host; nothing is changed."""
    try:
        loaded = native.load()
    except native.Unusable as error:
        return Facts(missing=(error.reason, error.detail))
    manager = DEVICE_FILES / "rdma_cm"
    closed = why_closed(manager)
    if closed and closed.errno in OF_THE_PROCESS:
        return Facts(failed=f"cannot open {manager}: {closed.strerror}", failed_fix=_MORE_FILES)
    is_absent = closed is not None and closed.errno == E.ENOENT
    facts = Facts(
        absent=str(manager) if is_absent else "",
        barred=f"cannot open {manager}: {closed.strerror}" if closed and not is_absent else "",
        memlock=memlock.limit(),
        needed=slab.layout(QpInit(), _ROCE_MAX_MTU, _ROCE_MAX_MTU)[1],
    )
    try:
        usable, unusable = survey(loaded)
    except McastError as error:
        failed = facts._replace(failed=str(error).splitlines()[0])
        return failed._replace(failed_fix=_MORE_FILES) if error.errno in OF_THE_PROCESS else failed
    return facts._replace(devices=usable, unusable=unusable)
