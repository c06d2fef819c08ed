"""`mcast send`, `mcast recv`: the protocol under loss, doubles, disorder and malice; files; the commands."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from signal import SIGHUP, SIGINT, SIGTERM, pthread_kill
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcast import McastAddress, open_endpoint
from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Duplicate, Messages, Reorder
from mcast.cli.cast import packets
from mcast.cli.cast.drive import DEPTH, ReceivingParty, SendingParty, run
from mcast.cli.cast.files import NewFile, Sink, Source, Stream, open_sink
from mcast.cli.cast.packets import (
    EVERYBODY,
    OVERHEAD,
    Ask,
    Close,
    Data,
    Done,
    End,
    Hello,
    Join,
    Packet,
    Reason,
    Rejected,
    Report,
    Verdict,
    Welcome,
    decode,
    encode,
    number_at,
)
from mcast.cli.cast.receiver import FileReceiver
from mcast.cli.cast.sender import Fate, FileSender, Patience

from ..commands import MCAST, Run
from .network import LARGEST, Lies, Network, address, number

DATA = Random(1).randbytes(20_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
PYTHON = Path(sys.executable)
TEXT = "a line of text\n" * 5000
S = number(0)
"""The session of a network's sender."""
PIECES = -(-len(DATA) // (LARGEST - OVERHEAD))

# --- messages --------------------------------------------------------------------------------

words = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
u64, u32, u16 = (st.integers(0, (1 << bits) - 1) for bits in (64, 32, 16))
KINDS: dict[type[Packet], st.SearchStrategy[Packet]] = {
    Hello: st.builds(Hello, u64, u64, words),
    Join: st.builds(Join, u64, u64, u16, u16, words),
    Welcome: st.builds(Welcome, u64, u64),
    Data: st.builds(Data, u64, u64, st.binary(min_size=1, max_size=50)),
    Ask: st.builds(Ask, u64, u64, u32),
    Report: st.builds(Report, u64, u64, u32, u64, u16, st.integers(0, (1 << packets.WINDOW) - 1)),
    End: st.builds(End, u64, u64, u64, st.binary(min_size=32, max_size=32)),
    Done: st.builds(Done, u64, u64, st.sampled_from(Verdict), words),
    Close: st.builds(Close, u64, u64, st.sampled_from(Reason), words),
}
any_packet = st.one_of(*KINDS.values())


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


# --- the protocol ----------------------------------------------------------------------------


def fates(network: Network) -> list[Fate]:
    return [peer.fate for _, peer in sorted(network.sender.peers.items())]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 32),
    receivers=st.integers(1, 5),
    loss=st.floats(0, 0.15),
    doubles=st.floats(0, 0.3),
    disorder=st.floats(0, 0.5),
    size=st.integers(0, len(DATA)),
)
def test_every_copy_is_whole_whatever_is_lost_doubled_or_late(
    seed: int, receivers: int, loss: float, doubles: float, disorder: float, size: int
) -> None:
    network = Network(DATA[:size], receivers, seed, loss, doubles, disorder)
    network.run()
    assert fates(network) == [Fate.VERIFIED] * receivers
    assert {bytes(copy) for copy in network.copies} == {DATA[:size]}
    assert all(receiver.verified and not receiver.lost for receiver in network.receivers)


def test_nothing_is_sent_twice_without_loss() -> None:
    network = Network(DATA, 3)
    network.run()
    assert (network.sender.repeated, network.sender.pieces) == (0, PIECES)
    assert not network.sender.rejected
    assert not any(receiver.rejected or receiver.doubles for receiver in network.receivers)


def test_the_same_seed_makes_the_same_run() -> None:
    first, second = (Network(DATA, 3, 7, 0.1, 0.1, 0.1) for _ in range(2))
    first.run()
    second.run()
    assert (first.now, first.sender.repeated) == (second.now, second.sender.repeated)


def test_losses_are_counted_by_receiver() -> None:
    lost = Counter[bytes]()

    def lose(source: int, target: int, message: bytes) -> bool:
        packet = decode(message)
        if target != 2 or not isinstance(packet, Data) or packet.number % 10 or lost[message]:
            return False
        lost[message] += 1
        return True

    network = Network(DATA, 3, lose=lose)
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 3
    assert [peer.repaired for _, peer in sorted(network.sender.peers.items())] == [0, len(lost), 0]
    assert network.sender.repeated == len(lost)


def test_no_more_copies_are_under_way_than_a_host_queues() -> None:
    network = Network(DATA, 9)
    network.run(lambda: network.sender.started)
    burst = network.sender.messages(network.now)
    network.sender.offer([b"x"] * network.sender.wants)
    burst += network.sender.messages(network.now)
    pieces = [message for message in burst if isinstance(decode(message), Data)]
    assert 256 < len(pieces) * 10 <= 512


