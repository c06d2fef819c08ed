"""The two ends of the file protocol under loss, doubles, disorder and silence."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcast.cast import packets
from mcast.cast.packets import (
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
    Report,
    Verdict,
    Welcome,
    decode,
    encode,
    number_at,
)
from mcast.cast.sender import Fate, FileSender, Patience

from .arbitrary import any_packet
from .network import DATA, LARGEST, PIECES, Network, S, address, number


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
    assert network.fates == [Fate.VERIFIED] * receivers
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
    assert network.fates == [Fate.VERIFIED] * 3
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
    assert network.fates == [Fate.VERIFIED, Fate.SILENT, Fate.VERIFIED]
    assert 0 < network.sender.peers[number(2)].has <= network.receivers[1].pieces < PIECES
    assert network.now < 2 * Patience().silence


def test_the_send_ends_when_all_have_died() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[1].pieces > 10)
    network.dead |= {1, 2}
    network.run()
    assert network.fates == [Fate.SILENT, Fate.SILENT]


def test_a_piece_that_never_arrives_is_named() -> None:
    def lose(source: int, target: int, message: bytes) -> bool:
        packet = decode(message)
        return target == 1 and isinstance(packet, Data) and packet.number in (17, 18)

    network = Network(DATA, 2, lose=lose, patience=Patience(repairs=3))
    network.run()
    assert network.fates == [Fate.LOST, Fate.VERIFIED]
    assert network.sender.peers[number(1)].lost == (17, 18)
    assert network.receivers[0].lost[0] == range(17, 19)
    assert network.receivers[0].failure == "the sender stopped: the receiver lost pieces"


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
    assert network.fates == [Fate.FAILED, Fate.VERIFIED]
    assert network.sender.peers[number(1)].words == "No space left on device"


def test_a_receiver_that_leaves_before_the_beginning_is_not_waited_for() -> None:
    network = Network(DATA, 3, wanted=4)
    network.run(lambda: len(network.sender.peers) == 3)
    network.receivers[1].fail("interrupted")
    network.run(lambda: len(network.sender.peers) == 2)
    network.sender._wanted = 2
    network.run()
    assert network.fates == [Fate.VERIFIED] * 2


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
    assert network.fates == [Fate.VERIFIED]
    assert deaf_until < network.now < deaf_until + 1


def test_a_receiver_that_is_done_does_not_stay_for_a_sender_that_is_gone() -> None:
    network = Network(DATA, 1, lose=lambda source, target, message: isinstance(decode(message), Close))
    network.run()
    assert network.fates == [Fate.VERIFIED]
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
    assert network.fates == [Fate.VERIFIED] * 4
    assert 1 < network.now < 2


def test_a_late_receiver_gets_nothing_and_knows_why() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[0].pieces > 10)
    late = network.receiver(3)
    network.receivers.append(late)
    network.copies.append(bytearray())
    network.post(3, [encode(Join(S, number(3), 512, LARGEST, "late"))])
    network.run()
    assert network.fates == [Fate.VERIFIED] * 2
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
    assert network.fates == [Fate.RECEIVING] * 2
    network.slow.clear()
    since = network.now
    network.run(lambda: network.receivers[0].pieces > packets.WINDOW)
    assert network.now - since < 0.01  # it tells at once that there is room
    network.run()
    assert network.fates == [Fate.VERIFIED] * 2
    assert not network.sender.rejected + network.receivers[0].rejected
    assert network.now < 32


def test_a_reader_that_stands_still_is_given_up_after_a_minute() -> None:
    network = Network(DATA * 3, 2)
    network.slow.add(1)
    network.run()
    assert network.fates == [Fate.STALLED, Fate.VERIFIED]
    assert network.receivers[0].failure == "the sender stopped: the receiver read nothing more"
    assert 60 < network.now < 63


@pytest.mark.parametrize("ends", ["gives up", "is interrupted", "dies"])
def test_what_has_all_come_is_kept_whatever_becomes_of_the_sender(ends: str) -> None:
    data = (DATA * 3)[: 300 * (LARGEST - OVERHEAD)]
    network = Network(data, 2)
    network.slow.add(1)  # a disk, or a reader, that takes its time
    first = network.receivers[0]
    network.run(lambda: first.complete)
    if ends == "is interrupted":
        network.sender.abort("interrupted")
    elif ends == "dies":
        network.dead.add(0)
    network.run(lambda: network.sender.over if ends != "dies" else network.receivers[1].over)
    first.messages(network.now + 500)
    assert (first.over, first.failure, first.due) == (False, "", None)
    network.slow.clear()
    network.run(lambda: first.over)
    assert (first.verified, bytes(network.copies[0])) == (True, data)


def test_one_receiver_less_leaves_more_room_for_the_others() -> None:
    network = Network(DATA * 3, 5)
    network.run(lambda: network.sender.started)
    narrow = network.sender._widest
    network.dead |= {2, 3, 4, 5}
    network.run()
    assert (narrow, network.sender._widest) == (512 // 6, 256)
    assert network.fates == [Fate.VERIFIED, *[Fate.SILENT] * 4]


def test_a_small_receiver_makes_small_pieces() -> None:
    network = Network(DATA, 2)
    network.sender._largest = 4096
    network.receivers[1]._largest = network.receivers[0]._largest = 256
    network.run()
    assert network.fates == [Fate.VERIFIED] * 2
    assert network.sender.pieces == -(-len(DATA) // (256 - OVERHEAD))


def test_a_changed_byte_is_found_by_the_digest() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[0].pieces > 10)
    network.receivers[0]._hash.update(b"!")
    network.run()
    assert network.fates == [Fate.DIFFERS, Fate.VERIFIED]
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
    assert network.fates == [Fate.VERIFIED] * 2
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
    assert network.fates == [Fate.VERIFIED] * 2


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
    assert network.fates == [Fate.VERIFIED]


@settings(deadline=None)
@given(st.ip_addresses(), st.ip_addresses(), st.integers(1, (1 << 32) - 1))
def test_nobody_has_the_number_of_another(one: object, other: object, salt: int) -> None:
    assert number_at(str(one), salt) == number_at(str(one), salt) != 0
    assert (number_at(str(one), salt) == number_at(str(other), salt)) == (one == other)


def spoken_to_the_group(network: Network) -> set[type[Packet]]:
    """The kinds of the packets that went to everybody, in a whole transfer."""
    kinds: set[type[Packet]] = set()
    post = network.post

    def noting(source: int, messages: list[bytes], only: int | None = None) -> None:
        kinds.update(type(decode(message)) for message in messages if only is None)
        post(source, messages, only)

    network.post = noting  # type: ignore[method-assign]
    network.run()
    return kinds


def test_answers_go_to_the_sender_alone() -> None:
    network = Network(DATA, 3)
    assert spoken_to_the_group(network) == {Hello, Data, Ask, End, Close}
    assert network.fates == [Fate.VERIFIED] * 3
    assert network.alone


def test_where_unicast_is_lost_the_group_hears_the_answers() -> None:
    network = Network(DATA, 3, unicast=False)
    assert spoken_to_the_group(network) >= {Join, Welcome, Report, Done}
    assert network.fates == [Fate.VERIFIED] * 3
    assert network.now < 2 + 4 * Patience().hello  # it took the third HELLO, and no time-out


def test_a_receiver_that_leaves_before_the_beginning_tells_the_group() -> None:
    """That the sender can be answered alone is not known then, and it would wait."""
    receiver = Network(DATA, 1).receivers[0]
    receiver.hears(encode(Hello(S, 5, "sender")), address(0), 0.0, 0)
    receiver.messages(0.0)
    assert [way for way, _ in receiver.answers()] == [0]
    receiver.fail("interrupted")
    told = [decode(message) for message in receiver.messages(0.0)]
    assert told == [Done(S, number(1), Verdict.FAILED, "interrupted")] * 3
