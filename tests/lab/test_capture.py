"""The same exchange on Soft-RoCE, `udp` and the simulator: the kernel's packets against ours, by field.

Two members join, one sends, both leave: in the lab, once from Soft-RoCE and once from `udp`, captured on a
bridge's ports as packets come out of their host; and on a simulated fabric. The lab's receiver is mckey. Its
sender is not, because mckey leaves the group as soon as it has posted its messages, and Linux 6.12 drops
those that it has not sent by then. Then Soft-RoCE and `udp` answer each other. All are decoded by tshark.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from mcast.api import LinkLayer
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.trace.pcapng import packets_of
from mcast.pcapng import writer as pcapng
from mcast.pcapng.dissect import datagram
from mcast.pcapng.reader import Frame
from mcast.wire import packets
from mcast.wire.addresses import Gid
from mcast.wire.mapping import group_mac
from rdma_lab import LabMachine

from ..sim.wireshark import Decoded, Row, has, is_message, scapy_icrc

GROUP, COUNT, SIZE = "239.129.2.3", 4, 101
SENDER, RECEIVER = 0, 1

EXCHANGE = r"""
import contextlib, functools, json, os, pathlib, select, socket, subprocess, sys, time
import mcast
from mcast.backends.net.namespace import Namespace

shared, group, count, size = sys.argv[1:]
# Ports of their own, without a querier: the lab's speaks IGMPv2, and so does who has heard it, for minutes.
def ip(command):
    subprocess.run(["ip", *command.split()], check=True)

addresses = ["10.78.0.1", "10.78.0.2", "10.78.0.3"]
ip("link add brc type bridge mcast_querier 0")
ip("link set brc up")
# The interfaces of one host answer for their own addresses alone.
pathlib.Path("/proc/sys/net/ipv4/conf/all/arp_ignore").write_text("1")
here = contextlib.nullcontext
for index, port in enumerate(("q1", "q2")):
    host = f"c{index + 1}"
    ip(f"link add {host} type veth peer name {port}")
    ip(f"addr add {addresses[index]}/24 dev {host}")
    for name, value in ("accept_local", "1"), ("rp_filter", "0"):
        pathlib.Path(f"/proc/sys/net/ipv4/conf/{host}/{name}").write_text(value)
    ip(f"link set {port} master brc up")
    ip(f"link set {host} up")
    subprocess.run(["rdma", "link", "add", f"rx{host}", "type", "rxe", "netdev", host], check=True)
# The host of `udp` has a namespace of its own, because Soft-RoCE has bound port 4791 in this one. It cuts
# large datagrams (GSO) itself, as one with a card without segmentation does.
there = Namespace().entered
with there():
    ip("link add c3 type veth peer name q3 netns 1")
    ip(f"addr add {addresses[2]}/24 dev c3")
    ip("link set c3 gso_max_segs 1 up")
    ip("link set lo up")
ip("link set q3 master brc up")
taps = {}
for port in ("q1", "q2", "q3"):
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    tap.bind((port, 0))
    taps[tap] = port
start, captured = time.monotonic(), []

def capture(until, seconds=120):
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"not done after {seconds} s: {[(p, d.hex()) for _, p, d in captured]}"
        for tap in select.select(list(taps), [], [], 0.1)[0]:
            data, (_, _, kind, _, _) = tap.recvfrom(65536)
            if kind != socket.PACKET_OUTGOING:
                captured.append((time.monotonic() - start, taps[tap], data))

def reported(port, kind):
    wanted = socket.inet_aton(group)
    return any(p == port and data[23] == 2 and data[38] == 0x22 and data[46] == kind and data[50:54] == wanted
               for _, p, data in captured if len(data) >= 54 and data[12:14] == b"\x08\x00")

def messages(port):
    return sum(p == port and data[23] == 17 for _, p, data in captured if data[12:14] == b"\x08\x00")

def taken():
    found = [(round(t * 1e9), port, data.hex()) for t, port, data in captured]
    captured.clear()
    return found