def test_a_receiver_that_dies_is_named_and_the_others_go_on() -> None:
    network = Network(DATA, 3)
    network.run(lambda: network.receivers[1].pieces > PIECES // 2)
    network.dead.add(2)
    network.run()
    assert fates(network) == [Fate.VERIFIED, Fate.SILENT, Fate.VERIFIED]
    assert 0 < network.sender.peers[number(2)].has <= network.receivers[1].pieces < PIECES
    assert network.now < 2 * Patience().silence


def test_the_send_ends_when_all_have_died() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[1].pieces > 10)
    network.dead |= {1, 2}
    network.run()
    assert fates(network) == [Fate.SILENT, Fate.SILENT]


def test_a_piece_that_never_arrives_is_named() -> None:
    def lose(source: int, target: int, message: bytes) -> bool:
        packet = decode(message)
        return target == 1 and isinstance(packet, Data) and packet.number in (17, 18)

    network = Network(DATA, 2, lose=lose, patience=Patience(repairs=3))
    network.run()
    assert fates(network) == [Fate.LOST, Fate.VERIFIED]
    assert network.sender.peers[number(1)].lost == (17, 18)
    assert network.receivers[0].lost[0] == range(17, 19)
    assert network.receivers[0].failure == "the sender stopped: it lost pieces"


def test_a_sender_that_dies_ends_its_receivers() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[1].pieces > PIECES // 2)
    network.dead.add(0)
    network.run(lambda: all(receiver.over for receiver in network.receivers))
    assert {receiver.failure for receiver in network.receivers} == {"the sender fell silent for 10 s"}
    assert not any(receiver.verified for receiver in network.receivers)


def test_a_sender_that_is_interrupted_says_so() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[1].pieces > 10)
    network.sender.abort("interrupted")
    network.run()
    assert {receiver.failure for receiver in network.receivers} == {"the sender stopped: interrupted"}


def test_a_receiver_whose_disk_is_full_says_so() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[0].pieces > 10)
    network.receivers[0].fail("No space left on device")
    network.run()
    assert fates(network) == [Fate.FAILED, Fate.VERIFIED]
    assert network.sender.peers[number(1)].words == "No space left on device"


def test_a_receiver_that_leaves_before_the_beginning_is_not_waited_for() -> None:
    network = Network(DATA, 3, wanted=4)
    network.run(lambda: len(network.sender.peers) == 3)
    network.receivers[1].fail("interrupted")
    network.run(lambda: len(network.sender.peers) == 2)
    network.sender._wanted = 2
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 2


def test_a_report_before_the_beginning_changes_nothing() -> None:
    network = Network(DATA, 2, wanted=3)
    network.run(lambda: len(network.sender.peers) == 2)
    network.sender.hears(encode(Report(S, number(1), 0, 0, 512, 0)), address(1), network.now)
    assert set(network.sender.peers) == {number(1), number(2)}
    assert not network.sender.rejected


def test_invented_receivers_fill_neither_the_memory_nor_the_places_of_others() -> None:
    sender = FileSender(S, "sender", 1, LARGEST, wanted=5000)
    for salt in range(1, 3000):
        sender.hears(encode(Join(S, number_at("10.9.9.9", salt), 512, LARGEST, "")), "10.9.9.9", 0)
    assert len(sender.peers) == 16
    for end in range(1, 1500):
        sender.hears(encode(Join(S, number(end), 512, LARGEST, "")), address(end), 0)
    assert len(sender.peers) == 1000
    assert decode(sender.messages(0)[-2]) == Close(S, number(1499), Reason.TOO_LATE, "")


def test_a_receiver_that_is_done_stays_until_the_sender_knows() -> None:
    deaf_until = 6.0

    def lose(source: int, target: int, message: bytes) -> bool:
        return target == 0 and network.now < deaf_until and isinstance(decode(message), Done)

    network = Network(DATA, 1, lose=lose)
    network.run()
    assert fates(network) == [Fate.VERIFIED]
    assert deaf_until < network.now < deaf_until + 1


def test_a_receiver_that_is_done_does_not_stay_for_a_sender_that_is_gone() -> None:
    network = Network(DATA, 1, lose=lambda source, target, message: isinstance(decode(message), Close))
    network.run()
    assert fates(network) == [Fate.VERIFIED]
    assert network.receivers[0].verified
    assert 2 < network.now < 3


def test_too_few_receivers_end_the_wait() -> None:
    network = Network(DATA, 2, wanted=3, patience=Patience(wait=5))
    network.run()
    assert network.sender.failure == "2 of 3 receivers joined within 5 s"
    assert not any(
        receiver.failure or receiver.over for receiver in network.receivers
    )  # they wait for another


def test_without_a_number_whoever_joins_in_time_takes_part() -> None:
    network = Network(DATA, 4)
    network.sender = type(network.sender)(S, "sender", len(DATA), LARGEST)
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 4
    assert 1 < network.now < 2


