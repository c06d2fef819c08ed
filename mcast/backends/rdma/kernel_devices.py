"""Devices that the kernel has, whether or not libibverbs lists them.

libibverbs leaves a device out of its list, without a reason, if the device is in another network namespace,
has no device file, or has no provider. The kernel knows more: netlink names the devices of this namespace
(`rdma dev`), and /sys/class/infiniband_verbs, which no namespace hides, those of the others, too.
"""

from __future__ import annotations

import errno as E
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mcast.backends.net import netlink
from mcast.backends.rdma.drivers import DRIVERS, Driver

SYSFS = Path("/sys/class/infiniband")
VERBS = Path("/sys/class/infiniband_verbs")
DEVICE_FILES = Path("/dev/infiniband")

OF_THE_PROCESS = frozenset({E.EMFILE, E.ENFILE})
"""Errnos of opening a file that say nothing about it."""


class KernelDevice(NamedTuple):
    """A device as the kernel knows it.

    file    its device file, which may not exist; None: ib_uverbs has made none
    here    True if it is in this network namespace
    driver  the provider that belongs to it; None: not known
    """

    file: Path | None
    here: bool = True
    driver: Driver | None = None


def kernel_devices() -> dict[str, KernelDevice]:
    """Name -> the device, of all network namespaces as far as the kernel shows them.

    Raises OSError if this process can open no more files, because the kernel cannot be asked then.
    """
    files = _verbs_names()
    here = _devices_here()
    if here is None:  # nobody says which are elsewhere
        here = dict.fromkeys(files, netlink.RdmaDevice())
    found = {}
    for name in sorted(here.keys() | files.keys()):
        about = here.get(name)
        file = about.file if about and about.file else files.get(name)
        found[name] = KernelDevice(
            DEVICE_FILES / file if file else None,
            about is not None,
            DRIVERS.get(about.driver_id) if about else None,
        )
    return found


def why_closed(file: Path) -> OSError | None:
    """Return the error of opening a device file for reading and writing; None if it opens.

    It is opened because a device cgroup refuses that where access(2) allows it.
    """
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error
    return None


def _devices_here() -> dict[str, netlink.RdmaDevice] | None:
    """The devices of this network namespace; from sysfs where the kernel does not answer by netlink.

    None where that cannot be read either.
    """
    try:
        return netlink.rdma_devices()
    except OSError as error:
        if error.errno in OF_THE_PROCESS:
            raise
    with suppress(OSError):
        return {path.name: netlink.RdmaDevice() for path in SYSFS.iterdir()}
    return None


def _verbs_names() -> dict[str, str]:
    """Device -> the name of its device file, such as `uverbs0`."""
    found = {}
    for entry in VERBS.glob("uverbs*"):
        with suppress(OSError):  # the device is gone since the entry was listed
            name = os.fsdecode((entry / "ibdev").read_bytes().rstrip(b"\n"))
            if name:
                found[name] = entry.name
    return found
