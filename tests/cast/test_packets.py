"""The messages of the file protocol: written, read, and what is none."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mcast.cast import packets
from mcast.cast.packets import (
    Hello,
    Packet,
    Rejected,
    decode,
    encode,
)

from .arbitrary import KINDS, any_packet


@settings(deadline=None)
@given(any_packet)
def test_a_message_is_read_as_it_was_written(packet: Packet) -> None:
    assert decode(encode(packet)) == packet


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=80), st.binary(max_size=80).map(lambda rest: packets.MAGIC + rest)))
def test_any_bytes_are_a_packet_or_rejected(raw: bytes) -> None:
    try:
        packet = decode(raw)
    except Rejected:
        return
    assert type(packet) in KINDS


def test_every_kind_is_tested() -> None:
    assert set(KINDS) == set(Packet.__args__)


def test_a_name_moves_no_cursor() -> None:
    packet = decode(encode(Hello(1, 2, "evil\x1b[2J\nname")))
    assert packet == Hello(1, 2, "evil?[2J?name")
