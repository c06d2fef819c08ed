"""Runs of messages as one datagram: what the kernel cuts has the ICRC that was made for it, and what comes
whole is taken apart."""

from __future__ import annotations

import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from itertools import pairwise
from random import Random

import pytest

from mcast import open_backend
from mcast.api import Destination, EventChannel, Gid, QpInit, QueuePair
from mcast.backends.udp.backend import UdpQueuePair
from mcast.backends.udp.datapath import MIN_RUN_DEPTH
from mcast.conformance.helpers import BOUND
from mcast.wire.packets import ROCE_UDP_PORT

from ..own_network import needs_namespaces
from .conftest import Host
from .oracle import masked, sealed
from .test_filter import QKEY, message

GROUP, LOOPBACK = "239.1.1.1", "127.0.0.1"
LO = IPv4Address(LOOPBACK)
UDP_SEGMENT, UDP_GRO = 103, 104
SOME = [
    [b"a" * 1000] * 64,
    [b"b" * 1024] * 70,
    [*[b"c" * 100] * 9, b"short"],
    [b"d" * 4, b"e" * 8, b"f" * 8, b"g" * 3, b"h" * 3, b"", b""],
    [b"one"],
]
"""Batches: of one size, more than one datagram holds, with a short end, of several runs, of one message."""
COUNT = sum(map(len, SOME))

SEND = """
import sys
from tests.udp.test_offloads import SOME, joined
from mcast import open_backend

with open_backend("udp") as backend, backend.event_channel() as channel:
    qp, to = joined(channel, "10.0.0.1", 64)
    for batch in SOME:
        qp.send(to, batch, imm=7 if sys.argv[1] == "imm" else None)
    qp.send(to, memoryview(b"rows" * 256 * 10).cast("B", (10, 1024)))
"""
CAPTURE = """
import socket, struct, sys
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as taking:
    taking.setsockopt(socket.SOL_SOCKET, 33, 4 << 20)  # SO_RCVBUFFORCE
    taking.bind(("eth0", 0))
    taking.settimeout(60)
    print("ready", flush=True)
    left = int(sys.argv[1])
    while left:
        frame = taking.recv(1 << 17)
        if frame[23] == 17 and frame[36:38] == struct.pack(">H", 4791):
            print(frame[14:].hex(), flush=True)
            left -= 1
"""


def joined(channel: EventChannel, address: str, depth: int) -> tuple[QueuePair, Destination]:
    """Make a queue pair that is a member of the group."""
    cm_id = channel.create_id()
    cm_id.bind_addr(address)
    qp = cm_id.create_qp(QpInit(max_recv_wr=depth))
    cm_id.join_multicast(GROUP)
    event = channel.get_event(BOUND)
    assert event is not None
    assert event.ud is not None
    return qp, event.ud.destination


