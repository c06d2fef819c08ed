"""Slow receivers under `deadline` and `quorum`: they are left behind, so that the promise is kept."""

from __future__ import annotations

import sys
from math import inf
from random import Random
from types import FrameType
from typing import Any

import pytest

from mcast.cast.protocol.packets import (
    COMPLETE,
    LEFT,
    PENDING,
    STORED,
    Ack,
    BlockInfo,
    Join,
    Nack,
    Packet,
    RepairRequest,
    micros,
    number_at,
)
from mcast.cast.protocol.repairs import SegmentRange
from mcast.cast.protocol.sender import ObjectResult, ObjectSender
from mcast.cast.protocol.strategy import Strategy, all_receivers, deadline, quorum
from mcast.testing.transfer import SimulatedTransfer, TransferSetup

from .network import Case, Conditions, Network

DATA = Random(1).randbytes(200_000)
SEGMENTS_PER_SECOND = 400
"""Rate of a slow receiver: the object has 256 segments, which the others receive in some ms."""
QUEUE = 64
PROMISES = ("deadline", "quorum")


class SlowTransfer(SimulatedTransfer):
    """Transfer to receivers of which the first `slow` take few messages a second, from a short queue."""

    def __init__(self, setup: TransferSetup, slow: int) -> None:
        super().__init__(setup._replace(window=8, parity=False))
        self._slow, self._emptied_at = slow, [0.0] * slow

    def outcome(self) -> tuple[ObjectResult, list[str]]:
        """Transfer the object; return its result, and the reason of each receiver that does not have it."""
        begun = self._gather()
        self._emptied_at = [begun] * self._slow
        self._about = self.sender.begin(begun, self.setup.strategy, self.setup.size, "", b"", 8, 0)
        for _ in self._turns(begun):
            if self.sender.results:
                break
        return self.sender.results[0], [
            one.reason for end in self._ends for one in end.ended if not one.complete
        ]

    def _arrive(self, burst: list[Any], now: float) -> None:
        if isinstance(burst[0], int):
            number, *late = burst
            self._deliver(number, late, [], now)
            return
        total = sum(count for count, _ in burst)
        for number in range(len(self._ends)):
            lost = self._losses[number].of(total)
            if number >= self._slow or self.sender.outgoing is None:
                self._deliver(number, burst, lost, now)
                continue
            waiting = max(0.0, self._emptied_at[number] - now) * SEGMENTS_PER_SECOND
            window = int(QUEUE - waiting)
            lost = sorted({*lost, *range(window, total)}) if window < total else lost
            self._emptied_at[number] = (
                max(now, self._emptied_at[number]) + (total - len(lost)) / SEGMENTS_PER_SECOND
            )
            heard = self._heard(burst, lost)
            if heard:
                self._push(self._emptied_at[number], 1, [number, *heard])

    @staticmethod
    def _heard(burst: list[Any], lost: list[int]) -> list[Any]:
        """Return a burst without the lost messages."""
        lost_here, found, at = {*lost}, list[Any](), 0
        for count, one in burst:
            if isinstance(one, SegmentRange):
                start = None
                for index in range(one.segments + 1):
                    there = index < one.segments and at + index not in lost_here
                    if there and start is None:
                        start = index
                    if not there and start is not None:
                        found.append(
                            (index - start, SegmentRange(one.block, one.first + start, index - start))
                        )
                        start = None
            elif at not in lost_here:
                found.append((1, one))
            at += count
        return found

    def _deliver(self, number: int, burst: list[Any], lost: list[int], now: float) -> None:
        end, at = self._ends[number], 0
        for count, one in burst:
            lost_here = [index - at for index in lost if at <= index < at + count]
            at += count
            if isinstance(one, SegmentRange):
                self._receive(end, one, lost_here, now)
            elif not lost_here:
                end.on_packet(one, now)
        for ready in end.take_ready():
            end.checked(ready.block, self._is_valid(ready), now)
        self._wake(number, end, now)


COUNTS = [(2, 1), (16, 1), (16, 8), (16, 15), (100, 1), (100, 50), (100, 99)]
CASES = [(*count, promise, loss) for count in COUNTS for promise in PROMISES for loss in (0.0, 0.02)]
MANY = [(1000, slow, promise, loss) for slow in (1, 500, 999) for promise in PROMISES for loss in (0.0, 0.02)]


@pytest.mark.parametrize(
    ("receivers", "slow", "promise", "loss"),
    [*CASES, MANY[0], *(pytest.param(*case, marks=pytest.mark.long) for case in MANY[1:])],
)
def test_slow_receivers_are_left_behind(receivers: int, slow: int, promise: str, loss: float) -> None:
    """They alone, early, and by name: the others have the object long before."""
    strategy = deadline(1.0) if promise == "deadline" else quorum(receivers - slow)
    result, words = SlowTransfer(TransferSetup(receivers, loss, 1 << 20, strategy, seed=1), slow).outcome()
    assert result.strategy_met
    fast = [one for one in result.receivers if int(one.name.split()[1]) >= slow]
    left = [one for one in result.receivers if int(one.name.split()[1]) < slow]
    assert (len(fast), len(left)) == (receivers - slow, slow)
    assert max(one.seconds for one in fast) < 0.6
    reason = f"left behind: this receiver is too slow for the {promise}"
    assert {(one.complete, one.reason) for one in left} == {(False, reason)}
    assert all(one.startswith("left behind") for one in words)


@pytest.mark.parametrize("receivers", [2, 40])
def test_a_receiver_that_makes_the_deadline(receivers: int) -> None:
    """The sender waits for it, however slow it is, and however long it holds the others up."""
    result, _ = SlowTransfer(TransferSetup(receivers, 0.0, 1 << 20, deadline(8.0), seed=1), 1).outcome()
    assert [one.reason for one in result.receivers if not one.complete] == []
    assert result.receivers[0].seconds > 0.5


@pytest.mark.parametrize(
    "strategy", [all_receivers(), quorum(3), deadline(60.0)], ids=["all", "quorum", "late"]
)
def test_needed_receivers_are_not_left_behind(strategy: Strategy) -> None:
    """`all` waits for each receiver, a quorum for as many as it wants."""
    result, _ = SlowTransfer(TransferSetup(3, 0.0, 1 << 20, strategy, seed=1), 1).outcome()
    assert (result.strategy_met, [one.reason for one in result.receivers]) == (True, ["", "", ""])


@pytest.mark.parametrize("seed", range(4))
def test_losses_do_not_make_a_receiver_slow(seed: int) -> None:
    """On a bad network only the receiver is left behind that empties its queue too seldom."""
    case = Case((DATA,), 30, strategy=deadline(1.0), queue=64)
    network = Network(case, Conditions(loss=0.05, naps={1: (16, 0.05)}), seed)
    network.run()
    (result,) = network.sender.results
    assert [one.name for one in result.receivers if not one.complete] == ["r1"]


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
