"""The book and the wire alone: pure, so no fabric."""

from __future__ import annotations

from itertools import permutations

import pytest

from pricefeed.book import Book
from pricefeed.wire import BadMessage, Heartbeat, Message, Part, Request, Update, decode, encode, snapshot

STORY: list[Message] = [
    Update(1, "ACME", 100),
    Update(2, "BOLT", 200),
    Update(3, "ACME", 101),
    Part(3, 0, 2, {"ACME": 101}),
    Part(3, 1, 2, {"BOLT": 200}),
    Update(4, "BOLT", -1),
]


def test_any_order_and_any_number_of_copies_end_in_the_same_book() -> None:
    for order in permutations(STORY):
        book = Book()
        for message in order:
            book.take(message)
            book.take(message)
        assert (book.version, book.behind) == (4, False)
        assert book.prices == {"ACME": 101, "BOLT": -1}


def test_a_heartbeat_shows_that_the_last_update_is_missing() -> None:
    book = Book()
    book.take(Update(1, "ACME", 100))
    assert not book.behind
    book.take(Heartbeat(2))
    assert book.behind


def test_what_is_old_is_passed_over() -> None:
    book = Book()
    for message in (
        Heartbeat(9),
        Heartbeat(2),
        Part(3, 0, 2, {"ACME": 1}),
        Part(2, 1, 2, {"BOLT": 0}),
        Part(3, 1, 2, {"BOLT": 2}),
    ):
        book.take(message)
    assert (book.version, book.newest, book.prices) == (3, 9, {"ACME": 1, "BOLT": 2})


@pytest.mark.parametrize("message", [*STORY, Heartbeat(7), Request(2), Part(9, 0, 1, {})], ids=repr)
def test_what_is_encoded_decodes_to_the_same(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_snapshot_is_cut_into_parts_that_fit() -> None:
    prices = {f"S{n}": n for n in range(100)}
    parts = list(snapshot(5, prices, room=1024))
    assert len(parts) == 2
    assert max(len(encode(part)) for part in parts) <= 1024
    book = Book()
    for part in reversed(parts):
        book.take(part)
    assert (book.version, book.prices) == (5, prices)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"U",
        encode(Update(1, "ACME", 1))[:-1],
        encode(Heartbeat(1)) + b"x" * 16,
        b"X" + encode(Heartbeat(1))[1:],
        encode(Part(1, 0, 1, {}))[:-4] + b"\0\7\0\3",
        encode(Update(1, "ACME", 1)).replace(b"ACME", b"\xff\xfe\xfd\xfc"),
    ],
)
def test_hostile_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(payload)
