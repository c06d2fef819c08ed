"""Capture files: what is written is read again, what others write too; damage is a clear error."""

from __future__ import annotations

import io
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcast.api import MULTICAST_QPN, LinkLayer
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.trace import pcapng as of_trace
from mcast.pcapng.dissect import SkipPacket, datagram
from mcast.pcapng.reader import CaptureError, Frame, read_frames
from mcast.pcapng.writer import CapturedPacket, Direction, Writer
from mcast.wire import packets
from mcast.wire.addresses import Gid
from mcast.wire.packets import Datagram

from ..capture.captures import Made
from ..file_objects import READERS, WRITERS

ETHERNET, INFINIBAND = LinkLayer.ETHERNET, LinkLayer.INFINIBAND
MAC = bytes.fromhex("020000000001")

gids_v4 = st.integers(0xE0000000, 0xEFFFFFFF).map(lambda number: Gid(IPv4Address(number)))
gids_v6 = st.integers(0xFF << 120, (1 << 128) - 1).map(lambda number: Gid(IPv6Address(number)))


def numbers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, (1 << bits) - 1)


def messages(infiniband: bool) -> st.SearchStrategy[Datagram]:
    local = numbers(16) if infiniband else st.just(0)
    v4 = st.tuples(numbers(32).map(lambda number: Gid(IPv4Address(number))), gids_v4, st.just(0))
    v6 = st.tuples(numbers(128).map(lambda number: Gid(IPv6Address(number))), gids_v6, numbers(20))
    return st.builds(
        lambda ends, **rest: Datagram(source=ends[0], dest=ends[1], flow_label=ends[2], **rest),
        v4 | v6 if not infiniband else v6,
        src_qp=numbers(24),
        dest_qp=st.just(MULTICAST_QPN),
        qkey=numbers(32),
        pkey=numbers(16),
        psn=numbers(24),
        payload=st.binary(max_size=300),
        imm=st.none() | numbers(32),
        hop_limit=numbers(8),
        traffic_class=numbers(8),
        slid=local,
        dlid=local,
        sl=numbers(4) if infiniband else st.just(0),
    )


def on_the_wire(message: Datagram, link_layer: LinkLayer) -> bytes:
    return packets.infiniband(message) if link_layer is INFINIBAND else packets.roce(message, MAC, MAC)


def written(link_layer: LinkLayer, found: list[tuple[int, Datagram]]) -> bytes:
    file = io.BytesIO()
    writer = Writer(file, link_layer, ["port"], "a comment")
    for t, message in found:
        writer.write(
            CapturedPacket(t, "port", Direction.IN, on_the_wire(message, link_layer), "what happened")
        )
    return file.getvalue()


def read(data: bytes) -> list[Frame]:
    return list(read_frames(io.BytesIO(data)))


@pytest.mark.parametrize("link_layer", list(LinkLayer), ids=lambda layer: layer.value)
@given(data=st.data())
def test_every_message_is_read_as_it_was_written(link_layer: LinkLayer, data: st.DataObject) -> None:
    timed = st.tuples(numbers(60), messages(link_layer is INFINIBAND))
    found = data.draw(st.lists(timed, max_size=4))
    assert [(frame.t, datagram(frame)) for frame in read(written(link_layer, found))] == found


def example(payload: bytes = b"payload", imm: int | None = None) -> Datagram:
    source, dest = Gid(IPv4Address("10.0.0.1")), Gid(IPv4Address("239.1.1.1"))
    return Datagram(source, dest, 17, MULTICAST_QPN, 0x01234567, 0xFFFF, 5, payload, imm)


@pytest.mark.parametrize("kind", [one for one in WRITERS if "blocks" not in one and "nothing" not in one])
def test_a_capture_is_whole_whatever_the_file_takes(kind: str) -> None:
    file = WRITERS[kind]()
    writer = Writer(file, ETHERNET, ["port"])
    for _ in range(20):
        writer.write(CapturedPacket(5, "port", Direction.IN, on_the_wire(example(bytes(900)), ETHERNET)))
    assert [datagram(frame) for frame in read(file.took)] == [example(bytes(900))] * 20


@pytest.mark.parametrize("kind", ["less than asked", "one byte", "more than asked", "the same memory"])
def test_a_capture_is_whole_whatever_the_file_gives(kind: str) -> None:
    data = written(ETHERNET, [(5, example(bytes(900)))] * 20)
    assert len([*read_frames(READERS[kind](data))]) == 20


# --- what others write -------------------------------------------------------------------


