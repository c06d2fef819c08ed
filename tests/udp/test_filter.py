"""The rules of the C extension against the same in Python: each datagram has exactly one fate."""

from __future__ import annotations

import os
import struct
from collections import Counter
from ipaddress import IPv4Address
from random import Random

from mcast.backends.udp import _native
from mcast.backends.udp.datapath import FATES

from .oracle import Receiver, sealed

OWN, PEER = IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2")
GROUPS = frozenset({IPv4Address("239.1.1.1"), IPv4Address("239.1.1.2"), IPv4Address("224.0.0.251")})
GROUP = IPv4Address("239.1.1.1")
QP, QKEY, PORT = 0x9C4001, 0x01234567, 4791
_RECORD = struct.Struct("<QIII4xB7x12x4s16s8x")


def message(
    payload: bytes,
    imm: int | None = None,
    dest_qp: int = 0xFFFFFF,
    qkey: int = QKEY,
    pkey: int = 0xFFFF,
    src_qp: int = 7,
) -> bytes:
    """A datagram with four bytes for the ICRC."""
    pad = -len(payload) % 4
    head = struct.pack(">BBHIIII", 0x64 + (imm is not None), pad << 4, pkey, dest_qp, 1, qkey, src_qp)
    return head + (b"" if imm is None else imm.to_bytes(4)) + payload + bytes(pad) + bytes(4)


def ring_of(rules: Receiver, depth: int) -> _native.Ring:
    ring = _native.Ring(int(rules.address), rules.qp_num, rules.qkey, rules.pkey, rules.blocks_own)
    ring.post(bytearray(depth * rules.room), depth, rules.room, rules.room)
    ring.mtu = rules.mtu
    for group in rules.groups:
        ring.attach(int(group))
    return ring


def receiver(random: Random, depth: int) -> Receiver:
    mtu = random.choice((256, 1024, 4096))
    room = random.choice((mtu, mtu, 64, 3))
    return Receiver(
        OWN,
        QP,
        QKEY,
        random.choice((0xFFFF, 0xFFFF, 0x7FFF)),
        mtu,
        room,
        random.random() < 0.3,
        GROUPS,
        depth,
    )


def drawn(random: Random) -> tuple[bytes, IPv4Address, int, IPv4Address, int]:
    """A datagram that is right but for some changes, before or after the ICRC was made."""
    size = random.choice((0, 1, 3, 60, 64, 65, random.randrange(1100), random.randrange(5000)))
    imm = random.choice((None, random.getrandbits(32)))
    dest = random.choice((*GROUPS, GROUP, GROUP, OWN, IPv4Address("239.9.9.9"), PEER))
    source, source_port = random.choice((PEER, PEER, OWN)), random.choice((QP >> 8, 0xC000, 4791))
    dest_port = PORT if dest.is_multicast else QP >> 8
    made = bytearray(
        message(
            random.randbytes(size),
            imm,
            random.choice((0xFFFFFF, QP))
            if random.random() < 0.2
            else (0xFFFFFF if dest.is_multicast else QP),
            random.choice((QKEY, QKEY, QKEY, QKEY ^ 1)),
            random.choice((0xFFFF, 0xFFFF, 0x7FFF, 0x8001)),
            random.choice((7, QP)),
        )
    )
    before, after = random.random() < 0.3, random.random() < 0.3
    if before:
        change(made, random)
    data = bytes(made)
    if len(data) >= 24:
        data = sealed(data, source, source_port, dest, random.choice((0, 0, 1, 77, 0xFFFF)), dest_port)
    if after:
        mutated = bytearray(data)
        change(mutated, random)
        data = bytes(mutated)
    return data, source, source_port, dest, dest_port


def change(data: bytearray, random: Random) -> None:
    for _ in range(random.randrange(1, 4)):
        match random.randrange(4):
            case 0 if data:
                data[random.randrange(len(data))] ^= 1 << random.randrange(8)
            case 1:
                del data[random.randrange(len(data) + 1) :]
            case 2:
                data += random.randbytes(random.randrange(9))
            case _ if data:
                data[random.randrange(min(len(data), 24))] = random.getrandbits(8)


