"""Slow receivers under `deadline` and `quorum`: they are left behind, so that the promise is kept."""

from __future__ import annotations

import sys
from math import inf
from random import Random
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from mcast.cast.protocol.packets import (
    COMPLETE,
    LEFT,
    PENDING,
    STORED,
    Ack,
    Admit,
    BlockInfo,
    Describe,
    Join,
    Nack,
    Packet,
    RepairRequest,
    micros,
    number_at,
)
from mcast.cast.protocol.receiver import ObjectReceiver, ReceiverConfig
from mcast.cast.protocol.sender import ObjectResult, ObjectSender
from mcast.cast.protocol.stragglers import Stragglers
from mcast.cast.protocol.strategy import Strategy, all_receivers, deadline, quorum
from mcast.testing.transfer import SimulatedTransfer, TransferSetup

from .network import Case, Conditions, Network

DATA = Random(1).randbytes(200_000)
PROMISES = ("deadline", "quorum")
COUNTS = [(2, 1), (10, 1), (10, 5), (10, 9), (100, 1), (100, 50), (100, 99)]
CASES = [(*count, promise, loss) for count in COUNTS for promise in PROMISES for loss in (0.0, 0.01)]
MANY = [(1000, slow, promise, loss) for slow in (1, 500, 999) for promise in PROMISES for loss in (0.0, 0.01)]


def transfer_to(
    receivers: int, slow: int, strategy: Strategy, loss: float = 0.0
) -> tuple[ObjectResult, list[str]]:
    """Transfer an object that a slow receiver alone takes a second for, and the others some milliseconds.

    Returns the result, and the reason that each receiver has for not having the object.
    """
    setup = TransferSetup(receivers, loss, 1 << 20, strategy, seed=1, window=8, parity=False, k=8, slow=slow)
    transfer = SimulatedTransfer(setup)
    transfer.run()
    reasons = transfer.reasons()
    return transfer.sender.results[0], reasons


@pytest.mark.parametrize(
    ("receivers", "slow", "promise", "loss"),
    [*CASES, MANY[0], *(pytest.param(*case, marks=pytest.mark.long) for case in MANY[1:])],
)
def test_slow_receivers_are_left_behind(receivers: int, slow: int, promise: str, loss: float) -> None:
    """They alone, early, and by name; each of them knows. The others have the object long before.

    A thousand that lose messages have it in 0.2 s without the slow ones, which may cost 0.1 s. Losses spread
    these over the window of 8 blocks, and each time the lower half of it is left behind: up to four times,
    each after five checks of 12.5 ms.
    """
    strategy = deadline(1.0) if promise == "deadline" else quorum(receivers - slow)
    result, reasons = transfer_to(receivers, slow, strategy, loss)
    assert result.strategy_met
    fast = [one for one in result.receivers if int(one.name.split()[1]) >= slow]
    left = [one for one in result.receivers if int(one.name.split()[1]) < slow]
    assert (len(fast), len(left)) == (receivers - slow, slow)
    assert max(one.seconds for one in fast) < (0.6 if loss and receivers == 1000 else 0.5)
    reason = f"left behind: this receiver is too slow for the {promise}"
    assert {(one.complete, one.reason) for one in left} == {(False, reason)}
    assert all(one.startswith("left behind: ") for one in reasons[:slow])
    assert {*reasons[slow:]} == {""}


@pytest.mark.parametrize("receivers", [2, 40])
def test_a_receiver_that_makes_the_deadline(receivers: int) -> None:
    """The sender waits for it, however slow it is, and however long it holds the others up."""
    result, reasons = transfer_to(receivers, 1, deadline(8.0))
    assert {*reasons} == {one.reason for one in result.receivers} == {""}
    assert result.receivers[0].seconds > 0.5


@pytest.mark.parametrize(
    "strategy", [all_receivers(), quorum(3), deadline(60.0)], ids=["all", "quorum", "late"]
)
def test_needed_receivers_are_not_left_behind(strategy: Strategy) -> None:
    """`all` waits for each receiver, a quorum for as many as it wants."""
    result, _ = transfer_to(3, 1, strategy)
    assert (result.strategy_met, [one.reason for one in result.receivers]) == (True, ["", "", ""])


@pytest.mark.parametrize("seed", range(4))
def test_losses_do_not_make_a_receiver_slow(seed: int) -> None:
    """On a bad network only the receiver is left behind that empties its queue too seldom."""
    case = Case((DATA,), 30, strategy=deadline(1.0), queue=64)
    network = Network(case, Conditions(loss=0.05, naps={1: (16, 0.05)}), seed)
    network.run()
    (result,) = network.sender.results
    assert [one.name for one in result.receivers if not one.complete] == ["r1"]


