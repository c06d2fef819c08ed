"""The field's own programs, and what runs them in the lab's guest.

One row for each program: the commands of its two ends, what its client must print, and how many packets its
ports must have carried. Run in the guest, this file runs the named rows one after another and prints a line
of JSON for each. It imports the standard library alone, because an emulated guest takes seconds for more.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal

FabricKind = Literal["roce", "infiniband"]
Ready = Literal["", "cm", "group", "mad"] | int
"""Sign that a server waits: the TCP port that it listens on, a listening rdma_cm id, a joined group, or
an open umad device. "" for a program without a server."""

ROCE, INFINIBAND = ("roce",), ("infiniband",)
BOTH = (*ROCE, *INFINIBAND)
BOUND = 60.0
"""Seconds after which an end is taken to hang; emulated, the slowest takes a tenth."""
DEBUGFS = Path("/sys/kernel/debug/softib")

PLACES: Mapping[str, Mapping[str, str]] = {
    "roce": {"a": "rxe1", "b": "rxe2", "g": "-g 1", "x": "-x 1", "gid": "UCX_IB_GID_INDEX=0"},
    "infiniband": {"a": "softib1", "b": "softib2", "g": "", "x": "", "gid": ""},
}
"""The devices of client and server, and the options that choose a GID where the link layer is Ethernet.

Index 1 is the IPv4 address. UCX over UD takes link-local GIDs alone on Soft-RoCE, which are index 0.
"""
ADDRESSES = {"client": "10.77.0.1", "server": "10.77.0.2", "python": sys.executable}
UCX = "env {gid} UCX_TLS={tls},self"
"""Environment that leaves UCX no TCP and no shared memory."""
MPI = (
    "env {gid} mpirun --allow-run-as-root --mca pml ucx --mca btl self --mca pml_ucx_tls any"
    " --mca pml_ucx_devices any -x UCX_TLS={tls},self"
)


@dataclass(frozen=True, slots=True)
class Program:
    """One program: its commands, and what counts as success."""

    name: str
    package: str
    """Debian's."""
    client: str
    """The command whose output is looked at; braces are filled from PLACES and ADDRESSES."""
    shows: str
    """A regular expression that the client's output matches."""
    fabrics: Sequence[str] = BOTH
    server: str = ""
    ready: Ready = ""
    packets: int = 0
    """Minimum number of packets that the ports must send, and receive: 0 for one that only asks."""
    stays: bool = False
    """True: the server ends when it is told to, not with its client."""
    core: Sequence[str] = ()
    """The fabrics on which `make test` runs it, too."""

    @property
    def identity(self) -> str:
        return self.name.replace(" ", "_")

    def command(self, fabric: str, *, of_server: bool = False) -> list[str]:
        text = self.server if of_server else self.client
        return shlex.split(text.format(**PLACES[fabric], **ADDRESSES))


def _both_ends(
    name: str, package: str, options: str, shows: str, ready: Ready, packets: int, **more: object
) -> Program:
    """A program whose client has the server's options and its address besides."""
    program = name.split()[0]
    return Program(
        name,
        package,
        f"{program} -d {{a}} {options} {{server}}",
        shows,
        server=f"{program} -d {{b}} {options}",
        ready=ready,
        packets=packets,
        **more,  # type: ignore[arg-type]
    )


def _diagnosis(command: str, shows: str, core: Sequence[str] = ()) -> Program:
    """One of infiniband-diags, whose first word may be followed by what it is asked."""
    return Program(command.split()[0], "infiniband-diags", command, shows, INFINIBAND, core=core)


VERBS, PERF, UCX_PORT, FI_PORT, QPERF_PORT = 18515, 18515, 13337, 47592, 19765

