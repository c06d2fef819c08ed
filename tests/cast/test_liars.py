"""Ends of the file protocol that lie cost only themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcast.cast.packets import (
    EVERYBODY,
    UNKNOWN_SIZE,
    Ask,
    Close,
    Data,
    Done,
    End,
    Hello,
    Join,
    Packet,
    Reason,
    Report,
    Verdict,
    Welcome,
    decode,
    encode,
    number_at,
)
from mcast.cast.receiver import FileReceiver
from mcast.cast.sender import Fate, FileSender, Patience

from .arbitrary import KINDS
from .network import DATA, LARGEST, PIECES, Lies, Network, S, address, number

LIAR = 2
"""Its number as an end; the first receiver is honest."""

ONE_THAT_STANDS_STILL: dict[type[Packet], Packet] = {
    Hello: Join(S, number(LIAR), 512, LARGEST, "liar"),
    Ask: Report(S, number(LIAR), 0, 0, 512, 0),
    End: Report(S, number(LIAR), 0, 0, 512, 0),
}


def said(answers: dict[type[Packet], Packet]) -> Callable[[bytes | None], list[bytes]]:
    """A liar that answers each kind in one way."""

    def lie(heard: bytes | None) -> list[bytes]:
        answer = None if heard is None else answers.get(type(decode(heard)))
        return [] if answer is None else [encode(answer)]

    return lie


@pytest.mark.parametrize("size", [100, 2000, len(DATA)])
def test_a_receiver_that_answers_and_takes_nothing_is_given_up(size: int) -> None:
    network = Lies(said(ONE_THAT_STANDS_STILL), DATA[:size])
    network.run(long=200)
    assert network.fates == [Fate.VERIFIED, Fate.STALLED]


def test_a_receiver_that_only_promises_more_room_is_given_up() -> None:
    room = 1600

    def lie(heard: bytes | None) -> list[bytes]:
        nonlocal room
        if heard is not None and isinstance(decode(heard), Hello):
            return [encode(Join(S, number(LIAR), room // 100, LARGEST, "liar"))]
        if heard is not None and isinstance(decode(heard), Ask):
            room += 10
            return [encode(Report(S, number(LIAR), 0, 0, room // 100, 0))]
        return said(ONE_THAT_STANDS_STILL)(heard)

    network = Lies(lie, DATA)
    network.run(long=200)
    assert network.fates == [Fate.VERIFIED, Fate.STALLED]


def test_a_receiver_that_claims_every_loss_is_given_up() -> None:
    """The honest receiver's copy costs a few times its pieces, not as many as the liar would like."""
    asked = 0

    def lie(heard: bytes | None) -> list[bytes]:
        nonlocal asked
        packet = None if heard is None else decode(heard)
        if isinstance(packet, Hello):
            return [encode(Join(S, number(LIAR), 512, LARGEST, "liar"))]
        if isinstance(packet, Ask):
            asked += 1
            place = min(packet.pieces, asked // 15)  # so slowly that each piece is sent again and again
            return [encode(Report(S, number(LIAR), packet.serial, place, 512, 0))]
        return []

    network = Lies(lie, DATA, patience=Patience(stall=1e9))
    network.run(long=10_000)
    assert network.fates == [Fate.VERIFIED, Fate.LOST]
    assert network.sender.repeated < 3 * PIECES


def test_a_receiver_that_calls_and_hears_no_welcome_is_named_so() -> None:
    def lose(source: int, target: int, message: bytes) -> bool:
        return target == 2 and isinstance(decode(message), Welcome)

    network = Network(DATA, 2, lose=lose)
    network.run()
    assert network.fates == [Fate.VERIFIED, Fate.DEAF]


def test_patience_is_longer_than_standing_still_where_one_says_so() -> None:
    network = Network(DATA, 2, patience=Patience(silence=100))
    network.run(lambda: network.receivers[1].pieces > 10)
    network.dead.add(2)
    network.run()
    assert network.fates == [Fate.VERIFIED, Fate.SILENT]
    assert network.now > 100


def test_a_receiver_that_leaves_again_does_not_end_the_wait() -> None:
    sender = FileSender(S, "sender", 1, LARGEST)
    sender.hears(encode(Join(S, number(2), 512, LARGEST, "")), address(2), 0)
    sender.hears(encode(Done(S, number(2), Verdict.FAILED, "")), address(2), 0)
    sender.messages(2)
    sender.hears(encode(Join(S, number(1), 512, LARGEST, "")), address(1), 3)
    sender.messages(5)
    assert (sender.started, sender.failure, [*sender.peers]) == (True, "", [number(1)])


def offered(*more: Packet) -> FileReceiver:
    """A receiver that is welcome in the transfer of a liar, which says more at the same time."""
    receiver = Network(DATA, 1).receiver(1)
    for packet in (Hello(S, UNKNOWN_SIZE, "liar"), Welcome(S, number(1)), *more):
        receiver.hears(encode(packet), address(0), 0)
        receiver.messages(0)
    return receiver


def persist(receiver: FileReceiver, packet: Packet, hours: int = 2) -> float:
    """Say it twice a second until it is over, or it waits for another; when that is."""
    for turn in range(hours * 7200):
        now = turn / 2
        receiver.messages(now)
        if receiver.over or not receiver.welcome:
            return now
        receiver.hears(encode(packet), address(0), now)
    raise AssertionError("it waits for ever")


NO_END = End(S, 0, 0, bytes(32))
EMPTY = End(S, 0, 0, hashlib.sha256().digest())


def test_an_end_with_a_wrong_digest_ends_the_receiver() -> None:
    receiver = offered(NO_END)
    receiver.messages(1)
    receiver.messages(5)
    assert (receiver.over, receiver.verified, receiver.failure[:10]) == (True, False, "SHA-256 is")


@pytest.mark.parametrize(
    ("first", "then", "most"),
    [
        (Ask(S, 0, 0), NO_END, 30),
        (Ask(S, 9, 1), Ask(S, 9, 2), 61),
        (Data(S, 0, b"x"), Ask(S, 1 << 60, 2), 61),
        (Data(S, 0, b"x"), End(S, 2, 2, bytes(32)), 61),
        (Data(S, 0, b"x"), End(S, 0, 0, bytes(32)), 61),
        (Data(S, 1, b"x"), Data(S, 1, b"x"), 61),
        (Hello(S, 0, ""), Hello(S, 0, ""), 3601),
        (Ask(S, 0, 1), Ask(S, 0, 2), 3601),
        (Ask(S, 0, 1), Welcome(S, number(1)), 3601),
    ],
)
def test_a_sender_that_never_ends_does_not_hold_a_receiver(first: Packet, then: Packet, most: float) -> None:
    receiver = offered(first)
    assert persist(receiver, then) <= most
    assert not receiver.verified
    assert receiver.over == bool(receiver.pieces or receiver.lost or "SHA" in receiver.failure)


def test_a_file_that_is_not_as_long_as_announced_is_not_stored() -> None:
    receiver = Network(DATA, 1).receiver(1)
    shorter = Network(DATA, 1).receiver(1)
    for packet in (Hello(S, 2, "liar"), Welcome(S, number(1)), Data(S, 0, b"x")):
        receiver.hears(encode(packet), address(0), 0)
        shorter.hears(encode(packet), address(0), 0)
    receiver.hears(encode(Data(S, 1, b"yz")), address(0), 0)
    assert receiver.failure == "more came than the 2 bytes that the sender has announced"
    shorter.hears(encode(End(S, 1, 1, hashlib.sha256(b"x").digest())), address(0), 0)
    assert shorter.failure == "the sender announced 2 bytes, and 1 came"
    for one in (receiver, shorter):
        left = Done(S, number(1), Verdict.FAILED, one.failure)
        assert (one.over, one.storable, {*map(decode, one.messages(0))}) == (True, False, {left})


def test_a_pause_of_the_source_is_no_lie() -> None:
    receiver = offered(Data(S, 0, b"x"))
    for second in range(3000):
        receiver.hears(encode(Ask(S, 1, second)), address(0), second)
        receiver.messages(second)
    receiver.hears(encode(Ask(S, 2, 3000)), address(0), 3000)
    receiver.messages(3000)
    receiver.hears(encode(Data(S, 1, b"y")), address(0), 3001)
    receiver.messages(3001)
    assert (receiver.over, receiver.pieces) == (False, 2)


def test_what_is_done_is_not_said_without_end() -> None:
    receiver = offered(EMPTY)
    receiver.stored(0)
    assert persist(receiver, EMPTY) <= 11
    assert receiver.verified


def test_a_stranger_does_not_keep_a_receiver_waiting_for_a_dead_sender() -> None:
    receiver = offered(Data(S, 0, b"x"))
    for second in range(12):
        receiver.hears(encode(Hello(number(7), 0, "")), address(7), second)
        receiver.messages(second)
    assert receiver.failure == "the sender fell silent for 10 s"


def test_offers_of_one_do_not_push_out_those_of_others() -> None:
    receiver = Network(DATA, 1).receiver(1)
    receiver.hears(encode(Hello(S, 0, "")), address(0), 0)
    for salt in range(1, 200):
        receiver.hears(encode(Hello(number_at("10.9.9.9", salt), 0, "")), "10.9.9.9", 0)
    receiver.hears(encode(Welcome(S, number(1))), address(0), 0)
    assert receiver.welcome


@pytest.mark.parametrize("welcome", [False, True])
def test_a_flood_makes_a_receiver_say_no_more_than_it_has_to(welcome: bool) -> None:
    receiver = offered() if welcome else Network(DATA, 1).receiver(1)
    for turn in range(1, 500):
        of = number_at("10.9.9.9", turn)
        for packet in (Hello(of, 0, ""), Ask(of, 0, 0), End(of, 0, 0, bytes(32))):
            receiver.hears(encode(packet), "10.9.9.9", 0)
        receiver.hears(encode(Ask(S, 0, turn)), address(0), 0)
    assert len(receiver.messages(0)) == (1 if welcome else 4)
    taken = Welcome(number_at("10.9.9.9", 1), number(1))
    for _ in range(500):
        receiver.hears(encode(taken), "10.9.9.9", 0)
    assert len(receiver.messages(0)) == (1 if welcome else 0)
    assert receiver.rejected["another transfer"] >= 500 * welcome


def test_a_second_sender_is_told_that_the_receiver_is_taken() -> None:
    first, second = S, number(5)
    receiver = Network(DATA, 1).receiver(1)
    for session, end in ((first, 0), (second, 5)):
        receiver.hears(encode(Hello(session, 0, "")), address(end), 0)
    receiver.messages(0)
    receiver.hears(encode(Welcome(first, number(1))), address(0), 0)
    taken = Done(second, number(1), Verdict.FAILED, "the receiver takes another file")
    assert set(map(decode, receiver.messages(0))) == {taken}
    receiver.hears(encode(Welcome(second, number(1))), address(5), 0)  # it heard the JOIN after that
    assert set(map(decode, receiver.messages(0))) == {taken}


def test_the_second_of_two_senders_does_not_wait_for_a_receiver_that_is_taken() -> None:
    network = Network(DATA, 1)
    other = FileSender(number(5), "other", 1, LARGEST, wanted=1, patience=Patience(wait=5))
    network.receivers[0].hears(encode(Hello(number(5), 1, "")), address(5), 0)
    for message in network.receivers[0].messages(0):
        other.hears(message, address(1), 0)
    other.messages(0)
    assert other.started
    network.run(lambda: network.receivers[0].welcome)
    for message in network.receivers[0].messages(network.now):
        other.hears(message, address(1), network.now)
    (peer,) = other.peers.values()
    assert (peer.fate, peer.words) == (Fate.FAILED, "the receiver takes another file")


def lies(seed: int, sends: bool) -> Callable[[bytes | None], list[bytes]]:
    """A liar at random: nearly right figures, in its own name or another's, or a transfer of its own."""
    random = Random(seed)
    heard_so_far = [b""]
    eager, forged = random.choice([0.1, 0.5, 0.9]), random.choice([0, 0, 0.5])
    known = [*KINDS] if sends or forged else [Join, Report, Done]
    kinds = random.sample(known, random.randint(1, len(known)))
    quick: list[Packet] = [Hello(number(LIAR), 0, "liar"), Welcome(number(LIAR), number(1))]
    if not sends or seed % 2:
        quick.clear()
    figures = [0, 1, 15, 16, 17, 100, PIECES - 1, PIECES, PIECES + 1, 511, 512, (1 << 64) - 1]

    def figure(bits: int) -> int:
        return min(random.choice([*figures, random.getrandbits(bits)]), (1 << bits) - 1)

    def invented() -> Packet:
        session = number(LIAR) if sends and random.random() < 0.8 else S
        receiver = random.choice([number(1), S, EVERYBODY]) if random.random() < forged else number(LIAR)
        makes: dict[type[Packet], Callable[[], Packet]] = {
            Hello: lambda: Hello(session, figure(64), "liar"),
            Join: lambda: Join(S, receiver, figure(16), figure(16), "liar"),
            Welcome: lambda: Welcome(session, random.choice([receiver, number(1)])),
            Data: lambda: Data(session, figure(64), random.randbytes(random.randrange(1, 40))),
            Ask: lambda: Ask(session, figure(64), figure(32)),
            Report: lambda: Report(S, receiver, figure(32), figure(64), figure(16), figure(512)),
            End: lambda: End(session, figure(64), figure(64), random.randbytes(32)),
            Done: lambda: Done(S, receiver, random.choice([*Verdict]), "I wish"),
            Close: lambda: Close(session, receiver, random.choice([*Reason]), "I wish"),
        }
        return makes[random.choice(kinds)]()

    def lie(heard: bytes | None) -> list[bytes]:
        if heard is not None:
            heard_so_far.append(heard)
            del heard_so_far[:-50]
            if isinstance(decode(heard), Hello):
                return [encode(Join(S, number(LIAR), 512, LARGEST, "liar"))]
        elif quick:
            return [encode(quick.pop(0)), encode(quick.pop(0))]
        if random.random() > eager:
            return []
        if random.random() < 0.1:
            return [random.choice(heard_so_far)]  # the words of others
        return [encode(invented())]

    return lie


SHORT = Patience(wait=30, stall=5)
"""A receiver is asked twenty times before it counts as silent, so loss alone never makes it so."""


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), loss=st.sampled_from([0, 0.1]), size=st.integers(0, len(DATA)))
def test_a_receiver_that_lies_costs_only_itself(seed: int, loss: float, size: int) -> None:
    network = Lies(lies(seed, sends=False), DATA[:size], 1, seed=seed, loss=loss, patience=SHORT)
    network.run(long=1000)
    assert network.sender.peers[number(1)].fate is Fate.VERIFIED
    assert (network.receivers[0].verified, bytes(network.copies[0])) == (True, DATA[:size])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), loss=st.sampled_from([0, 0.1]), size=st.integers(0, len(DATA)))
def test_a_sender_that_lies_makes_nobody_wait_or_verify(seed: int, loss: float, size: int) -> None:
    network = Lies(lies(seed, sends=True), DATA[:size], 1, seed=seed, loss=loss, patience=SHORT, silent=4000)
    network.run(lambda: network.sender.over, long=1000)
    (receiver,) = network.receivers
    network.run(long=5000)
    if receiver.verified:
        assert (receiver.address, bytes(network.copies[0])) == (address(0), DATA[:size])