def send_to_mckey(provider, place, address, port):
    command = ["stdbuf", "-oL", "mckey", "-m", group, "-C", count, "-S", size, "-b", addresses[1]]
    receiver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    os.set_blocking(receiver.stdout.fileno(), False)
    output = bytearray()

    def attached():
        with contextlib.suppress(BlockingIOError):
            output.extend(os.read(receiver.stdout.fileno(), 65536))
        return b"receiving data transfers" in output or receiver.poll() is not None

    capture(lambda: attached() and reported("q2", 4))
    with place(), mcast.open_backend(provider) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr(address)
        qp = cm_id.create_qp()
        cm_id.join_multicast(group)
        to = channel.get_event(120).check().ud.destination
        payloads = [bytes([number]) * int(size) for number in range(int(count))]
        qp.send(to, payloads[:1], imm=0x12345678)
        qp.send(to, payloads[1:], imm=0x12345678)
        capture(lambda: receiver.poll() is not None)
        cm_id.leave_multicast(group)
        cm_id.destroy()
    capture(lambda: reported(port, 3) and reported("q2", 3))
    output += receiver.stdout.read() or b""
    return {"exit": receiver.returncode, "output": output.decode(), "packets": taken()}

def answer_each_other():
    with contextlib.ExitStack() as stack:
        def member(provider, place, address):
            with place():
                endpoint = stack.enter_context(mcast.open_endpoint(provider, bind=address, loopback="off"))
                membership = endpoint.join(group)
            stack.callback(functools.partial(within, place, membership.leave))
            return endpoint, membership

        def within(place, call):
            with place():
                call()

        _, ours = member("udp", there, addresses[2])
        their_endpoint, theirs = member("rdma", here, addresses[1])
        capture(lambda: reported("q2", 4) and reported("q3", 4))
        theirs.send(b"question")
        with there():
            question = ours.recv(120)
            ours.reply(question, bytes([7]) * int(size), 7)
        answer = their_endpoint.recv(120)
        theirs.reply(answer, bytes([7]) * int(size), 7)
        capture(lambda: messages("q2") >= 2 and messages("q3") >= 1)
    return {"packets": taken()}

found = {
    "rdma": send_to_mckey("rdma", here, addresses[0], "q1"),
    "udp": send_to_mckey("udp", there, addresses[2], "q3"),
    "answers": answer_each_other(),
}
pathlib.Path(shared, "found.json").write_text(json.dumps(found))
"""


@dataclass(frozen=True)
class Side:
    """One side of the comparison: its packets by port, sender first, and what tshark reads in them."""

    provider: str
    packets: list[pcapng.CapturedPacket]
    ports: list[str]
    decoded: Decoded

    def datagrams(self) -> list[bytes]:
        """Return the frames of UDP."""
        return [p.data for p in self.packets if p.data[12:14] == b"\x08\x00" and p.data[23] == 17]

    def messages(self, *fields: str) -> list[Row]:
        return self.decoded.rows(is_message, *fields)

    def reports(self, port: int, *fields: str) -> list[Row]:
        """IGMP records of a port; one that is only repeated counts once (RFC 3376, 5.1: robustness)."""

        def shown(packet: dict[str, list[str]]) -> bool:
            from_port = has("frame.interface_name", self.ports[port])(packet)
            return from_port and has("igmp.maddr", GROUP)(packet)

        rows = self.decoded.rows(shown, *fields)
        return [row for index, row in enumerate(rows) if row not in rows[:index]]


def side(provider: str, ports: list[str], captured: list[pcapng.CapturedPacket], file: Path) -> Side:
    with file.open("wb") as out:
        pcapng.write_packets(LinkLayer.ETHERNET, ports, captured, out)
    return Side(provider, captured, ports, Decoded(file))


@pytest.fixture(scope="module")
def exchanges(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Side]:
    """All that the lab's guest captured: by sender, and the answers."""
    if shutil.which("mckey") is None:
        pytest.fail("the exchange is mckey's: apt-get install rdmacm-utils", pytrace=False)
    shared = tmp_path_factory.mktemp("kernel")
    out = io.BytesIO()
    command = [sys.executable, "-c", EXCHANGE, str(shared), GROUP, str(COUNT), str(SIZE)]
    lab = LabMachine(kernel=pytestconfig.getoption("--lab-kernel"), share=[shared])
    result = lab.run(command, output_timeout=300, stdout=out, stderr=out)
    assert result.exit_code == 0, out.getvalue().decode()
    found: dict[str, Any] = json.loads((shared / "found.json").read_text())
    sides = {}
    for name, ports in (("rdma", ["q1", "q2"]), ("udp", ["q3", "q2"]), ("answers", ["q3", "q2"])):
        assert found[name].get("exit", 0) == 0, found[name]["output"]
        captured = [
            pcapng.CapturedPacket(t, port, pcapng.Direction.IN, bytes.fromhex(data))
            for t, port, data in found[name]["packets"]
            if port in ports
        ]
        sides[name] = side(name, ports, captured, shared / f"{name}.pcapng")
    return sides


