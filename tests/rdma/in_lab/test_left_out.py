"""Devices that a process cannot use, planted one by one: each is named, and the others work."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib import import_module
from ipaddress import IPv4Address
from multiprocessing import get_context
from pathlib import Path
from pkgutil import walk_packages
from typing import NamedTuple

import pytest

import mcast.backends.rdma
import mcast.endpoint
from mcast.api import DeviceInfo, McastError, NotSupported, UnavailableReason
from mcast.backends.rdma import PROVIDER
from mcast.backends.rdma.drivers import DRIVERS, Driver
from mcast.backends.rdma.kernel_devices import kernel_devices
from mcast.endpoint.blocking import open_endpoint

from .conftest import BOUND, devices, sh, until

CLONE_NEWNET, NOBODY, RXE = 0x40000000, 65534, 14
GROUP = "239.80.1.1"


def ipv4_of(device: DeviceInfo) -> IPv4Address:
    return next(one for one in device.ports[0].addresses if isinstance(one, IPv4Address))


def file_of(device: DeviceInfo) -> Path:
    file = kernel_devices()[device.name].file
    assert file is not None
    return file


class Seen(NamedTuple):
    """Findings of a process: is the provider available, devices that are left out, the error of a bind."""

    available: bool
    left_out: list[tuple[str, UnavailableReason]]
    error: str


def see(left_out: DeviceInfo, other: DeviceInfo) -> Seen:
    """Bind to the one device, and join and send on the other."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for package in (mcast.endpoint, mcast.backends.rdma):  # nobody may not read them in root's home
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if "csrc" not in module.name:
                import_module(module.name)
    os.setuid(NOBODY)
    status = PROVIDER.status()
    with PROVIDER.open() as backend:
        with open_endpoint(backend, ipv4_of(other)) as endpoint:
            endpoint.join(GROUP).send(b"hello")
        try:
            open_endpoint(backend, ipv4_of(left_out)).close()
        except McastError as error:
            said = str(error)
    return Seen(status.available, [(one.name, one.reason) for one in status.unusable], said)


PLANTED = {
    "closed file": ("chmod 000 {file}", "chmod 666 {file}", UnavailableReason.NO_PERMISSION),
    "no file": ("mv {file} {file}.hidden", "mv {file}.hidden {file}", UnavailableReason.NO_DEVICE_FILE),
}


@pytest.mark.long  # an emulated process needs seconds to import the package
@pytest.mark.parametrize("case", PLANTED)
def test_one_device_is_left_out_alone(case: str) -> None:
    """In a process without root's rights.

    Spawned: a forked one has the devices that librdmacm has opened as root, where others may not write.
    """
    plant, undo, reason = PLANTED[case]
    first, second, *_ = devices()
    file = file_of(first)
    sh(plant.format(file=file))
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as apart:
            seen = apart.submit(see, first, second).result(10 * BOUND)
    finally:
        sh(undo.format(file=file))
    assert seen.available
    assert seen.left_out == [(first.name, reason)]
    assert f"{first.name} is left out: " in seen.error
    assert f"{file} (docker: --device" in seen.error or f"docker --device={file}" in seen.error


STATUS = """
import json
from mcast.backends.rdma import PROVIDER
status = PROVIDER.status()
found = [(one.name, one.reason.name, one.fix) for one in status.unusable]
print(json.dumps([status.available, status.reason.name, status.detail, status.fix, found]))
"""


@pytest.mark.long  # an emulated process needs seconds to import the package
def test_missing_providers_of_libibverbs_are_named(tmp_path: Path) -> None:
    """They are hidden from a new process, because libibverbs loads them once."""
    names = [device.name for device in devices()]
    hide = 'mount --bind "$0" /etc/libibverbs.d && exec "$1" -c "$2"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, tmp_path, sys.executable, STATUS],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert (done.returncode, done.stderr) == (0, "")
    available, reason, detail, fix, found = json.loads(done.stdout)
    assert (available, reason, fix) == (False, "NO_PROVIDER", "apt-get install ibverbs-providers")
    assert detail == f"{', '.join(sorted(names))}: no provider in libibverbs for the driver rxe"
    assert found == [[name, "NO_PROVIDER", fix] for name in sorted(names)]


def set_netns(mode: str) -> None:
    """Wait for it: the kernel refuses while another namespace exists, such as that of a thread that ended."""
    words = ["rdma", "system", "set", "netns", mode]
    until(lambda: subprocess.run(words, capture_output=True, timeout=BOUND).returncode == 0, " ".join(words))


def test_devices_of_another_namespace_are_named() -> None:
    """Of exclusive devices neither netlink nor libibverbs tells another network namespace."""
    names = sorted(device.name for device in devices())

    def look_elsewhere() -> list[tuple[str, UnavailableReason]]:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0  # of this thread alone
        status = PROVIDER.status()
        assert (status.available, status.reason) == (False, UnavailableReason.OTHER_NAMESPACE)
        return [(one.name, one.reason) for one in status.unusable]

    set_netns("exclusive")
    try:
        with ThreadPoolExecutor(1) as elsewhere:
            found = elsewhere.submit(look_elsewhere).result(BOUND)
        assert PROVIDER.status().unusable == ()
    finally:
        set_netns("shared")
    assert found == [(name, UnavailableReason.OTHER_NAMESPACE) for name in names]


def test_the_driver_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without multicast, for which Soft-RoCE stands in, is named before a join."""
    assert {(one.driver, one.no_multicast) for one in devices()} == {("rxe", "")}
    monkeypatch.setitem(DRIVERS, RXE, Driver("rxe", attaches=False))
    with PROVIDER.open() as backend, pytest.raises(NotSupported, match="its driver rxe does not implement"):
        open_endpoint(backend, "10.77.0.1")
    assert any(one.seen.startswith("no multicast: its driver rxe") for one in PROVIDER.checks(0))
