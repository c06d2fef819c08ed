"""The kernel's view of its devices, planted as sysfs and as answers of netlink."""

from __future__ import annotations

import errno as E
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcast.backends.net import netlink
from mcast.backends.net.netlink import RdmaDevice
from mcast.backends.rdma import kernel_devices
from mcast.backends.rdma.drivers import DRIVERS, RDMA_CORE, is_newer
from mcast.backends.rdma.kernel_devices import KernelDevice, why_closed

RXE, SIW = 14, 18


def no_answer() -> dict[str, RdmaDevice]:
    raise OSError(E.EPROTONOSUPPORT, "netlink has no such family")


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plants devices: in sysfs, by the names of their device files, and as netlink lists them."""
    sysfs, verbs = tmp_path / "infiniband", tmp_path / "infiniband_verbs"
    monkeypatch.setattr(kernel_devices, "SYSFS", sysfs)
    monkeypatch.setattr(kernel_devices, "VERBS", verbs)
    monkeypatch.setattr(kernel_devices, "DEVICE_FILES", tmp_path / "dev")

    def planted(
        files: dict[str, str], here: Callable[[], dict[str, RdmaDevice]], shown: tuple[str, ...] = ()
    ) -> None:
        for file, device in files.items():
            (verbs / file).mkdir(parents=True)
            (verbs / file / "ibdev").write_text(f"{device}\n")
        for device in shown:
            (sysfs / device).mkdir(parents=True)
        monkeypatch.setattr(netlink, "rdma_devices", here)

    return planted


def test_devices_of_other_namespaces_are_known(plant: Callable[..., None], tmp_path: Path) -> None:
    """Netlink lists those of this namespace, sysfs lists the device files of all."""
    plant(
        {"uverbs0": "rxe0", "uverbs1": "mlx5_1"},
        lambda: {"rxe0": RdmaDevice("uverbs0", RXE), "siw0": RdmaDevice("", SIW), "new0": RdmaDevice()},
    )
    assert kernel_devices.kernel_devices() == {
        "mlx5_1": KernelDevice(tmp_path / "dev/uverbs1", here=False),
        "new0": KernelDevice(None),
        "rxe0": KernelDevice(tmp_path / "dev/uverbs0", driver=DRIVERS[RXE]),
        "siw0": KernelDevice(None, driver=DRIVERS[SIW]),
    }


def test_sysfs_serves_where_netlink_does_not(plant: Callable[..., None], tmp_path: Path) -> None:
    plant({"uverbs0": "rxe0"}, no_answer, shown=("rxe0", "rxe1"))
    assert kernel_devices.kernel_devices() == {
        "rxe0": KernelDevice(tmp_path / "dev/uverbs0"),
        "rxe1": KernelDevice(None),
    }


def test_a_host_without_rdma_has_no_device(plant: Callable[..., None]) -> None:
    plant({}, no_answer)
    assert kernel_devices.kernel_devices() == {}


def test_a_device_that_goes_meanwhile_has_no_file(plant: Callable[..., None], tmp_path: Path) -> None:
    plant({"uverbs0": "rxe0", "uverbs1": "rxe1"}, no_answer)
    (tmp_path / "infiniband_verbs/uverbs1/ibdev").unlink()
    assert list(kernel_devices.kernel_devices()) == ["rxe0"]


def test_a_device_file_is_opened_not_only_looked_at(tmp_path: Path) -> None:
    """A device cgroup refuses an open that access(2) allows; a folder stands for such a file."""
    (tmp_path / "uverbs0").touch()
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert why_closed(tmp_path / "uverbs0") is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for file, errno in ((tmp_path / "uverbs1", E.ENOENT), (tmp_path, E.EISDIR)):
        closed = why_closed(file)
        assert closed is not None
        assert closed.errno == errno
    assert os.access(tmp_path, os.R_OK | os.W_OK)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("@HH", 4 + len(value), kind) + value.ljust(-(-len(value) // 4) * 4, b"\0")


def test_netlink_tells_file_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attributes of <rdma/rdma_netlink.h>, by their numbers there; the second device has no file."""
    asked = []

    def answer(family: int, request: int, flags: int, payload: bytes) -> Iterator[bytes]:
        asked.append((family, request, payload))
        if request == 5 << 10 | 1:
            for index, name in enumerate((b"rxe0\0", b"siw0\0")):
                yield attribute(1, struct.pack("@I", index)) + attribute(2, name)
        elif payload.startswith(attribute(1, struct.pack("@I", 0))):
            yield attribute(70, b"uverbs7\0") + attribute(73, struct.pack("@I", RXE))
        else:
            raise OSError(E.ENODATA, "no such device file")

    monkeypatch.setattr(netlink, "_ask", answer)
    assert netlink.rdma_devices() == {"rxe0": RdmaDevice("uverbs7", RXE), "siw0": RdmaDevice()}
    assert asked[1] == (20, 5 << 10 | 15, attribute(1, bytes(4)) + attribute(69, b"uverbs\0"))


