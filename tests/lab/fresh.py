"""Debians in folders of their own, which hold nothing but certificates and a clone of this project.

`in_fresh_debian` runs one script there. A `FreshRoot` waits for commands, each of which may be in another
network namespace and without privileges.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

FRESH = Path(__file__).parents[2] / "scripts" / "fresh-debian"
CLONE = "/root/mcast"
"""The clone in the root file system that `fresh-debian` makes; the script starts there."""
SECONDS = 3000
"""Against hangs: packages come by the network, and the guest is emulated."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="scripts/fresh-debian refuses anyone but root")


def in_fresh_debian(text: str) -> str:
    """Return what a script prints in a fresh Debian 12."""
    done = subprocess.run(
        [str(FRESH), "bookworm", "--", "bash", "-euc", text],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


USER, UID = "user", 1000
HOME = Path("/home", USER)
_WAIT = """
apt-get update -q && apt-get install -qy --no-install-recommends python3-venv
useradd --create-home --uid $1 $0
echo waits in $(readlink /proc/self/ns/pid)
exec sleep infinity
"""


class FreshRoot:
    """A fresh Debian with Python and one user, in a mount and a PID namespace of its own."""

    def __init__(self, pid: int) -> None:
        self.root = Path(f"/proc/{pid}/root")
        """Where its files are for programs outside."""
        self._enter = ("nsenter", f"--target={pid}", "--mount", "--pid")
        # With them goes this host's way to the registries.
        words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        self._environment = dict(word.split("=", 1) for word in words if word)

    def popen(self, *command: str, network: str = "/proc/self/ns/net") -> subprocess.Popen[str]:
        """Start a command of the user, who has no capability and can get none, in a network namespace."""
        ids = (f"--reuid={UID}", f"--regid={UID}", "--clear-groups")
        nothing = ("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
        # nsenter, which is what is killed here, only waits for the command.
        drop = ("setpriv", *ids, *nothing, "--pdeathsig=KILL", "env", f"--chdir={HOME}")
        environment = {"HOME": str(HOME), "LANG": "C.UTF-8", "PATH": "/opt/mcast/bin:/usr/bin:/bin"}
        return subprocess.Popen(
            [*self._enter, f"--net={network}", *drop, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, network: str = "/proc/self/ns/net") -> tuple[int, str]:
        """Return status and output of a command of the user."""
        with self.popen(*command, network=network) as process:
            try:
                said, _ = process.communicate(timeout=SECONDS)
            finally:
                process.kill()
        return process.returncode, said

    def install(self, script: str) -> None:
        """Run a script of root, with the network and the registries of this host."""
        command = [*self._enter, "bash", "-euc", script]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@contextmanager
def fresh_root(release: str, folder: Path) -> Iterator[FreshRoot]:
    """Make a Debian below the folder, and remove it after the `with`."""
    command = [str(FRESH), release, "--", "bash", "-euc", _WAIT, USER, str(UID)]
    environment: Mapping[str, str] = {**os.environ, "FRESH_FOLDER": str(folder)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("waits in "):
                    break
            else:
                raise AssertionError("".join(said[-40:]))
            yield FreshRoot(_process_in(line.removeprefix("waits in ").strip()))
        finally:
            process.send_signal(signal.SIGTERM)


def _process_in(namespace: str) -> int:
    """Return the number of a process in that PID namespace."""
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and str((process / "ns/pid").readlink()) == namespace:
                return int(process.name)
        except OSError:  # it has ended
            continue
    raise AssertionError(f"nobody is in {namespace}")
