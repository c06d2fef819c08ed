"""`udp` in fresh Debians without RDMA packages or a compiler, for a user without capabilities.

Two hosts, Debian 12 and Debian 13, are connected by a cable. Each has the wheel, installed by pip.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

import pytest

from ..udp import conftest as udp
from .fresh import CLONE, HOME, SECONDS, UID, FreshRoot, fresh_root, needs_root

pytestmark = [needs_root, pytest.mark.long, pytest.mark.timeout(SECONDS + 60)]

RELEASES = ("bookworm", "trixie")
"""Debian 12 and Debian 13."""
GROUP, BOUND = "239.1.1.1", 120.0
PURE = "/opt/pure/bin"
"""Programs of an environment whose package is built there, where there is no compiler."""
EVERYTHING = """
import importlib, pkgutil, mcast.backends.udp
for module in pkgutil.walk_packages(mcast.backends.udp.__path__, "mcast.backends.udp."):
    importlib.import_module(module.name)
for name in dir(mcast):
    getattr(mcast, name)
with mcast.open_backend("udp") as backend:
    print(*(device.name for device in backend.devices()))
assert not [line for line in open("/proc/self/maps") if "ibverbs" in line or "rdmacm" in line]
"""
DIRECTIONS = pytest.mark.parametrize("direction", [RELEASES, RELEASES[::-1]], ids="-to-".join)
EACH = pytest.mark.parametrize("release", RELEASES)

hosts = udp.hosts


@pytest.fixture(scope="module")
def roots(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, FreshRoot]]:
    """Both Debians with the wheel in /opt/mcast."""
    folder = tmp_path_factory.mktemp("roots")
    with ExitStack() as stack, ThreadPoolExecutor(len(RELEASES)) as pool:
        made = list(pool.map(lambda release: stack.enter_context(fresh_root(release, folder)), RELEASES))
        for root in made:
            assert_lacks_everything(root)
        for root in made:
            shutil.copy(wheel, root.root / "opt")
        install = (
            f"python3 -m venv /opt/mcast; /opt/mcast/bin/pip install -q '/opt/{wheel.name}[conformance]'"
        )
        list(pool.map(lambda root: root.install(install), made))
        yield dict(zip(RELEASES, made, strict=True))


def assert_lacks_everything(root: FreshRoot) -> None:
    """Check that no package of RDMA and no compiler is installed."""
    status, packages = root.run("dpkg-query", "-W")
    assert status == 0, packages
    assert not [line for line in packages.splitlines() if "ibverbs" in line or "rdma" in line]
    for name in ("cc", "gcc", "rdma"):
        assert root.run("sh", "-c", f"command -v {name}")[0] != 0, name


def wait_for_member(host: udp.Host) -> None:
    """Wait until the kernel of the host has joined the group."""
    wanted, end = "010101EF", monotonic() + BOUND
    while wanted not in Path(f"/proc/{host.pid}/net/igmp").read_text():
        assert monotonic() < end, "nobody joins"
        sleep(0.05)


@EACH
def test_user_has_nothing(roots: dict[str, FreshRoot], release: str) -> None:
    """Run without a capability, and without a way to get one."""
    status, said = roots[release].run("cat", "/proc/self/status")
    assert status == 0, said
    fields = dict(line.split(":\t", 1) for line in said.splitlines())
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert fields["Uid"].split() == [str(UID)] * 4
    assert fields["NoNewPrivs"] == "1"


@DIRECTIONS
def test_file_passes(
    roots: dict[str, FreshRoot], hosts: tuple[udp.Host, udp.Host], direction: tuple[str, str]
) -> None:
    """Send a file by the two commands of the page, between hosts that share a cable and nothing else."""
    sender, receiver = (roots[release] for release in direction)
    here, there = hosts
    film = sender.root / HOME.relative_to("/") / "film.mkv"
    film.write_bytes(os.urandom(20_000_000))
    copy = receiver.root / HOME.relative_to("/") / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    command = ("mcast", "recv", GROUP, "-o", "copy", "--backend", "udp")
    with receiver.popen(*command, network=f"/proc/{there.pid}/ns/net") as receiving:
        try:
            wait_for_member(there)
            sending = ("mcast", "send", "film.mkv", GROUP, "--backend", "udp")
            status, said = sender.run(*sending, network=f"/proc/{here.pid}/ns/net")
            assert status == 0, said
            heard, _ = receiving.communicate(timeout=BOUND)
        finally:
            receiving.kill()
    assert receiving.returncode == 0, heard
    (got,) = (path for path in (copy, copy / "film.mkv") if path.is_file())
    assert hashlib.sha256(got.read_bytes()).digest() == hashlib.sha256(film.read_bytes()).digest()
    assert got.stat().st_uid == UID


@EACH
def test_everything_imports(roots: dict[str, FreshRoot], release: str) -> None:
    """Import each module of `udp` and each name of the package without libibverbs and librdmacm."""
    status, said = roots[release].run("/opt/mcast/bin/python", "-c", EVERYTHING)
    assert status == 0, said
    assert "lo" in said.split()


@EACH
def test_doctor_finds_no_problem(
    roots: dict[str, FreshRoot], hosts: tuple[udp.Host, udp.Host], release: str
) -> None:
    network = f"/proc/{hosts[0].pid}/ns/net"
    status, said = roots[release].run("mcast", "doctor", "--backend", "udp", network=network)
    assert status == 0, said
    assert "RoCEv2 over UDP sockets on lo, eth0" in said
    assert "no problems" in said


@EACH
def test_suite_conforms(roots: dict[str, FreshRoot], hosts: tuple[udp.Host, udp.Host], release: str) -> None:
    """Run the suite on loopback, because the user may make no network namespace."""
    network = f"/proc/{hosts[0].pid}/ns/net"
    status, said = roots[release].run("mcast", "conformance", "--backend", "udp", network=network)
    assert status == 0, said
    assert said.rstrip().endswith("conformance: udp conforms")
    found = re.search(r"^(\d+) passed", said, re.M)
    assert found is not None
    assert int(found[1]) > 300


@EACH
def test_error_says_how_to_build(roots: dict[str, FreshRoot], release: str) -> None:
    """Built without a compiler, the package has no `udp`, and names the line that builds it."""
    root = roots[release]
    root.install(f"python3 -m venv {PURE}/..; {PURE}/pip install -q {CLONE}")
    status, said = root.run(f"{PURE}/mcast", "recv", GROUP, "-o", "copy", "--backend", "udp")
    assert status == 2
    assert "mcast: backend 'udp': extension not built" in said
    (fix,) = re.findall(r"(apt-get install .*?) && in a clone: (pip install .*\.)$", said, re.M)
    status, said = root.run(f"{PURE}/mcast", "doctor", "--backend", "udp")
    assert status == 1
    assert " && in a clone: ".join(fix) in said
    assert root.run(f"{PURE}/python", "-c", "import mcast; mcast.open_backend('sim').close()")[0] == 0
    packages, build = fix
    root.install(f"{packages} -qy --no-install-recommends; cd {CLONE}; PATH={PURE}:$PATH {build}")
    status, said = root.run(f"{PURE}/python", "-c", "import mcast; mcast.open_backend('udp').close()")
    assert status == 0, said