def test_a_late_receiver_gets_nothing_and_knows_why() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[0].pieces > 10)
    late = network.receiver(3)
    network.receivers.append(late)
    network.copies.append(bytearray())
    network.post(3, [encode(Join(S, number(3), 512, LARGEST, "late"))])
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 2
    assert (late.missed_one, late.pieces, late.over) == (True, 0, False)


def test_a_receiver_takes_nothing_of_a_transfer_it_is_not_welcome_in() -> None:
    receiver = Network(DATA, 1).receiver(5)

    def hears(*packets: Packet) -> None:
        for packet in packets:
            receiver.hears(encode(packet), address(0), 0)

    hears(Hello(S, 100, "sender"), Data(S, 0, b"piece"))
    assert (receiver.pieces, receiver.take()) == (0, b"")
    hears(Welcome(S, number(6)), Data(S, 0, b"piece"))
    assert not receiver.welcome
    hears(Welcome(S, EVERYBODY), Data(S, 0, b"piece"))
    assert not receiver.welcome
    hears(Welcome(S, number(5)), Data(S, 0, b"piece"))
    assert receiver.take() == b"piece"


def test_a_slow_reader_holds_the_sender_back_and_is_not_given_up() -> None:
    network = Network(DATA * 3, 2)
    network.slow.add(1)
    network.run(lambda: network.now > 30)
    assert network.receivers[0].pieces == packets.WINDOW
    assert network.receivers[1].pieces == packets.WINDOW
    assert fates(network) == [Fate.RECEIVING] * 2
    network.slow.clear()
    since = network.now
    network.run(lambda: network.receivers[0].pieces > packets.WINDOW)
    assert network.now - since < 0.01  # it tells at once that there is room
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 2
    assert not network.sender.rejected + network.receivers[0].rejected
    assert network.now < 32


@pytest.mark.parametrize("size", [3 * len(DATA), 300 * (LARGEST - OVERHEAD)], ids=["much", "all in memory"])
def test_a_reader_that_stands_still_is_given_up_after_a_minute(size: int) -> None:
    network = Network((DATA * 3)[:size], 2)
    network.slow.add(1)
    network.run()
    assert fates(network) == [Fate.STALLED, Fate.VERIFIED]
    assert network.receivers[0].failure == "the sender stopped: its reader stood still"
    assert 60 < network.now < 63


def test_a_small_receiver_makes_small_pieces() -> None:
    network = Network(DATA, 2)
    network.sender._largest = 4096
    network.receivers[1]._largest = network.receivers[0]._largest = 256
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 2
    assert network.sender.pieces == -(-len(DATA) // (256 - OVERHEAD))


def test_a_changed_byte_is_found_by_the_digest() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[0].pieces > 10)
    network.receivers[0]._hash.update(b"!")
    network.run()
    assert fates(network) == [Fate.DIFFERS, Fate.VERIFIED]
    assert network.receivers[0].failure.startswith("SHA-256 is ")
    assert not network.receivers[0].verified


@settings(max_examples=60)
@given(st.lists(st.one_of(any_packet.map(encode), st.binary(max_size=70)), max_size=30), st.booleans())
def test_messages_of_strangers_change_nothing(strange: list[bytes], begun: bool) -> None:
    network = Network(DATA[:2000], 2)
    network.run(lambda: network.sender.started if begun else network.now > 0)
    for message in strange:
        network.sender.hears(message, "10.9.9.9", network.now)
        for receiver in network.receivers:
            receiver.hears(message, "10.9.9.9", network.now)
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 2
    assert {bytes(copy) for copy in network.copies} == {DATA[:2000]}


OUT_OF_PLACE: dict[str, tuple[int, Packet, str]] = {
    "ahead": (1, Report(S, number(1), 0, 1 << 40, 512, 0), "a report of what was not sent"),
    "unasked": (1, Report(S, number(1), 1 << 30, 0, 512, 0), "a report of what was not sent"),
    "contradiction": (1, Report(S, number(1), 0, 0, 512, 1), "a report of what was not sent"),
    "stranger": (77, Report(S, number(77), 0, 0, 512, 0), "not a receiver of this transfer"),
    "too soon": (1, Done(S, number(1), Verdict.VERIFIED, ""), "done before the end"),
    "sender's": (0, Data(S, 0, b"x"), "a sender's message"),
    "other": (7, Data(number(7), 0, b"x"), "another transfer"),
    "no room": (7, Join(S, number(7), 15, 1000, ""), "malformed"),
    "tiny": (7, Join(S, number(7), 512, LARGEST - 1, ""), "malformed"),
    "everybody": (7, Join(S, EVERYBODY, 10, 1000, ""), "another's number"),
    "for another": (2, Done(S, number(1), Verdict.FAILED, "I wish"), "another's number"),
    "in its name": (7, Join(S, number(1), 512, 1000, ""), "another's number"),
    "as sender": (7, Close(S, EVERYBODY, Reason.ABORTED, ""), "another's number"),
}
"""Who says what, and the reason that it is counted under."""


