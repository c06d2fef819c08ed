"""One exchange on Soft-RoCE and on the simulator: the kernel's packets against ours, field by field.

Two members join, one sends, both leave: in the lab, captured on a bridge's ports as packets come out of their
host; and on a simulated fabric. The lab's receiver is mckey. Its sender is not, because mckey leaves the
group as soon as it has posted its messages, and Linux 6.12 drops those that it has not sent by then.
Both are decoded by tshark.
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
import contextlib, json, os, pathlib, select, socket, subprocess, sys, time
import mcast

shared, group, count, size = sys.argv[1:]
# Ports of their own, without a querier: the lab's speaks IGMPv2, and so does who has heard it, for minutes.
def ip(command):
    subprocess.run(["ip", *command.split()], check=True)

addresses = ["10.78.0.1", "10.78.0.2"]
ip("link add brc type bridge mcast_querier 0")
ip("link set brc up")
taps = {}
for index, port in enumerate(("q1", "q2")):
    host = f"c{index + 1}"
    ip(f"link add {host} type veth peer name {port}")
    ip(f"addr add {addresses[index]}/24 dev {host}")
    for name, value in ("accept_local", "1"), ("rp_filter", "0"):
        pathlib.Path(f"/proc/sys/net/ipv4/conf/{host}/{name}").write_text(value)
    ip(f"link set {port} master brc up")
    ip(f"link set {host} up")
    subprocess.run(["rdma", "link", "add", f"rx{host}", "type", "rxe", "netdev", host], check=True)
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    tap.bind((port, 0))
    taps[tap] = port
start, captured = time.monotonic(), []

def capture(until, seconds):
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

command = ["stdbuf", "-oL", "mckey", "-m", group, "-C", count, "-S", size, "-b", addresses[1]]
receiver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
os.set_blocking(receiver.stdout.fileno(), False)
output = bytearray()

def attached():
    with contextlib.suppress(BlockingIOError):
        output.extend(os.read(receiver.stdout.fileno(), 65536))
    return b"receiving data transfers" in output or receiver.poll() is not None

capture(lambda: attached() and reported("q2", 4), 120)
with mcast.open_backend("rdma") as backend, backend.event_channel() as channel, channel.create_id() as cm_id:
    cm_id.bind_addr(addresses[0])
    qp = cm_id.create_qp()
    cm_id.join_multicast(group)
    to = channel.get_event(120).check().ud.destination
    qp.send(to, [bytes([number]) * int(size) for number in range(int(count))], imm=qp.qp_num)
    capture(lambda: receiver.poll() is not None, 120)
    cm_id.leave_multicast(group)
capture(lambda: reported("q1", 3) and reported("q2", 3), 120)
output += receiver.stdout.read() or b""
found = {
    "exit": receiver.returncode,
    "output": output.decode(),
    "packets": [(round(t * 1e9), port, data.hex()) for t, port, data in captured],
}
pathlib.Path(shared, "found.json").write_text(json.dumps(found))
"""


@dataclass(frozen=True)
class Side:
    """One side of the comparison: its packets by port, sender first, and what tshark reads in them."""

    packets: list[pcapng.CapturedPacket]
    ports: list[str]
    decoded: Decoded

    def messages(self, *fields: str) -> list[Row]:
        return self.decoded.rows(is_message, *fields)

    def reports(self, port: int, *fields: str) -> list[Row]:
        """IGMP records of a port; one that is only repeated counts once (RFC 3376, 5.1: robustness)."""

        def shown(packet: dict[str, list[str]]) -> bool:
            from_port = has("frame.interface_name", self.ports[port])(packet)
            return from_port and has("igmp.maddr", GROUP)(packet)

        rows = self.decoded.rows(shown, *fields)
        return [row for index, row in enumerate(rows) if row not in rows[:index]]