@pytest.fixture(scope="module")
def kernel(exchanges: dict[str, Side]) -> Side:
    return exchanges["rdma"]


@pytest.fixture(scope="module")
def simulated(kernel: Side, tmp_path_factory: pytest.TempPathFactory) -> Side:
    """Repeat the exchange on the simulator, with the payloads and the immediate of the kernel's."""
    payloads = [
        bytes.fromhex(row["data.data"].replace(":", ""))[:SIZE] for row in kernel.messages("data.data")
    ]
    imm = int(kernel.messages("infiniband.immdt")[0]["infiniband.immdt"].replace(":", ""), 16)
    fabric = Fabric.roce(ports=2, trace=True)
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        ids = [channel.create_id() for _ in range(2)]
        for index in (RECEIVER, SENDER):
            ids[index].bind_addr(backend.devices()[index].ports[0].addresses[0])
            ids[index].create_qp()
            ids[index].join_multicast(GROUP)
            event = channel.get_event(1)
        assert event is not None
        assert event.ud is not None
        qp = ids[SENDER].qp
        assert qp is not None
        for payload in payloads:
            qp.send(event.ud.destination, [payload], imm=imm)
        for cm_id in ids:
            cm_id.leave_multicast(GROUP)
    assert fabric.trace is not None
    captured = list(packets_of(fabric.trace))
    ports = [port.name for port in fabric.ports]
    return side("sim", ports, captured, tmp_path_factory.mktemp("sim") / "sim.pcapng")


SAME_IN_MESSAGES = (
    "eth.dst",
    "eth.type",
    "ip.version",
    "ip.hdr_len",
    "ip.dsfield",
    "ip.len",
    "ip.flags",
    "ip.frag_offset",
    "ip.ttl",
    "ip.proto",
    "ip.checksum.status",
    "ip.dst",
    "udp.dstport",
    "udp.length",
    "udp.checksum",
    "infiniband.bth.opcode",
    "infiniband.bth.se",
    "infiniband.bth.m",
    "infiniband.bth.padcnt",
    "infiniband.bth.tver",
    "infiniband.bth.p_key",
    "infiniband.bth.destqp",
    "infiniband.bth.a",
    "infiniband.bth.reserved7",
    "infiniband.bth.psn",
    "infiniband.deth.q_key",
    "infiniband.immdt",
    "data.data",
    "_ws.malformed",
)
_OF_ANY_SENDER = {
    "eth.src": "the guest draws its MAC addresses",
    "ip.src": "each sender has its own",
    "ip.id": "the kernel counts; with DF set any number will do (RFC 6864), and 0 is ours",
    "ip.checksum": "follows from these",
    "infiniband.deth.srcqp": "QPs are numbered from another start",
    "infiniband.deth": "holds the number of the QP",
    "udp.srcport": "follows from the QP number",
    "infiniband.invariant.crc": "follows from all",
}
_OF_A_SOCKET = {
    "ip.id": "a socket's is 0, and the number of the segment within one large datagram (GSO)",
    "udp.srcport": "the socket's own, which is the upper part of the QP number",
    "udp.checksum": "Soft-RoCE sends 0, which is none; a socket that sends large datagrams (GSO) has one",
    "udp.checksum.status": "the same",
}
DIFFERING: dict[str, dict[str, str]] = {
    "sim": _OF_ANY_SENDER,
    "udp": _OF_ANY_SENDER | _OF_A_SOCKET,
    "answers": _OF_ANY_SENDER
    | _OF_A_SOCKET
    | {
        "eth.dst": "each answers the other",
        "ip.dst": "the same",
        "infiniband.bth.destqp": "the same",
        "infiniband.bth": "holds the number of the QP, and the PSN",
        "infiniband.bth.psn": "the kernel's QP has sent the question before",
    },
}
"""Fields of messages that differ from Soft-RoCE's, by the exchange; each with the reason."""
SAME_IN_REPORTS = (
    "eth.dst",
    "eth.type",
    "ip.version",
    "ip.hdr_len",
    "ip.dsfield",
    "ip.len",
    "ip.id",
    "ip.flags",
    "ip.frag_offset",
    "ip.ttl",
    "ip.proto",
    "ip.checksum.status",
    "ip.dst",
    "ip.opt.type",
    "ip.opt.ra",
    "igmp.type",
    "igmp.num_grp_recs",
    "igmp.record_type",
    "igmp.aux_data_len",
    "igmp.num_src",
    "igmp.maddr",
    "igmp.checksum",
    "igmp.checksum.status",
)