@pytest.mark.parametrize("case", OUT_OF_PLACE)
def test_the_sender_counts_what_is_out_of_place(case: str) -> None:
    end, packet, reason = OUT_OF_PLACE[case]
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[0].pieces > 10)
    network.sender.hears(encode(packet), address(end), network.now)
    assert network.sender.rejected == {reason: 1}
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 2


@pytest.mark.parametrize(
    ("end", "packet", "reason"),
    [
        (0, Data(S, 1 << 50, b"x"), "a piece there is no room for"),
        (0, End(S, 3, 3, bytes(32)), "an end before the end"),
        (7, Hello(number(7), 3, "another"), "another transfer"),
        (7, Data(S, 11, b"x"), "another's number"),
        (7, Close(S, EVERYBODY, Reason.ABORTED, "I wish"), "another's number"),
        (7, Hello(S, 3, "sender"), "another's number"),
    ],
)
def test_a_receiver_counts_what_is_out_of_place(end: int, packet: Packet, reason: str) -> None:
    network = Network(DATA, 1)
    network.run(lambda: network.receivers[0].pieces > 10)
    network.receivers[0].hears(encode(packet), address(end), network.now)
    assert network.receivers[0].rejected == {reason: 1}
    network.run()
    assert fates(network) == [Fate.VERIFIED]


@settings(deadline=None)
@given(st.ip_addresses(), st.ip_addresses(), st.integers(1, (1 << 32) - 1))
def test_nobody_has_the_number_of_another(one: object, other: object, salt: int) -> None:
    assert number_at(str(one), salt) == number_at(str(one), salt) != 0
    assert (number_at(str(one), salt) == number_at(str(other), salt)) == (one == other)


# --- ends that lie ---------------------------------------------------------------------------

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
    assert fates(network) == [Fate.VERIFIED, Fate.STALLED]


