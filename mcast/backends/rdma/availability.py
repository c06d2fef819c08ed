"""Whether the real stack can run here. `judge` decides from the facts that `gather` has found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mcast.api import DeviceInfo, McastError, PortInfo, PortState, QpInit, Status, UnavailableReason
from mcast.backends.rdma import memlock, native, slab
from mcast.backends.rdma.devices import read_devices

_DEVICE_FILES = Path("/dev/infiniband")
_VERBS = Path("/sys/class/infiniband_verbs")
_ROCE_MAX_MTU = 4096

FIXES = {
    UnavailableReason.NOT_BUILT: (
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
        "load the driver of your card, or make a software one: rdma link add rxe0 type rxe netdev eth0 "
        "(or use `mcast lab run`)"
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
    """What was found on this host.

    `lack`      the extension or library that is missing, and how loading it failed
    `failed`    why the devices could not be listed, "" if they could
    `names`     the devices that the kernel has
    `absent`    device files that these devices need, and that do not exist
    `barred`    device files that this process may not open
    `memlock`   how many bytes this process may lock, None without limit
    `needed`    how many bytes one queue pair locks
    """

    lack: tuple[UnavailableReason, str] | None = None
    failed: str = ""
    names: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    barred: tuple[str, ...] = ()
    memlock: int | None = None
    needed: int = 0
    devices: tuple[DeviceInfo, ...] = ()


def judge(facts: Facts) -> Status:
    """The first thing that is wrong, in the order in which they have to be repaired."""
    hurdles = (hurdle(facts) for hurdle in HURDLES.values())
    return next((status for status in hurdles if status is not None), Status(True, _usable(facts)))


def _lack(facts: Facts) -> Status | None:
    return _no(*facts.lack) if facts.lack else None


def _no_device(facts: Facts) -> Status | None:
    return None if facts.names else _no(UnavailableReason.NO_DEVICE, "the kernel has no RDMA device")


def _no_files(facts: Facts) -> Status | None:
    fix = "modprobe -a rdma_ucm ib_uverbs (docker: --device=/dev/infiniband)"
    detail = f"no {', '.join(facts.absent)}"
    return _no(UnavailableReason.NO_DEVICE, detail, fix) if facts.absent else None


def _no_permission(facts: Facts) -> Status | None:
    """The process has to be able to open these files; it need not be root (K-DATA-24)."""
    files = ", ".join(facts.barred)
    return _no(UnavailableReason.NO_PERMISSION, f"cannot open {files}") if files else None


def _memlock_too_small(facts: Facts) -> Status | None:
    if facts.memlock is None or facts.memlock >= facts.needed:
        return None
    return _no(UnavailableReason.MEMLOCK, f"the limit is {facts.memlock} bytes, one QP needs {facts.needed}")


def _unreadable(facts: Facts) -> Status | None:
    fix = "look at `ibv_devinfo -v` and `dmesg`"
    return _no(UnavailableReason.BROKEN, facts.failed, fix) if facts.failed else None


def _all_down(facts: Facts) -> Status | None:
    states = (f"{name}/{port.port_num} is {port.state.name}" for name, port in _ports(facts))
    return None if _up(facts) else _no(UnavailableReason.PORT_DOWN, ", ".join(states))


def _no_address(facts: Facts) -> Status | None:
    names = ", ".join(name for name, _ in _up(facts))
    detail = f"no interface of {names} has an IP address"
    return None if _usable(facts) else _no(UnavailableReason.NO_ADDRESS, detail)


HURDLES: dict[str, Callable[[Facts], Status | None]] = {
    "libraries": _lack,
    "device": _no_device,
    "modules": _no_files,
    "files": _no_permission,
    "memlock": _memlock_too_small,
    "verbs": _unreadable,
    "link": _all_down,
    "address": _no_address,
}
"""What has to be right, in the order of repair. Each function says what is wrong, or returns None."""


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
        return Facts(lack=(error.reason, error.detail))
    names = loaded.device_names()
    files = _files(names)
    facts = Facts(
        names=names,
        absent=tuple(str(file) for file in files if not file.exists()),
        barred=tuple(str(file) for file in files if file.exists() and not os.access(file, os.R_OK | os.W_OK)),
        memlock=memlock.limit(),
        needed=slab.layout(QpInit(), _ROCE_MAX_MTU, _ROCE_MAX_MTU)[1],
    )
    if not names or facts.absent or facts.barred:
        return facts
    try:
        return facts._replace(devices=read_devices(loaded))
    except McastError as error:
        return facts._replace(failed=str(error))


def _files(names: tuple[str, ...]) -> tuple[Path, ...]:
    """The device files that these devices need."""
    entries = sorted(_VERBS.glob("uverbs*"))
    needed = [entry for entry in entries if _device_of(entry) in names]
    return (_DEVICE_FILES / "rdma_cm", *(_DEVICE_FILES / entry.name for entry in needed))


def _device_of(entry: Path) -> str:
    """The device of a uverbs entry in sysfs; "" if the device has gone since the entry was listed."""
    try:
        return (entry / "ibdev").read_text().strip()
    except OSError:
        return ""
