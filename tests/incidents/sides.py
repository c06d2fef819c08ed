"""The two fabrics that incidents happen to: the simulator's, and the lab's InfiniBand with a real OpenSM.

Both have two ports behind two leaf switches; incidents happen to the second.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from mcast.api import Backend
from mcast.backends.net import hostnet
from mcast.backends.rdma import PROVIDER
from mcast.backends.rdma.backend import RdmaBackend
from mcast.backends.rdma.infiniband_bed import InfinibandTestbed, add_hca
from mcast.backends.sim import Fabric, open_fabric
from mcast.wire.addresses import Gid

SOFTIB = Path("/sys/kernel/debug/softib")
LIDS = Path("/var/cache/opensm/guid2lid")
"""The LIDs that OpenSM has given, from one start to the next."""
BOUND = 120.0
"""Seconds that the kernel and OpenSM may take for anything; never a delay."""
LEAF = 2
"""The leaf switch of the second port."""


class Side(ABC):
    """A fabric with faults, each of which returns when the SM has seen what it has to see."""

    backend: Backend
    sender: str
    receiver: str

    @abstractmethod
    def restart_sm(self) -> None:
        """The SM ends, and starts again at once with nothing of what it knew."""

    @abstractmethod
    def fail_over(self) -> None:
        """The SM ends without a word, and a second one, which stood by, takes over."""

    @abstractmethod
    def relabel(self) -> None:
        """A tool writes another LID into the receiver's port, and the SM, which knows better, the old one."""

    @abstractmethod
    def renumber(self) -> None:
        """The SM starts again with another LID for the receiver's port."""

    @abstractmethod
    def link(self, up: bool) -> None:
        """The receiver's link goes down or comes back."""

    @abstractmethod
    def remove(self) -> None:
        """The receiver's device goes away, as soon as nobody has it open."""

    @abstractmethod
    def add(self) -> None:
        """It comes back, with its address."""

    @abstractmethod
    def cable(self, whole: bool) -> None:
        """The cable between the receiver's leaf and the root is cut or repaired."""

    @abstractmethod
    def program(self, at_once: bool) -> None:
        """Switches use what the SM writes at once, or not before they do again."""

    @abstractmethod
    def exhaust(self) -> None:
        """The multicast tables hold 32 groups, IPoIB's own among them."""

    @abstractmethod
    def close(self) -> None:
        """Undo what was done."""


