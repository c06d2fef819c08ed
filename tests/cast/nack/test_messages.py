"""The messages of the protocol of objects: written as they are read, and bounded."""

from __future__ import annotations

import pytest

from mcast.cast.nack.header import TEXT, Rejected, number_at
from mcast.cast.nack.messages import (
    AROUND,
    LARGEST,
    MOST_ADMITTED,
    MOST_BLOCKS,
    MOST_MEMBERS,
    MOST_METADATA,
    MOST_PIECE,
    MOST_SEALS,
    MOST_SPARE,
    MOST_WIDTH,
    Admit,
    Behind,
    Bye,
    Describe,
    Enter,
    Flush,
    Have,
    Lack,
    Offer,
    Over,
    Piece,
    Seal,
    Sealed,
    Spoken,
    Want,
    packed,
    piece_size,
    pieces_in,
    told,
    unpacked,
)

from .network import address, number

S, R = number(0), number(1)
SEALED = Sealed(4, 4000, bytes(32))
GOOD: dict[str, Spoken] = {
    "offer": Offer(S, 0, 5, 3, 1000, 9, "sender"),
    "enter": Enter(S, R, 8, LARGEST, 1, 5, 9, 0, "r"),
    "admit": Admit(S, {R: (0, 9), 7: (MOST_MEMBERS - 1, 8)}),
    "describe": Describe(S, 0, 20_000, 976, MOST_WIDTH, MOST_SPARE, 0, 0, "thing", bytes(MOST_METADATA)),
    "piece": Piece(S, 0, 1, 2, b"x"),
    "seal": Seal(S, 0, MOST_SEALS, 0, 5, 3, 1000, (SEALED,) * MOST_SEALS),
    "flush": Flush(S, 0, 6, 6, 0, 5, 3, 1000, 1, bytes(32), MOST_MEMBERS - 3, 5),
    "lack": Lack(S, 0, R, 1, 5, 100, (Want(1, MOST_WIDTH, (1 << MOST_WIDTH) - 1), Want(4, 0, 0))),
    "have": Have(S, 0, R, 6, 5, 10, 1, ""),
    "over": Over(S, 0, 0, 7),
    "behind": Behind(S, 0, 3, 5),
    "bye": Bye(S, 0, "done"),
}
LONGEST: dict[str, Spoken] = {
    "admit": Admit(S, {number_at("a", salt): (salt, 1) for salt in range(1, MOST_ADMITTED + 1)}),
    "describe": Describe(S, 0, 1, 976, 1, 0, 0, 0, "n" * TEXT, bytes(MOST_METADATA)),
    "piece": Piece(S, 0, 1, 2, bytes(piece_size(LARGEST))),
}
BAD: dict[str, Spoken] = {
    "more members than there are": Offer(S, 0, 5, MOST_MEMBERS + 1, 1000, 9, "sender"),
    "a long name": Bye(S, 0, "n" * (TEXT + 1)),
    "no room": Enter(S, R, 0, LARGEST, 1, 5, 9, 0, "r"),
    "short messages": Enter(S, R, 8, LARGEST - 1, 1, 5, 9, 0, "r"),
    "neither parity nor none": Enter(S, R, 8, LARGEST, 2, 5, 9, 0, "r"),
    "an index beyond the bitmap": Admit(S, {R: (MOST_MEMBERS, 9)}),
    "too many at once": Admit(S, dict.fromkeys(range(MOST_ADMITTED + 1), (0, 0))),
    "nobody": Admit(S, {}),
    "an empty piece of all": Describe(S, 0, 1, 0, 4, 4, 0, 0, "", b""),
    "small pieces": Describe(S, 0, 1, piece_size(LARGEST) - 1, 4, 4, 0, 0, "", b""),
    "large pieces": Describe(S, 0, 1, MOST_PIECE + 1, 4, 4, 0, 0, "", b""),
    "no width": Describe(S, 0, 1, 976, 0, 4, 0, 0, "", b""),
    "wide blocks": Describe(S, 0, 1, 976, MOST_WIDTH + 1, 4, 0, 0, "", b""),
    "much parity": Describe(S, 0, 1, 976, 4, MOST_SPARE + 1, 0, 0, "", b""),
    "more blocks than there are": Describe(S, 0, 1 << 63, 976, 1, 0, 0, 0, "", b""),
    "more pieces than are missing": Lack(S, 0, R, 1, 5, 100, (Want(1, 3, 3),)),
    "much metadata": Describe(S, 0, 1, 976, 4, 4, 0, 0, "", bytes(MOST_METADATA + 1)),
    "an empty piece": Piece(S, 0, 1, 2, b""),
    "a long piece": Piece(S, 0, 1, 2, bytes(MOST_PIECE + 1)),
    "a block beyond all": Piece(S, 0, 1 << 31, 2, b"x"),
    "a place beyond parity": Piece(S, 0, 1, MOST_WIDTH + MOST_SPARE, b"x"),
    "blocks before the first": Seal(S, 0, 0, 0, 5, 3, 1000, (SEALED, SEALED)),
    "many seals": Seal(S, 0, 99, 0, 5, 3, 1000, (SEALED,) * (MOST_SEALS + 1)),
    "a sealed block of nothing": Seal(S, 0, 0, 0, 5, 3, 1000, (Sealed(0, 0, bytes(32)),)),
    "gone before it was sent": Flush(S, 0, 6, 6, 7, 5, 3, 1000, 1, bytes(32), 0, 5),
    "more sent than there is": Flush(S, 0, 7, 6, 0, 5, 3, 1000, 1, bytes(32), 0, 5),
    "asked beyond the bitmap": Flush(S, 0, 6, 6, 0, 5, 3, 1000, 1, bytes(32), MOST_MEMBERS, 1),
    "lacking nothing": Lack(S, 0, R, 1, 5, 100, ()),
    "lacking what it has": Lack(S, 0, R, 2, 5, 100, (Want(1, 1, 1),)),
    "lacking more than a block": Lack(S, 0, R, 1, 5, 100, (Want(1, MOST_WIDTH + 1, 1),)),
    "a state that is none": Have(S, 0, R, 6, 5, 10, 6, ""),
    "whole beyond the bitmap": Over(S, 0, MOST_MEMBERS, 1),
    "slow beyond the bitmap": Behind(S, 0, MOST_MEMBERS, 1),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_message_is_read_as_it_was_written(name: str) -> None:
    spoken = GOOD[name]
    assert unpacked(packed(spoken)) == spoken
    assert told(packed(spoken), address(1 if isinstance(spoken, Enter | Lack | Have) else 0)) == spoken


@pytest.mark.parametrize("name", GOOD)
def test_a_message_fits_into_the_smallest_that_a_member_takes(name: str) -> None:
    assert len(packed(LONGEST.get(name, GOOD[name]))) <= LARGEST


@pytest.mark.parametrize("name", BAD)
def test_what_is_out_of_bounds_is_malformed(name: str) -> None:
    with pytest.raises(Rejected, match="malformed"):
        unpacked(packed(BAD[name]))


def test_a_bitmap_has_no_byte_that_it_does_not_need() -> None:
    flush = Flush(S, 0, 6, 6, 0, 5, 3, 1000, 1, bytes(32), 0, 0)
    sizes = [len(packed(flush._replace(asked=bits))) for bits in (0, 1, 0xFF, 0x100)]
    assert [size - sizes[0] for size in sizes] == [0, 1, 1, 2]


@pytest.mark.parametrize("name", GOOD)
def test_nobody_speaks_for_an_end_at_another_address(name: str) -> None:
    with pytest.raises(Rejected, match="another's number"):
        told(packed(GOOD[name]), "10.9.9.9")


@pytest.mark.parametrize("apart", [0, 6])
def test_pieces_that_follow_one_another_are_found_together(apart: int) -> None:
    """Wherever one breaks the row, it ends before that one, which is read by itself."""

    def piece(place: int, block: int = 7, session: int = S, object_: int = 0) -> bytes:
        return packed(Piece(session, object_, block, place, bytes(32)))

    row = [piece(place) for place in range(3, 13)]
    size = len(row[0])
    step = size + apart

    def found(messages: list[bytes], begin: int = 0) -> tuple[int, ...] | None:
        memory = (b"x" * apart).join(messages)
        return pieces_in(memory, begin * step, step, size, len(messages) - begin)

    assert found(row) == (S, 0, 7, 3, 10)
    assert found(row, 9) == (S, 0, 7, 12, 1)
    last = MOST_WIDTH + MOST_SPARE - 1
    assert found([piece(last), piece(last + 1)]) == (S, 0, 7, last, 1)
    seal = packed(Seal(S, 0, 1, 0, 0, 1, 1000, (SEALED,))).ljust(size, b"\0")[:size]
    for other in (piece(3), piece(20), piece(4, 8), piece(4, 7, R), piece(4, 7, S, 1), seal, b"?" * size):
        for at in range(1, 10):
            broken = [*row[:at], other, *row[at + 1 :]]
            assert found(broken) == (S, 0, 7, 3, at)
    for wrong in (piece(last + 1), piece(0, MOST_BLOCKS), seal, bytes(size)):
        assert found([wrong, *row]) is None
    assert pieces_in(row[0], 0, AROUND, AROUND, 1) is None, "without a byte"
    assert pieces_in(bytes(1 << 16), 0, 1 << 15, 1 << 15, 1) is None, "too long"


def test_foreign_and_cut_bytes_are_rejected() -> None:
    with pytest.raises(Rejected, match="foreign"):
        unpacked(b"mcF1" + bytes(40))
    with pytest.raises(Rejected, match="another version of this protocol: install the same mcast"):
        unpacked(b"mcC1" + packed(GOOD["lack"])[4:])
    for at in range(4, len(packed(GOOD["lack"])) - 21):
        with pytest.raises(Rejected, match="malformed"):
            unpacked(packed(GOOD["lack"])[:at])