PROGRAMS: tuple[Program, ...] = (
    Program("ibv_devinfo", "ibverbs-utils", "ibv_devinfo -d {a}", r"PORT_ACTIVE \(4\)", core=BOTH),
    _both_ends(
        "ibv_rc_pingpong",
        "ibverbs-utils",
        "{g} -e -n 100 -s 1024",
        r"100 iters",
        VERBS,
        100,
        core=BOTH,
    ),
    _both_ends(
        "ibv_ud_pingpong", "ibverbs-utils", "{g} -e -n 100 -s 1024", r"100 iters", VERBS, 100, core=INFINIBAND
    ),
    Program(
        "rping",
        "rdmacm-utils",
        "rping -c -a {server} -I {client} -C 20 -v",
        r"ping data: rdma-ping-19:",
        server="rping -s -a {server} -C 20",
        ready="cm",
        packets=20,
        core=ROCE,
    ),
    _both_ends(
        "ib_send_bw",
        "perftest",
        "{x} -e -F -n 100 -s 4096",
        r"\n 4096 +100 ",
        PERF,
        100,
        core=ROCE,
    ),
    _both_ends("ib_write_bw", "perftest", "{x} -F -n 100 -s 4096", r"\n 4096 +100 ", PERF, 100),
    _both_ends("ib_send_lat", "perftest", "{x} -F -n 100", r"\n 2 +100 ", PERF, 100),
    _both_ends(
        "ib_send_bw -c UD",
        "perftest",
        "{x} -c UD -e -F -n 100 -s 1024",
        r"\n 1024 +100 ",
        PERF,
        100,
    ),
    _both_ends("ib_send_lat -c UD", "perftest", "{x} -c UD -F -n 100", r"\n 2 +100 ", PERF, 100),
    *(
        Program(
            name,
            "ucx-utils",
            f"{UCX.replace('{tls}', tls)} UCX_NET_DEVICES={{a}}:1 ucx_perftest -t tag_lat -n 100 {{server}}",
            r"Final: +100 ",
            server=f"{UCX.replace('{tls}', tls)} UCX_NET_DEVICES={{b}}:1 ucx_perftest",
            ready=UCX_PORT,
            packets=100,
        )
        for name, tls in (("ucx_perftest", "rc_verbs,ud_verbs"), ("ucx_perftest over UD", "ud_verbs"))
    ),
    Program(
        "fi_pingpong",
        "libfabric-bin",
        "env FI_PROVIDER=verbs fi_pingpong -p verbs -e msg -I 20 -S 1024 {server}",
        r"1k +20 ",
        ROCE,  # its client takes the device of the server's address, and an HCA does not count for itself
        server="env FI_PROVIDER=verbs fi_pingpong -p verbs -e msg -I 20 -S 1024 -d {b}",
        ready=FI_PORT,
        packets=20,
    ),
    *(
        Program(
            name,
            "openmpi-bin",
            f"{MPI.replace('{tls}', tls)} -n 1 -x UCX_NET_DEVICES={{a}}:1 {ranks} :"
            f" -n 1 -x UCX_NET_DEVICES={{b}}:1 {ranks}",
            r"\n +1024 ",
            packets=100,
        )
        for ranks in ("{python} -m mpi4py.bench pingpong --min-size 1024 --max-size 1024 --skip 5 --loop 50",)
        for name, tls in (("Open MPI", "rc_verbs,ud_verbs"), ("Open MPI over UD", "ud_verbs"))
    ),
    Program(
        "qperf rc_lat",
        "qperf",
        "qperf {server} -cm1 -t 1 rc_lat",
        r"latency +=",
        ROCE,  # as fi_pingpong
        server="qperf -lp 19765",
        ready=QPERF_PORT,
        packets=10,
        stays=True,
    ),
    Program(
        "qperf ud_lat",
        "qperf",
        "qperf {server} -li {a} -ri {b} -t 1 ud_lat",
        r"latency +=",
        INFINIBAND,
        server="qperf -lp 19765",
        ready=QPERF_PORT,
        packets=10,
        stays=True,
    ),
    Program(
        "mckey",
        "rdmacm-utils",
        # It ends right after its last post, and Linux 6.12 drops what Soft-RoCE has not sent by then: of 50
        # messages most, or all; of 4,000 at least some hundred are on their way.
        "mckey -s -m 239.1.1.9 -b {client} -C 4000 -S 512",
        r"data transfers complete",
        server="mckey -m 239.1.1.9 -b {server} -C 20 -S 512",
        ready="group",
        packets=20,
    ),
    Program("ibstat", "infiniband-diags", "ibstat {b}", r"State: Active"),
    _diagnosis("ibnetdiscover", r"(?s)Switch.*softib4", core=INFINIBAND),
    _diagnosis("iblinkinfo", r"4X.*LinkUp"),
    _diagnosis("ibhosts", r"Ca.*softib4"),
    _diagnosis("ibswitches", r"Switch"),
    _diagnosis("ibroute -M -C {a} -G 0x5254000000020001", r"(?i)0xc000"),
    _diagnosis("ibtracert -C {a} -G 0x5254000000010001 0x5254000000010011", r"To ca"),
    _diagnosis("ibqueryerrors -s PortRcvSwitchRelayErrors", r"Summary: \d+ nodes checked"),
    _diagnosis("perfquery -x -C {b}", r"PortXmitPkts:\.+[1-9]", core=INFINIBAND),
    _diagnosis("saquery -C {a} NR", r"NodeDescription\.+softib4", core=INFINIBAND),
    _diagnosis("smpquery nodeinfo -C {a} -D 0,1", r"NodeType:\.+Switch"),
    _diagnosis("sminfo -C {b}", r"SMINFO_MASTER", core=INFINIBAND),
    _diagnosis("ibportstate -C {a} -D 0 1 query", r"LinkState:\.+Active"),
    Program(
        "ibping",
        "infiniband-diags",
        "ibping -c 3 -C {a} -G 0x5254000000010011",
        r"[1-3] received",
        INFINIBAND,
        server="ibping -S -C {b}",
        ready="mad",
        packets=3,
        stays=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a program; an exit status is None if it was ended, or if there is no server."""

    name: str
    client: int | None
    client_says: str
    server: int | None
    server_says: str
    sent: int
    received: int
    seconds: float


def port_packets(fabric: str) -> tuple[int, int]:
    """Packets that the ports of both ends have sent and received so far."""
    names = {
        "roce": ("hw_counters/sent_pkts", "hw_counters/rcvd_pkts"),
        "infiniband": ("counters/port_xmit_packets", "counters/port_rcv_packets"),
    }[fabric]
    ports = [Path(f"/sys/class/infiniband/{PLACES[fabric][end]}/ports/1") for end in "ab"]
    sent, received = (sum(int((port / name).read_text()) for port in ports) for name in names)
    return sent, received


def waits(ready: Ready, fabric: str, process: subprocess.Popen[bytes]) -> bool:
    """Return True if the server can take its client."""
    if isinstance(ready, int):
        listening, wanted = "0A", f":{ready:04X}"
        lines = [
            line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
        ]
        return any(line.split()[1].endswith(wanted) and line.split()[3] == listening for line in lines)
    if ready == "cm":
        done = subprocess.run(["rdma", "-j", "resource", "show", "cm_id"], capture_output=True)
        return b'"LISTEN"' in done.stdout
    if ready == "group":
        if fabric == "roce":
            return "090101EF" in Path("/proc/net/igmp").read_text()
        return ":0f01:0109 " in (DEBUGFS / "attached").read_text()
    fds = Path(f"/proc/{process.pid}/fd")
    with suppress(OSError):  # the process has ended
        return any("umad" in fd.readlink().name for fd in fds.iterdir())
    return False


@contextmanager
def started(command: Sequence[str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The program, in a group of processes that is gone after the block."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(there: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Return when `there` is true, the process has ended, or BOUND is over."""
    end = time.monotonic() + BOUND
    while not there() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)


def ended(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(BOUND)
    except subprocess.TimeoutExpired:
        return None


def text_of(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")


def run_one(program: Program, fabric: str) -> Outcome:
    """Start the server, wait for it, run the client, and end both."""
    begun, (sent, received) = time.monotonic(), port_packets(fabric)
    server_status = None
    with TemporaryFile() as client_out, TemporaryFile() as server_out:
        if program.server:
            with started(program.command(fabric, of_server=True), server_out) as server:
                until(lambda: waits(program.ready, fabric, server), server)
                with started(program.command(fabric), client_out) as client:
                    client_status = ended(client)
                # A client that failed has not told its server.
                server_status = None if program.stays or client_status else ended(server)
        else:
            with started(program.command(fabric), client_out) as client:
                client_status = ended(client)
        sent_now, received_now = port_packets(fabric)
        return Outcome(
            program.name,
            client_status,
            text_of(client_out),
            server_status,
            text_of(server_out),
            sent_now - sent,
            received_now - received,
            time.monotonic() - begun,
        )


def main(fabric: str, names: Sequence[str]) -> None:
    for program in PROGRAMS:
        if program.name in names:
            print(json.dumps(asdict(run_one(program, fabric))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