@pytest.fixture(params=["simulated", "udp"])
def ours(request: pytest.FixtureRequest, exchanges: dict[str, Side]) -> Side:
    """What a provider without a device of RDMA sends."""
    found = exchanges["udp"] if request.param == "udp" else request.getfixturevalue("simulated")
    assert isinstance(found, Side)
    return found


def test_messages_are_the_same_field_by_field(kernel: Side, ours: Side) -> None:
    fields = [name for name in SAME_IN_MESSAGES if name not in DIFFERING[ours.provider]]
    mine, theirs = ours.messages(*fields), kernel.messages(*fields)
    assert len(theirs) == COUNT
    assert mine == theirs


def test_what_differs_is_what_must(kernel: Side, ours: Side) -> None:
    """Every field that tshark shows of a message is the same, or differs for a reason given here."""
    mine, theirs = ([p for p in each.decoded.decoded if is_message(p)] for each in (ours, kernel))
    for one, other in zip(mine, theirs, strict=True):
        assert differing(one, other) <= DIFFERING[ours.provider].keys()


def differing(one: dict[str, list[str]], other: dict[str, list[str]]) -> set[str]:
    """Return the names of the fields that are not the same in two messages."""
    found = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return {name for name in found if name.startswith(ON_THE_WIRE) and not name.startswith(SAID_TWICE)}


ON_THE_WIRE = ("eth.", "ip.", "udp.", "infiniband.", "data.")
SAID_TWICE = (
    *("eth.src.", "eth.src_", "eth.dst.", "eth.dst_", "eth.addr", "ip.addr", "ip.src_host", "ip.dst_host"),
    *("ip.host", "ip.checksum_calculated", "eth.stream", "ip.stream", "udp.port", "udp.stream", "udp.time_"),
    *("udp.payload", "udp.checksum_"),
)
"""tshark's further names for what it has shown, and numbers of its own."""


def test_answers_differ_in_what_they_must(exchanges: dict[str, Side]) -> None:
    """A message to one queue pair, from `udp` to Soft-RoCE and back."""
    answers = exchanges["answers"]
    found = [p for p in answers.decoded.decoded if is_message(p) and p["ip.dst"] != [GROUP]]
    by_port = {port: [p for p in found if has("frame.interface_name", port)(p)] for port in answers.ports}
    (mine,), (theirs,) = by_port.values()
    assert mine["data.data"] == theirs["data.data"]
    assert mine["infiniband.bth.destqp"] == [f"0x{int(theirs['infiniband.deth.srcqp'][0], 0):06x}"]
    assert differing(mine, theirs) <= DIFFERING["answers"].keys()


def test_the_source_port_follows_from_the_qp(kernel: Side, simulated: Side) -> None:
    for each in (kernel, simulated):
        for row in each.messages("udp.srcport", "infiniband.deth.srcqp"):
            assert int(row["udp.srcport"]) == packets.udp_source_port(int(row["infiniband.deth.srcqp"], 0))


def test_a_sockets_port_is_in_its_qp_number(exchanges: dict[str, Side]) -> None:
    """So who has received a message knows where its sender takes answers."""
    for row in exchanges["udp"].messages("udp.srcport", "infiniband.deth.srcqp"):
        assert int(row["udp.srcport"]) == int(row["infiniband.deth.srcqp"], 0) >> 8


