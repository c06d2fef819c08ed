"""A trace's packets, as tshark reads them; their CRCs, as others compute them."""

from __future__ import annotations

import io
from collections.abc import Callable
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from mcast.api import CmEvent, CmId, Destination, EventChannel, JoinAttrEx, LinkLayer
from mcast.backends.model.log_events import Attach
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop
from mcast.backends.sim.trace import pcapng
from mcast.backends.sim.trace.events import (
    Entry,
    MessagesLost,
    PortMade,
    SaAnswered,
    SaAsked,
    Send,
    Trace,
)
from mcast.pcapng.reader import read_frames
from mcast.pcapng.writer import CapturedPacket, Direction, write_packets
from mcast.wire import packets
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import SaMethod, SaStatus

from .wireshark import Decoded, every, has, is_message, nanoseconds, scapy_icrc

GROUP = "239.129.2.3"
PAYLOADS = [b"first", b"x" * 1000, b"", b"the fourth is lost"]
LATE = b"after somebody left"


def exchange(make: Callable[..., Fabric]) -> Trace:
    """Three members join, two send, one loses a message, one leaves, one is answered, one is refused."""
    fabric = make(ports=4, trace=True)
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        first, second, third, fourth = (ready(channel, d.ports[0].addresses[0]) for d in backend.devices())
        events = [join(channel, cm_id) for cm_id in (first, second, third)]
        assert events[0].ud is not None
        to = events[0].ud.destination
        fabric.clock.wait(lambda: False, 0.25, "", None)  # type: ignore[arg-type]
        with fabric.rules.on_delivery(
            lambda d: Drop() if d.number == 3 and d.target == fabric.ports[1].name else None
        ):
            assert first.qp is not None
            first.qp.send(to, PAYLOADS)
        assert second.qp is not None
        second.qp.send(to, [b"with an immediate"], imm=0xDEADBEEF)
        third.leave_multicast(GROUP)
        fabric.clock.run_until_idle()
        first.qp.send(to, [LATE])
        with second.qp.recv(1, 0) as batch:
            got = batch[0]
            assert fabric.trace is not None
            reply = Destination(
                gid=got.source, qp_num=got.src_qp, dlid=fabric.ports[0].lid, sgid_index=to.sgid_index
            )
            second.qp.send(reply, [b"to you alone"])
        if fabric.sa is not None:
            fabric.sa.send_only_full_member = False
            fourth.join_multicast_ex(JoinAttrEx.send_only("239.9.9.9"))
            refused = channel.get_event(5)
            assert refused is not None
            assert refused.errno
        fabric.clock.run_until_idle()
    fabric.clock.run_until_idle()
    return fabric.trace


def ready(channel: EventChannel, address: Any) -> CmId:
    cm_id = channel.create_id()
    cm_id.bind_addr(address)
    cm_id.create_qp()
    return cm_id


def join(channel: EventChannel, cm_id: CmId) -> CmEvent:
    cm_id.join_multicast(GROUP)
    event = channel.get_event(5)
    assert event is not None
    return event.check()


class Capture(Decoded):
    """A trace in a file, and what tshark reads there."""

    def __init__(self, trace: Trace, file: Path) -> None:
        self.trace = trace
        with file.open("wb") as out:
            pcapng.write(trace, out)
        super().__init__(file)

    @property
    def ports(self) -> dict[str, PortMade]:
        return {event.port: event for _, event in self.trace if isinstance(event, PortMade)}

    def frames(self) -> list[CapturedPacket]:
        return list(pcapng.packets_of(self.trace))


