"""The lab's InfiniBand fabric as others see it: OpenSM, infiniband-diags and mckey, in one guest.

What they say is compared with what the lab was asked for; none of them knows of us.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from mcast.lab import LabMachine, LabResult

from .guest_run import SILENCE

SCRIPT = Path(__file__).with_name("infiniband_tools.sh")
PORTS, SWITCHES, MESSAGES = 4, 3, 100
STORM, STORM_LONG = 3_000, 100_000
BROADCAST = "ff12:401b:ffff::ffff:ffff"

pytestmark = pytest.mark.timeout(3600)  # against hangs of this process: the guest is bounded by its progress


class Said(NamedTuple):
    """What the tools have said, and how the guest was."""

    folder: Path
    result: LabResult

    def __call__(self, name: str, status: int = 0) -> str:
        """What the tool said; its exit status must be this one."""
        text = (self.folder / f"{name}.out").read_text()
        assert int((self.folder / f"{name}.status").read_text()) == status, text
        return text

    def field(self, name: str, field: str) -> str:
        """A line `field:....value` of infiniband-diags."""
        found = re.search(rf"^{field}:\.*(.*)$", self(name), re.MULTILINE)
        assert found, self(name)
        return found[1]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, long: bool) -> Said:
    shared = tmp_path_factory.mktemp("infiniband")
    kernel = pytestconfig.getoption("--lab-kernel")
    lab = LabMachine(PORTS, kernel, share=[shared], fabric="infiniband", switches=SWITCHES)
    command = ["sh", str(SCRIPT), str(shared), str(STORM_LONG if long else STORM), sys.executable]
    return Said(shared, lab.run(command, silence=SILENCE))


def test_every_tool_ran(said: Said) -> None:
    assert said.result.exit_code == 0
    names = {path.stem for path in said.folder.glob("*.out")}
    assert names == {path.stem for path in said.folder.glob("*.status")}
    assert names >= {"ibstat", "ibnetdiscover", "saquery", "log"}


def test_ports_are_active_and_managed(said: Said) -> None:
    lines = {line.strip() for line in said("ibstat").splitlines()}
    assert lines >= {
        "State: Active",
        "Physical state: LinkUp",
        "Rate: 40",
        "SM lid: 1",
        "Link layer: InfiniBand",
    }
    assert lines & {f"Base lid: {lid}" for lid in range(1, 1 + PORTS + SWITCHES)}


def test_the_cables_are_those_that_were_asked_for(said: Said) -> None:
    """Switch 0 is the root; HCAs are dealt to the two leaves in turn."""
    text = said("ibnetdiscover")
    assert len(re.findall(r"^Switch\t", text, re.MULTILINE)) == SWITCHES
    cables = re.findall(r'# "softib(\d)"\n\[1\]\(\w+\) \t"S-52540000000200(\d)0"\[(\d)\]', text)
    assert sorted(cables) == [("1", "1", "1"), ("2", "2", "1"), ("3", "1", "2"), ("4", "2", "2")]


def test_the_kernel_has_joined_the_broadcast_group_through_the_sa(said: Said) -> None:
    groups = re.findall(r"MGID\.+(\S+)\n\s*Mlid\.+(\S+)", said("saquery"))
    assert dict(groups)[BROADCAST] == "0xC000"
    assert routes(said("ibroute"))["0xc000"] == {1, 2, 3}


def test_smps_by_directed_route_are_answered(said: Said) -> None:
    assert said.field("nodeinfo", "NodeType") == "Switch"
    assert said.field("nodeinfo", "NumPorts") == "3"
    assert said.field("portinfo", "LinkState") == "Active"
    assert said.field("portinfo", "NeighborMTU") == "2048"
    assert int(said.field("switchinfo", "McastFdbCap")) == 1024
    assert int(said.field("switchinfo", "LinearFdbTop")) >= PORTS + SWITCHES


def test_a_port_that_a_switch_has_not_is_refused(said: Said) -> None:
    assert "failed" in said("no_such_port", status=255)


def routes(text: str) -> dict[str, set[int]]:
    """MLID -> ports, of what ibroute says."""
    header = re.search(r"Ports: 0", text)
    assert header, text
    line_start = text.rindex("\n", 0, header.start()) + 1
    port_0 = header.end() - 1 - line_start
    found: dict[str, set[int]] = {}
    for line in re.findall(r"^0xc\w+ .*$", text, re.MULTILINE):
        mlid = line.split()[0]
        marks = re.finditer("x", line[len(mlid) :])
        found[mlid] = {(len(mlid) + mark.start() - port_0) // 2 for mark in marks}
    return found


@pytest.mark.parametrize(
    ("name", "receivers"), [("forth", (2, 3)), ("back", (1,))], ids=["full", "send-only"]
)
def test_mckey_is_heard(said: Said, name: str, receivers: tuple[int, ...]) -> None:
    assert "data transfers complete" in said(f"{name}.sender")
    for port in receivers:
        assert "data transfers complete" in said(f"{name}.{port}")


def test_messages_go_where_the_tables_send_them(said: Said) -> None:
    """Of the second leaf's ports the first, softib2's, is a member's, the second, softib4's, is not."""
    before, now = routes(said("ibroute")), routes(said("forth.route"))
    new = {mlid: ports for mlid, ports in now.items() if mlid not in before}
    assert list(new.values()) == [{1, 3}]
    received = {
        port: int(said.field(f"after.{port}", "PortMulticastRcvPkts"))
        - int(said.field(f"before.{port}", "PortMulticastRcvPkts"))
        for port in (2, 4)
    }
    assert received[2] >= MESSAGES
    assert received[4] < MESSAGES


def test_counters_can_be_reset(said: Said) -> None:
    said("reset")
    assert int(said.field("cleared", "PortMulticastRcvPkts")) < MESSAGES


def test_a_cable_can_be_taken_out_and_put_in(said: Said) -> None:
    assert "State: Down" in said("unplugged")
    assert "State: Active" in said("plugged")
    assert "switch2/3 1 switch0/2 1 out" in said("cut")


def test_a_line_that_names_no_port_is_refused(said: Said) -> None:
    assert (said.folder / "refused.txt").read_text().count("refused") == 7


def test_lost_messages_are_counted(said: Said) -> None:
    assert int(said.field("dropped", "PortRcvErrors")) >= 4


def test_malformed_datagrams_do_no_harm(said: Said, long: bool) -> None:
    """All are sent, some are answered, and the module goes away afterwards as if nothing had been."""
    sent, answered = map(int, said("storm").split())
    assert sent > (STORM_LONG if long else STORM) // 2
    assert answered > sent // 100
    assert said("unload") == ""


def test_the_kernel_has_no_complaint(said: Said) -> None:
    """But one: rdmavt's own copy of a work request, which Debian's fortified memcpy tells once."""
    complaints = re.findall(r"(?:WARNING|BUG|Oops).*", said("log"))
    assert [one for one in complaints if "rdmavt/qp.c" not in one] == []
