"""Hosts on one machine: network namespaces, each with a cable to a switch (a bridge)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

LOOPBACK = "127.0.0.1"


def address(number: int) -> str:
    """Return the address of a host's interface."""
    return f"10.77.4.{number + 1}"


class Namespace:
    """A network namespace, held by a process that sleeps in it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"])
        self.pid: int = self._holder.pid
        own = Path("/proc/self/ns/net").stat().st_ino
        while Path(f"/proc/{self.pid}/ns/net").stat().st_ino == own:
            if self._holder.poll() is not None:
                raise SystemExit("no network namespace can be made here: run this as root")
        self.run("ip", "link", "set", "lo", "up")

    def command(self, *words: str) -> tuple[str, ...]:
        """Return the command that runs these words there."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net", *words)

    def run(self, *words: str) -> None:
        """Run a command there."""
        subprocess.run(self.command(*words), check=True)

    def close(self) -> None:
        """Let it go, with what is in it."""
        self._holder.kill()
        self._holder.wait()


@contextmanager
def hosts(count: int, mtu: int) -> Iterator[list[Namespace]]:
    """Make hosts on one switch, all links of which have that MTU; the first number is 0."""
    with ExitStack() as stack:

        def made() -> Namespace:
            one = Namespace()
            stack.callback(one.close)
            return one

        switch, found = made(), [made() for _ in range(count)]
        switch.run("ip", "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        switch.run("ip", "link", "set", "br0", "mtu", str(mtu), "up")
        for number, host in enumerate(found):
            cable = ("ip", "link", "add", "eth0", "mtu", str(mtu), "type", "veth")
            host.run(*cable, "peer", "name", f"p{number}", "mtu", str(mtu), "netns", str(switch.pid))
            switch.run("ip", "link", "set", f"p{number}", "master", "br0", "up")
            host.run("ip", "addr", "add", f"{address(number)}/24", "broadcast", "+", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            host.run("ip", "route", "add", "224.0.0.0/4", "dev", "eth0")
        yield found