def test_a_receiver_that_only_promises_more_room_is_given_up() -> None:
    room = 0

    def lie(heard: bytes | None) -> list[bytes]:
        nonlocal room
        if heard is not None and isinstance(decode(heard), Ask):
            room += 1
            return [encode(Report(S, number(LIAR), 0, 0, 1 + room // 100, 0))]
        return said(ONE_THAT_STANDS_STILL)(heard)

    network = Lies(lie, DATA)
    network.run(long=200)
    assert fates(network) == [Fate.VERIFIED, Fate.STALLED]


def test_a_receiver_that_calls_and_hears_no_welcome_is_named_so() -> None:
    def lose(source: int, target: int, message: bytes) -> bool:
        return target == 2 and isinstance(decode(message), Welcome)

    network = Network(DATA, 2, lose=lose)
    network.run()
    assert fates(network) == [Fate.VERIFIED, Fate.DEAF]


def test_patience_is_longer_than_standing_still_where_one_says_so() -> None:
    network = Network(DATA, 2, patience=Patience(silence=100))
    network.run(lambda: network.receivers[1].pieces > 10)
    network.dead.add(2)
    network.run()
    assert fates(network) == [Fate.VERIFIED, Fate.SILENT]
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
    for packet in (Hello(S, 0, "liar"), Welcome(S, number(1)), *more):
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


def test_a_second_sender_is_told_that_the_receiver_is_taken() -> None:
    first, second = S, number(5)
    receiver = Network(DATA, 1).receiver(1)
    for session, end in ((first, 0), (second, 5)):
        receiver.hears(encode(Hello(session, 0, "")), address(end), 0)
    receiver.messages(0)
    receiver.hears(encode(Welcome(first, number(1))), address(0), 0)
    taken = Done(second, number(1), Verdict.FAILED, "it receives another file")
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
    assert (peer.fate, peer.words) == (Fate.FAILED, "it receives another file")


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


# --- on a fabric -----------------------------------------------------------------------------

GROUP = McastAddress.of("239.1.1.1")
RULES = {
    "nothing": None,
    "loss": (Messages(rate=0.03), Drop()),
    "doubles": (Messages(rate=0.1), Duplicate(2)),
    "disorder": (Messages(rate=0.1), Reorder(3)),
}


class Cast:
    """A transfer on one fabric: the sender here, receivers 1..n in threads of their own, each on its host."""

    def __init__(self, fabric: Fabric, receivers: int, tmp_path: Path) -> None:
        self.fabric, self.tmp_path = fabric, tmp_path
        self.parties: dict[int, ReceivingParty] = {}
        self._threads = [threading.Thread(target=self._receive, args=(n + 1,)) for n in range(receivers)]

    def _receive(self, number: int) -> None:
        path = str(self.tmp_path / f"copy {number}")
        with (
            open_fabric(self.fabric, host=number) as backend,
            open_endpoint(backend, loopback="off", receive_depth=DEPTH) as endpoint,
            closing(open_sink(path)) as sink,
        ):
            sink.open()
            self.parties[number] = ReceivingParty(endpoint, GROUP, sink, silence=5.0)
            run(self.parties[number])

    def send(self, source: str, wait: float = 20.0) -> SendingParty:
        for thread in self._threads:
            thread.start()
        try:
            with (
                open_fabric(self.fabric, host=0) as backend,
                open_endpoint(backend, loopback="off", receive_depth=DEPTH) as endpoint,
                closing(Source(source)) as file,
            ):
                patience = Patience(wait=wait, silence=5.0)
                party = SendingParty(endpoint, GROUP, file, len(self._threads), patience)
                run(party)
                return party
        finally:
            for thread in self._threads:
                thread.join(200)


@pytest.mark.parametrize("fault", RULES)
@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband])
def test_a_file_reaches_every_host(make: Callable[..., Fabric], fault: str, tmp_path: Path) -> None:
    data = Random(2).randbytes(300_000)
    (tmp_path / "file").write_bytes(data)
    fabric = make(4, clock="wall")
    cast = Cast(fabric, 3, tmp_path)
    rule = RULES[fault]
    if rule is not None:
        with fabric.rules.when(*rule):
            party = cast.send(str(tmp_path / "file"))
    else:
        party = cast.send(str(tmp_path / "file"))
    assert {peer.fate for peer in party.core.peers.values()} == {Fate.VERIFIED}
    assert {(tmp_path / f"copy {number}").read_bytes() == data for number in (1, 2, 3)} == {True}
    assert {path.name for path in tmp_path.iterdir()} == {"file", "copy 1", "copy 2", "copy 3"}
    if fault != "disorder":
        assert bool(party.core.repeated) == (fault == "loss")


def test_a_pipe_is_sent_as_it_comes(tmp_path: Path) -> None:
    data = Random(3).randbytes(200_000)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    cast = Cast(Fabric.roce(2, clock="wall"), 1, tmp_path)

    def write() -> None:
        with fifo.open("wb", buffering=0) as pipe:
            pipe.write(data[:100])
            while not cast.parties or cast.parties[1].core.pieces < 1:
                cast.fabric.clock.run_out()
            pipe.write(data[100:])

    writer = threading.Thread(target=write)
    writer.start()
    party = cast.send(str(fifo))
    writer.join(100)
    assert [peer.fate for peer in party.core.peers.values()] == [Fate.VERIFIED]
    assert (tmp_path / "copy 1").read_bytes() == data


def test_the_receivers_that_did_not_come_are_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    fabric = Fabric.roce(2, clock="wall")
    with (
        open_fabric(fabric, host=0) as backend,
        open_endpoint(backend, loopback="off") as endpoint,
        closing(Source(str(tmp_path / "file"))) as source,
    ):
        party = SendingParty(endpoint, GROUP, source, 2, Patience(wait=0.2))
        run(party)
    assert party.core.failure == "0 of 2 receivers joined within 0.2 s"


@contextmanager
def listening(
    fabric: Fabric, sink: Sink, *more: Packet
) -> Iterator[tuple[ReceivingParty, Callable[[], list[Packet]]]]:
    """A receiver on host 0, and what it has said to the group since it was last asked."""
    with (
        open_fabric(fabric, host=0) as backend,
        open_endpoint(backend, loopback="off", receive_depth=DEPTH) as endpoint,
        open_fabric(fabric, host=1) as other,
        open_endpoint(other, loopback="off") as watching,
        watching.join(GROUP) as group,
        closing(sink),
    ):
        sink.open()
        party = ReceivingParty(endpoint, GROUP, sink, silence=5.0)
        for packet in (
            Hello(number(1), 0, "sender"),
            Welcome(number(1), party.number),
            Data(number(1), 0, b"piece"),
            *more,
        ):
            group.send(encode(packet))

        def heard() -> list[Packet]:
            return [decode(message.payload) for message in iter(lambda: watching.recv(0.0), None)]

        yield party, heard


def test_a_receiver_that_gives_up_says_so(tmp_path: Path) -> None:
    def give_up() -> None:
        if party.core.welcome:
            party.core.fail("no transfer began")

    with listening(Fabric.roce(2), open_sink(str(tmp_path / "copy"))) as (party, heard):
        run(party, give_up)
        assert Done(number(1), party.number, Verdict.FAILED, "no transfer began") in heard()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (OSError(28, "No space left on device", "/secret/path"), "No space left on device"),
        (RuntimeError("/secret/path"), "it broke down"),
    ],
    ids=["interrupt", "error of the system", "any other"],
)
@pytest.mark.parametrize("where", ["write", "commit", "watch"])
def test_the_group_does_not_learn_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str, where: str
) -> None:
    def fail(*_: object) -> bool:
        raise error

    def watch() -> None:
        if where == "watch" and party.core.welcome:
            fail()

    sink = open_sink(str(tmp_path / "copy"))
    if where != "watch":
        monkeypatch.setattr(sink, where, fail)
    ends = [End(number(1), 1, 5, hashlib.sha256(b"piece").digest())] if where == "commit" else []
    with listening(Fabric.roce(2), sink, *ends) as (party, heard):
        with suppress(type(error)):
            run(party, watch)
        words = {packet.text for packet in heard() if isinstance(packet, Done)}
    assert words == {said}
    if isinstance(error, OSError) and where != "watch":
        assert party.core.failure == f"{tmp_path / 'copy'}: No space left on device"


