"""Devices that are left out, one by one, beside one that works."""

from __future__ import annotations

import errno as E
import os
import socket
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcast import open_endpoint
from mcast.api import (
    AddressNotAvailable,
    CmEventType,
    DeviceGone,
    Gid,
    McastError,
    NotSupported,
    PermissionDenied,
    QpInit,
    UnavailableReason,
)
from mcast.backends.rdma import availability, devices, native
from mcast.backends.rdma.drivers import DRIVERS
from mcast.backends.rdma.kernel_devices import KernelDevice, why_closed
from mcast.backends.rdma.native import Native
from mcast.backends.rdma.net import ipoib

from .card import Card, ethernet_port
from .provider import CardBackend

GROUP = "239.1.1.1"
SIW = DRIVERS[18]
HERE = IPv4Address("127.0.0.1")
"""The address of the interface lo, which the test gives to the device that is left out."""


@pytest.fixture
def known(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, KernelDevice]:
    """Devices that the kernel knows: two, whose files exist. A test changes it."""
    card.ethernet(2)
    found = {}
    for number in range(2):
        (tmp_path / f"uverbs{number}").touch()
        found[f"card{number}"] = KernelDevice(tmp_path / f"uverbs{number}")
    monkeypatch.setattr(devices, "kernel_devices", lambda: found)
    return found


def no_access(file: Path) -> OSError | None:
    return PermissionError(E.EPERM, "Operation not permitted") if file.name == "uverbs0" else why_closed(file)


def _at_lo(card: Card, name: str) -> None:
    """Let the device have the interface lo, as Soft-RoCE shows it in sysfs."""
    assert card.sysfs is not None
    (card.sysfs / name).mkdir(exist_ok=True)
    (card.sysfs / name / "parent").write_text("lo\n")


Plant = Callable[[dict[str, KernelDevice], pytest.MonkeyPatch], str]


def closed(known: dict[str, KernelDevice], patch: pytest.MonkeyPatch) -> str:
    """Refuse to open a device, as a device cgroup does; root may open any file."""
    patch.setattr(devices, "why_closed", no_access)
    return "card0"


def missing(known: dict[str, KernelDevice], patch: pytest.MonkeyPatch) -> str:
    file = known["card0"].file
    assert file is not None
    file.unlink()
    return "card0"


def unlisted(about: KernelDevice) -> Plant:
    """A device that libibverbs does not list, and about which the kernel knows that much."""

    def plant(known: dict[str, KernelDevice], patch: pytest.MonkeyPatch) -> str:
        known["card9"] = about._replace(file=about.file and known["card1"].file)
        return "card9"

    return plant


