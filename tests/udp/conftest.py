"""Each test of `udp` has a network of its own; who may make no network namespace skips what needs two."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def network_of_its_own(own_network: None) -> None:
    """No test hears another one."""


class Host:
    """A network namespace, held by a process that sleeps in it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "600"])
        own = Path("/proc/self/ns/net").stat().st_ino
        while Path(f"/proc/{self._holder.pid}/ns/net").stat().st_ino == own:
            assert self._holder.poll() is None
        self.pid = self._holder.pid
        self.run("ip", "link", "set", "lo", "up")

    @property
    def prefix(self) -> tuple[str, ...]:
        """Command line in front of a command, which runs it there."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net")

    def run(self, *command: str) -> str:
        return subprocess.run(
            [*self.prefix, *command], check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, 10.0.0.1 and 10.0.0.2, connected by a cable: eth0 of each."""
    first, second = Host(), Host()
    try:
        first.run(
            "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second.pid)
        )
        for number, host in enumerate((first, second), 1):
            host.run("ip", "addr", "add", f"10.0.0.{number}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            host.run("ip", "route", "add", "224.0.0.0/4", "dev", "eth0")
        yield first, second
    finally:
        first.close()
        second.close()
