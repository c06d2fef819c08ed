"""The feed on the simulated fabric of mcast's pytest plugin, and once as two programs."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

import simulate
from feed import FEED, REPAIR, RETRY, Receiver, Sender
from mcast.backends.sim.faults import Drop, Messages
from mcast.testing.plugin import McastEndpoints, McastFabric

HERE = Path(__file__).parent


def exchange(sender: Sender, *receivers: Receiver) -> list[list[int]]:
    """Let each end have its turn until no tick is missing; return the numbers that each has received."""
    received: list[list[int]] = [[] for _ in receivers]
    for _ in range(20):
        for receiver, numbers in zip(receivers, received, strict=True):
            numbers += [tick.number for tick in receiver.ticks(timeout=RETRY)]
        sender.serve(RETRY)
    assert not any(receiver.missing for receiver in receivers)
    return received


@pytest.mark.mcast(fabric=["roce", "infiniband"])
@pytest.mark.mcast_faults("drop", group=FEED, target=1, nth=[3, 4, 9])
def test_lost_ticks_are_repaired(mcast_endpoints: McastEndpoints) -> None:
    one, other = mcast_endpoints(2)
    receiver, sender = Receiver(other), Sender(one)
    for number in range(1, 11):
        sender.send("ACME", number)
    assert exchange(sender, receiver) == [list(range(1, 11))]
    assert (receiver.requests, sender.repaired) == (1, 3)


def test_a_heartbeat_shows_that_the_last_tick_is_lost(
    mcast_fabric: McastFabric, mcast_endpoints: McastEndpoints
) -> None:
    one, other = mcast_endpoints(2)
    receiver, sender = Receiver(other), Sender(one)
    sender.send("ACME", 1)
    with mcast_fabric.rules.when(Messages(group=FEED), Drop()):
        sender.send("ACME", 2)
    assert [tick.price for tick in receiver.ticks(timeout=1)] == [1]
    assert exchange(sender, receiver) == [[2]]


@pytest.mark.mcast_faults("drop", rate=0.3)
def test_a_fabric_that_loses_a_third_of_all(mcast_endpoints: McastEndpoints) -> None:
    """Requests and repairs are lost, too."""
    first, *others = mcast_endpoints(3)
    receivers, sender = [Receiver(other) for other in others], Sender(first)
    sender.serve(0.1)
    for number in range(1, 101):
        sender.send("ACME", number)
    for numbers in exchange(sender, *receivers):
        assert numbers == list(range(numbers[0], 101))
        assert numbers[0] < 20


@pytest.mark.mcast_faults("drop", group=FEED, nth=[2, 3])
def test_what_the_sender_has_no_longer_is_counted(mcast_endpoints: McastEndpoints) -> None:
    one, other = mcast_endpoints(2)
    receiver, sender = Receiver(other), Sender(one, history=2)
    for number in range(1, 6):
        sender.send("ACME", number)
    assert exchange(sender, receiver) == [[1, 4, 5]]
    assert receiver.lost == 2


def test_a_late_receiver_starts_with_what_it_hears(mcast_endpoints: McastEndpoints) -> None:
    one, other = mcast_endpoints(2)
    sender = Sender(one)
    sender.send("ACME", 1)
    receiver = Receiver(other)
    sender.send("ACME", 2)
    assert exchange(sender, receiver) == [[2]]


def test_messages_of_strangers_are_passed_over(mcast_endpoints: McastEndpoints) -> None:
    one, other, stranger = mcast_endpoints(3)
    receiver, sender = Receiver(other), Sender(one)
    stranger.sender(FEED).send_batch([b"nonsense", b"\xff" * 100])
    requests = [b"", b"nonsense", struct.pack("!QQ", 0, 1 << 63), struct.pack("!QQ", 9, 1)]
    stranger.sender(REPAIR).send_batch(requests)
    sender.send("ACME", 1)
    assert exchange(sender, receiver) == [[1]]


def test_a_symbol_that_does_not_fit(mcast_endpoints: McastEndpoints) -> None:
    (endpoint,) = mcast_endpoints(1)
    with pytest.raises(ValueError, match="give 1 to 8 ASCII letters"):
        Sender(endpoint).send("NINEBYTES", 1)


def test_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    simulate.main()
    assert capsys.readouterr().out.splitlines() == [
        "received [1], missing [2, 3, 9]",
        "received [2, 3, 4, 5, 6, 7, 8, 9, 10], missing []",
        "3 ticks sent again for 1 request",
    ]


def test_two_programs_over_udp() -> None:
    command = [sys.executable, str(HERE / "feed.py")]
    with subprocess.Popen([*command, "receive", "127.0.0.1"], stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout is not None
        try:
            assert receiver.stdout.readline() == "listening\n"
            subprocess.run([*command, "send", "127.0.0.1", "--ticks", "50"], check=True, timeout=60)
            ticks = [receiver.stdout.readline() for _ in range(50)]
        finally:
            receiver.kill()
    assert len(ticks) == len(set(ticks))
    assert (ticks[0], ticks[-1]) == ("1 ACME 100.00\n", "50 BOLT 100.49\n")