def pcap(frames: list[bytes], link_type: int, order: str = "<", nanoseconds: bool = False) -> bytes:
    magic, unit = (0xA1B23C4D, 5) if nanoseconds else (0xA1B2C3D4, 5_000)
    head = struct.pack(f"{order}IHHIIII", magic, 2, 4, 0, 0, 65535, link_type)
    return head + b"".join(
        struct.pack(f"{order}IIII", 7, unit, len(data), len(data)) + data for data in frames
    )


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("nanoseconds", "t"), [(True, 7_000_000_005), (False, 7_005_000_000)])
def test_pcap_of_each_byte_order_and_resolution(order: str, nanoseconds: bool, t: int) -> None:
    """Pcap of either byte order and resolution is read."""
    (frame,) = read(pcap([packets.roce(example(), MAC, MAC)], 1, order, nanoseconds))
    assert (frame.t, datagram(frame)) == (t, example())


def block(kind: int, body: bytes, order: str) -> bytes:
    size = 12 + len(body)
    return struct.pack(f"{order}II", kind, size) + body + struct.pack(f"{order}I", size)


def pcapng(order: str, options: bytes, packet: bytes, kind: int = 6, ticks: int = 0) -> bytes:
    """A section with an unknown block, an interface and a packet."""
    length = len(packet)
    padded = packet + bytes(-length % 4)
    if kind == 6:
        padded = struct.pack(f"{order}IIIII", 0, ticks >> 32, ticks & 0xFFFFFFFF, length, length) + padded
    else:
        padded = struct.pack(f"{order}I", length) + padded
    return (
        block(0x0A0D0D0A, struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1), order)
        + block(0x0BAD, b"what is it?!", order)
        + block(1, struct.pack(f"{order}HHI", 1, 0, 0) + options, order)
        + block(kind, padded, order)
    )


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("options", "ticks", "t"),
    [
        ((), 3_000_001, 3_000_001_000),
        (((9, b"\x09"),), 3_000_001, 3_000_001),
        (((9, b"\x8a"),), 1 << 10 | 1 << 9, 1_500_000_000),
        (((2, b"name"), (9, b"\x09"), (14, 2)), 5, 2_000_000_005),
        (((0, b""), (9, b"\x09")), 1, 1_000),
    ],
)
def test_pcapng_of_each_byte_order_and_clock(
    order: str, options: tuple[tuple[int, bytes | int], ...], ticks: int, t: int
) -> None:
    """Pcapng of either byte order and any clock is read."""
    listed = b""
    for code, value in options:
        data = struct.pack(f"{order}q", value) if isinstance(value, int) else value
        listed += struct.pack(f"{order}HH", code, len(data)) + data + bytes(-len(data) % 4)
    (frame,) = read(pcapng(order, listed, packets.roce(example(), MAC, MAC), ticks=ticks))
    assert (frame.t, datagram(frame)) == (t, example())


@pytest.mark.parametrize("seconds", [(1 << 32) - 1, 1 << 32, 1 << 33])
def test_a_time_after_2106_is_read_as_it_was_written(seconds: int) -> None:
    """Of the two times of a packet on InfiniBand one has 32 bits for the seconds."""
    file, t = io.BytesIO(), seconds * 10**9 + 1
    Writer(file, INFINIBAND, ["a"]).write(CapturedPacket(t, "a", Direction.IN, b"?"))
    file.seek(0)
    assert [frame.t for frame in read_frames(file)] == [t]


def test_a_simple_packet_block_has_no_time() -> None:
    (frame,) = read(pcapng("<", b"", packets.roce(example(), MAC, MAC), kind=3))
    assert (frame.t, datagram(frame)) == (0, example())


def test_a_second_section_begins_anew() -> None:
    one = pcapng("<", b"", packets.roce(example(b"one"), MAC, MAC))
    two = pcapng(">", b"", packets.roce(example(b"two"), MAC, MAC))
    assert [datagram(frame).payload for frame in read(one + two)] == [b"one", b"two"]


def links() -> Iterator[tuple[int, bytes]]:
    """One message in every link layer that is known."""
    frame = packets.roce(example(), MAC, MAC)
    packet, head = frame[14:], frame[:12]
    yield 1, frame
    yield 1, head + bytes.fromhex("8100 0064") + frame[12:]
    yield 1, head + bytes.fromhex("88a8 0001 8100 0064") + frame[12:]
    yield 1, frame + bytes(7)
    yield 101, packet
    yield 228, packet
    yield 113, bytes(14) + frame[12:14] + packet
    yield 276, frame[12:14] + bytes(18) + packet


@pytest.mark.parametrize(("link_type", "data"), list(links()))
def test_a_message_is_found_in_every_link_layer(link_type: int, data: bytes) -> None:
    assert datagram(Frame(0, link_type, data, len(data), 0)) == example()