# --- files -----------------------------------------------------------------------------------


def placed(sink: NewFile) -> None:
    """Wait until it is where it belongs."""
    limit = time.monotonic() + 60
    while not sink.commit():
        assert time.monotonic() < limit


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to make a file last, in order."""
    done: list[str] = []

    def noting(name: str, call: Callable[..., Any], about: Callable[..., str]) -> None:
        def noted(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            done.append(f"{name} {about(*arguments)}")
            return result

        monkeypatch.setattr(os, name, noted)

    def kind(fd: int) -> str:
        return "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"{os.fstat(fd).st_size} bytes"

    noting("fsync", os.fsync, kind)
    noting("replace", os.replace, lambda source, target: Path(target).name)
    return done


def test_what_is_verified_survives_a_crash(tmp_path: Path, synced: list[str]) -> None:
    with closing(NewFile(tmp_path / "file")) as sink:
        sink.open()
        sink.write(b"new")
        assert synced == []
        placed(sink)
    assert synced == ["fsync 3 bytes", "replace file", "fsync folder"]


def test_a_slow_disk_does_not_silence_the_receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, sync = threading.Event(), os.fsync

    def fsync(fd: int) -> None:
        assert slow.wait(60)
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with closing(NewFile(tmp_path / "file")) as sink:
        sink.open()
        assert not sink.commit()
        assert not sink.commit()
        assert not (tmp_path / "file").exists()
        slow.set()
        placed(sink)
    assert (tmp_path / "file").exists()


def test_a_file_that_cannot_be_placed_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with closing(NewFile(tmp_path / "file")) as sink:
        sink.open()
        (tmp_path / "file").mkdir()
        with pytest.raises(IsADirectoryError):
            placed(sink)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


NAMES = {
    "255 bytes of 3": "\u5b57" * 85,
    "255 bytes of 4": "x" * 3 + "\U0001f4c4" * 63,
    "255 bytes of 1": "x" * 255,
    "no text at all": os.fsdecode(bytes([255] * 255)),
    "one byte": "x",
}


@pytest.mark.parametrize("case", NAMES)
def test_every_legal_name_can_be_written(tmp_path: Path, case: str) -> None:
    target = tmp_path / NAMES[case]
    with closing(open_sink(str(target))) as sink:
        assert isinstance(sink, NewFile)
        sink.open()
        sink.write(b"new")
        placed(sink)
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == [NAMES[case]]


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    target.chmod(0o640)
    with closing(NewFile(target)) as sink:
        sink.open()
        sink.write(b"new")
        assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_bytes() == b"old"
    with closing(NewFile(target)) as sink:
        sink.open()
        sink.write(b"new")
        placed(sink)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with closing(NewFile(tmp_path / "file")) as sink:
        sink.open()
        placed(sink)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with closing(open_sink(str(tmp_path / "link"))) as sink:
        assert isinstance(sink, NewFile)
        sink.open()
        sink.write(b"new")
        placed(sink)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("command", "said"), [("send - 239.1.1.1 <&-", "read"), ("recv 239.1.1.1 -o - >&-", "write")]
)
def test_a_closed_stream_is_one_sentence(run: Run, command: str, said: str) -> None:
    done = run("sh", "-c", f"{MCAST} {command}")
    assert (done.returncode, done.stderr) == (2, f"mcast: cannot {said} -: Bad file descriptor\n")


def test_stdout_by_its_path_is_the_pipe_that_it_is(with_others: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(TEXT)
    done = with_others("recv", "239.1.1.1", "-o", "/dev/stdout")
    assert (done.returncode, done.stdout[: len(TEXT)]) == (0, TEXT)


def test_a_device_is_written_to_and_not_replaced() -> None:
    with closing(open_sink("/dev/full")) as sink:
        assert isinstance(sink, Stream)
        with pytest.raises(OSError, match="No space left"):
            sink.write(b"x")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_a_pipe_that_is_empty_or_full_is_not_waited_for(tmp_path: Path) -> None:
    out, into = os.pipe()
    with closing(Stream(into, "pipe")) as sink:
        while sink.ready():
            sink.write(bytes(4096))
        assert len(os.read(out, 1 << 20)) >= 4096
        assert sink.ready()
    os.close(out)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDWR)
    with closing(Source(str(fifo))) as source:
        assert (source.size, source.read(10)) == (None, None)
        os.write(end, b"text")
        assert source.read(10) == b"text"
        os.close(end)
        assert source.read(10) == b""


# --- the command -----------------------------------------------------------------------------

BAD_INPUT = {
    "missing file": (("send", "missing", "239.1.1.1"), "cannot read missing: No such file"),
    "directory": (("send", ".", "239.1.1.1"), "it is a directory: pack it"),
    "unicast": (("send", MCAST, "10.0.0.1"), "10.0.0.1 is a unicast address"),
    "simulator": (("send", MCAST, "239.1.1.1", "--backend", "sim"), "'sim' is a fabric inside this process"),
    "unknown backend": (("send", MCAST, "239.1.1.1", "--backend", "x"), "'x' is no backend"),
    "no receiver": (("send", MCAST, "239.1.1.1", "-n", "0"), "greater than or equal to 1"),
    "no address": (("send", MCAST, "239.1.1.1", "-b", "x"), "'x' is not an IPv4 or IPv6 address"),
    "no group": (("send", MCAST), "Missing argument"),
    "no output": (("recv", "239.1.1.1"), "Missing option '--output'"),
    "no such directory": (("recv", "239.1.1.1", "-o", "no/file"), "cannot write no/file: No such file"),
    "output directory": (("recv", "239.1.1.1", "-o", "."), "cannot write .: it is a directory"),
    "name too long": (("recv", "239.1.1.1", "-o", "x" * 256), "xxx: File name too long"),
    "file as directory": (
        ("recv", "239.1.1.1", "-o", f"{MCAST}/x"),
        f"cannot write {MCAST}/x: Not a directory",
    ),
    "simulated sender": (("recv", "239.1.1.1", "-o", "f", "--backend", "sim-ib"), "'sim-ib' is a fabric"),
    "no device": (("recv", "239.1.1.1", "-o", "f", "--device", "x/y"), "'x/y' is no device"),
    "both": (("recv", "239.1.1.1", "-o", "f", "--device", "x", "-b", "10.0.0.1"), "give one of them"),
    "negative patience": (("recv", "239.1.1.1", "-o", "f", "--patience", "-1"), "greater than or equal"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(here: Run, tmp_path: Path, case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mcast")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_loop_of_links_is_one_sentence_and_status_2(here: Run, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    for arguments in (("recv", "239.1.1.1", "-o", "one"), ("send", "one", "239.1.1.1")):
        done = here(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith(" one: Too many levels of symbolic links\n")


@pytest.mark.parametrize("command", ["send", "recv", "ping"])
def test_help_fits_80_columns(mcast: Run, command: str) -> None:
    done = mcast(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80


ONE_FABRIC = """
from mcast.backends.sim import Fabric, ROCE, open_fabric