class SimSide(Side):
    """The simulator, in virtual time: an event that is waited for comes at once, or never."""

    def __init__(self) -> None:
        self._make(Fabric.infiniband(ports=2, switches=3))

    def _make(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.backend = open_fabric(fabric)
        self.sender, self.receiver = (str(port.interfaces[0].ipv4) for port in fabric.ports)

    def restart_sm(self) -> None:
        self.fabric.restart_sm()

    def fail_over(self) -> None:
        self.fabric.restart_sm(2.0)

    def relabel(self) -> None:
        port = self.fabric.ports[1]
        before = port.lid
        self.fabric.change_lid(port)
        self.fabric.change_lid(port, before)

    def renumber(self) -> None:
        self.fabric.change_lid(self.fabric.ports[1])
        self.fabric.restart_sm()

    def link(self, up: bool) -> None:
        self.fabric.set_link(self.fabric.ports[1], up=up)

    def remove(self) -> None:
        self.fabric.remove_device(self.fabric.ports[1])

    def add(self) -> None:
        self.fabric.restore_device(self.fabric.ports[1])

    def cable(self, whole: bool) -> None:
        (self.fabric.repair_cable if whole else self.fabric.cut_cable)(LEAF)

    def program(self, at_once: bool) -> None:
        self.fabric.program_late(0.0 if at_once else 3600.0)

    def exhaust(self) -> None:
        self.backend.close()
        self._make(Fabric.infiniband(ports=2, switches=3, max_mlid=0xC000 + 31))

    def close(self) -> None:
        self.backend.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for the condition. Raises AssertionError if it does not come."""
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {BOUND:.0f} s"
        time.sleep(0.05)


class SoftibSide(Side):
    """The lab's InfiniBand: softib1 and softib2 behind two leaves, OpenSM on softib1."""

    GUIDS = ("0x5254000000010001", "0x5254000000010011")
    sender, receiver = "10.77.0.1", "10.77.0.2"

    def __init__(self) -> None:
        self.backend = RdmaBackend()

    def restart_sm(self) -> None:
        self._end_sm(signal.SIGTERM)
        self._start_sm(0)

    def fail_over(self) -> None:
        """The one on softib2 asks the master four times a second whether it lives."""
        options = Path("/tmp/standby.conf")
        lines = ("sminfo_polling_timeout 250", "polling_retry_number 2", "log_file /tmp/standby.log")
        options.write_text("".join(f"{line}\n" for line in (*lines, "dump_files_dir /tmp")))
        master = self._managers()
        self._start_sm(1, "-F", str(options))
        until(lambda: "SMINFO_STANDBY" in self._sminfo(), "the second OpenSM stands by")
        for pid in master:
            os.kill(pid, signal.SIGKILL)
        until(lambda: "SMINFO_MASTER" in self._sminfo(), "the second OpenSM takes over")

    def relabel(self) -> None:
        before = self._lid()
        tool = [hostnet.program("ibportstate"), "-C", "softib1", "-G", self.GUIDS[1], "1", "lid", "77"]
        subprocess.run(tool, check=True, stdout=subprocess.DEVNULL)
        until(lambda: self._lid() == 77, "softib2 has another LID")
        for pid in self._managers():
            os.kill(pid, signal.SIGHUP)  # sweep now
        until(lambda: self._lid() == before, "OpenSM writes its LID")

    def renumber(self) -> None:
        lid = self._lid() + 32
        self._end_sm(signal.SIGTERM)
        known = re.sub(rf"(?m)^({self.GUIDS[1]}) .*$", rf"\1 {lid:#06x} {lid:#06x}", LIDS.read_text())
        LIDS.write_text(known)
        self._start_sm(0)
        until(lambda: self._lid() == lid, "OpenSM gives another LID")
        self._sees(2)

    def link(self, up: bool) -> None:
        self._write("links", f"softib2 {'in' if up else 'out'}")
        self._sees(2 if up else 1)

    def remove(self) -> None:
        self._removal = subprocess.Popen(["sh", "-c", f"echo softib2 remove >{SOFTIB}/hcas"])

    def add(self) -> None:
        assert self._removal.wait(BOUND) == 0
        add_hca("softib2", Gid("fe80::5254:0:1:11"), "ib2", f"{self.receiver}/24", "fd77::2/64")
        self._sees(2)

    def cable(self, whole: bool) -> None:
        self._write("links", f"switch0/{LEAF} {'in' if whole else 'out'}")
        self._sees(2 if whole else 1)

    def program(self, at_once: bool) -> None:
        for switch in range(3):
            self._write("tables", f"switch{switch} {'0' if at_once else 'hold'}")

    def exhaust(self) -> None:
        self._write("mlids", "32")
        self._restart_whole()

    def close(self) -> None:
        self.backend.close()
        self.program(at_once=True)
        for port in ("softib2", f"switch0/{LEAF}"):
            self._write("links", f"{port} in")
        if (SOFTIB / "mlids").read_text() != "1024\n":
            self._write("mlids", "1024")
            self._restart_whole()
        self._sees(2)

    def _restart_whole(self) -> None:
        """Restart the SM, until every host is in IPoIB's group again: none can join before (SA-PATH-1)."""
        self.restart_sm()
        self._sees(2)
        with PROVIDER.testbed() as bed:
            assert isinstance(bed, InfinibandTestbed)
            bed.until_whole()

    def _write(self, file: str, line: str) -> None:
        (SOFTIB / file).write_text(f"{line}\n")

    def _sees(self, ports: int) -> None:
        """Wait until the SM knows so many of the two HCAs."""

        def known() -> bool:
            asked = subprocess.run(
                [hostnet.program("saquery"), "-C", "softib1", "NR"], capture_output=True, text=True
            )
            return len(re.findall(r"NodeDescription.*softib[12]$", asked.stdout, re.MULTILINE)) == ports

        until(known, f"the SM knows {ports} of softib1 and softib2")

    def _sminfo(self) -> str:
        """Return the state that the SM on softib2 reports."""
        asked = [hostnet.program("sminfo"), "-C", "softib2", str(self._lid())]
        return subprocess.run(asked, capture_output=True, text=True).stdout

    def _lid(self) -> int:
        """The LID of the receiver's port."""
        return int(Path("/sys/class/infiniband/softib2/ports/1/lid").read_text(), 0)

    def _managers(self) -> list[int]:
        found = subprocess.run(["pidof", "opensm"], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def _end_sm(self, how: signal.Signals) -> None:
        for pid in self._managers():
            os.kill(pid, how)
        until(lambda: not self._managers(), "OpenSM ends")

    def _start_sm(self, port: int, *options: str) -> None:
        command = [hostnet.program("opensm"), "-B", "-g", self.GUIDS[port], *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
