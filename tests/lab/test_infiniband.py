"""The lab's InfiniBand fabric as others see it: OpenSM, infiniband-diags, mckey and tshark, in one guest.

What they say is compared with what the lab was asked for; none of them knows of us.
"""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults.rules import SaRequest
from mcast.backends.sim.trace import pcapng as trace_pcapng
from mcast.pcapng.dissect import SkipPacket, datagram
from mcast.pcapng.reader import read_frames
from mcast.wire import packets
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import SaMethod
from rdma_lab import LabMachine, LabResult

from ..sim.wireshark import Decoded, Shown, has, is_message
from ..tapped import asked_of_the_sa
from . import join_storm
from .guest_run import OUTPUT_TIMEOUT

SCRIPT = Path(__file__).with_name("infiniband_tools.sh")
PORTS, SWITCHES, MESSAGES = 4, 3, 100
STORM, LIVES = 100_000, 1_000
JOINS = 1_000, 8
"""Groups, and processes that join each of them."""
BROADCAST = "ff12:401b:ffff::ffff:ffff"
MGID = "ff12:4001:ffff::f01:107"
"""Of 239.1.1.7, for who uses rdma_cm with PS_UDP."""
COMPARED = 4
"""Number of messages of the tap that are compared with the simulator's."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),  # against hangs of this process: the guest is bounded by its progress
]


class Said(NamedTuple):
    """Output of the tools, and state of the guest."""

    folder: Path
    result: LabResult
    progress: list[str]
    """Lines that the guest wrote as it went on; one that writes none for long is taken to hang."""

    def __call__(self, name: str, status: int = 0) -> str:
        """Return the output of the tool; its exit status must be this one."""
        text = (self.folder / f"{name}.out").read_text()
        assert int((self.folder / f"{name}.status").read_text()) == status, text
        return text

    def field(self, name: str, field: str) -> str:
        """A line `field:....value` of infiniband-diags."""
        found = re.search(rf"^{field}:\.*(.*)$", self(name), re.MULTILINE)
        assert found, self(name)
        return found[1]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Said:
    shared = tmp_path_factory.mktemp("infiniband")
    kernel = pytestconfig.getoption("--lab-kernel")
    lab = LabMachine(PORTS, kernel, share=[shared], fabric="infiniband", switches=SWITCHES)
    command = ["sh", str(SCRIPT), str(shared), str(STORM), sys.executable, str(LIVES), *map(str, JOINS)]
    output = io.BytesIO()
    try:
        result = lab.run(command, output_timeout=OUTPUT_TIMEOUT, stdout=output)
    finally:
        print(output.getvalue().decode())
    return Said(shared, result, output.getvalue().decode().splitlines())


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


def test_kernel_joins_the_broadcast_group(said: Said) -> None:
    """The kernel has joined the broadcast group through the SA."""
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
    ("name", "receivers"),
    [("forth", (2, 3)), ("back", (1,)), ("mended", (2, 3))],
    ids=["full", "send-only", "after the malformed datagrams"],
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


def test_a_switch_tells_the_sm_that_a_link_went_down(said: Said) -> None:
    """IBA 14.2.5.1, trap 128. Without one, OpenSM's sweeps find the change in the end."""
    assert int(said("trap")) > 0


