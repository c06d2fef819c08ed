"""Whether the real stack can run here. `judge` is pure: facts in, status out."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

from mcast.api import DeviceInfo, McastError, PortState, QpInit, Status, UnavailableReason
from mcast.backends.rdma import native, slab
from mcast.backends.rdma.devices import read_devices

_DEVICE_FILES = Path("/dev/infiniband")
_VERBS = Path("/sys/class/infiniband_verbs")
_CAP_IPC_LOCK = 14
_ROCE_MAX_MTU = 4096

FIXES = {
    UnavailableReason.NOT_BUILT: (
        "install the headers and build it again: apt-get install gcc librdmacm-dev libibverbs-dev && "
        "MCAST_RDMA=1 pip install --force-reinstall --no-binary mcast mcast"
    ),
    UnavailableReason.BROKEN: "install mcast again for this interpreter: pip install --force-reinstall mcast",
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
    UnavailableReason.MEMLOCK: "raise it: ulimit -l unlimited (docker: --ulimit memlock=-1)",
    UnavailableReason.PORT_DOWN: "bring a link up: ip link set DEV up, then look at `rdma link`",
    UnavailableReason.NO_ADDRESS: "give a port an address: ip addr add 10.0.0.1/24 dev DEV",
}
"""The one line that mends each."""


class Facts(NamedTuple):
    """What was found on this host.

    `lack`      the extension or a library that is not there, and how it failed
    `failed`    why the devices could not be asked, '' if they could
    `names`     devices the kernel has
    `no_module` the connection manager's device file does not exist
    `barred`    device files this process may not open
    `memlock`   bytes it may lock, None without limit; `needed` those of one QP
    """

    lack: tuple[UnavailableReason, str] | None = None
    failed: str = ""
    names: tuple[str, ...] = ()
    no_module: bool = False
    barred: tuple[str, ...] = ()
    memlock: int | None = None
    needed: int = 0
    devices: tuple[DeviceInfo, ...] = ()


def judge(facts: Facts) -> Status:
    """The first thing that is wrong, in the order in which they have to be mended."""
    if facts.lack:
        reason, detail = facts.lack
        return _no(reason, detail)
    if not facts.names:
        return _no(UnavailableReason.NO_DEVICE, "the kernel has no RDMA device")
    if facts.no_module:
        file = _DEVICE_FILES / "rdma_cm"
        fix = "modprobe rdma_ucm ib_uverbs (docker: --device=/dev/infiniband)"
        return _no(UnavailableReason.NO_DEVICE, f"{file} does not exist", fix)
    if facts.barred:
        return _no(UnavailableReason.NO_PERMISSION, f"cannot open {', '.join(facts.barred)}")
    if facts.memlock is not None and facts.memlock < facts.needed:
        detail = f"the limit is {facts.memlock} bytes, one QP needs {facts.needed}"
        return _no(UnavailableReason.MEMLOCK, detail)
    if facts.failed:
        return _no(UnavailableReason.BROKEN, facts.failed, "look at `ibv_devinfo -v` and `dmesg`")
    ports = [(device.name, port) for device in facts.devices for port in device.ports]
    up = [(name, port) for name, port in ports if port.state == PortState.ACTIVE]
    if not up:
        states = ", ".join(f"{name}/{port.port_num} is {port.state.name}" for name, port in ports)
        return _no(UnavailableReason.PORT_DOWN, states)
    usable = [f"{name} ({', '.join(map(str, port.addresses))})" for name, port in up if port.addresses]
    if not usable:
        names = ", ".join(name for name, _ in up)
        return _no(UnavailableReason.NO_ADDRESS, f"no interface of {names} has an IP address")
    return Status(True, ", ".join(usable))


def _no(reason: UnavailableReason, detail: str, fix: str = "") -> Status:
    return Status(False, detail, reason, fix or FIXES[reason])


def gather() -> Facts:
    """Look at this host; nothing is changed."""
    try:
        loaded = native.load()
    except native.Unusable as error:
        return Facts(lack=(error.reason, error.detail))
    names = loaded.device_names()
    facts = Facts(
        names=names,
        no_module=not (_DEVICE_FILES / "rdma_cm").exists(),
        barred=_barred(names),
        memlock=_memlock(),
        needed=slab.layout(QpInit(), _ROCE_MAX_MTU, _ROCE_MAX_MTU)[1],
    )
    if not names or facts.barred:
        return facts
    try:
        return facts._replace(devices=read_devices(loaded))
    except McastError as error:
        return facts._replace(failed=str(error))


def _barred(names: tuple[str, ...]) -> tuple[str, ...]:
    """Device files that these devices need and this process may not open."""
    entries = sorted(_VERBS.glob("uverbs*"))
    needed = [entry for entry in entries if (entry / "ibdev").read_text().strip() in names]
    files = [_DEVICE_FILES / "rdma_cm", *(_DEVICE_FILES / entry.name for entry in needed)]
    return tuple(str(file) for file in files if file.exists() and not os.access(file, os.R_OK | os.W_OK))


def _memlock() -> int | None:
    """Bytes this process may lock; None without limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lines = Path("/proc/self/status").read_text().splitlines()
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff")), "0")
    unlimited = limit == resource.RLIM_INFINITY or int(effective, 16) >> _CAP_IPC_LOCK & 1
    return None if unlimited else limit
