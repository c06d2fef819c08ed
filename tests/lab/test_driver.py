"""Building the InfiniBand module, and what is refused before a guest boots."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rdma_lab import LabMachine, children, driver, host, kernels
from rdma_lab.cli import app
from rdma_lab.errors import LabUnavailableError

KERNEL = kernels.Kernel("6.1.0-mcast", Path("/nowhere/vmlinuz"), Path("/nowhere/modules"))


def test_a_module_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the same sources and symbols; other sources are another module."""
    kernel = kernels.Kernel(KERNEL.version, KERNEL.image, tmp_path / "modules")
    (kernel.modules / "build").mkdir(parents=True)
    (kernel.modules / "build/Module.symvers").write_text("symbols")
    built: list[list[str]] = []

    def make(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        built.append(command)
        (folder,) = (word.removeprefix("M=") for word in command if word.startswith("M="))
        assert (Path(folder) / "Kbuild").exists()
        (Path(folder) / "softib.ko").write_text("module")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(children, "run", make)
    one = driver.module(kernel)
    assert one == b"module"
    assert driver.module(kernel) == one
    assert len(built) == 1
    (kernel.modules / "build/Module.symvers").write_text("other symbols")
    assert driver.module(kernel) == one
    assert len(built) == 2
    stored = list((tmp_path / "cache").rglob("*.*"))
    assert [path.name for path in stored if path.is_file()] == ["softib.ko"] * 2
    for damage in (b"", b"modul", stored[-1].read_bytes().replace(b"u", b"v")):
        for path in stored:
            if path.is_file():
                path.write_bytes(damage)
        built.clear()
        assert driver.module(kernel) == one
        assert len(built) == 1, "one that is damaged is built again"


def test_without_a_cache_a_module_is_built_each_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert driver.no_send_only_library().startswith(b"\x7fELF")
    (message,) = caplog.messages
    assert message.endswith(
        "no_send_only.so could not be saved, so later runs build it again: Not a directory"
    )


def test_failed_build_shows_the_compilers_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A build that fails is told in the compiler's words."""

    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 2, "", "softib.h:1: no such thing\n")

    kernel = kernels.Kernel(KERNEL.version, KERNEL.image, tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/Module.symvers").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(children, "run", fail)
    with pytest.raises(LabUnavailableError, match=r"cannot be built against .*softib\.h:1: no such thing"):
        driver.module(kernel)


def test_old_opensm_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library that makes OpenSM an older one is compiled once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = driver.no_send_only_library()
    assert made.startswith(b"\x7fELF")
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
    assert driver.no_send_only_library() == made
    (stored,) = (tmp_path / "rdma-lab/opensm").glob("*/*")
    stored.unlink()
    with pytest.raises(LabUnavailableError, match="cannot be built without gcc: apt-get install gcc"):
        driver.no_send_only_library()


def test_without_headers_the_line_to_type_is_told() -> None:
    with pytest.raises(LabUnavailableError, match=r": apt-get install linux-headers-6\.1\.0-mcast$"):
        driver.module(KERNEL)


def test_the_headers_of_a_fetched_kernel_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To install them, apt would install that kernel, and the lab would boot it from then on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = kernels.fetched_dir() / "6.12.9-amd64"
    kernel = kernels.Kernel("6.12.9-amd64", root / "boot/vmlinuz", root / "lib/modules/6.12.9-amd64")
    with pytest.raises(LabUnavailableError, match=r": rdma-lab kernel 6\.12\.9-amd64$"):
        driver.module(kernel)
    headers = root / "usr/src/linux-headers-6.12.9-amd64"
    headers.mkdir(parents=True)
    (headers / "Module.symvers").touch()
    assert driver.headers(kernel) == headers


def test_headers_match_the_booted_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The headers to install are those of the kernel that is booted.

    The newest headers, which linux-headers-amd64 has, may be of another kernel and bring that along.
    """
    kernel = kernels.Kernel("6.1.0-9-amd64", tmp_path / "vmlinuz", tmp_path / "lib/modules/6.1.0-9-amd64")
    monkeypatch.setattr(kernels, "find", lambda: kernel)
    (need,) = (need for need in host.needs() if need.name == "InfiniBand: kernel headers")
    assert (need.package, need.found) == ("linux-headers-6.1.0-9-amd64", None)


def test_default_headers_are_not_for_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of the default kernel are not asked for another."""
    monkeypatch.setattr(driver, "headers", lambda kernel: None)
    host.require("infiniband")


def test_a_kernel_without_rdmavt_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text("kernel/ib_umad.ko.xz:\nkernel/rdma_ucm.ko.xz:\n")
    (tmp_path / "modules.builtin").write_text("kernel/ib_ipoib.ko\n")
    with pytest.raises(LabUnavailableError, match=r"6\.1\.0-mcast .* it has no module rdmavt; "):
        driver.write_job(tmp_path, kernels.Kernel(KERNEL.version, KERNEL.image, tmp_path), 2, 1)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"ports": 65}, "65 ports asked for: the lab makes 1 to 64"),
        ({"switches": 0}, "0 switches asked for: on infiniband the lab makes 1 to 16"),
        ({"switches": 17, "ports": 64}, "17 switches asked for: on infiniband the lab makes 1 to 16"),
        ({"ports": 64}, "1024 MiB of memory for 64 ports: .* take 1664 MiB; .*--memory 1664"),
        ({"ports": 4, "memory": 300}, "300 MiB of memory for 4 ports: .* take 344 MiB"),
        ({"switches": 6, "ports": 4}, "6 switches for 4 ports: a leaf would have none"),
        ({"fabric": "roce", "switches": 2}, "2 switches asked for: on roce the lab makes 1 bridge"),
        ({"fabric": "ethernet"}, "no fabric ethernet: give roce or infiniband"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_made_is_refused_before_a_boot(wrong: dict[str, Any], expected: str) -> None:
    with pytest.raises(LabUnavailableError, match=expected):
        LabMachine(**({"fabric": "infiniband"} | wrong))


def test_the_command_says_so_in_one_sentence() -> None:
    done = CliRunner().invoke(app, ["run", "--fabric", "infiniband", "--switches", "99", "--", "/bin/true"])
    assert done.exit_code == 125
    assert done.stderr == "rdma-lab: 99 switches asked for: on infiniband the lab makes 1 to 16\n"


def test_only_infiniband_wants_its_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "INFINIBAND", (("OpenSM", "opensm", lambda: None),))
    host.require()
    with pytest.raises(LabUnavailableError, match=r": OpenSM: .*apt-get install -y \S+ opensm"):
        host.require("infiniband")
    assert [need.name for need in host.needs() if need.found is None] == ["OpenSM"]
