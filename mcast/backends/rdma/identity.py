"""Identifies the devices of this host: drivers, firmware, models, and the version of rdma-core.

Read from sysfs and from the list of loaded libraries. `node_desc` is left out, because rdma-ndd writes the
host's name into it; so are PCI addresses and serial numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mcast.api import DeviceIdentity, Identity

SYSFS = Path("/sys/class/infiniband")
MODULES = Path("/sys/module")
MAPS = Path("/proc/self/maps")

_HARDWARE = ("hca_type", "board_id", "hw_rev")
_PCI = ("vendor", "device", "subsystem_vendor", "subsystem_device", "revision")
_LIBRARY = re.compile(r"/(lib(?:ibverbs|rdmacm|mlx4|mlx5|efa|mana|hns))\.so\.(\d+(?:\.\d+)+)$")
_SOFTWARE = {"rxe": "rdma_rxe", "siw": "siw"}
"""Default node_desc of software devices -> their driver."""


def identify(sysfs: Path = SYSFS, modules: Path = MODULES, maps: Path = MAPS) -> Identity:
    """Return what the devices of this host are, and which libraries this process has loaded."""
    lines = _read(maps).splitlines()
    names = sorted(path.name for path in sysfs.glob("*"))
    return Identity(_libraries(lines), {name: _device(sysfs / name, modules) for name in names})


def _libraries(lines: Iterable[str]) -> dict[str, str]:
    """The versions in the names of the loaded libraries: `libibverbs.so.1.14.44.0` is of rdma-core 44.0."""
    found = {}
    for line in lines:
        if named := _LIBRARY.search(line):
            found[named[1]] = named[2]
    verbs = found.get("libibverbs", "").split(".", 2)
    if len(verbs) == 3:
        found["rdma-core"] = verbs[2]
    return dict(sorted(found.items()))


def _device(folder: Path, modules: Path) -> DeviceIdentity:
    link = folder / "device" / "driver"
    driver = link.resolve().name if link.exists() else _SOFTWARE.get(_read(folder / "node_desc"), "")
    hardware = {name: _read(folder / name) for name in _HARDWARE}
    hardware |= {f"pci_{name}": _read(folder / "device" / name) for name in _PCI}
    return DeviceIdentity(
        driver=driver,
        driver_version=_read(modules / driver / "version") if driver else "",
        firmware=_read(folder / "fw_ver"),
        hardware={name: value for name, value in hardware.items() if value},
    )


def _read(path: Path) -> str:
    """The text of a small file; "" if it does not exist or may not be read."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
