"""Checks of a host that lacks something; no guest is booted."""

import json
import os
import struct
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rdma_lab import LabMachine, cli, host, kernels
from rdma_lab.cli import app
from rdma_lab.errors import LabError, LabUnavailableError

PACKAGES = ("busybox-static", "file", "iproute2", "kmod", "linux-image-amd64", "qemu-system-x86")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with nothing on the PATH, no kernel and no virtme-ng."""

    def no_module(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host, "SYSTEM_PATH", str(tmp_path))
    monkeypatch.setattr(host, "find_spec", no_module)
    monkeypatch.setattr(kernels, "default_roots", lambda: (tmp_path,))


@pytest.mark.usefixtures("bare")
def test_one_line_installs_all_that_is_missing() -> None:
    missing = [need for need in host.needs() if need.boots]
    assert all(need.found is None for need in missing)
    sudo = "" if os.geteuid() == 0 else "sudo "
    install = f"{sudo}apt-get install -y --no-install-recommends {' '.join(PACKAGES)}"
    assert host.apt_line(missing) == f"{install} && pip install virtme-ng"


def test_no_line_when_nothing_is_missing() -> None:
    assert host.apt_line([]) == ""


@pytest.mark.usefixtures("bare")
def test_a_boot_is_refused_with_that_line() -> None:
    with pytest.raises(
        LabUnavailableError, match=r"qemu-system-x86_64.*: .*apt-get install -y \S+ busybox-static"
    ):
        host.require()


@pytest.mark.usefixtures("bare")
def test_run_says_it_in_one_line_without_a_traceback() -> None:
    done = CliRunner().invoke(app, ["run", "--", "/bin/true"])
    assert done.exit_code == 125
    assert done.stdout == ""
    assert done.stderr.startswith("rdma-lab: not on this machine: qemu-system-x86_64, ")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("bare")
def test_check_lists_it_and_exits_1() -> None:
    done = CliRunner().invoke(app, ["check"])
    assert done.exit_code == 1
    assert "missing qemu-system-x86_64\n" in done.stdout
    assert "\nto install the rest: " in done.stdout
    report = json.loads(CliRunner().invoke(app, ["check", "--json"]).stdout)
    assert {need["package"] for need in report["needs"] if need["boots"]} == {*PACKAGES, ""}
    assert report["kvm"] is False
    assert all(package in report["fix"] for package in PACKAGES)


@pytest.mark.usefixtures("bare")
def test_check_of_one_fabric_asks_for_no_other() -> None:
    def packages(*options: str) -> set[str]:
        report = json.loads(CliRunner().invoke(app, ["check", "--json", *options]).stdout)
        return {need["package"] for need in report["needs"]}

    of_infiniband = {"gcc", "libc6-dev", "make", "opensm", "linux-headers-amd64"}
    assert packages("--fabric", "infiniband") == packages()
    assert packages() - packages("--fabric", "roce") == of_infiniband


def test_error_of_check_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the lab, and a wrong option, which ends the command before its options are read."""

    def fail(_: object) -> None:
        raise LabError("no such luck")

    monkeypatch.setattr(cli, "look_up_needs", fail)
    done = CliRunner().invoke(app, ["check", "--json"])
    assert (json.loads(done.stdout), done.exit_code) == ({"error": "no such luck", "status": 125}, 125)
    assert done.stderr == "rdma-lab: no such luck\n"
    assert CliRunner().invoke(app, ["check"]).stdout == ""
    for wrong in (["--fabric", "ethernet"], ["--no-such-option"]):
        command = [sys.executable, "-m", "rdma_lab", "check", "--json", *wrong]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        said = json.loads(ended.stdout)
        assert said["status"] == ended.returncode == 2
        assert ended.stderr == f"rdma-lab check: {said['error']}\n"


def test_check_is_content_here() -> None:
    done = CliRunner().invoke(app, ["check"])
    assert done.exit_code == 0, done.stdout
    assert "missing" not in done.stdout


def test_check_fits_80_columns_whatever_the_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ("/y".ljust(59, "x"), "/y".ljust(60, "x"), "/y".ljust(200, "x"))
    found = [host.Need("libibverbs", path, "", False) for path in paths]
    monkeypatch.setattr(cli, "look_up_needs", lambda _: found)
    monkeypatch.setattr(cli, "kvm_problem", lambda: "none")
    lines = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["check"]).stdout.splitlines()
    assert [len(line) for line in lines[:4]] == [80, 80, 80, 54]
    assert paths[0] in lines[0]
    assert "..." + "x" * 55 in lines[1]


def test_only_a_static_busybox_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest's root has no libraries until the script that busybox runs has mounted them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host, "SYSTEM_PATH", "")
    busybox = tmp_path / "busybox"
    busybox.symlink_to("/bin/sh")
    assert host.static_busybox() is None
    busybox.unlink()
    busybox.touch(mode=0o755)
    for other in (b"", b"#!/bin/sh\nexec /opt/busybox-1.36/bin/busybox --a-wrapper $@\n", bytes(100)):
        busybox.write_bytes(other)
        assert host.static_busybox() is None
    made = struct.pack("<5s27xQ14xHH", b"\x7fELF\x02", 64, 56, 1)
    for kind, static in ((1, True), (3, False)):
        busybox.write_bytes(made.ljust(64, b"\0") + struct.pack("<I", kind))
        assert (host.static_busybox() is not None) is static


@pytest.mark.parametrize(
    ("qemu", "why"),
    [
        ("echo 'Kernel panic - not syncing: VFS'", ""),
        (
            "echo 'qemu: failed to initialize kvm: EPERM' >&2; exit 1",
            "ends early: qemu: failed",
        ),
        ("exit 3", "ends early: status 3"),
        ("exec sleep 600", "hangs: it was stopped after"),
    ],
)
def test_kvm_is_used_if_a_kernel_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qemu: str, why: str
) -> None:
    program = tmp_path / "qemu-system-x86_64"
    program.write_text(f"#!/bin/sh\n{qemu}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    opened = os.open

    def open_it(path: str, *flags: int) -> int:
        return opened(os.devnull if path == "/dev/kvm" else path, *flags)

    monkeypatch.setattr(os, "open", open_it)
    host.kvm_problem.cache_clear()
    try:
        found = host.kvm_problem()
    finally:
        host.kvm_problem.cache_clear()
    assert why in found
    assert bool(found) is bool(why)


def test_broken_kvm_is_reported_before_a_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KVM that does not work is said before anything is started."""
    monkeypatch.setattr(host, "kvm_problem", lambda: "/dev/kvm: Permission denied")
    with pytest.raises(LabUnavailableError, match="here: /dev/kvm: Permission denied; leave out --accel kvm"):
        LabMachine(accel="kvm").run(["true"])


def test_check_says_why_kvm_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "kvm_problem", lambda: "/dev/kvm: Permission denied")
    for exists in (False, True):
        monkeypatch.setattr(Path, "exists", lambda _, exists=exists: exists)
        shown = CliRunner().invoke(app, ["check"]).stdout
        assert ("\nKVM is not used: /dev/kvm: Permission denied\n" in shown) is exists
    report = json.loads(CliRunner().invoke(app, ["check", "--json"]).stdout)
    assert report["kvm_problem"] == "/dev/kvm: Permission denied"
