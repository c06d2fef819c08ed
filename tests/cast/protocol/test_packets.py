"""The messages of the protocol of objects: written as they are read, and bounded."""

from __future__ import annotations

import pytest

from mcast.cast.protocol.packets import (
    DATA_HEADER_SIZE,
    MAX_ADMITTED,
    MAX_BLOCKS,
    MAX_K,
    MAX_MEMBERS,
    MAX_METADATA,
    MAX_PARITY,
    MAX_SEALS,
    MAX_SEGMENT,
    MAX_TEXT,
    MAX_VERSION,
    MIN_MESSAGE_SIZE,
    UNKNOWN_SIZE,
    Ack,
    Admit,
    Behind,
    BlockInfo,
    Bye,
    Data,
    Describe,
    Done,
    Flush,
    Join,
    Nack,
    Offer,
    Packet,
    Rejected,
    RepairRequest,
    Seal,
    decode,
    decode_from,
    decode_run,
    encode,
    number_at,
    segment_size,
)

from .network import address, number

S, R = number(0), number(1)
SEALED = BlockInfo(4, 4000, bytes(32))
GOOD: dict[str, Packet] = {
    "offer": Offer(S, 0, 5, 3, 1000, 9, "sender"),
    "join": Join(S, R, 8, MIN_MESSAGE_SIZE, 1, 5, 9, 0, "r"),
    "rejoin": Join(S, R, 8, MIN_MESSAGE_SIZE, 1, 5, 9, 0, "r", MAX_VERSION),
    "admit": Admit(S, {R: (0, 9), 7: (MAX_MEMBERS - 1, 8)}),
    "describe": Describe(S, 0, 20_000, 976, MAX_K, MAX_PARITY, 0, 0, "thing", bytes(MAX_METADATA)),
    "version": Describe(S, 0, 20_000, 976, MAX_K, MAX_PARITY, 0, 0, "thing", b"", 0),
    "data": Data(S, 0, 1, 2, b"x"),
    "seal": Seal(S, 0, MAX_SEALS, 0, 5, 3, 1000, (SEALED,) * MAX_SEALS),
    "flush": Flush(S, 0, 6, 6, 0, 5, 3, 1000, 1, bytes(32), MAX_MEMBERS - 3, 5),
    "nack": Nack(S, 0, R, 1, 5, 100, (RepairRequest(1, MAX_K, (1 << MAX_K) - 1), RepairRequest(4, 0, 0))),
    "ack": Ack(S, 0, R, 6, 5, 10, 1, ""),
    "done": Done(S, 0, 0, 7),
    "behind": Behind(S, 0, 3, 5),
    "bye": Bye(S, 0, "done"),
}
LONGEST: dict[str, Packet] = {
    "admit": Admit(S, {number_at("a", salt): (salt, 1) for salt in range(1, MAX_ADMITTED + 1)}),
    "describe": Describe(S, 0, 1, 976, 1, 0, 0, 0, "n" * MAX_TEXT, bytes(MAX_METADATA), MAX_VERSION),
    "data": Data(S, 0, 1, 2, bytes(segment_size(MIN_MESSAGE_SIZE))),
}
BAD: dict[str, Packet] = {
    "more members than there are": Offer(S, 0, 5, MAX_MEMBERS + 1, 1000, 9, "sender"),
    "a long name": Bye(S, 0, "n" * (MAX_TEXT + 1)),
    "no room": Join(S, R, 0, MIN_MESSAGE_SIZE, 1, 5, 9, 0, "r"),
    "short messages": Join(S, R, 8, MIN_MESSAGE_SIZE - 1, 1, 5, 9, 0, "r"),
    "neither parity nor none": Join(S, R, 8, MIN_MESSAGE_SIZE, 2, 5, 9, 0, "r"),
    "a version of nothing": Join(S, R, 8, MIN_MESSAGE_SIZE, 1, 5, 9, 0, "r", -2),
    "a negative version": Describe(S, 0, 1, 976, 4, 4, 0, 0, "", b"", -2),
    "a version that goes round": Describe(S, 0, 1, 976, 4, 4, 1, 0, "", b"", 0),
    "a version of unknown size": Describe(S, 0, UNKNOWN_SIZE, 976, 4, 4, 0, 0, "", b"", 0),
    "an index beyond the bitmap": Admit(S, {R: (MAX_MEMBERS, 9)}),
    "too many at once": Admit(S, dict.fromkeys(range(MAX_ADMITTED + 1), (0, 0))),
    "nobody": Admit(S, {}),
    "segments of no bytes": Describe(S, 0, 1, 0, 4, 4, 0, 0, "", b""),
    "small segments": Describe(S, 0, 1, segment_size(MIN_MESSAGE_SIZE) - 1, 4, 4, 0, 0, "", b""),
    "large segments": Describe(S, 0, 1, MAX_SEGMENT + 1, 4, 4, 0, 0, "", b""),
    "no k": Describe(S, 0, 1, 976, 0, 4, 0, 0, "", b""),
    "large k": Describe(S, 0, 1, 976, MAX_K + 1, 4, 0, 0, "", b""),
    "much parity": Describe(S, 0, 1, 976, 4, MAX_PARITY + 1, 0, 0, "", b""),
    "more blocks than there are": Describe(S, 0, 1 << 63, 976, 1, 0, 0, 0, "", b""),
    "more segments than are missing": Nack(S, 0, R, 1, 5, 100, (RepairRequest(1, 3, 3),)),
    "much metadata": Describe(S, 0, 1, 976, 4, 4, 0, 0, "", bytes(MAX_METADATA + 1)),
    "an empty segment": Data(S, 0, 1, 2, b""),
    "a long segment": Data(S, 0, 1, 2, bytes(MAX_SEGMENT + 1)),
    "a block beyond all": Data(S, 0, 1 << 31, 2, b"x"),
    "an id beyond parity": Data(S, 0, 1, MAX_K + MAX_PARITY, b"x"),
    "blocks before the first": Seal(S, 0, 0, 0, 5, 3, 1000, (SEALED, SEALED)),
    "many seals": Seal(S, 0, 99, 0, 5, 3, 1000, (SEALED,) * (MAX_SEALS + 1)),
    "a sealed block of nothing": Seal(S, 0, 0, 0, 5, 3, 1000, (BlockInfo(0, 0, bytes(32)),)),
    "released before it was sent": Flush(S, 0, 6, 6, 7, 5, 3, 1000, 1, bytes(32), 0, 5),
    "more sent than there is": Flush(S, 0, 7, 6, 0, 5, 3, 1000, 1, bytes(32), 0, 5),
    "asks beyond the bitmap": Flush(S, 0, 6, 6, 0, 5, 3, 1000, 1, bytes(32), MAX_MEMBERS, 1),
    "no request": Nack(S, 0, R, 1, 5, 100, ()),
    "request before the base": Nack(S, 0, R, 2, 5, 100, (RepairRequest(1, 1, 1),)),
    "request for more than a block": Nack(S, 0, R, 1, 5, 100, (RepairRequest(1, MAX_K + 1, 1),)),
    "an unknown state": Ack(S, 0, R, 6, 5, 10, 6, ""),
    "complete beyond the bitmap": Done(S, 0, MAX_MEMBERS, 1),
    "slow beyond the bitmap": Behind(S, 0, MAX_MEMBERS, 1),
}


