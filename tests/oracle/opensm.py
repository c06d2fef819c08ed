"""A real OpenSM on a simulated fabric (ibsim), driven by one umad client per host. No root is needed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import pytest

from mcast.wire.mcmember import RECORD_SIZE, McMemberRecord

from .topology import SM_HOST, Topology

PACKAGES = {"ibsim": "ibsim-utils", "opensm": "opensm", "setpriv": "util-linux"}
PRELOADS = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
CLIENT = Path(__file__).with_name("umad_client.py")
SM_TIMEOUT = 200.0
"""Seconds for anything of OpenSM or ibsim that takes milliseconds on an idle machine."""

MC_MEMBER_RECORD = 0x0038
ROW = 56  # bytes from one record of a table to the next
DATA_AT = 56
ROWS_IN_A_MAD = (256 - DATA_AT) // ROW
_HEADER = struct.Struct(">BBBBHHIIHHIBBBBIIQHHQ")
_REPLY = struct.Struct("=iII")


class OracleError(Exception):
    """The machinery failed, so nothing can be said about the model."""


class NoAnswer(Exception):
    """OpenSM did not answer where it should have, or answered where it should not have."""


class Answer(NamedTuple):
    """Answer; of a table the first three records, which is what the simulated fabric carries."""

    status: int
    records: tuple[McMemberRecord, ...]


def missing() -> str:
    """The apt line that this machine needs before an oracle can run, or nothing."""
    packages = {PACKAGES[tool] for tool in PACKAGES if not which(tool)}
    if not preload():
        packages.add("ibsim-utils")
    if not any(Path(root).glob("**/libibumad.so.3") for root in PRELOADS if Path(root).is_dir()):
        packages.add("libibumad3")
    return f"apt-get install -y {' '.join(sorted(packages))}" if packages else ""


def which(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


@cache  # it looks through all libraries, and each start of OpenSM asks
def preload() -> Path | None:
    """libumad2sim, which turns a process into a host of the simulated fabric."""
    for root in PRELOADS:
        for found in Path(root).glob("**/umad2sim/libumad2sim.so"):
            return found
    return None


def until(what: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SM_TIMEOUT
    while not done():
        if time.monotonic() > deadline:
            raise OracleError(f"{what}: not within {SM_TIMEOUT:.0f} s")
        time.sleep(0.001)


class OpenSm:
    """The subnet of a topology, up and running from `__enter__` to `__exit__`."""

    def __init__(self, topology: Topology, directory: Path) -> None:
        self.topology = topology
        self.directory = directory
        self.requests = 0
        self.answer_seconds = 30
        """OpenSM answers in 0.1 ms; a machine with far too much to do lets it take seconds."""
        self.unlinked: set[str] = set()
        """Hosts whose cable is cut."""
        self._clients: dict[str, tuple[socket.socket, subprocess.Popen[bytes]]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = directory / "opensm.log"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("COV_")},
            "IBSIM_SOCKNAME": f"mcast-oracle-{os.getpid()}-{directory.name}",
            "OSM_TMP_DIR": str(directory),
            "OSM_CACHE_DIR": str(directory),
        }

    def __enter__(self) -> OpenSm:
        for name, text in (
            ("net", self.topology.netlist()),
            ("partitions", self.topology.partitions()),
            ("options", self.topology.options()),
        ):
            (self.directory / name).write_text(text)
        try:
            self._start_fabric()
            self._start_sm()
            for host in self.topology.hosts:
                if host.name != SM_HOST:
                    self._start_client(host.name)
            for channel, _ in self._clients.values():
                channel.recv(16)  # "ready"
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- processes

    def _spawn(self, *command: str, host: str | None = None, **options: object) -> subprocess.Popen[bytes]:
        """Run it so that it dies with this process; as a host of the fabric if one is named."""
        host_environment = [f"SIM_HOST={host}", f"LD_PRELOAD={preload()}"] if host else []
        process: subprocess.Popen[bytes] = subprocess.Popen(  # type: ignore[call-overload]
            ["setpriv", "--pdeathsig", "KILL", "env", *host_environment, *command],
            cwd=self.directory,
            env=self._environment,
            **{"stdin": subprocess.DEVNULL, "stderr": self._file("stderr"), **options},
        )
        self._processes.append(process)
        return process

    def lend(self, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
        """Let programs that this process starts be that host, while the patch lasts."""
        monkeypatch.chdir(self.directory)
        for name, value in {**self._environment, "SIM_HOST": host, "LD_PRELOAD": str(preload())}.items():
            monkeypatch.setenv(name, value)

    def _file(self, name: str) -> int:
        """A descriptor to append to; the child inherits it and this process closes its own when it stops."""
        if name not in self._files:
            self._files[name] = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self._files[name]

    def _start_fabric(self) -> None:
        self._files: dict[str, int] = {}
        self._fabric = self._spawn(
            which("ibsim") or "ibsim",
            "-s",
            "-M",
            str(self.topology.mlids),
            "net",
            stdin=subprocess.PIPE,
            stdout=self._file("ibsim.out"),
        )
        name = f"@{self._environment['IBSIM_SOCKNAME']}:ctl"
        until("ibsim's start", lambda: name in Path("/proc/net/unix").read_text())

    def _console(self, command: str) -> None:
        """Type a command and wait for the next prompt."""
        out = self.directory / "ibsim.out"
        prompts = out.read_text().count("sim> ")
        assert self._fabric.stdin
        self._fabric.stdin.write(command.encode() + b"\n")
        self._fabric.stdin.flush()
        until(f"ibsim's {command}", lambda: out.read_text().count("sim> ") > prompts)

    def _start_sm(self) -> None:
        self._log.unlink(missing_ok=True)
        self._sm = self._spawn(
            which("opensm") or "opensm",
            "-e",
            "-F",
            "options",
            "-P",
            "partitions",
            "-f",
            str(self._log),
            host=SM_HOST,
            stdout=self._file("opensm.out"),
        )
        until("OpenSM's start", lambda: self._log.exists() and self._swept() > 0)

    def _swept(self) -> int:
        return self._log.read_text().count("SUBNET UP")

    def _change(self, command: str) -> None:
        """A change of the fabric and its sweep, asked for: OpenSM ignores a switch that traps often.

        It returns after the sweep: a request in the midst of one may find either state (SA-SM-7).
        """
        before = self._swept()
        self._console(command)
        self._sm.send_signal(signal.SIGHUP)
        until("OpenSM's sweep", lambda: self._swept() > before)

    def _start_client(self, name: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = self._spawn(
                sys.executable,
                "-IS",
                str(CLIENT),
                str(theirs.fileno()),
                "1",
                host=name,
                pass_fds=(theirs.fileno(),),
            )
        ours.settimeout(SM_TIMEOUT)
        self._clients[name] = ours, process

    def stop(self) -> None:
        """End every process; bounded."""
        for channel, process in self._clients.values():
            channel.close()
            process.kill()
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdin:
                process.stdin.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    # -- the fabric

    def restart_sm(self) -> None:
        """Kill OpenSM and start it again."""
        self._sm.kill()
        self._sm.wait()
        self._processes.remove(self._sm)
        self._console(
            "X 0"
        )  # its seat at ibsim is the first, as it came first and they are refilled in order
        self._start_sm()

    def unlink(self, host: str) -> None:
        """Cut the host's cable and wait until OpenSM has seen it."""
        self.unlinked.add(host)
        self._change(f'Unlink "{host}"[1]')

    def relink(self, host: str) -> None:
        """Mend the cable and wait until the port is in service again."""
        self._change(f'ReLink "{host}"[1]')
        self.unlinked.remove(host)

    # -- requests

    def ask(self, host: str, method: int, mask: int, record: McMemberRecord, sm_key: int = 0) -> Answer:
        """One request and its answer. Raises NoAnswer if there is none, or one to an earlier `tell`."""
        wait = bytes((self.answer_seconds,))
        channel, _ = self._clients[host]
        channel.send(self._mad(method, mask, record, sm_key) + wait)
        reply = channel.recv(1024)
        if len(reply) < _REPLY.size:
            raise OracleError(f"the client of {host} has died: {self._complaint()}")
        error, strays, length = _REPLY.unpack_from(reply)
        if strays:
            raise NoAnswer("an answer where none should be")
        if self._sm.poll() is not None:
            raise OracleError(f"OpenSM has died with {self._sm.returncode}: {self._complaint()}")
        if error:
            raise NoAnswer(f"no answer: umad status {error}")
        mad = reply[_REPLY.size :]
        status = int.from_bytes(mad[4:6])
        rows = min(ROWS_IN_A_MAD, (length - DATA_AT) // ROW) if status == 0 else 0
        return Answer(status, tuple(_record(mad[DATA_AT + ROW * at :][:RECORD_SIZE]) for at in range(rows)))

    def tell(self, host: str, method: int, mask: int, record: McMemberRecord, sm_key: int = 0) -> None:
        """A request that must get no answer: one is noticed with the next `ask` from this host."""
        self._clients[host][0].send(self._mad(method, mask, record, sm_key) + b"\0")

    def _mad(self, method: int, mask: int, record: McMemberRecord, sm_key: int) -> bytes:
        self.requests += 1
        header = _HEADER.pack(
            *(1, 3, 2, method, 0, 0, 0, self.requests & 0xFFFFFFFF, MC_MEMBER_RECORD, 0, 0),
            *(0, 0, 0, 0, 0, 0),
            *(sm_key, 0, 0, mask),
        )
        return (header + _wire(record)).ljust(256, b"\0")

    def _complaint(self) -> str:
        return (self.directory / "stderr").read_text()[-1000:]


# OpenSM keeps ProxyJoin in a C bit field, which on a little-endian machine is not the bit of the wire.
def _wire(record: McMemberRecord) -> bytes:
    wire = bytearray(record.pack())
    wire[49] >>= 7
    return bytes(wire)


def _record(wire: bytes) -> McMemberRecord:
    if wire[49] & 0xFE or wire[50:52] != bytes(2):
        raise OracleError(f"reserved bits in an answer: {wire[49:].hex()}")
    return McMemberRecord.unpack(wire[:49] + bytes((wire[49] << 7, 0, 0)))