def test_a_sockets_identification_is_known(exchanges: dict[str, Side]) -> None:
    """It is the number of the segment: the first message was sent alone, and the others in one datagram."""
    found = [int(row["ip.id"], 0) for row in exchanges["udp"].messages("ip.id")]
    assert found == [0, *range(COUNT - 1)]


def test_a_sockets_udp_checksum_is_right(exchanges: dict[str, Side]) -> None:
    """Or the sum of the addresses, lengths and protocol, with which the interface begins."""
    for frame in exchanges["udp"].datagrams():
        ip, udp = frame[14:34], frame[34:]
        begun = internet_sum(ip[12:20] + bytes((0, 17)) + udp[4:6])
        whole = internet_sum(ip[12:20] + bytes((0, 17)) + udp[4:6] + udp[:6] + udp[8:])
        assert int.from_bytes(udp[6:8]) in (begun, 0xFFFF - whole or 0xFFFF)


def internet_sum(data: bytes) -> int:
    """Return the one's complement sum (RFC 1071)."""
    total = sum(int.from_bytes(data[at : at + 2].ljust(2, b"\0")) for at in range(0, len(data), 2))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def test_reports_are_the_same_field_by_field(kernel: Side, ours: Side) -> None:
    """The receiver of both of the lab's exchanges is the same mckey."""
    for port in (SENDER, RECEIVER) if ours.provider == "sim" else (SENDER,):
        mine, theirs = (each.reports(port, *SAME_IN_REPORTS) for each in (ours, kernel))
        assert [row["igmp.record_type"] for row in theirs] == ["4", "3"], "to EXCLUDE {}, to INCLUDE {}"
        assert mine == theirs


def test_a_report_is_the_kernels_to_the_byte(kernel: Side) -> None:
    found = [p.data for p in kernel.packets if p.data[12:14] == b"\x08\x00" and p.data[23] == 2]
    found = [data for data in found if data[50:54] == IPv4Address(GROUP).packed]
    assert len(found) >= 4
    for data in found:
        joined = data[46] == 4
        assert packets.igmp_report(IPv4Address(data[26:30]), IPv4Address(GROUP), joined, data[6:12]) == data


def test_packet_equals_the_kernels_except_its_ip_id(kernel: Side) -> None:
    """A message is the kernels to the byte but for its ip id."""
    found = kernel.datagrams()
    fields = ("infiniband.deth.srcqp", "infiniband.bth.psn", "infiniband.immdt")
    for data, row in zip(found, kernel.messages(*fields), strict=True):
        imm = int(row["infiniband.immdt"].replace(":", ""), 16)
        message = packets.Datagram(
            source=Gid(IPv4Address(data[26:30])),
            dest=Gid(IPv4Address(GROUP)),
            src_qp=int(row["infiniband.deth.srcqp"], 0),
            dest_qp=0xFFFFFF,
            qkey=0x01234567,
            pkey=0xFFFF,
            psn=int(row["infiniband.bth.psn"]),
            payload=data[-4 - SIZE - 3 : -4 - 3],
            imm=imm,
        )
        made = packets.roce(message, data[6:12], group_mac(message.dest))
        assert without_id(made) == without_id(data)
        assert datagram(Frame(0, pcapng.ETHERNET, data, len(data), 0)) == message


def without_id(frame: bytes) -> bytes:
    """A frame without its IP identification, and what is computed over it: IP checksum and ICRC."""
    return frame[:18] + frame[20:24] + frame[26:-4]


@pytest.mark.parametrize(("name", "count"), [("rdma", COUNT), ("udp", COUNT), ("answers", 3)])
def test_the_icrc_is_the_one_we_compute(exchanges: dict[str, Side], name: str, count: int) -> None:
    """scapy, which agrees with us on our packets, agrees with the kernel on its, and with `udp`."""
    found = exchanges[name].datagrams()
    assert len(found) == count
    for data in found:
        carried, computed = scapy_icrc(data)
        assert carried == computed
        ip, rest = data[14:34], data[34:-4]
        masked = ip[:1] + b"\xff" + ip[2:8] + b"\xff" + ip[9:10] + b"\xff\xff" + ip[12:]
        masked += rest[:6] + b"\xff\xff" + rest[8:12] + b"\xff" + rest[13:]
        assert packets.icrc(b"\xff" * 8 + masked) == data[-4:]