def test_a_line_that_names_no_port_is_refused(said: Said) -> None:
    text = (said.folder / "refused.txt").read_text()
    wrong = re.search(r"<<END\n(.*)^END$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert wrong
    assert text.splitlines() == [f"refused: {line.replace(':', ': ', 1)}" for line in wrong[1].splitlines()]


def test_a_port_can_be_disabled_and_enabled(said: Said) -> None:
    assert {"State: Down", "Physical state: Disabled"} <= {line.strip() for line in said("down").splitlines()}
    assert "State: Active" in said("up")


def test_switch_applies_tables_when_told(said: Said) -> None:
    """A switch uses what is written when it is told to.

    OpenSM has written, and reads, its entry; messages go by the old one until then.
    """
    assert said("held.tables") == "switch0 0\nswitch1 0\nswitch2 hold\n"
    assert (said.folder / "held.txt").read_text() == "nothing was heard\n"
    before, after = (int(said.field(f"held.{name}", "PortMulticastRcvPkts")) for name in ("before", "after"))
    assert after - before < MESSAGES
    assert "data transfers complete" in said("late.4")


def test_lost_messages_are_counted(said: Said) -> None:
    assert int(said.field("dropped", "PortRcvErrors")) >= 4


def test_port_with_an_mkey_requires_it(said: Said) -> None:
    """A port with a key answers those who know that key.

    IBA 14.2.4: at protection level 2 a Get wants the M_Key, as a Set does; what lacks it is counted.
    """
    said("key.set")
    assert "failed" in said("key.unknown", status=255)
    assert int(said.field("key.known", "MkeyViolations")) > 0
    said("key.cleared")
    assert int(said.field("key.none", "ProtectBits")) == 0


def test_malformed_datagrams_do_no_harm(said: Said) -> None:
    """All are sent, and some are answered."""
    sent, answered = map(int, said("storm").split())
    assert sent > STORM // 2
    assert answered > sent // 100
    assert (said.folder / "opensm.txt").read_text().strip(), "OpenSM has ended"
    assert set(said.progress) >= {f"{number} of {STORM} datagrams" for number in range(500, STORM + 1, 500)}


def test_processes_may_come_and_go_at_once(said: Said) -> None:
    """Each made queue pairs, joined and sent; some were killed, some ended without closing anything."""
    assert int(said("churn")) == LIVES
    assert set(said.progress) >= {f"{number} of {LIVES} lives" for number in range(1, LIVES + 1)}


class Asked(NamedTuple):
    """Requests to the SA for the groups of a storm: how many Sets, and for each how many ports left it."""

    joins: int
    left: Counter[Gid]


def asked_in_simulator(count: int, processes: int) -> Asked:
    fabric = Fabric.infiniband(ports=PORTS, switches=SWITCHES)
    requests: list[SaRequest] = []
    with ExitStack() as stack, fabric.rules.on_sa_request(requests.append):
        lives = []
        for number in range(processes):
            backend = stack.enter_context(open_fabric(fabric))
            address = str(fabric.ports[1 + number % (PORTS - 1)].interfaces[0].ipv4)
            lives.append(join_storm.life(backend, address, number, count, lambda joined: None))
        for _ in ("all join", "all leave"):
            assert [next(one) for one in lives] == [0] * processes
        assert [next(one, None) for one in lives] == [None] * processes
    joins = sum(one.method is SaMethod.SET for one in requests)
    left = {(one.source, Gid(one.record.mgid)) for one in requests if one.method is SaMethod.DELETE}
    return Asked(joins, Counter(mgid for _, mgid in left))


def asked_in(capture: Path) -> Asked:
    """For an unanswered Delete the kernel makes more."""
    seen: dict[tuple[int, bytes], tuple[SaMethod, Gid]] = {}
    with capture.open("rb") as file:
        for asked in asked_of_the_sa(file):
            if join_storm.is_of_storm(mgid := Gid(asked.record.mgid)):
                seen[asked.lid, asked.transaction] = asked.method, mgid
    joins = sum(method is SaMethod.SET for method, _ in seen.values())
    left = {(lid, mgid) for (lid, _), (method, mgid) in seen.items() if method is SaMethod.DELETE}
    return Asked(joins, Counter(mgid for _, mgid in left))


def test_a_storm_of_joins_asks_the_sa_as_often_as_on_the_simulator(said: Said) -> None:
    """SA-SHARE-1: the first process of a port asks for all of them. What is not answered is asked again."""
    simulated = asked_in_simulator(*JOINS)
    joins, left = asked_in(said.folder / "joins.pcapng")
    assert joins - int(said("joins")) == simulated.joins
    assert left == simulated.left


def test_the_module_stays_while_a_queue_pair_is_open(said: Said) -> None:
    assert "in use" in said("in_use", status=1)


def test_an_hca_goes_with_the_last_queue_pair(said: Said) -> None:
    assert said("removed") == "softib1 here\nsoftib2 here\nsoftib3 here\nsoftib4 gone\n"


def test_the_module_goes_under_opensm_and_ipoib(said: Said) -> None:
    """While switches tell that their ports go; nothing complains, which the last test sees."""
    assert said("unload") == ""


@pytest.fixture(scope="module")
def tapped(said: Said) -> Decoded:
    return Decoded(said.folder / "tap.pcapng")


@pytest.fixture(scope="module")
def simulated(tapped: Decoded, tmp_path_factory: pytest.TempPathFactory) -> Decoded:
    """The beginning of the same exchange on the simulator, with mckey's payload, immediate and PSNs."""
    first = tapped.rows(left("softib1"), "data.data", "infiniband.immdt")[:COMPARED]
    fabric = Fabric.infiniband(ports=3, switches=3, trace=True)
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        ids = [channel.create_id() for _ in range(3)]
        for index in (1, 2, 0):
            ids[index].bind_addr(backend.devices()[index].ports[0].addresses[0])
            ids[index].create_qp()
            ids[index].join_multicast("239.1.1.7")
            event = channel.get_event(1)
        assert event is not None
        assert event.ud is not None
        qp = ids[0].qp
        assert qp is not None
        for row in first:
            payload = bytes.fromhex(row["data.data"].replace(":", ""))
            qp.send(event.ud.destination, [payload], imm=int(row["infiniband.immdt"].replace(":", ""), 16))
    assert fabric.trace is not None
    file = tmp_path_factory.mktemp("sim") / "sim.pcapng"
    with file.open("wb") as out:
        trace_pcapng.write(fabric.trace, out)
    return Decoded(file)


def left(port: str) -> Shown:
    """Messages to a group as they leave that port."""

    def shown(packet: dict[str, list[str]]) -> bool:
        outward = has("frame.packet_flags_direction", "0x00000002")(packet)
        return (
            is_message(packet) and outward and has("frame.interface_name", port)(packet) and is_ours(packet)
        )

    return shown


def is_ours(packet: dict[str, list[str]]) -> bool:
    return MGID in packet.get("infiniband.grh.dgid", ())


MESSAGE_DIFFERS = {
    "infiniband.lrh.slid": "OpenSM numbers switches, too",
    "infiniband.lrh.dlid": "the kernel's other groups have MLIDs before",
    "infiniband.grh.sgid": "softib has its own GUIDs",
    "infiniband.deth.srcqp": "queue pairs are numbered from another start",
    "infiniband.invariant.crc": "follows from these",
    "infiniband.variant.crc": "follows from all",
}

WHOLE_HEADERS = {"infiniband.lrh", "infiniband.grh", "infiniband.deth"}
"""tshark shows each header's bytes, too, whose fields are compared."""


def test_tapped_packet_equals_the_simulators(tapped: Decoded, simulated: Decoded) -> None:
    """A tapped message is the simulator's field by field."""
    theirs = [packet for packet in tapped.decoded if left("softib1")(packet)][:COMPARED]
    ours = [packet for packet in simulated.decoded if is_message(packet)]
    assert len(theirs) == len(ours) == COMPARED
    for mine, yours in zip(ours, theirs, strict=True):
        names = {
            name for name in mine.keys() | yours.keys() if name.startswith(("infiniband", "data", "_ws"))
        }
        differing = {name for name in names if mine.get(name) != yours.get(name)}
        assert differing - WHOLE_HEADERS <= MESSAGE_DIFFERS.keys()
        assert "_ws.malformed" not in yours


def test_a_tapped_message_is_ours_to_the_byte(said: Said) -> None:
    """With both CRCs, which the module computes in C and `mcast.wire.packets` by other means."""
    with (said.folder / "tap.pcapng").open("rb") as file:
        frames = list(read_frames(file))
    erf_header = 16
    found = 0
    for frame in frames:
        with suppress(SkipPacket):
            message = datagram(frame)
            if message.dest == Gid(MGID):
                found += 1
                assert packets.infiniband(message) == frame.data[erf_header:]
    assert found >= 3 * MESSAGES


def test_message_is_tapped_at_both_ends(tapped: Decoded) -> None:
    """A message is tapped where it leaves and where it arrives.

    Once at softib1's port, and at the two members' ports: nothing comes by softib4.
    """
    where = Counter(
        (packet["frame.interface_name"][0], packet["frame.packet_flags_direction"][0])
        for packet in tapped.decoded
        if is_message(packet) and is_ours(packet)
    )
    assert where.keys() == {("softib1", "0x00000002"), ("softib2", "0x00000001"), ("softib3", "0x00000001")}
    assert min(where.values()) >= MESSAGES


def test_the_kernel_s_join_is_in_the_tap(tapped: Decoded) -> None:
    """Two full members, each a Set of MCMemberRecord that the SA answers."""
    joins = [packet for packet in tapped.decoded if MGID in packet.get("infiniband.mcmemberrecord.mgid", ())]
    asked = {
        packet["frame.interface_name"][0] for packet in joins if "0x02" in packet["infiniband.mad.method"]
    }
    assert asked >= {"softib2", "softib3"}


def test_the_tap_has_one_reader(said: Said) -> None:
    assert "busy" in (said.folder / "second_reader.txt").read_text()


def test_the_kernel_has_no_complaint(said: Said) -> None:
    """But one: rdmavt's own copy of a work request, which Debian's fortified memcpy tells once."""
    complaints = re.findall(r"(?:WARNING|BUG|Oops).*", said("log"))
    assert [one for one in complaints if "rdmavt/qp.c" not in one] == []


def test_minutes_of_everything_at_once(pytestconfig: pytest.Config) -> None:
    """A short run of `make soak`."""
    lab = LabMachine(8, pytestconfig.getoption("--lab-kernel"), fabric="infiniband")
    output = io.BytesIO()
    command = [sys.executable, "-m", "tests.soak", "--guest", "--minutes", "3"]
    result = lab.run(command, output_timeout=OUTPUT_TIMEOUT, stdout=output)
    assert result.exit_code == 0, output.getvalue().decode()