def side(ports: list[str], captured: list[pcapng.CapturedPacket], file: Path) -> Side:
    with file.open("wb") as out:
        pcapng.write_packets(LinkLayer.ETHERNET, ports, captured, out)
    return Side(captured, ports, Decoded(file))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Side:
    if shutil.which("mckey") is None:
        pytest.fail("the exchange is mckey's: apt-get install rdmacm-utils", pytrace=False)
    shared = tmp_path_factory.mktemp("kernel")
    out = io.BytesIO()
    command = [sys.executable, "-c", EXCHANGE, str(shared), GROUP, str(COUNT), str(SIZE)]
    result = LabMachine(share=[shared]).run(command, output_timeout=300, stdout=out, stderr=out)
    assert result.exit_code == 0, out.getvalue().decode()
    found: dict[str, Any] = json.loads((shared / "found.json").read_text())
    assert found["exit"] == 0, found["output"]
    captured = [
        pcapng.CapturedPacket(t, port, pcapng.Direction.IN, bytes.fromhex(data))
        for t, port, data in found["packets"]
    ]
    return side(["q1", "q2"], captured, shared / "kernel.pcapng")


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
    return side([port.name for port in fabric.ports], captured, tmp_path_factory.mktemp("sim") / "sim.pcapng")


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
OTHER_IN_MESSAGES = {
    "eth.src": "the guest draws its MAC addresses",
    "ip.src": "the guest's network is another",
    "ip.id": "the kernel counts; with DF set any number will do (RFC 6864), and 0 is ours",
    "ip.checksum": "follows from these",
    "infiniband.deth.srcqp": "QPs are numbered from another start",
    "udp.srcport": "follows from the QP number",
    "infiniband.invariant.crc": "follows from all",
}
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


def test_messages_are_the_same_field_by_field(kernel: Side, simulated: Side) -> None:
    ours, theirs = simulated.messages(*SAME_IN_MESSAGES), kernel.messages(*SAME_IN_MESSAGES)
    assert len(theirs) == COUNT
    assert ours == theirs


def test_what_differs_is_what_must(kernel: Side, simulated: Side) -> None:
    """Every field that tshark shows of a message is the same, or differs for a reason given here."""
    ours, theirs = ([p for p in each.decoded.decoded if is_message(p)] for each in (simulated, kernel))
    for mine, yours in zip(ours, theirs, strict=True):
        differing = {name for name in mine.keys() | yours.keys() if mine.get(name) != yours.get(name)}
        shown = {
            name for name in differing if name.startswith(ON_THE_WIRE) and not name.startswith(SAID_TWICE)
        }
        assert shown <= OTHER_IN_MESSAGES.keys()


ON_THE_WIRE = ("eth.", "ip.", "udp.", "infiniband.", "data.")
SAID_TWICE = (
    *("eth.src.", "eth.src_", "eth.addr", "ip.addr", "ip.src_host", "ip.host", "ip.checksum_calculated"),
    *("eth.stream", "ip.stream", "udp.port", "udp.stream", "udp.time_", "udp.payload"),
)
"""tshark's further names for what it has shown, and numbers of its own."""


def test_the_source_port_follows_from_the_qp(kernel: Side, simulated: Side) -> None:
    for each in (kernel, simulated):
        for row in each.messages("udp.srcport", "infiniband.deth.srcqp"):
            assert int(row["udp.srcport"]) == packets.udp_source_port(int(row["infiniband.deth.srcqp"], 0))


def test_reports_are_the_same_field_by_field(kernel: Side, simulated: Side) -> None:
    for port in (SENDER, RECEIVER):
        ours, theirs = (each.reports(port, *SAME_IN_REPORTS) for each in (simulated, kernel))
        assert [row["igmp.record_type"] for row in theirs] == ["4", "3"], "to EXCLUDE {}, to INCLUDE {}"
        assert ours == theirs


def test_a_report_is_the_kernels_to_the_byte(kernel: Side) -> None:
    found = [p.data for p in kernel.packets if p.data[12:14] == b"\x08\x00" and p.data[23] == 2]
    found = [data for data in found if data[50:54] == IPv4Address(GROUP).packed]
    assert len(found) >= 4
    for data in found:
        joined = data[46] == 4
        assert packets.igmp_report(IPv4Address(data[26:30]), IPv4Address(GROUP), joined, data[6:12]) == data


def test_packet_equals_the_kernels_except_its_ip_id(kernel: Side) -> None:
    """A message is the kernels to the byte but for its ip id."""
    found = [p.data for p in kernel.packets if p.data[12:14] == b"\x08\x00" and p.data[23] == 17]
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


def test_the_kernels_icrc_is_the_one_we_compute(kernel: Side) -> None:
    """scapy, which agrees with us on our packets, agrees with the kernel on its."""
    found = [p.data for p in kernel.packets if p.data[12:14] == b"\x08\x00" and p.data[23] == 17]
    assert len(found) == COUNT
    for data in found:
        carried, computed = scapy_icrc(data)
        assert carried == computed
        ip, rest = data[14:34], data[34:-4]
        masked = ip[:1] + b"\xff" + ip[2:8] + b"\xff" + ip[9:10] + b"\xff\xff" + ip[12:]
        masked += rest[:6] + b"\xff\xff" + rest[8:12] + b"\xff" + rest[13:]
        assert packets.icrc(b"\xff" * 8 + masked) == data[-4:]
