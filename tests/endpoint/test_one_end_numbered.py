"""Sequence headers at one end alone: each receiver says so once; unknown gaps are None."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from mcast import Endpoint, Membership, open_endpoint
from mcast.backends.sim import open_fabric
from mcast.backends.sim.fabric import Fabric
from mcast.endpoint.blocking import Sender
from mcast.endpoint.sequence import HEADER_SIZE
from mcast.endpoint.waiting import DEFAULT_BATCH

GROUP = "239.1.1.1"


@contextmanager
def ends(receives: bool | None, sends: bool) -> Iterator[tuple[Endpoint, Membership, Sender]]:
    """A receiver and its membership, and another endpoint's sender; whether each has sequence headers."""
    with (
        open_fabric(Fabric.roce(2)) as backend,
        open_endpoint(backend, "10.0.0.1", sequence=receives) as receiver,
        open_endpoint(backend, "10.0.0.2", sequence=sends) as sender,
        receiver.join(GROUP) as member,
        sender.sender(GROUP) as group,
    ):
        yield receiver, member, group


def test_missing_headers_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A receiver with headers says once that a sender has none."""
    caplog.set_level(logging.WARNING, "mcast")
    with ends(receives=True, sends=False) as (receiver, member, group):
        group.send_batch([b"short", bytes(100), b"again"])
        assert member.recv(timeout=0.1) is None
        assert sum(receiver.stats().dropped.values()) == 3
    (said,) = [record.getMessage() for record in caplog.records]
    sender_and_group = f"::ffff:10.0.0.2 sends to ::ffff:{GROUP}"
    assert said.startswith(f"roce0/1, 10.0.0.1: {sender_and_group} without sequence headers, ")
    assert "Open both ends with sequence=True, or both without" in said


def by_one(endpoint: Endpoint, member: Membership) -> list[bytes]:
    return [bytes(one.payload) for one in iter(lambda: member.recv(timeout=0), None)]


def by_batch(endpoint: Endpoint, member: Membership) -> list[bytes]:
    return [bytes(one.payload) for batch in endpoint.batches(max=8, timeout=0) for one in batch]


@pytest.mark.parametrize("receive", [by_one, by_batch])
@pytest.mark.parametrize("first", [0, 3], ids=["at once", "after others"])
@pytest.mark.parametrize("groups", [1, 2])
def test_unexpected_headers_are_logged_once(
    receive: Callable[[Endpoint, Membership], list[bytes]],
    first: int,
    groups: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A receiver without headers says once that a sender has them."""
    caplog.set_level(logging.WARNING, "mcast")
    with (
        open_fabric(Fabric.roce(3)) as backend,
        open_endpoint(backend, "10.0.0.1") as receiver,
        open_endpoint(backend, "10.0.0.2") as plain,
        open_endpoint(backend, "10.0.0.3", sequence=True) as sender,
        receiver.join(GROUP) as member,
        receiver.join("239.1.1.2") if groups == 2 else nullcontext(),
        plain.sender(GROUP) as others,
        sender.sender(GROUP) as group,
    ):
        others.send_batch([b"plain"] * first)
        group.send_batch([b"hello"] * 2 * DEFAULT_BATCH)  # of which one is looked at
        payloads = receive(receiver, member)
    assert payloads[:first] == [b"plain"] * first
    assert {payload[HEADER_SIZE:] for payload in payloads[first:]} == {b"hello"}
    (said,) = [record.getMessage() for record in caplog.records]
    sender_and_group = f"::ffff:10.0.0.3 sends to ::ffff:{GROUP}"
    assert said.startswith(f"roce0/1, 10.0.0.1: {sender_and_group} with sequence headers, ")
    assert "Open both ends with sequence=True, or both without" in said


def test_a_receiver_that_takes_both_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mcast")
    with ends(receives=None, sends=True) as (receiver, member, group), receiver.sender("239.1.1.2") as own:
        group.send(b"hello")
        assert by_one(receiver, member)[0].endswith(b"hello")
        assert own.max_message_size == receiver.port.active_mtu
        assert receiver.stats().gaps is None
    assert caplog.records == []


@pytest.mark.parametrize("sequenced", [True, False])
def test_what_nobody_can_know_is_none(sequenced: bool) -> None:
    with (
        open_fabric(Fabric.roce(1)) as backend,
        open_endpoint(backend, "10.0.0.1", sequence=sequenced) as endpoint,
        endpoint.join(GROUP),
    ):
        stats = endpoint.stats()
    for counted in stats, stats.groups[0]:
        assert {counted.gaps, counted.late, counted.duplicates} == ({0} if sequenced else {None})


@pytest.mark.parametrize("sequenced", [True, False])
def test_equal_ends_say_nothing(sequenced: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mcast")
    with ends(sequenced, sequenced) as (_, member, group):
        group.send_batch([b"hello"] * 100)
        assert sum(member.recv(timeout=1) is not None for _ in range(100)) == 100
    assert caplog.records == []
