"""The archive that the lab puts behind virtme-ng's; no guest is booted."""

import subprocess
from pathlib import Path

import pytest

from rdma_lab import host, initramfs, kernels
from rdma_lab.errors import LabUnavailableError


def unpacked(archive: bytes, into: Path) -> dict[str, bytes]:
    busybox = host.static_busybox()
    assert busybox is not None
    subprocess.run([busybox, "cpio", "-i"], cwd=into, input=archive, check=True, stderr=subprocess.DEVNULL)
    return {str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*") if path.is_file()}


def test_an_archive_holds_what_was_put_in(tmp_path: Path) -> None:
    contents = {"init": b"#!/bin/sh\n", "lab/bin/ip": bytes(range(256)) * 5, "lab/empty": b"", "a/b/c": b"x"}
    archive = initramfs.archive(contents)
    assert len(archive) % 4 == 0, "the next one may follow"
    assert unpacked(archive, tmp_path) == contents
    assert (tmp_path / "init").stat().st_mode & 0o111 == 0o111


def test_guest_has_modules_and_tools(tmp_path: Path) -> None:
    """A guest has its modules in order and tools that run."""
    kernel = kernels.find()
    file = tmp_path / "initramfs"
    file.write_bytes(b"")
    initramfs.add_ours(file, kernel, 5)
    root = tmp_path / "root"
    root.mkdir()
    found = unpacked(file.read_bytes(), root)
    settings = dict(line.split("=", 1) for line in found["lab/settings"].decode().splitlines())
    assert settings["PORTS"] == "5"
    order = settings["MODULES"].strip("'").split()
    assert [Path(path).name for path in order] == [
        f"{path.name.partition('.')[0]}.ko" for path in kernel.load_order()
    ]
    assert all(found[path.lstrip("/")].startswith(b"\x7fELF") for path in order)
    for name in initramfs.TOOLS:  # with nothing but what came along
        (loader,) = root.glob("lib*/ld-linux*")
        command: list[str | Path] = [
            loader,
            "--library-path",
            root / "lab/lib",
            "--list",
            root / "lab/bin" / name,
        ]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        libraries = [line.split()[2] for line in listed.splitlines() if "=>" in line]
        assert libraries
        assert all(path.startswith(str(root)) for path in libraries), listed


def test_a_module_that_cannot_be_inflated_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "rdma_rxe.ko.zst"
    module.write_bytes(b"in no known format")
    monkeypatch.setattr(kernels.Kernel, "load_order", lambda self: (module,))
    kernel = kernels.Kernel("6.1", tmp_path, tmp_path)
    with pytest.raises(LabUnavailableError, match=r"rdma_rxe.ko.zst cannot be decompressed here: apt-get"):
        initramfs.add_ours(tmp_path / "initramfs", kernel, 1)