def test_infiniband_and_rocev1_packets_are_found() -> None:
    dest = Gid("ff12:4001:ffff::f01:101")
    message = example()._replace(source=Gid("fe80::1"), dest=dest, slid=3, dlid=0xC001, sl=2)
    packet = packets.infiniband(message)
    extended = bytes(8) + bytes((21 | 0x80, 4)) + bytes(6) + bytes((0x80, *bytes(7))) + bytes(8) + packet
    for link_type, data in ((247, packet), (197, extended)):
        assert datagram(Frame(0, link_type, data, len(data), 0)) == message
    v1 = bytes(12) + b"\x89\x15" + packet[8:-2]
    assert datagram(Frame(0, 1, v1, len(v1), 0)) == message._replace(slid=0, dlid=0, sl=0)


ROCE = packets.roce(example(), MAC, MAC)
GRH = struct.pack(">IHBB", 6 << 28, 20, 0x1B, 1) + bytes(32)
DNS = ROCE[:36] + b"\x00\x35" + ROCE[38:]
SKIPPED: dict[str, tuple[Frame, str]] = {
    "link type": (Frame(0, 105, ROCE, len(ROCE), 0), "link type 105 is not known"),
    "ARP": (Frame(0, 1, ROCE[:12] + b"\x08\x06" + bytes(28), 42, 0), "not RoCE or InfiniBand"),
    "TCP": (Frame(0, 1, ROCE[:23] + b"\x06" + ROCE[24:], len(ROCE), 0), "not RoCE or InfiniBand"),
    "another port": (
        Frame(0, 1, DNS, len(ROCE), 0),
        "not RoCE or InfiniBand",
    ),
    "fragment": (Frame(0, 1, ROCE[:20] + b"\x20\x00" + ROCE[22:], len(ROCE), 0), "an IP fragment"),
    "RC": (Frame(0, 1, ROCE[:42] + b"\x04" + ROCE[43:], len(ROCE), 0), "not a UD message"),
    "cut short": (Frame(0, 1, ROCE[:-6], len(ROCE), 0), "cut short by the capture"),
    "cut in the headers": (Frame(0, 1, ROCE[:60], len(ROCE), 0), "cut short by the capture"),
    "too short": (Frame(0, 1, ROCE[:60], 60, 0), "shorter than its headers say"),
    "nothing": (Frame(0, 1, b"", 0, 0), "shorter than its headers say"),
    "RoCEv1 without room": (
        Frame(0, 1, bytes(12) + b"\x89\x15" + GRH + ROCE[42:62], 74, 0),
        "shorter than its headers say",
    ),
    "a flipped bit": (Frame(0, 1, ROCE[:64] + b"\xff" + ROCE[65:], len(ROCE), 0), "wrong ICRC"),
    "Ethernet in ERF": (Frame(0, 197, bytes(8) + b"\x02" + bytes(40), 49, 0), "not RoCE or InfiniBand"),
    "a MAD": (Frame(0, 247, b"\x00\x02" + bytes(60), 62, 0), "without a GRH, so not for a group"),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_another_packet_is_skipped_with_the_reason(case: str) -> None:
    frame, why = SKIPPED[case]
    with pytest.raises(SkipPacket) as skipped:
        datagram(frame)
    assert str(skipped.value) == why


def test_the_ttl_may_change_on_the_way() -> None:
    data = ROCE[:22] + b"\x01" + ROCE[23:]
    assert datagram(Frame(0, 1, data, len(data), 0)).hop_limit == 1


@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_the_packets_of_a_simulated_fabric_are_read(make: Callable[..., Fabric], tmp_path: Path) -> None:
    fabric = make(ports=2, trace=True)
    with open_fabric(fabric) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp()
        cm_id.join_multicast("239.1.1.1")
        event = channel.get_event(5)
        assert event is not None
        assert event.ud is not None
        qp.send(event.ud.destination, [b"one", b"two"], imm=9)
    assert fabric.trace is not None
    file = io.BytesIO()
    of_trace.write(fabric.trace, file)
    found = list[Datagram]()
    for frame in read(file.getvalue()):
        try:
            found.append(datagram(frame))
        except SkipPacket:
            continue
    sent = [message for message in found if message.dest_qp == MULTICAST_QPN]
    assert [(message.payload, message.imm, message.src_qp) for message in sent] == [
        (b"one", 9, qp.qp_num),
        (b"two", 9, qp.qp_num),
    ]
    assert {message.dest for message in sent} == {event.ud.destination.gid}


# --- damage ------------------------------------------------------------------------------

DAMAGED: dict[str, tuple[bytes, int, str]] = {
    "empty": (b"", 0, "the file is truncated: it has 0 of 4 bytes"),
    "text": (b"hello, world", 0, "the file is neither pcapng nor pcap: it begins with 68 65 6c 6c"),
    "gzip": (b"\x1f\x8b\x08\x00", 0, "neither pcapng nor pcap"),
    "a magic alone": (bytes.fromhex("0a0d0d0a"), 4, "the section header is truncated"),
    "pcap's magic alone": (bytes.fromhex("d4c3b2a1"), 4, "the file's header is truncated"),
}
WHOLE = written(ETHERNET, [(1, example())])
SECTION_SIZE = struct.unpack_from("<I", WHOLE, 4)[0]
INTERFACE_SIZE = struct.unpack_from("<I", WHOLE, SECTION_SIZE + 4)[0]
PACKET_AT = SECTION_SIZE + INTERFACE_SIZE


def changed(offset: int, value: int, size: int = 4) -> bytes:
    return WHOLE[:offset] + value.to_bytes(size, "little") + WHOLE[offset + size :]


CLOCK_AT = WHOLE.index(struct.pack("<HHB", 9, 1, 9))
DAMAGED |= {
    "clock without units": (changed(CLOCK_AT + 2, 0, 2), CLOCK_AT, "option 9 of an interface has 0 bytes"),
    "short time offset": (changed(CLOCK_AT, 14, 2), CLOCK_AT, "option 14 of an interface has 1 bytes"),
    "byte order": (changed(8, 0x12345678), 8, "the section header has no byte order"),
    "version": (changed(12, 2, 2), 12, "the section is of version 2, known is 1"),
    "length not of words": (
        changed(PACKET_AT + 4, 61),
        PACKET_AT + 4,
        "a block has the impossible length of 61 bytes",
    ),
    "huge length": (
        changed(PACKET_AT + 4, 1 << 31),
        PACKET_AT + 4,
        "a block has the impossible length of 2147483648 bytes",
    ),
    "tiny length": (changed(PACKET_AT + 4, 8), PACKET_AT + 4, "a block has the impossible length of 8 bytes"),
    "length at the end": (changed(len(WHOLE) - 4, 16), len(WHOLE) - 4, "ends with the length 16"),
    "no such interface": (changed(PACKET_AT + 8, 1), PACKET_AT + 8, "of interface 1, 1 are described"),
    "packet larger than its block": (changed(PACKET_AT + 20, 4000), PACKET_AT + 28, "a packet of 4000 bytes"),
    "interface's option": (
        changed(SECTION_SIZE + 18, 4000, 2),
        SECTION_SIZE + 16,
        "option 2 of an interface",
    ),
    "pcap's length": (
        pcap([], 1) + struct.pack("<IIII", 0, 0, 1 << 30, 60),
        32,
        "a packet has the impossible size of 1073741824 bytes",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named_with_its_offset(case: str) -> None:
    data, offset, says = DAMAGED[case]
    with pytest.raises(CaptureError) as error:
        read(data)
    assert says in str(error.value)
    assert str(error.value).startswith(f"at offset {offset}: ")


ORDERS = pytest.mark.parametrize("order", ["<", ">"])


def counted(data: bytes) -> tuple[list[bytes], dict[str, int]]:
    """The packets of a file, and what was left out."""
    skipped = Counter[str]()
    return [frame.data for frame in read_frames(io.BytesIO(data), skipped)], dict(skipped)


@ORDERS
@pytest.mark.parametrize("kind", ["pcap", "pcapng", "obsolete"])
def test_a_cut_file_loses_its_last_packet_alone(order: str, kind: str) -> None:
    """It is cut at each byte, as when the disk is full or tcpdump is killed."""
    made, last = Made(order), (3.0, b"three?")
    if kind == "pcap":
        before = made.pcap((1.0, b"one"), (2.0, b"two"))
        whole = made.pcap((1.0, b"one"), (2.0, b"two"), last)
    else:
        block = made.packet if kind == "pcapng" else made.obsolete_packet
        before = made.section() + made.interface() + block(1.0, b"one") + block(2.0, b"two")
        whole = before + block(*last)
    assert counted(whole) == ([b"one", b"two", b"three?"], {})
    assert counted(before) == ([b"one", b"two"], {})
    for end in range(len(before) + 1, len(whole)):
        known = kind == "pcap" or end >= len(before) + 4
        what = "packet" if known else "block"
        says = f"the last {what}, at offset {len(before)}: the file ends in its middle"
        assert counted(whole[:end]) == ([b"one", b"two"], {says: 1}), end


@ORDERS
def test_an_obsolete_packet_block_is_read(order: str) -> None:
    made = Made(order)
    data = made.section() + made.interface(101) + made.interface() + made.obsolete_packet(7.5, ROCE, 1)
    (frame,) = read(data)
    assert (frame.t, frame.link_type, frame.interface) == (7_500_000_000, 1, 1)
    assert datagram(frame) == example()


@ORDERS
def test_a_damaged_obsolete_packet_block_is_named(order: str) -> None:
    made = Made(order)
    begin = made.section() + made.interface()
    for body, says in (
        (bytes(16), "a packet block is too short"),
        (struct.pack(f"{order}HHIIII", 1, 0, 0, 0, 0, 0), "a packet is of interface 1, 1 are described"),
        (struct.pack(f"{order}HHIIII", 0, 0, 0, 0, 99, 99), "a packet of 99 bytes is in a block of 20"),
    ):
        with pytest.raises(CaptureError, match=says):
            read(begin + made.block(2, body))


@ORDERS
def test_what_is_no_packet_is_counted(order: str) -> None:
    made = Made(order)
    others = [made.block(kind, bytes(12)) for kind in (4, 5, 5, 9, 10, 0x0BAD, 0x40000BAD, 0x77)]
    data = made.section() + others[0] + made.interface() + made.packet(1.0, b"one") + b"".join(others[1:])
    assert counted(data) == (
        [b"one"],
        {
            "a block of name resolution": 1,
            "a block of interface statistics": 2,
            "a block of a system's journal": 1,
            "a block of secrets for decryption": 1,
            "a block of another program's own kind": 2,
            "a block of the unknown type 0x77": 1,
        },
    )


def test_an_interface_has_one_number_in_the_file() -> None:
    little, big = Made("<"), Made(">")
    data = b"".join(
        made.section() + made.interface() + made.interface() + made.packet(1.0, b"one", 1)
        for made in (little, big)
    )
    assert [frame.interface for frame in read(data)] == [1, 3]


@pytest.mark.parametrize("order", ["<", ">"])
def test_kinds_without_number_are_counted_together(order: str) -> None:
    """Each reason is a line for the reader, so a damaged file may not have one for each block."""
    made = Made(order)
    blocks = b"".join(made.block(1_000 + number, b"") for number in range(1_000))
    frames, skipped = counted(made.section() + blocks + made.interface() + made.packet(1.0, b"data"))
    assert frames == [b"data"]
    assert (len(skipped), sum(skipped.values())) == (65, 1_000)
    assert skipped["of other kinds"] == 936


def test_interfaces_without_number_are_damage() -> None:
    made = Made()
    most = made.section() + made.interface() * 65_536 + made.packet(1.0, b"data", 65_535)
    assert counted(most) == ([b"data"], {})
    with pytest.raises(CaptureError, match="more than 65,536 interfaces"):
        counted(most + made.interface())


def drain(data: bytes) -> None:
    """Read everything there is. Raises CaptureError, and nothing else."""
    for frame in read_frames(io.BytesIO(data)):
        try:
            datagram(frame)
        except SkipPacket:
            pass


FILES = [
    WHOLE,
    written(INFINIBAND, [(1, example()._replace(dest=Gid("ff12:4001:ffff::f01:101")))]),
    pcap([ROCE, ROCE[14:]], 1),
    pcap([ROCE[14:]], 101),
    pcapng(">", b"", ROCE),
]


@pytest.mark.parametrize("whole", FILES, ids=["roce", "infiniband", "pcap", "raw IP", "big endian"])
@settings(max_examples=300)
@given(data=st.data())
def test_a_corrupted_file_is_never_another_error(whole: bytes, data: st.DataObject) -> None:
    damaged = bytearray(whole)
    offset = 0
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        drain(bytes(damaged[:cut]) if data.draw(st.booleans()) else bytes(damaged))
    except CaptureError as error:
        offset = error.offset
    assert 0 <= offset <= len(damaged)


@given(st.binary(max_size=200), st.sampled_from([b"", *(file[:4] for file in FILES), WHOLE[:PACKET_AT]]))
def test_noise_is_never_another_error(noise: bytes, begins: bytes) -> None:
    try:
        drain(begins + noise)
    except CaptureError:
        pass


@given(st.sampled_from([1, 101, 113, 197, 228, 229, 247, 276]), st.binary(max_size=200))
def test_a_frame_of_noise_is_skipped(link_type: int, noise: bytes) -> None:
    with pytest.raises(SkipPacket):
        datagram(Frame(0, link_type, noise, len(noise), 0))