FILE = Path("uverbs")
CASES: dict[str, tuple[Plant, UnavailableReason, str, str, type[McastError]]] = {
    "closed file": (
        closed,
        UnavailableReason.NO_PERMISSION,
        "uverbs0: Operation not permitted",
        "--device=",
        PermissionDenied,
    ),
    "no file": (
        missing,
        UnavailableReason.NO_DEVICE_FILE,
        "there is no device file",
        "--device=",
        DeviceGone,
    ),
    "no ib_uverbs": (
        unlisted(KernelDevice(None)),
        UnavailableReason.NO_DEVICE_FILE,
        "ib_uverbs has made no device file",
        "modprobe ib_uverbs",
        DeviceGone,
    ),
    "no provider": (
        unlisted(KernelDevice(FILE, driver=SIW)),
        UnavailableReason.NO_PROVIDER,
        "no provider in libibverbs for the driver siw",
        "ibverbs-providers",
        DeviceGone,
    ),
    "another namespace": (
        unlisted(KernelDevice(FILE, here=False)),
        UnavailableReason.OTHER_NAMESPACE,
        "not in this network namespace",
        "rdma dev set card9 netns",
        DeviceGone,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_device_is_left_out_alone(
    case: str,
    card: Card,
    known: dict[str, KernelDevice],
    backend: CardBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is named with its reason and fix, also by the error of a bind to it; another device works."""
    plant, reason, detail, fix, kind = CASES[case]
    name = plant(known, monkeypatch)
    _at_lo(card, name)
    (left_out,) = backend.unusable_devices()
    assert (left_out.name, left_out.reason) == (name, reason)
    assert detail in left_out.detail
    assert fix in left_out.fix
    assert HERE in left_out.addresses
    assert name not in [device.name for device in backend.devices()]
    for bind, device in ((HERE, None), (None, name)):
        with pytest.raises(kind) as caught:
            open_endpoint(backend, bind, device=device)
        (cause,) = caught.value.causes
        assert f"{name} is left out: " in str(caught.value)
        assert (detail in cause.why, fix in cause.next_step) == (True, True)
    with pytest.raises(ValueError, match=f"no port has the address 10.9.9.9; .*; left out: {name}: "):
        open_endpoint(backend, "10.9.9.9")
    with open_endpoint(backend, "10.0.0.2") as endpoint:
        endpoint.join(GROUP).send(b"hello")


def test_a_bind_of_the_contract_names_the_device(
    card: Card, known: dict[str, KernelDevice], backend: CardBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "why_closed", no_access)
    _at_lo(card, "card0")
    cm_id = backend.event_channel().create_id()
    with pytest.raises(PermissionDenied, match=r"bind_addr\(src=127.0.0.1\): EPERM: card0 is left out"):
        cm_id.bind_addr(HERE)


IN_SYSFS = {
    "Soft-RoCE": ("parent", "lo\n"),
    "an adapter": ("device/net/lo/mtu", "1500\n"),
    "a VLAN": ("ports/1/gid_attrs/ndevs/3", "lo\n"),
    "IPoIB": ("ports/1/gids/0", "fe80:0000:0000:0000:0000:0000:0000:0001\n"),
}


@pytest.mark.parametrize("case", IN_SYSFS)
def test_its_addresses_are_known_without_asking(
    case: str,
    card: Card,
    known: dict[str, KernelDevice],
    backend: CardBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the interfaces that sysfs names, so that a bind to one names the device."""
    path, text = IN_SYSFS[case]
    assert card.sysfs is not None
    file = card.sysfs / "card0" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    monkeypatch.setattr(ipoib, "port_gids", lambda: {"lo": Gid("fe80::1")})
    monkeypatch.setattr(devices, "why_closed", no_access)
    (left_out,) = backend.unusable_devices()
    assert HERE in left_out.addresses


def test_a_device_that_is_renamed_is_not_left_out(
    card: Card, known: dict[str, KernelDevice], backend: CardBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that changed during the search is read again: udev renames a device soon after it has come."""
    before = {"card9": known["card0"]._replace(here=False), "card1": known["card1"]}
    answers = iter((before, known))
    monkeypatch.setattr(devices, "kernel_devices", lambda: next(answers, known))
    assert backend.unusable_devices() == ()


def test_an_old_name_is_no_missing_provider(known: dict[str, KernelDevice], backend: CardBackend) -> None:
    """libibverbs lists a device by the name that it had when the process listed it first."""
    known["new0"] = known.pop("card0")
    (left_out,) = backend.unusable_devices()
    assert (left_out.name, left_out.fix) == ("new0", "start the process again")
    assert left_out.detail == "renamed since this process has listed it: libibverbs lists card0"
    assert [device.name for device in backend.devices()] == ["card0", "card1"]


def test_a_look_ends_while_devices_come_and_go(
    known: dict[str, KernelDevice], backend: CardBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = count()
    monkeypatch.setattr(devices, "kernel_devices", lambda: {f"new{next(numbers)}": KernelDevice(None)})
    assert [device.name for device in backend.devices()] == ["card0", "card1"]


def test_a_name_that_is_no_text(card: Card, backend: CardBackend) -> None:
    """The kernel takes any bytes; the device is left out alone, and named as a shell takes it."""
    card.add(ethernet_port("10.0.0.1"), name=b"card\xff", guid=1)
    card.add(ethernet_port("10.0.0.2"), name="kärtchen".encode(), guid=2)
    assert [device.name for device in backend.devices()] == ["kärtchen"]
    (left_out,) = backend.unusable_devices()
    assert (left_out.name, left_out.reason) == ("card\\xff", UnavailableReason.BROKEN)
    assert left_out.fix == "rename it: rdma dev set $'card\\xff' name NAME"


def test_folders_that_go_during_the_look(
    card: Card, known: dict[str, KernelDevice], backend: CardBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders vanish as those of a device that is removed: sysfs has shown them a moment before."""
    assert card.sysfs is not None
    (card.sysfs / "card0/device/net").mkdir(parents=True)

    def gone(*_: object) -> Iterator[Path]:
        raise FileNotFoundError(E.ENOENT, "No such file or directory")

    missing(known, monkeypatch)
    monkeypatch.setattr(ipoib, "port_gids", dict)
    monkeypatch.setattr(Path, "iterdir", gone)
    monkeypatch.setattr(Path, "glob", gone)
    assert [device.name for device in backend.devices()] == ["card1"]
    assert backend._port_counters("card0", 1) == {}


# --- a process that can open no more files ---------------------------------------------------------


def full(*_: object) -> dict[str, KernelDevice]:
    raise OSError(E.EMFILE, "Too many open files")


def test_a_process_without_descriptors_is_told(
    known: dict[str, KernelDevice], backend: CardBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither devices nor permissions are at fault, so the fix is another."""
    monkeypatch.setattr(availability, "why_closed", lambda file: None)
    monkeypatch.setattr(devices, "kernel_devices", full)
    by_devices = availability.judge(availability.gather())
    monkeypatch.setattr(availability, "why_closed", lambda file: OSError(E.EMFILE, "Too many open files"))
    for status in (by_devices, availability.judge(availability.gather())):
        assert (status.available, status.reason) == (False, UnavailableReason.BROKEN)
        assert "Too many open files" in status.detail
        assert "\n" not in status.detail
        assert "ulimit -n" in status.fix
    with pytest.raises(McastError, match=r"devices\(.*EMFILE"):
        backend.devices()


def test_interfaces_that_cannot_be_asked_are_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a port would seem to have no address."""
    monkeypatch.setattr(socket, "if_indextoname", full)
    with pytest.raises(McastError, match="EMFILE"):
        devices._netdevs("card0", {1})


def test_the_error_of_a_bind_is_not_hidden(
    card: Card, backend: CardBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that of the search for its reason."""
    card.ethernet(1)
    cm_id = backend.event_channel().create_id()
    monkeypatch.setattr(devices, "kernel_devices", full)
    with pytest.raises(AddressNotAvailable, match="bind_addr"):
        cm_id.bind_addr("10.9.9.9")


def test_hundreds_of_devices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond the room would seem to have no provider."""
    there = [f"mlx5_{number}" for number in range(1000)]

    def names(out: Any, room: int) -> int:
        for number, name in enumerate(there[:room]):
            out[number] = name.encode()
        return min(room, len(there))

    loaded = native.load()
    monkeypatch.setattr(loaded, "_lib", SimpleNamespace(mcast_device_names=names))
    assert loaded.device_names() == tuple(there)


# --- drivers without multicast ---------------------------------------------------------------------


def test_a_driver_without_multicast_is_named_first(
    known: dict[str, KernelDevice], backend: CardBackend
) -> None:
    """Before a join, whatever limits the device reports."""
    known["card0"] = known["card0"]._replace(driver=SIW)
    (first, second) = backend.devices()
    assert (first.driver, bool(first.no_multicast), second.driver) == ("siw", True, "")
    with pytest.raises(NotSupported, match="its driver siw does not implement ibv_attach_mcast"):
        open_endpoint(backend, "10.0.0.1")


def test_a_newer_driver_is_tried(
    known: dict[str, KernelDevice], backend: CardBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have multicast by now; doctor says that it is not known, and a failed join names the driver."""
    monkeypatch.setattr(Native, "verbs_library", lambda self: "/usr/lib/libibverbs.so.1.20.99.0")
    known["card0"] = known["card0"]._replace(driver=SIW)
    assert {(one.driver, one.no_multicast) for one in backend.devices()} == {("siw", ""), ("", "")}
    with open_endpoint(backend, "10.0.0.1") as endpoint:
        endpoint.join(GROUP).send(b"hello")


def test_the_library_is_known_by_its_file(card: Card) -> None:
    assert native.load().verbs_library() == os.environ["MCAST_LIBIBVERBS"]


def test_an_unknown_driver_is_tried(known: dict[str, KernelDevice], backend: CardBackend) -> None:
    with open_endpoint(backend, "10.0.0.1") as endpoint:
        endpoint.join(GROUP).send(b"hello")


def test_a_failed_attach_names_the_driver(
    card: Card, known: dict[str, KernelDevice], backend: CardBackend
) -> None:
    """At the level of the contract a program may try."""
    known["card0"] = known["card0"]._replace(driver=SIW)
    channel = backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr("10.0.0.1")
    cm_id.create_qp(QpInit())
    card.fail("ibv_attach_mcast", E.EOPNOTSUPP)
    cm_id.join_multicast(GROUP)
    event = channel.get_event(10)
    assert event is not None
    assert (event.type, event.errno) == (CmEventType.MULTICAST_ERROR, E.EOPNOTSUPP)
    with pytest.raises(NotSupported, match="card0 has no multicast, for its driver siw"):
        event.check()