def test_each_datagram_has_the_fate_of_the_rules(long: bool) -> None:
    seed = int.from_bytes(os.urandom(4))
    random, left, seen = Random(seed), 1_000_000 if long else 30_000, Counter[str]()
    while left:
        depth = random.choice((1, 8, 64))
        rules = receiver(random, depth)
        ring, ours = ring_of(rules, depth), Counter[str]()
        for _ in range(min(left, random.choice((3, 200)))):
            left -= 1
            data, source, source_port, dest, dest_port = drawn(random)
            wanted = rules.fate(data, source, source_port, dest, dest_port)
            found = FATES[ring.judge(data, int(source), source_port, int(dest), dest_port)]
            assert found == wanted, (seed, rules, data.hex(), source, source_port, dest, dest_port)
            ours[wanted] += 1
        received, free, _, _, fates = ring.counts()
        assert {name: count for name, count in zip(FATES, fates, strict=True) if count} == ours, seed
        assert (received, free) == (len(rules.delivered), rules.free), seed
        check_messages(ring, rules)
        seen += ours
    assert set(seen) == set(FATES), "each fate was drawn"


def check_messages(ring: _native.Ring, rules: Receiver) -> None:
    count = ring.queued
    records, slots = ring.take(count)
    assert len(slots) == 4 * count == 4 * len(rules.delivered)
    for row, (payload, imm, src_qp, source) in zip(
        _RECORD.iter_unpack(records), rules.delivered, strict=True
    ):
        _, length, found_qp, found_imm, has_imm, found_source, _ = row
        assert (length, found_qp, found_imm if has_imm else None) == (len(payload), src_qp, imm)
        assert IPv4Address(found_source) == source


def test_payloads_lie_where_the_records_say() -> None:
    """With an immediate, and where the payload fills the receive to the last byte."""
    for room in (64, 65, 67, 1024):
        memory = bytearray(4 * room)
        ring = _native.Ring(int(OWN), QP, QKEY, 0xFFFF, False)
        ring.post(memory, 4, room, room)
        ring.mtu = 4096
        ring.attach(int(GROUP))
        sent = [(os.urandom(room), None), (os.urandom(room), 0x01020304), (os.urandom(room - 1), 5), (b"", 6)]
        for payload, imm in sent:
            data = sealed(message(payload, imm), PEER, 4000, GROUP)
            assert FATES[ring.judge(data, int(PEER), 4000, int(GROUP), PORT)] == "delivered"
        records, _ = ring.take(4)
        for row, (payload, imm) in zip(_RECORD.iter_unpack(records), sent, strict=True):
            begin, length, _, found, has_imm, _, _ = row
            assert bytes(memory[begin : begin + length]) == payload
            assert (found if has_imm else None) == imm


def test_every_identification_is_solved_for() -> None:
    rules = Receiver(OWN, QP, QKEY, 0xFFFF, 4096, 4096, False, GROUPS, 1)
    ring, wrong = ring_of(rules, 1), 0
    for identification in range(0, 65536, 7):
        data = sealed(message(b"x" * (identification % 97)), PEER, 4000, GROUP, identification)
        ring.judge(data, int(PEER), 4000, int(GROUP), PORT)
        ring.drop()
    assert dict(zip(FATES, ring.counts()[4], strict=True))["delivered"] == len(range(0, 65536, 7))
    data = sealed(message(b"x" * 40), PEER, 4000, GROUP)
    for flip in range(2000):  # of 65,536 wrong ones, one is taken for right: 16 bits are checked
        spoilt = data[:-4] + (int.from_bytes(data[-4:]) ^ (flip * 0x9E3779B1 + 1) & 0xFFFFFFFF).to_bytes(4)
        wrong += FATES[ring.judge(spoilt, int(PEER), 4000, int(GROUP), PORT)] == "delivered"
        ring.drop()
    assert wrong <= 3