def test_late_answers_after_a_slow_receiver_do_not_make_another_slow() -> None:
    """The pace of the others was that of the slow one, and two late answers at once are one check."""
    watch: Any = Stragglers(deadline(30), 0.0)
    about: Any = SimpleNamespace(full=False, all_sent=False, window=264, sent=10, blocks=230)
    slow, late, fast = members = [
        SimpleNamespace(
            number=number,
            base=0,
            loss=0.0,
            loss_at=-inf,
            pending=True,
            behind_since=inf,
            probes=0,
            probed_at=-inf,
            held_up=0.0,
            joined=0.0,
            last_heard=0.0,
        )
        for number in range(3)
    ]

    def check(now: float, *awaited: SimpleNamespace) -> list[SimpleNamespace]:
        for member in members:
            member.last_heard = now - 0.01
        numbers = [member.number for member in awaited]
        found: list[SimpleNamespace] = watch.check(now, about, 0, members, numbers, False)
        return found

    now = 8.0  # a slow rate without recent losses is not counted as time in which others were held up
    left: list[SimpleNamespace] = []
    while not left:
        assert now < 20
        now += 0.5
        slow.base, late.base, fast.base = int(now), int(now) + 4, int(now) + 4
        left = check(now, slow)
        assert check(now + 0.25) == []
    assert left == [slow]
    members.remove(slow)
    for _ in range(20):
        now += 0.05
        assert check(now, late) == []
        assert check(now + 0.01) == []
    while not (left := check(now, late)):
        assert now < 30, "a slow one is left behind, too"
        now += 0.5
    assert left == [late]


def test_stragglers_take_part_in_the_next_object() -> None:
    """They get a BEHIND, and take part again."""
    naps = {1: (16, 0.05)}
    case = Case((DATA, b"small"), 3, strategy=deadline(1.0), queue=64)
    network = Network(case, Conditions(naps=naps))
    network.run()
    without = [
        [one.name for one in result.receivers if not one.complete] for result in network.sender.results
    ]
    assert without == [["r1"], []]
    assert network.receivers[1].got == {1: b"small"}
    assert network.receivers[1].wrong == ["left behind: this receiver is too slow for the sender's strategy"]


def test_data_beyond_the_window_ends_the_object() -> None:
    """A receiver that has lost the BEHIND fails at once: its timer would be due for ever."""
    session, number = number_at("10.0.0.1", 1), number_at("10.0.0.2", 1)
    end = ObjectReceiver(session, ReceiverConfig(number, "r", 4, 4096, False), Random(1), 0.0)
    end.on_packet(Admit(session, {number: (0, end.config.nonce)}), 0.0)
    end.on_packet(Describe(session, 0, 100_000, 1000, 4, 0, 0, 0, "o", b""), 0.0)
    end.on_data(0, 0, 0b111, 3, 0.1)
    end.on_data(0, 1, 0b1111, 4, 0.1)
    assert 0.1 <= end.due < 1.0, "a segment is missing"
    end.on_data(0, 9, 0b1111, 4, 0.1)
    assert [one.reason.split(":")[0] for one in end.ended] == ["left behind"]
    end.messages(2.0)
    assert end.due > 2.0


def operations(kind: str, count: int, limit: float = inf) -> int:
    """Return the lines that a sender runs for `count` events, one by each receiver. Fails after `limit`."""
    sender = ObjectSender(number_at("10.9.9.9", 1), "s", 4096, 0.0)
    session = sender.session
    where = [f"10.1.{one // 250}.{one % 250 + 1}" for one in range(count)]
    numbers = [number_at(address, 1) for address in where]
    joins = [Join(session, number, 64, 4096, 1, 0, 1, 0, "r") for number in numbers]
    events: list[Packet] = [*joins]
    if kind != "join":
        for join, address in zip(joins, where, strict=True):
            sender.on_packet(join, address, 0.0)
    else:  # so that the object is under way
        first = number_at("10.0.0.9", 1)
        sender.on_packet(joins[0]._replace(member=first), "10.0.0.9", 0.0)
    sender.begin(0.0, all_receivers(), None, "o")
    for _ in range(4):
        sender.offer(BlockInfo(1, 10, bytes(32)))
    sender.messages(0.1)
    stamp = micros(0.1)
    states = {"leave": (0, LEFT), "resume": (2, STORED), "answer": (2, PENDING), "whole": (4, COMPLETE)}
    if kind in states:
        base, state = states[kind]
        events = [Ack(session, 0, number, base, stamp, 0, state, "") for number in numbers]
    if kind == "request":
        events = [Nack(session, 0, number, 0, stamp, 0, (RepairRequest(1, 1, 1),)) for number in numbers]
    if kind == "whole":
        sender.end(bytes(32))
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += 1
        if lines > limit:
            raise AssertionError(f"more than {limit:,.0f} lines for {count:,} of {kind}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for event, address in zip(events, where, strict=True):
            sender.on_packet(event, address, 0.2)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("kind", ["join", "leave", "resume", "answer", "whole", "request"])
def test_an_event_costs_as_much_in_a_large_group(kind: str) -> None:
    """The sender's work for 8,000 JOINs, ACKs and so on is 8 times that for 1,000."""
    assert operations(kind, 8000, 8.4 * operations(kind, 1000))
