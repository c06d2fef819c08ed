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
from collections.abc import Callable
from contextlib import closing
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
from mcast.cli.cast.files import NewFile, Source, Stream, open_sink
from mcast.cli.cast.packets import (
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
)
from mcast.cli.cast.sender import Fate, FileSender, Patience

from .conftest import MCAST, Run
from .network import LARGEST, Network

DATA = Random(1).randbytes(20_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
PYTHON = Path(sys.executable)
TEXT = "a line of text\n" * 5000
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


@given(any_packet)
def test_a_message_is_read_as_it_was_written(packet: Packet) -> None:
    assert decode(encode(packet)) == packet


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
    assert 0 < network.sender.peers[2].has <= network.receivers[1].pieces < PIECES
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
    assert network.sender.peers[1].lost == (17, 18)
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
    assert network.sender.peers[1].words == "No space left on device"


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
    network.sender.hears(encode(Report(99, 1, 0, 0, 512, 0)), "10.9.9.9", network.now)
    assert set(network.sender.peers) == {1, 2}


def test_invented_receivers_do_not_fill_the_memory() -> None:
    sender = FileSender(99, "sender", 1, LARGEST, wanted=5000)
    for number in range(1, 3000):
        sender.hears(encode(Join(99, number, 512, LARGEST, "")), "10.9.9.9", 0)
    assert len(sender.peers) == 1000
    assert decode(sender.messages(0)[-2]) == Close(99, 2999, Reason.TOO_LATE, "")


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
    network.sender = type(network.sender)(99, "sender", len(DATA), LARGEST)
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 4
    assert 1 < network.now < 2


def test_a_late_receiver_gets_nothing_and_knows_why() -> None:
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[0].pieces > 10)
    late = network.receiver(3)
    network.receivers.append(late)
    network.copies.append(bytearray())
    network.post(3, [encode(Join(99, 3, 512, LARGEST, "late"))])
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 2
    assert (late.missed_one, late.pieces, late.over) == (True, 0, False)


def test_a_receiver_takes_nothing_of_a_transfer_it_is_not_welcome_in() -> None:
    receiver = Network(DATA, 1).receiver(5)
    receiver.hears(encode(Hello(1, 100, "sender")), "", 0)
    receiver.hears(encode(Data(1, 0, b"piece")), "", 0)
    assert (receiver.pieces, receiver.take()) == (0, b"")
    receiver.hears(encode(Welcome(1, 6)), "", 0)
    receiver.hears(encode(Data(1, 0, b"piece")), "", 0)
    assert not receiver.welcome
    receiver.hears(encode(Welcome(1, 5)), "", 0)
    receiver.hears(encode(Data(1, 0, b"piece")), "", 0)
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
    network = Network(DATA[:500], 2)
    network.receivers[1]._largest = OVERHEAD + 7
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 2
    assert network.sender.pieces == -(-500 // 7)


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


OUT_OF_PLACE: dict[str, tuple[Packet, str]] = {
    "ahead": (Report(99, 1, 0, 1 << 40, 512, 0), "a report of what was not sent"),
    "unasked": (Report(99, 1, 1 << 30, 0, 512, 0), "a report of what was not sent"),
    "contradiction": (Report(99, 1, 0, 0, 512, 1), "a report of what was not sent"),
    "stranger": (Report(99, 77, 0, 0, 512, 0), "not a receiver of this transfer"),
    "too soon": (Done(99, 1, Verdict.VERIFIED, ""), "done before the end"),
    "sender's": (Data(99, 0, b"x"), "a sender's message"),
    "other": (Data(98, 0, b"x"), "another transfer"),
    "no room": (Join(99, 7, 0, 1000, ""), "malformed"),
    "tiny": (Join(99, 7, 10, OVERHEAD, ""), "malformed"),
    "everybody": (Join(99, 0, 10, 1000, ""), "malformed"),
}


@pytest.mark.parametrize("case", OUT_OF_PLACE)
def test_the_sender_counts_what_is_out_of_place(case: str) -> None:
    packet, reason = OUT_OF_PLACE[case]
    network = Network(DATA, 2)
    network.run(lambda: network.receivers[0].pieces > 10)
    network.sender.hears(encode(packet), "10.9.9.9", network.now)
    assert network.sender.rejected == {reason: 1}
    network.run()
    assert fates(network) == [Fate.VERIFIED] * 2


@pytest.mark.parametrize(
    ("packet", "reason"),
    [
        (Data(99, 1 << 50, b"x"), "a piece there is no room for"),
        (End(99, 3, 3, bytes(32)), "an end before the end"),
        (Hello(98, 3, "another"), "another transfer"),
    ],
)
def test_a_receiver_counts_what_is_out_of_place(packet: Packet, reason: str) -> None:
    network = Network(DATA, 1)
    network.run(lambda: network.receivers[0].pieces > 10)
    network.receivers[0].hears(encode(packet), "10.9.9.9", network.now)
    assert network.receivers[0].rejected == {reason: 1}
    network.run()
    assert fates(network) == [Fate.VERIFIED]


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


# --- files -----------------------------------------------------------------------------------


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
        sink.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with closing(NewFile(tmp_path / "file")) as sink:
        sink.open()
        sink.commit()
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with closing(open_sink(str(tmp_path / "link"))) as sink:
        sink.open()
        sink.write(b"new")
        sink.commit()
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
            _, said = process.communicate(timeout=20)
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
