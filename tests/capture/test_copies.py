"""A message that several interfaces of a host have shown is one message."""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Callable

import pytest

from mcast.capture import replay
from mcast.capture.replay import COPY_REASON, read_messages, summarize

from .captures import Made, cooked, frame

IN, MULTICAST, OUT = 0, 2, 4
SLL, SLL2 = 113, 276
Seen = tuple[float, bytes, int, int]
"""Seconds, the frame, its direction, the interface."""

ORDERS = pytest.mark.parametrize("order", ["<", ">"])


def sll2(made: Made, *seen: Seen) -> bytes:
    return made.pcap(*((t, cooked(data, way, number)) for t, data, way, number in seen), link_type=SLL2)


def sll(made: Made, *seen: Seen) -> bytes:
    return made.pcap(*((t, cooked(data, way)) for t, data, way, _ in seen), link_type=SLL)


def sll2_in_pcapng(made: Made, *seen: Seen) -> bytes:
    blocks = (made.packet(t, cooked(data, way, number)) for t, data, way, number in seen)
    return made.section() + made.interface(SLL2) + b"".join(blocks)


def by_interface(made: Made, *seen: Seen) -> bytes:
    """Write a capture on several interfaces in the way of dumpcap and Wireshark."""
    blocks = (made.packet(t, data, number) for t, data, _, number in seen)
    return made.section() + made.interface() * 4 + b"".join(blocks)


Make = Callable[..., bytes]
FORMATS = pytest.mark.parametrize("make", [sll2, sll, sll2_in_pcapng, by_interface])
TELLING = pytest.mark.parametrize("make", [sll2, sll2_in_pcapng, by_interface])
"""Those that tell which interface has shown a packet."""


def bridged(t: float, data: bytes) -> list[Seen]:
    """A packet on its way over a bridge: out of a port, into the bridge, out of it, and in."""
    return [(t, data, OUT, 0), (t + 1e-5, data, MULTICAST, 1), (t + 2e-5, data, OUT, 2), (t, data, IN, 3)]


def payloads(data: bytes, keep_copies: bool = False) -> tuple[list[bytes], dict[str, int]]:
    skipped = Counter[str]()
    found = [one.payload for one in read_messages(io.BytesIO(data), skipped, keep_copies)]
    return found, dict(skipped)


@ORDERS
@FORMATS
def test_a_bridged_message_is_one(make: Make, order: str) -> None:
    data = make(Made(order), *bridged(1.0, frame(b"one", 7)), *bridged(2.0, frame(b"two", 8)))
    assert payloads(data) == ([b"one", b"two"], {COPY_REASON: 6})
    assert payloads(data, keep_copies=True) == ([b"one"] * 4 + [b"two"] * 4, {})
    assert summarize(io.BytesIO(data)).messages == 2
    assert summarize(io.BytesIO(data), keep_copies=True).messages == 8


@FORMATS
def test_copies_may_be_mixed(make: Make) -> None:
    """Of two messages that pass at once."""
    one, two = bridged(1.0, frame(b"one", 7)), bridged(1.0, frame(b"two", 8))
    mixed = [seen for pair in zip(one, two, strict=True) for seen in pair]
    assert payloads(make(Made(), *mixed)) == ([b"one", b"two"], {COPY_REASON: 6})


@FORMATS
def test_a_message_with_the_same_payload_is_no_copy(make: Make) -> None:
    data = make(Made(), *(seen for psn in range(3) for seen in bridged(1.0, frame(b"same", psn))))
    assert payloads(data) == ([b"same"] * 3, {COPY_REASON: 9})


@FORMATS
def test_a_router_that_counts_the_hops_makes_copies(make: Make) -> None:
    seen = [(1.0, frame(b"one", hop_limit=9), MULTICAST, 0), (1.0, frame(b"one", hop_limit=8), OUT, 1)]
    assert payloads(make(Made(), *seen)) == ([b"one"], {COPY_REASON: 1})


@FORMATS
def test_a_number_that_comes_again_is_another_message(make: Make) -> None:
    """Sequence numbers have 24 bits."""
    data = make(Made(), *bridged(1.0, frame(b"one")), *bridged(2.5, frame(b"one")))
    assert payloads(data) == ([b"one", b"one"], {COPY_REASON: 6})


@TELLING
def test_what_one_interface_has_twice_came_twice(make: Make) -> None:
    data = make(Made(), *bridged(1.0, frame(b"one")), *bridged(1.1, frame(b"one")))
    assert payloads(data) == ([b"one", b"one"], {COPY_REASON: 6})


def test_a_capture_of_one_interface_has_no_copies() -> None:
    assert payloads(Made().pcap((1.0, frame(b"one")), (1.0, frame(b"one")))) == ([b"one", b"one"], {})


@pytest.mark.parametrize(
    ("times", "pause"), [([1.0], 0.0), ([1.0, 3.0, 3.5], 2.0), ([5.0, 1.0, 6.0], 1.0), ([5.0, 1.0], 0.0)]
)
def test_the_longest_pause_is_known(times: list[float], pause: float) -> None:
    """Of those that a replay waits for: not after a time that has run back."""
    data = Made().pcap(*((t, frame(b"x", psn)) for psn, t in enumerate(times)))
    assert summarize(io.BytesIO(data)).pause == pause * 1e9


def test_many_interfaces_take_no_time() -> None:
    """The time for a packet does not grow with the interfaces that have shown the message."""
    seen = [(1.0, frame(b"one"), IN, number) for number in range(30_000)]
    data, start = sll2(Made(), *seen), time.thread_time()
    assert payloads(data) == ([b"one"], {COPY_REASON: 29_999})
    assert time.thread_time() - start < 3


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is forgotten with its interfaces, the one that was seen last at the end."""
    one, two = bridged(1.0, frame(b"one", 1)), bridged(1.0, frame(b"two", 2))
    data = sll2(Made(), *one[:2], *two, *one[2:])
    monkeypatch.setattr(replay, "_MAX_SIGHTINGS", 6)
    assert payloads(data) == ([b"one", b"two"], {COPY_REASON: 6})
    monkeypatch.setattr(replay, "_MAX_SIGHTINGS", 5)
    assert payloads(data) == ([b"one", b"two", b"one"], {COPY_REASON: 5})