@needs_namespaces
@pytest.mark.parametrize("imm", ["imm", "plain"])
def test_each_segment_on_the_wire_has_its_icrc(hosts: tuple[Host, Host], imm: str) -> None:
    """The device takes no segments, so they are cut before it, and the capture shows each identification."""
    first, second = hosts
    first.run("ip", "link", "set", "eth0", "gso_max_segs", "1")
    capture = [*second.prefix, sys.executable, "-c", CAPTURE, str(COUNT + 10)]
    with subprocess.Popen(capture, stdout=subprocess.PIPE, text=True) as taking:
        try:
            assert taking.stdout is not None
            assert taking.stdout.readline() == "ready\n"
            first.run(sys.executable, "-c", SEND, imm)
            packets = [bytes.fromhex(line) for line in taking.stdout]
        finally:
            taking.kill()
    assert [len(one) for one in packets] == [
        20 + 8 + 20 + (4 if imm == "imm" and number < COUNT else 0) + -(-size // 4) * 4 + 4
        for number, size in enumerate([*(len(one) for batch in SOME for one in batch), *[1024] * 10])
    ]
    numbers = [int.from_bytes(one[4:6]) for one in packets]
    assert set(numbers) >= set(range(60)), "most messages of a full batch are segments of one datagram"
    for packet, number in zip(packets, numbers, strict=True):
        source, dest = IPv4Address(packet[12:16]), IPv4Address(packet[16:20])
        covered = masked(packet[28:], source, int.from_bytes(packet[20:22]), dest, ROCE_UDP_PORT, number)
        assert zlib.crc32(covered) == int.from_bytes(packet[-4:], "little"), number
        assert packet[8] == 64, "the hop limit of a destination"
    psns = [int.from_bytes(one[37:40]) for one in packets]
    assert all((after - before) & 0xFFFFFF == 1 for before, after in pairwise(psns))


@pytest.mark.parametrize("depth", [MIN_RUN_DEPTH - 1, MIN_RUN_DEPTH, 1024])
def test_a_queue_pair_takes_runs_if_it_has_receives_for_one(depth: int) -> None:
    with open_backend("udp") as backend, backend.event_channel() as channel:
        qp, _ = joined(channel, LOOPBACK, depth)
        assert isinstance(qp, UdpQueuePair)
        for one in (qp.path.own, *qp.path.groups.sockets):
            assert one.getsockopt(socket.IPPROTO_UDP, UDP_GRO) == (depth >= MIN_RUN_DEPTH)


@pytest.mark.parametrize("depth", [16, 1024])
@pytest.mark.parametrize("to_group", [True, False], ids=["group", "unicast"])
def test_batches_arrive_as_they_were_sent(depth: int, to_group: bool) -> None:
    """Of sizes that make runs of any length, with and without immediates, in order."""
    random = Random(7)
    with open_backend("udp") as backend, backend.event_channel() as channel:
        sender, to = joined(channel, LOOPBACK, 1)
        receiver, _ = joined(channel, LOOPBACK, depth)
        if not to_group:
            to = Destination(gid=Gid(LO), qp_num=receiver.qp_num, qkey=QKEY, sgid_index=to.sgid_index)
        for _ in range(200):
            sizes = [random.choice((0, 1, 4, 8, 8, 8, 1000, 4096)) for _ in range(random.randint(1, 16))]
            sent = [random.randbytes(size) for size in sizes]
            imm = random.choice((None, random.getrandbits(32)))
            sender.send(to, sent, imm)
            found: list[tuple[bytes, int | None]] = []
            while len(found) < len(sent):
                with receiver.recv(depth, BOUND) as batch:
                    assert len(batch)
                    found += [(bytes(one.payload), one.imm) for one in batch]
            assert found == [(payload, imm) for payload in sent]


@contextmanager
def member(depth: int) -> Iterator[tuple[UdpQueuePair, socket.socket]]:
    """A queue pair in the group, and a plain socket that sends to it."""
    with (
        open_backend("udp") as backend,
        backend.event_channel() as channel,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain,
    ):
        plain.setsockopt(socket.IPPROTO_IP, 10, 2)
        plain.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(LOOPBACK))
        plain.bind((LOOPBACK, 0))
        qp, _ = joined(channel, LOOPBACK, depth)
        assert isinstance(qp, UdpQueuePair)
        yield qp, plain


def test_each_message_of_a_run_is_judged_alone() -> None:
    """Of ten in one datagram two are spoilt in different ways, and the last one is a stump."""
    group = IPv4Address(GROUP)
    with member(64) as (qp, plain):
        port = plain.getsockname()[1]
        run = [
            sealed(
                message(b"%04d" % number, qkey=QKEY ^ (number == 3)),
                IPv4Address(LOOPBACK),
                port,
                group,
                number,
            )
            for number in range(10)
        ]
        run[6] = run[6][:-1] + bytes([run[6][-1] ^ 1])
        segment = len(run[0]).to_bytes(2, "little")
        control = [(socket.IPPROTO_UDP, UDP_SEGMENT, segment)]
        plain.sendmsg([*run, b"end"], control, 0, (GROUP, ROCE_UDP_PORT))
        found: list[bytes] = []
        while len(found) < 8:
            one = qp.recv_one(BOUND)
            assert one is not None
            found.append(bytes(one.payload))
        counts = {name: count for name, count in qp.path.counts()[4].items() if count}
    assert found == [b"%04d" % number for number in range(10) if number not in (3, 6)]
    assert counts == {"delivered": 8, "qkey_violations": 1, "icrc_errors": 1, "malformed": 1}


def test_a_run_past_the_last_receive_is_counted_by_message() -> None:
    group = IPv4Address(GROUP)
    with member(64) as (qp, plain):
        port = plain.getsockname()[1]
        for _ in range(2):
            run = [sealed(message(b"x"), LO, port, group, number) for number in range(40)]
            control = [(socket.IPPROTO_UDP, UDP_SEGMENT, len(run[0]).to_bytes(2, "little"))]
            plain.sendmsg(run, control, 0, (GROUP, ROCE_UDP_PORT))
        counters = qp.counters
    assert (counters.received, counters.dropped_no_receive) == (64, 16)
