"""`udp` in fresh Debians without RDMA packages or a compiler, for a user without capabilities.

Two hosts, Debian 12 and Debian 13, are connected by a cable. Each has the wheel, installed by pip.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

import pytest

from ..rdma import test_wheel
from ..udp import conftest as udp
from .fresh import CLONE, HOME, SECONDS, UID, FreshRoot, fresh_root, needs_root

pytestmark = [needs_root, pytest.mark.long, pytest.mark.timeout(SECONDS + 60)]

RELEASES = ("bookworm", "trixie")
"""Debian 12 and Debian 13."""
GROUP, BOUND = "239.1.1.1", 120.0
PURE = "/opt/pure/bin"
"""An environment whose package was built there, where there is no compiler."""
DIRECTIONS = pytest.mark.parametrize("direction", [RELEASES, RELEASES[::-1]], ids="-to-".join)
EACH = pytest.mark.parametrize("release", RELEASES)

clone = test_wheel.clone
hosts = udp.hosts


@pytest.fixture(scope="module")
def roots(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, FreshRoot]]:
    """Both Debians with the wheel in /opt/mcast."""
    folder = tmp_path_factory.mktemp("roots")
    with ExitStack() as stack, ThreadPoolExecutor(len(RELEASES)) as pool:
        made = list(pool.map(lambda release: stack.enter_context(fresh_root(release, folder)), RELEASES))
        wheel = test_wheel.built(clone, MCAST_RDMA="1")
        for root in made:
            shutil.copy(wheel, root.root / "opt")
        install = f"python3 -m venv /opt/mcast; /opt/mcast/bin/pip install -q '/opt/{wheel.name}[conformance]'"
        list(pool.map(lambda root: root.install(install), made))
        yield dict(zip(RELEASES, made, strict=True))


def wait_for_member(host: udp.Host) -> None:
    """Until the kernel of the host has joined the group."""
    wanted, end = "010101EF", monotonic() + BOUND
    while wanted not in Path(f"/proc/{host.pid}/net/igmp").read_text():
        assert monotonic() < end, "nobody joins"
        sleep(0.05)


@EACH
def test_user_has_no_privilege(roots: dict[str, FreshRoot], release: str) -> None:
    """Nor is there a file of RDMA or a compiler: the wheel alone brings what `udp` needs."""
    status, said = roots[release].run("cat", "/proc/self/status")
    assert status == 0
    fields = dict(line.split(":\t", 1) for line in said.splitlines())
    assert {fields[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {"0" * 16}
    assert fields["Uid"].split() == [str(UID)] * 4
    for name in ("cc", "gcc", "rdma", "ibv_devices"):
        assert roots[release].run("sh", "-c", f"command -v {name}")[0] != 0
    _, packages = roots[release].run("dpkg-query", "-W")
    assert not [line for line in packages.splitlines() if "ibverbs" in line or "rdma" in line]


@DIRECTIONS
def test_file_passes(
    roots: dict[str, FreshRoot], hosts: tuple[udp.Host, udp.Host], direction: tuple[str, str]
) -> None:
    """By the two commands of the page, between hosts that have nothing else in common than a cable."""
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
            command = ("mcast", "send", "film.mkv", GROUP, "--backend", "udp")
            status, said = sender.run(*command, network=f"/proc/{here.pid}/ns/net")
            assert status == 0, said
            heard, _ = receiving.communicate(timeout=BOUND)
        finally:
            receiving.kill()
    assert receiving.returncode == 0, heard
    (got,) = (path for path in (copy, copy / "film.mkv") if path.is_file())
    assert hashlib.sha256(got.read_bytes()).digest() == hashlib.sha256(film.read_bytes()).digest()
    assert got.stat().st_uid == UID