@pytest.fixture(scope="module")
def roce(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return Capture(exchange(Fabric.roce), tmp_path_factory.mktemp("roce") / "run.pcapng")


@pytest.fixture(scope="module")
def infiniband(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return Capture(exchange(Fabric.infiniband), tmp_path_factory.mktemp("ib") / "run.pcapng")


@pytest.fixture(params=["roce", "infiniband"])
def either(request: pytest.FixtureRequest) -> Capture:
    capture = request.getfixturevalue(request.param)
    assert isinstance(capture, Capture)
    return capture


# --- both --------------------------------------------------------------------------------


PACKET_COMMENT = str(0x100000)
"""Wireshark's severity of a comment that a file carries, the lowest it has."""


def test_every_packet_is_there_and_none_is_malformed(either: Capture) -> None:
    frames = either.frames()
    assert len(frames) >= 10
    assert either.column(every, "frame.len") == [str(len(frame.data)) for frame in frames]
    assert either.rows(has("_ws.malformed"), "frame.number") == []
    complaints = either.rows(has("_ws.expert.severity"), "_ws.expert.severity", "_ws.expert.message")
    assert {row["_ws.expert.severity"] for row in complaints} == {PACKET_COMMENT}, complaints
    assert all("infiniband" in packet or "igmp" in packet for packet in either.decoded)


def test_capture_has_virtual_time_and_interfaces(either: Capture) -> None:
    """Time is virtual and each port has an interface."""
    rows = either.rows(every, "frame.time_epoch", "frame.interface_name", "frame.packet_flags_direction")
    for row, packet in zip(rows, either.frames(), strict=True):
        assert nanoseconds(row["frame.time_epoch"]) == packet.t
        assert row["frame.interface_name"] == packet.port
        assert int(row["frame.packet_flags_direction"], 0) == packet.direction
    assert {packet.t for packet in either.frames()} != {0}


def test_headers_carry_what_the_sender_said(either: Capture) -> None:
    fields = ("opcode", "destqp", "p_key", "psn", "padcnt")
    rows = either.rows(
        is_message,
        *(f"infiniband.bth.{field}" for field in fields),
        "infiniband.deth.q_key",
        "infiniband.deth.srcqp",
        "infiniband.immdt",
    )
    sends = [event for _, event in either.trace if isinstance(event, Send)]
    expected = [(send, index) for send in sends for index in range(len(send.payloads))]
    assert len(rows) == len(expected) == len(PAYLOADS) + 3
    for row, (send, index) in zip(rows, expected, strict=True):
        assert row.pop("infiniband.immdt") == ("" if send.imm is None else send.imm.to_bytes(4).hex(":"))
        seen = {name.rpartition(".")[2]: int(text, 0) for name, text in row.items()}
        assert seen == {
            "opcode": 100 if send.imm is None else 101,
            "destqp": send.dest_qp,
            "p_key": 0xFFFF,
            "psn": send.psn + index,
            "padcnt": -len(send.payloads[index]) % 4,
            "q_key": 0x01234567,
            "srcqp": send.qp,
        }
    assert [send.dest_qp for send in sends[:-1]] == [0xFFFFFF] * 3
    assert sends[-1].dest_qp == sends[0].qp
    assert [send.imm for send in sends] == [None, 0xDEADBEEF, None, None]


def test_the_psn_counts_the_messages_of_a_qp(either: Capture) -> None:
    rows = either.rows(is_message, "infiniband.deth.srcqp", "infiniband.bth.psn")
    sequences: dict[str, list[int]] = {}
    for row in rows:
        sequences.setdefault(row["infiniband.deth.srcqp"], []).append(int(row["infiniband.bth.psn"]))
    assert sorted(sequences.values(), key=len) == [[0, 1], [0, 1, 2, 3, 4]]


def test_payloads_are_padded_to_words(either: Capture) -> None:
    seen = either.column(has("infiniband.deth.srcqp", "0x00000010"), "data.data")
    assert [text.replace(":", "") for text in seen] == [
        (payload + bytes(-len(payload) % 4)).hex() for payload in [*PAYLOADS, LATE]
    ]


def test_a_lost_message_says_who_lost_it_and_why(either: Capture) -> None:
    commented = either.rows(has("frame.comment"), "frame.comment", "infiniband.bth.psn")
    assert [row["infiniband.bth.psn"] for row in commented] == ["3"]
    second = list(either.ports)[1]
    assert commented[0]["frame.comment"] == f"lost at {second} QP 17: a fault rule dropped it"


# --- RoCEv2 ------------------------------------------------------------------------------


def test_losses_cost_no_more_than_sends() -> None:
    """A line of losses costs no more than the messages that were sent."""
    made = exchange(Fabric.roce)
    (t, lost), *_ = [(t, event) for t, event in made if isinstance(event, MessagesLost)]
    claims = [lost.model_copy(update={"first": 0, "count": (1 << 24) - 1, "qp": qp}) for qp in range(2_000)]
    forged = Trace([*made, *(Entry(t, claim) for claim in claims)])
    sent = [len(event.payloads) for _, event in made if isinstance(event, Send)]
    comments = [packet.comment for packet in pcapng.packets_of(forged) if packet.comment]
    assert len(comments) == sum(sent)
    assert {comment.splitlines()[-1] for comment in comments} <= {"lost at 1,900 more", "lost at 1,901 more"}
    file = io.BytesIO()
    pcapng.write(forged, file)
    assert len(file.getvalue()) < 100_000


def test_long_comment_is_cut() -> None:
    """A comment that is too long for the format loses its end."""
    file = io.BytesIO()
    packet = CapturedPacket(0, "roce0", Direction.OUT, b"x" * 64, "\u00fc" * 40_000)
    write_packets(LinkLayer.ETHERNET, ["roce0"], [packet], file)
    file.seek(0)
    (read,) = read_frames(file)
    assert read.data == packet.data


def test_roce_message_is_addressed_to_the_group(roce: Capture) -> None:
    """A group message on RoCE is addressed to the group."""
    fields = ("eth.dst", "eth.src", "ip.src", "ip.dst", "ip.ttl", "ip.checksum.status", "ip.flags.df")
    rows = roce.rows(has("ip.dst", GROUP), *fields, "udp.dstport", "udp.srcport", "udp.length", "ip.len")
    assert len(rows) == len(PAYLOADS) + 2
    first, second = rows[0], rows[len(PAYLOADS)]
    length = 8 + 12 + 8 + len(PAYLOADS[0]) + 3 + 4
    assert first == {
        "eth.dst": "01:00:5e:01:02:03",
        "eth.src": "02:00:00:00:00:01",
        "ip.src": "10.0.0.1",
        "ip.dst": GROUP,
        "ip.ttl": "64",
        "ip.checksum.status": "1",
        "ip.flags.df": "1",
        "udp.dstport": "4791",
        "udp.srcport": first["udp.srcport"],
        "udp.length": str(length),
        "ip.len": str(20 + length),
    }
    assert (second["eth.src"], second["ip.src"]) == ("02:00:00:00:00:02", "10.0.0.2")
    ports = {
        row["ip.src"]: {int(r["udp.srcport"]) for r in rows if r["ip.src"] == row["ip.src"]} for row in rows
    }
    assert all(len(used) == 1 and min(used) >= 0xC000 for used in ports.values())
    assert ports["10.0.0.1"] != ports["10.0.0.2"]


def test_a_reply_on_roce_goes_to_one_port(roce: Capture) -> None:
    rows = roce.rows(has("ip.dst", "10.0.0.1"), "eth.dst", "ip.src", "infiniband.bth.destqp")
    expected = {"eth.dst": "02:00:00:00:00:01", "ip.src": "10.0.0.2", "infiniband.bth.destqp": "0x000010"}
    assert rows == [expected]


def test_igmp_reports_announce_full_members(roce: Capture) -> None:
    fields = ("eth.dst", "ip.src", "ip.dst", "ip.ttl", "ip.hdr_len", "ip.opt.ra", "ip.dsfield")
    records = ("igmp.type", "igmp.num_grp_recs", "igmp.record_type", "igmp.num_src", "igmp.maddr")
    rows = roce.rows(has("igmp"), *fields, *records, "igmp.checksum.status", "ip.checksum.status")
    same = {
        "eth.dst": "01:00:5e:00:00:16",
        "ip.dst": "224.0.0.22",
        "ip.ttl": "1",
        "ip.hdr_len": "24",
        "ip.opt.ra": "0",
        "ip.dsfield": "0xc0",
        "igmp.type": "0x22",
        "igmp.num_grp_recs": "1",
        "igmp.num_src": "0",
        "igmp.maddr": GROUP,
        "igmp.checksum.status": "1",
        "ip.checksum.status": "1",
    }
    assert all(row | same == row for row in rows)
    to_exclude, to_include = "4", "3"
    assert [(row["ip.src"], row["igmp.record_type"]) for row in rows] == [
        ("10.0.0.1", to_exclude),
        ("10.0.0.2", to_exclude),
        ("10.0.0.3", to_exclude),
        ("10.0.0.3", to_include),
        ("10.0.0.1", to_include),
        ("10.0.0.2", to_include),
    ]


def test_scapy_computes_the_same_icrc_on_roce(roce: Capture) -> None:
    frames = [f.data for f in roce.frames() if f.data[23] == 17]
    assert len(frames) == len(PAYLOADS) + 3
    for frame in frames:
        carried, computed = scapy_icrc(frame)
        assert carried == computed == frame[-4:]
    shown = roce.column(has("data"), "infiniband.invariant.crc")
    assert [int(text, 0).to_bytes(4) for text in shown] == [f[-4:] for f in frames if len(f) > 66]


def test_scapy_computes_the_same_icrc() -> None:
    """Scapy computes the same ICRC over IPv6 and varying fields."""
    source, dest = Gid("fd00::1"), Gid("fd00::2")
    for payload in (b"", b"abc", b"x" * 257):
        message = packets.Datagram(
            source, dest, 16, 17, 0x80010000, 0x8001, 0xFFFFFF, payload, 1, 3, 0xA5, 0x12345
        )
        carried, computed = scapy_icrc(packets.roce(message, bytes(6), bytes(6)))
        assert carried == computed
        mapped = message._replace(source=Gid(IPv4Address("10.0.0.1")), dest=Gid(IPv4Address("10.0.0.2")))
        carried, computed = scapy_icrc(packets.roce(mapped, bytes(6), bytes(6)))
        assert carried == computed


# --- InfiniBand --------------------------------------------------------------------------


def test_infiniband_message_goes_to_the_mlid(infiniband: Capture) -> None:
    """A group message on InfiniBand goes to the MLID."""
    mlid = next(event.lid for _, event in infiniband.trace if isinstance(event, Attach))
    lrh = ("lnh", "dlid", "slid", "vl", "lver", "pktlen")
    grh = ("ipver", "paylen", "nxthdr", "sgid", "dgid")
    rows = infiniband.rows(
        has("infiniband.lrh.dlid", str(mlid)),
        *(f"infiniband.lrh.{field}" for field in lrh),
        *(f"infiniband.grh.{field}" for field in grh),
    )
    assert mlid == 0xC001
    assert len(rows) == len(PAYLOADS) + 2
    after_grh = 12 + 8 + len(PAYLOADS[0]) + 3 + 4
    assert {name.removeprefix("infiniband."): text for name, text in rows[0].items()} == {
        "lrh.lnh": "0x03",
        "lrh.dlid": str(mlid),
        "lrh.slid": "1",
        "lrh.vl": "0x00",
        "lrh.lver": "0",
        "lrh.pktlen": str((8 + 40 + after_grh) // 4),
        "grh.ipver": "6",
        "grh.paylen": str(after_grh),
        "grh.nxthdr": "27",
        "grh.sgid": "fe80::200:0:0:1",
        "grh.dgid": "ff12:4001:ffff::f81:203",
    }
    assert rows[len(PAYLOADS)]["infiniband.lrh.slid"] == "2"


def test_sa_mads_carry_the_records_to_and_from_qp_1(infiniband: Capture) -> None:
    common = ("mgmtclass", "method", "status", "transactionid", "attributeid")
    record = ("mgid", "portgid", "q_key", "mlid", "p_key", "joinstate", "scope", "mtu", "rate")
    rows = infiniband.rows(
        has("infiniband.mad"),
        "infiniband.bth.destqp",
        "infiniband.deth.srcqp",
        "infiniband.deth.q_key",
        "infiniband.lrh.lnh",
        "infiniband.lrh.dlid",
        "infiniband.lrh.slid",
        "infiniband.sa.componentmask",
        *(f"infiniband.mad.{field}" for field in common),
        *(f"infiniband.mcmemberrecord.{field}" for field in record),
    )
    sa_events = [event for _, event in infiniband.trace if isinstance(event, SaAsked | SaAnswered)]
    assert len(rows) == len(sa_events)
    asked: dict[int, SaAsked] = {}
    for row, event in zip(rows, sa_events, strict=True):
        seen = {name.rpartition(".")[2]: text for name, text in row.items()}
        lids = infiniband.ports[event.port].lid, packets.SA_LID
        if isinstance(event, SaAsked):
            asked[event.tid] = event
            method, status, (slid, dlid), record_sent = int(SaMethod[event.method]), 0, lids, event.record
        else:
            assert event.status is not None
            method, status, (dlid, slid) = ANSWERS[event.method], SaStatus[event.status], lids
            record_sent = event.record or asked[event.tid].record
        numbers = {name: int(text, 0) for name, text in seen.items() if "gid" not in name}
        assert numbers == {
            "destqp": 1,
            "srcqp": 1,
            "q_key": record_sent.qkey,
            "lnh": 2,
            "dlid": dlid,
            "slid": slid,
            "componentmask": event.mask,
            "mgmtclass": 3,
            "method": method,
            "status": status,
            "transactionid": event.tid,
            "attributeid": 0x38,
            "mlid": record_sent.mlid,
            "p_key": record_sent.pkey,
            "joinstate": record_sent.join_state,
            "scope": record_sent.scope,
            "mtu": record_sent.mtu,
            "rate": record_sent.rate,
        }
        assert int(row["infiniband.deth.q_key"], 0) == 0x80010000
        assert (Gid(seen["mgid"]), Gid(seen["portgid"])) == (record_sent.mgid, record_sent.port_gid)
    statuses = [event.status for event in sa_events if isinstance(event, SaAnswered)]
    # the member that is refused looks the group up, to say why; there is none
    assert statuses == ["OK"] * 4 + ["REQ_INVALID", "NO_RECORDS"] + ["OK"] * 2
    methods = [event.method for event in asked.values()]
    assert methods == ["SET"] * 3 + ["DELETE", "SET", "GET", "DELETE", "DELETE"]


ANSWERS = {"SET": 0x81, "GET": 0x81, "GET_TABLE": 0x92, "DELETE": 0x95}
"""Method of a request -> method of its answer (IBA vol 1, 15.2.2)."""


SPEC_PACKET = bytes.fromhex(
    "7012375c000e17d2 0a2024870087b1b3000dec2a 01710a1c015d400238f27a050000000e"
    "bb884d85fd5cfba4728bc0690ed40000"
)
"""The local packet of the specification's worked example (IBA vol 1, 7.8), and what it says the ICRC is."""
SPEC_ICRC = bytes.fromhex("9625b75a")


def remainder(data: bytes, polynomial: int, width: int) -> bytes:
    """The CRC by long division, the first bit of the wire highest; both CRCs of IBA are made so."""
    top, mask = 1 << width - 1, (1 << width) - 1
    register = mask
    for byte in data:
        for place in range(8):
            feedback = bool(register & top) ^ (byte >> place & 1)
            register = (register << 1 & mask) ^ (polynomial if feedback else 0)
    bits = f"{register ^ mask:0{width}b}"
    return bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, width, 8))


def test_the_icrc_of_the_specifications_example() -> None:
    masked = bytes((SPEC_PACKET[0] | 0xF0,)) + SPEC_PACKET[1:12] + b"\xff" + SPEC_PACKET[13:]
    assert packets.icrc(masked) == remainder(masked, 0x04C11DB7, 32) == SPEC_ICRC
    packet = SPEC_PACKET + SPEC_ICRC
    assert packets.vcrc(packet) == remainder(packet, 0x100B, 16)


def test_infiniband_packets_end_with_their_crcs(infiniband: Capture) -> None:
    frames = [frame.data for frame in infiniband.frames()]
    for frame in frames:
        packet, carried_icrc, carried_vcrc = frame[:-6], frame[-6:-2], frame[-2:]
        is_global = packet[1] & 3 == 3
        mask = bytearray(len(packet))
        if is_global:
            # The whole LRH; of the GRH traffic class, flow label and hop limit (IBA vol 1, 7.8.1).
            mask[:12] = b"\xff" * 8 + b"\x0f\xff\xff\xff"
            mask[15] = 0xFF
        else:
            mask[0] = 0xF0
        mask[(8 + 40 if is_global else 8) + 4] = 0xFF
        masked = bytes(a | b for a, b in zip(packet, mask, strict=True))
        assert carried_icrc == remainder(masked, 0x04C11DB7, 32)
        assert carried_vcrc == remainder(frame[:-2], 0x100B, 16)
    shown = infiniband.rows(has("data"), "infiniband.invariant.crc", "infiniband.variant.crc")
    smallest = 8 + 40 + 12 + 8 + 6
    messages = [frame for frame in frames if frame[1] & 3 == 3 and len(frame) > smallest]
    assert [int(row["infiniband.invariant.crc"], 0).to_bytes(4) for row in shown] == [
        f[-6:-2] for f in messages
    ]
    assert [int(row["infiniband.variant.crc"], 0).to_bytes(2) for row in shown] == [f[-2:] for f in messages]


# --- the file ----------------------------------------------------------------------------


def test_a_saved_trace_gives_the_same_file(either: Capture) -> None:
    first, again = io.BytesIO(), io.BytesIO()
    pcapng.write(either.trace, first)
    pcapng.write(Trace.load(str(either.trace)), again)
    assert first.getvalue() == again.getvalue()


def test_a_trace_without_its_beginning_is_refused(either: Capture) -> None:
    with pytest.raises(ValueError, match="must begin with a line 'fabric'"):
        pcapng.write(Trace(list(either.trace)[1:]), io.BytesIO())