class Answering:
    """A netlink socket of which the kernel's answer is made up."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def send(self, request: bytes) -> int:
        return len(request)

    def recv(self, size: int) -> bytes:
        return self.answer[:size]


CUT_OFF = {
    "no length": bytes(16),
    "longer than all": struct.pack("@IHHII", 64, 5121, 0, 1, 0) + bytes(8),
    "half a header": b"\x10\0\0",
}


@pytest.mark.parametrize("answer", CUT_OFF.values(), ids=CUT_OFF)
def test_a_cut_off_answer_is_none(
    answer: bytes, plant: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one without a length would be read for ever."""
    plant({"uverbs0": "rxe0"}, netlink.rdma_devices, shown=("rxe0",))
    monkeypatch.setattr(socket, "socket", lambda *kind: Answering(answer))
    assert kernel_devices.kernel_devices() == {"rxe0": KernelDevice(tmp_path / "dev/uverbs0")}


def test_an_answer_without_details_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes that the kernel leaves out are unknown."""

    def answer(family: int, request: int, flags: int, payload: bytes) -> Iterator[bytes]:
        if request == 5 << 10 | 1:
            yield attribute(1, bytes(4)) + attribute(2, b"rxe0\0")
            yield attribute(1, bytes(4))
        else:
            yield attribute(73, b"\x0e")

    monkeypatch.setattr(netlink, "_ask", answer)
    assert netlink.rdma_devices() == {"rxe0": RdmaDevice("", RXE if sys.byteorder == "little" else 0)}


def test_nobody_knows_which_devices_are_elsewhere(plant: Callable[..., None], tmp_path: Path) -> None:
    """A container without netlink of RDMA, and with half of /sys: the devices are taken for its own."""
    plant({"uverbs0": "rxe0"}, no_answer)
    assert kernel_devices.kernel_devices() == {"rxe0": KernelDevice(tmp_path / "dev/uverbs0")}


def test_a_process_without_descriptors_learns_nothing(plant: Callable[..., None]) -> None:
    """That is an error of the process, and no device is in another namespace by it."""

    def full() -> dict[str, RdmaDevice]:
        raise OSError(E.EMFILE, "Too many open files")

    plant({"uverbs0": "rxe0"}, full, shown=("rxe0",))
    with pytest.raises(OSError, match="Too many open files"):
        kernel_devices.kernel_devices()


def test_a_name_that_is_no_text_is_read(plant: Callable[..., None], tmp_path: Path) -> None:
    plant({"uverbs0": "rxe0", "uverbs1": ""}, dict)
    (tmp_path / "infiniband_verbs/uverbs0/ibdev").write_bytes(b"rxe\xff \n")
    assert list(kernel_devices.kernel_devices()) == [os.fsdecode(b"rxe\xff ")]


# --- the table of drivers ------------------------------------------------------------------

WITHOUT = {"bnxt_re", "efa", "erdma", "hns", "ionic", "mana", "qedr", "siw", "vmw_pvrdma"}


def test_the_drivers_without_multicast_are_named() -> None:
    """`git grep -L attach_mcast -- providers` lists them in rdma-core 65.0."""
    assert {one.name for one in DRIVERS.values() if not one.attaches} == WITHOUT
    for one in DRIVERS.values():
        assert bool(one.no_multicast) is (one.name in WITHOUT)
        assert not one.no_multicast or (one.name in one.no_multicast and RDMA_CORE in one.no_multicast)
    assert len({one.name for one in DRIVERS.values()}) == len(DRIVERS)


NAMES = {
    "/usr/lib/libibverbs.so.1.14.44.0": False,
    "/usr/lib/libibverbs.so.1.16.65.0": False,
    "/usr/lib/libibverbs.so.1.16.65.1": True,
    "/opt/lib/libibverbs.so.1.20.100.0": True,
    "/opt/lib/libibverbs.so.1": False,
    "card.so": False,
    "": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_library_tells_its_version(name: str, tmp_path: Path) -> None:
    link = tmp_path / "libibverbs.so.1"
    link.symlink_to(name or "nothing")
    assert (is_newer(name), is_newer(str(link))) == (NAMES[name], NAMES[name])
