"""Closed membership: what a stranger writes, records, changes or sends again is refused and counted."""

from __future__ import annotations

from random import Random

import pytest

from mcast.cast.protocol import auth
from mcast.cast.protocol.auth import (
    NEEDS_KEY,
    REPLAYED,
    UNKNOWN_SESSION,
    WRONG_KEY,
    Authenticator,
    KeyedAuthenticator,
)
from mcast.cast.protocol.packets import LEFT, VERSION, Ack, Admit, Offer, Packet, Rejected, encode
from mcast.cast.protocol.receiver import ObjectReceiver, ReceiverConfig

from .network import address, number

KEY = bytes(range(32))
SESSION, MEMBER = number(0), number(1)
OFFER = Offer(SESSION, 0, 5, 3, 1000, 77, "sender")
LEAVE = Ack(SESSION, 0, MEMBER, 0, 0, 0, LEFT, "")
TAGGED = "00000000000000013c19316262695d727f10b5fa320d1b6c"
"""The end of that message, the first of its end."""


def end(key: bytes = KEY, nonce: int = 77) -> KeyedAuthenticator:
    made = KeyedAuthenticator(key)
    made.begin(SESSION, nonce)
    return made


def written(by: Authenticator, packet: Packet) -> bytes:
    (message,) = by.sign([encode(packet)])
    return bytes(message)


def refusal(by: Authenticator, message: bytes, source: int = 0) -> str:
    with pytest.raises(Rejected) as caught:
        by.decode(message, address(source))
    return str(caught.value)


def test_members_read_each_other_and_nobody_else() -> None:
    here, there = end(), end()
    assert here.decode(written(there, OFFER), address(0)) == OFFER
    assert here.decode(written(end(), LEAVE), address(1)) == LEAVE
    assert refusal(here, written(end(bytes(32)), OFFER)) == WRONG_KEY
    assert refusal(here, encode(OFFER)) == WRONG_KEY
    assert refusal(Authenticator(), written(there, OFFER)) == NEEDS_KEY
    assert refusal(here, written(end(), OFFER), 1) == "forged: the number is of another address"


def test_no_byte_of_a_message_can_be_changed() -> None:
    message = written(end(), LEAVE)
    for index in range(len(message)):
        changed = bytearray(message)
        changed[index] ^= 1
        with pytest.raises(Rejected):
            end().decode(bytes(changed), address(1))
    for short in range(len(message)):
        with pytest.raises(Rejected):
            end().decode(message[:short], address(1))


def test_a_packet_is_accepted_once() -> None:
    """Packets may arrive in any order within the replay window."""
    there, here = end(), end()
    packets = [written(there, OFFER) for _ in range(5000)]
    for index in (1, 0, 4000, 3999, 4999):
        assert here.decode(packets[index], address(0)) == OFFER
    for index in (0, 1, 3999, 4000, 4999, 2):
        assert refusal(here, packets[index]) == REPLAYED, "heard, or too long ago"
    assert here.decode(packets[1000], address(0)) == OFFER
    there._count = (1 << 64) - 2
    latest = written(there, OFFER)
    assert here.decode(latest, address(0)) == OFFER
    for old in (packets[4998], latest):
        assert refusal(here, old) == REPLAYED, "a member that counts as far as it can costs nothing"


def test_packets_of_another_session_are_rejected() -> None:
    """Even by an end with the same key."""
    packets = written(end(nonce=76), LEAVE)
    assert refusal(end(nonce=77), packets, 1) == WRONG_KEY
    assert refusal(KeyedAuthenticator(KEY), packets, 1) == UNKNOWN_SESSION
    old = written(end(nonce=76), OFFER._replace(nonce=76))
    assert refusal(end(nonce=77), old) == REPLAYED


def test_a_recorded_admission_admits_nobody() -> None:
    config = ReceiverConfig(MEMBER, "r", 8, 1024, True, nonce=5)
    receiver = ObjectReceiver(SESSION, config, Random(1), 0.0)
    receiver.on_packet(Admit(SESSION, {MEMBER: (0, 4)}), 0.0)
    assert receiver.index is None
    receiver.on_packet(Admit(SESSION, {MEMBER: (3, 5)}), 0.0)
    assert receiver.index == 3


def test_a_tag_is_the_keyed_blake3_of_the_message() -> None:
    """The bytes are a format: other programs write them."""
    assert written(end(), LEAVE).hex()[-48:] == TAGGED


@pytest.mark.parametrize("sign", [b"mcC2", b"mcK2"])
def test_another_version_is_refused_as_such(sign: bytes) -> None:
    """Both by an end with a key and by one without."""
    old = sign + written(end(), LEAVE)[4:]
    assert {refusal(by, old, 1) for by in (end(), Authenticator())} == {VERSION}


def test_replay_of_dropped_receivers_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More receivers than MAX_MEMBERS join and leave; no packet of theirs is accepted twice."""
    monkeypatch.setattr(auth, "MAX_MEMBERS", 2)
    here, sender = end(), end()
    assert here.decode(written(sender, OFFER), address(0)) == OFFER
    recorded: list[tuple[bytes, int]] = []
    for member in range(1, 9):
        by, stamp = end(), 10 * member
        for count in range(2):
            has = Ack(SESSION, 0, number(member), 0, stamp + count, 0, LEFT, "")
            recorded.append((written(by, has), member))
            assert here.decode(recorded[-1][0], address(member)) == has
        assert [refusal(here, *one) for one in recorded] == [REPLAYED] * len(recorded)
        assert here.decode(written(sender, OFFER), address(0)) == OFFER, "the sender is one more"
        assert len(here._sessions[SESSION]._receivers) <= 2


def test_an_active_receiver_keeps_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other receivers join and leave meanwhile, more than MAX_MEMBERS."""
    monkeypatch.setattr(auth, "MAX_MEMBERS", 2)
    here, by = end(), end()
    packets: list[bytes] = []
    for other in range(2, 9):
        packets.append(written(by, LEAVE._replace(stamp=100)))
        here.decode(packets[-1], address(1))
        here.decode(written(end(), LEAVE._replace(member=number(other), stamp=other)), address(other))
    assert [refusal(here, one, 1) for one in packets] == [REPLAYED] * len(packets)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="a key of 15 bytes: at least 16"):
        KeyedAuthenticator(bytes(15))


def test_a_resumed_session_rejects_replays() -> None:
    """After `suspend` and `begin`, recorded packets of the sender and of other receivers are rejected."""
    sender, other, here = end(), end(), end()
    late = LEAVE._replace(stamp=9)
    packets, answered = [written(sender, OFFER) for _ in range(2)], written(other, late)
    here.decode(packets[0], address(0))
    here.decode(answered, address(1))
    here.suspend(SESSION)
    assert refusal(here, packets[0]) == REPLAYED
    here.begin(SESSION, 77)
    assert refusal(here, packets[0]) == REPLAYED
    assert refusal(here, answered, 1) == REPLAYED
    assert here.decode(packets[1], address(0)) == OFFER
    assert here.decode(written(other, late._replace(stamp=10)), address(1)) == late._replace(stamp=10)
    here.suspend(SESSION)
    here.forget(SESSION, 77)
    assert here.decode(packets[0], address(0)) == OFFER, "of a session that is not remembered"