FABRIC = Fabric.roce(3, clock="wall")
PROVIDER = ROCE._replace(open=lambda: open_fabric(FABRIC, host=0))
"""

OTHER_END = """
import sys, threading
from contextlib import closing
from mcast import McastAddress, open_endpoint
from mcast.backends.sim import open_fabric
from mcast.cli import main
from mcast.cli.cast.drive import DEPTH, ReceivingParty, SendingParty, run
from mcast.cli.cast.files import Source, open_sink
from acme_mcast import FABRIC

def other(host, make):
    with open_fabric(FABRIC, host=host) as backend:
        with open_endpoint(backend, loopback="off", receive_depth=DEPTH) as endpoint:
            run(make(endpoint, McastAddress.of("239.1.1.1")))

def receiving(endpoint, group):
    return ReceivingParty(endpoint, group, open_sink("/dev/null"), 60.0)

def sending(endpoint, group):
    return SendingParty(endpoint, group, Source("file"), 1)

hosts, make = (1, 2) if sys.argv[1] == "send" else (1,), receiving if sys.argv[1] == "send" else sending
threads = [threading.Thread(target=other, args=(host, make), daemon=True) for host in hosts]
for thread in threads:
    thread.start()
main()
"""
"""The command of the arguments on host 0, and what it needs on the others, in one process."""

Install = Callable[..., dict[str, str]]


@pytest.fixture
def with_others(run: Run, third_party: Install, tmp_path: Path) -> Run:
    """Run the command where the other end is there as well."""
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "script.py").write_text(OTHER_END)
    env = third_party(source=ONE_FABRIC)
    return lambda *words: run(PYTHON, "script.py", *words, "--backend", "acme", env=env)


def test_send_shows_each_receiver(with_others: Run) -> None:
    done = with_others("send", "file", "239.1.1.1", "-n", 2)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"file: 20,000 bytes, SHA-256 {SHA256[:16]}..."
    assert lines[1].startswith("10.0.0.1 -> 239.1.1.1 on sim-roce, 20 pieces, 0 sent again, ")
    assert [line.split()[-1] for line in lines[4:6]] == ["verified"] * 2
    assert lines[-1] == "send: 2/2 receivers verified, 20 pieces each"
    assert max(map(len, lines)) <= 80


def test_a_name_is_no_markup(with_others: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    named = "drive.name_of = lambda endpoint: '[red]me[/]'"
    script.write_text(f"from mcast.cli.cast import drive\n{named}\n{OTHER_END}")
    assert "[red]me[/]" in with_others("send", "file", "239.1.1.1").stdout


def test_send_as_json(with_others: Run) -> None:
    done = with_others("send", "file", "239.1.1.1", "--json")
    outcome = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (outcome["sha256"], outcome["size"], outcome["pieces"]) == (SHA256, 20_000, 20)
    assert sorted(receiver["address"] for receiver in outcome["receivers"]) == ["10.0.0.2", "10.0.0.3"]
    assert all(receiver["verified"] and not receiver["missed"] for receiver in outcome["receivers"])


def test_send_without_enough_receivers_is_status_1(with_others: Run) -> None:
    done = with_others("send", "file", "239.1.1.1", "-n", 3, "--wait", 0.5)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mcast: 2 of 3 receivers joined within 0.5 s: 10.0.0.")
    assert done.stderr.count("\n") == 1


def test_recv_writes_the_file_and_says_so(with_others: Run, tmp_path: Path) -> None:
    done = with_others("recv", "239.1.1.1", "-o", "copy")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "copy").read_bytes() == DATA
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        f"copy: 20,000 bytes, SHA-256 {SHA256[:16]}... verified",
        f"10.0.0.2 ({socket.gethostname()} roce1) -> 239.1.1.1 -> 10.0.0.1 (roce0)",
    ]
    outcome = json.loads(with_others("recv", "239.1.1.1", "-o", "copy", "--json").stdout)
    assert (outcome["verified"], outcome["sha256"], outcome["lost"]) == (True, SHA256, [])


@pytest.mark.parametrize("name", ["\u5b57" * 85, os.fsdecode(b"caf\xe9")], ids=["long", "no UTF-8"])
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["words", "JSON"])
def test_recv_takes_every_name(
    with_others: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    done = with_others("recv", "239.1.1.1", "-o", name, *form)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / name).read_bytes() == DATA


def test_recv_to_stdout_says_nothing_else(with_others: Run, tmp_path: Path) -> None:
    text = TEXT
    (tmp_path / "file").write_text(text)
    done = with_others("recv", "239.1.1.1", "-o", "-")
    assert (done.returncode, done.stdout, done.stderr) == (0, text, "")


def test_recv_to_a_full_device_is_one_sentence(with_others: Run) -> None:
    done = with_others("recv", "239.1.1.1", "-o", "/dev/full")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mcast: /dev/full: No space left on device")
    assert done.stderr.count("\n") == 1


def test_recv_that_waits_in_vain_is_one_sentence_and_leaves_nothing(
    run: Run, third_party: Install, tmp_path: Path
) -> None:
    done = run(
        MCAST,
        "recv",
        "239.1.1.1",
        "-o",
        "copy",
        "--wait",
        0.2,
        "--backend",
        "acme",
        env=third_party(source=ONE_FABRIC),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mcast: no transfer began on 239.1.1.1 as 10.0.0.1 (roce0) within 0.2 s\n"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


@pytest.mark.parametrize("signal", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_leaves_nothing(third_party: Install, tmp_path: Path, signal: int) -> None:
    env = {**os.environ, **third_party(source=ONE_FABRIC)}
    command = [str(MCAST), "recv", "239.1.1.1", "-o", "copy", "--backend", "acme"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 200
        while not list(tmp_path.glob(".copy.*")):
            assert time.monotonic() < limit
            time.sleep(0.02)
        process.send_signal(signal)
        try:
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
    assert (process.returncode, said) == (128 + signal, "mcast: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_signal_while_the_file_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkstemp

    def interrupted(**options: Any) -> tuple[int, str]:
        made = make(**options)
        pthread_kill(threading.get_ident(), SIGINT)
        return made

    monkeypatch.setattr(tempfile, "mkstemp", interrupted)
    with pytest.raises(KeyboardInterrupt), closing(NewFile(tmp_path / "file")) as sink:
        sink.open()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("send", "file", "239.1.1.1"), ("recv", "239.1.1.1", "-o", "copy")])
def test_a_terminal_gets_a_bar(third_party: Install, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "file").write_bytes(Random(1).randbytes(3_000_000))
    (tmp_path / "script.py").write_text(OTHER_END)
    env = {"TERM": "xterm-256color", "COLUMNS": "80"} | {**os.environ, **third_party(source=ONE_FABRIC)}
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [PYTHON, "script.py", *command, "--backend", "acme"],
        cwd=tmp_path,
        env=env,
        stdin=follower,
        stdout=follower,
        stderr=follower,
    ) as process:
        os.close(follower)
        written = b""
        try:
            while block := os.read(leader, 65536):
                written += block
        except OSError:  # the other end is closed: all is read
            pass
    os.close(leader)
    assert process.returncode == 0
    assert {"send": b"sending", "recv": b"receiving"}[command[0]] in written
    assert "━".encode() in written
