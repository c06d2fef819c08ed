"""Options of completion queues; a device that lacks one says so."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import inf, nan
from typing import Any

import pytest

from mcast.api import CqModeration, DeviceInfo, InvalidArgument, NotSupported, QpInit, Testbed, TimestampClock
from mcast.conformance.helpers import BOUND, Application, new_group


def device_of(peer: Application) -> DeviceInfo:
    return next(device for device in peer.bed.backend.devices() if device.name == peer.id.device)


def exchange(bed: Testbed, **init: Any) -> None:
    """Two messages reach a QP that was made like this."""
    group, receiver = new_group(), Application(bed, 0, QpInit(**init))
    outward = receiver.join(group)
    receiver.qp.send(outward, [b"one", b"two"])
    for expected in (b"one", b"two"):
        message = receiver.qp.recv_one(BOUND)
        assert message is not None
        assert bytes(message.payload) == expected


def refusal(call: Callable[[], object]) -> str:
    """Return the device's refusal; empty if it can do it."""
    try:
        call()
    except NotSupported as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seconds", [0.001, inf])
def test_poll_before_a_sleep_ends_in_time(bed: Testbed, seconds: float) -> None:
    """Who looks before it sleeps receives and ends in time."""
    exchange(bed, busy_poll=seconds)
    peer = Application(bed, 0, QpInit(busy_poll=seconds))
    assert peer.qp.recv_one(0) is None
    assert peer.qp.recv_one(0.01) is None


def test_completion_vector_may_be_chosen(bed: Testbed) -> None:
    """A completion vector of the device may be chosen."""
    there = device_of(Application(bed, 0, None)).num_comp_vectors
    assert there >= 1
    exchange(bed, comp_vector=there - 1)
    peer = Application(bed, 0, None)
    with pytest.raises(InvalidArgument) as refused:
        peer.id.create_qp(QpInit(comp_vector=there))
    assert f"comp_vector={there}" in str(refused.value)
    assert str(peer.id.device) in str(refused.value)
    assert ("one completion vector, 0" if there == 1 else f"0..{there - 1}") in str(refused.value)
    peer.id.create_qp()


def test_moderated_qp_misses_nothing_or_is_refused(bed: Testbed) -> None:
    """A moderated queue pair misses nothing or is refused in a sentence."""
    refused = refusal(lambda: exchange(bed, moderation=CqModeration(count=64, period=100)))
    assert not refused or "cannot moderate completions: do without" in refused


@pytest.mark.parametrize(
    ("init", "names"),
    [
        (lambda: CqModeration(count=0, period=5), ("count is 0", "1..65535 messages")),
        (lambda: CqModeration(count=8, period=0), ("period is 0", "1..65535 microseconds", "wake nobody")),
        (lambda: CqModeration(count=1 << 16, period=5), ("count is 65536", "1..65535")),
        (lambda: QpInit(comp_vector=-1), ("comp_vector", "-1")),
        (lambda: QpInit(busy_poll=-0.1), ("busy_poll", "-0.1")),
        (lambda: QpInit(busy_poll=nan), ("busy_poll", "nan")),
    ],
)
def test_what_no_device_could_do_is_refused(init: Any, names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refused:
        init()
    for name in names:
        assert name in str(refused.value)


def test_stamps_are_in_order_or_refused(bed: Testbed) -> None:
    """Messages are stamped in order or that is refused in a sentence."""
    group, sender, plain = new_group(), Application(bed, 0), Application(bed, 1)
    receiver = Application(bed, 1, None)
    if refused := refusal(lambda: receiver.id.create_qp(QpInit(timestamps=True))):
        assert "cannot stamp completions with the time: do without timestamps" in refused
        assert receiver.id.qp is None
        return
    assert isinstance(receiver.qp.timestamp_clock, TimestampClock)
    assert plain.qp.timestamp_clock is None
    outward = sender.join(group, send_only=True)
    receiver.join(group)
    plain.join(group)
    stamps = []
    for _ in range(3):
        sender.qp.send_one(outward, b"x")
        message, other = receiver.qp.recv_one(BOUND), plain.qp.recv_one(BOUND)
        assert message is not None
        assert other is not None
        assert other.timestamp is None
        assert message.timestamp is not None
        stamps.append(message.timestamp)
    assert all(earlier <= later for earlier, later in pairwise(stamps))