@pytest.mark.parametrize("name", GOOD)
def test_packets_round_trip(name: str) -> None:
    packet = GOOD[name]
    assert decode(encode(packet)) == packet
    assert decode_from(encode(packet), address(1 if isinstance(packet, Join | Nack | Ack) else 0)) == packet


@pytest.mark.parametrize("name", GOOD)
def test_packets_fit_into_the_minimum_size(name: str) -> None:
    assert len(encode(LONGEST.get(name, GOOD[name]))) <= MIN_MESSAGE_SIZE


@pytest.mark.parametrize("name", BAD)
def test_fields_out_of_bounds_are_malformed(name: str) -> None:
    with pytest.raises(Rejected, match="malformed"):
        decode(encode(BAD[name]))


def test_a_bitmap_has_no_unneeded_byte() -> None:
    flush = Flush(S, 0, 6, 6, 0, 5, 3, 1000, 1, bytes(32), 0, 0)
    sizes = [len(encode(flush._replace(ack_bits=bits))) for bits in (0, 1, 0xFF, 0x100)]
    assert [size - sizes[0] for size in sizes] == [0, 1, 1, 2]


@pytest.mark.parametrize("name", GOOD)
def test_a_number_of_another_address_is_forged(name: str) -> None:
    with pytest.raises(Rejected, match="forged: the number is of another address"):
        decode_from(encode(GOOD[name]), "10.9.9.9")


@pytest.mark.parametrize("gap", [0, 6])
def test_decode_run_finds_consecutive_segments(gap: int) -> None:
    """The run ends before the packet that breaks it, which is then decoded by itself."""

    def segment(esi: int, block: int = 7, session: int = S, object_: int = 0) -> bytes:
        return encode(Data(session, object_, block, esi, bytes(32)))

    row = [segment(esi) for esi in range(3, 13)]
    size = len(row[0])
    step = size + gap

    def found(messages: list[bytes], begin: int = 0) -> tuple[int, ...] | None:
        memory = (b"x" * gap).join(messages)
        return decode_run(memory, begin * step, step, size, len(messages) - begin)

    assert found(row) == (S, 0, 7, 3, 10)
    assert found(row, 9) == (S, 0, 7, 12, 1)
    last = MAX_K + MAX_PARITY - 1
    assert found([segment(last), segment(last + 1)]) == (S, 0, 7, last, 1)
    seal = encode(Seal(S, 0, 1, 0, 0, 1, 1000, (SEALED,))).ljust(size, b"\0")[:size]
    for other in (
        segment(3),
        segment(20),
        segment(4, 8),
        segment(4, 7, R),
        segment(4, 7, S, 1),
        seal,
        b"?" * size,
    ):
        for at in range(1, 10):
            broken = [*row[:at], other, *row[at + 1 :]]
            assert found(broken) == (S, 0, 7, 3, at)
    for wrong in (segment(last + 1), segment(0, MAX_BLOCKS), seal, bytes(size)):
        assert found([wrong, *row]) is None
    assert decode_run(row[0], 0, DATA_HEADER_SIZE, DATA_HEADER_SIZE, 1) is None, "without a byte"
    assert decode_run(bytes(1 << 16), 0, 1 << 15, 1 << 15, 1) is None, "too long"


def test_foreign_and_cut_bytes_are_rejected() -> None:
    with pytest.raises(Rejected, match="foreign"):
        decode(b"mcF1" + bytes(40))
    with pytest.raises(Rejected, match="another version of this protocol: install the same mcast"):
        decode(b"mcC1" + encode(GOOD["nack"])[4:])
    for at in range(4, len(encode(GOOD["nack"])) - 21):
        with pytest.raises(Rejected, match="malformed"):
            decode(encode(GOOD["nack"])[:at])
