"""Sequence headers at one end alone: the receiver that wants them says so once; unknown gaps are None."""

from __future__ import annotations

import logging

import pytest

from mcast import open_endpoint
from mcast.backends.sim import open_fabric
from mcast.backends.sim.fabric import Fabric

GROUP = "239.1.1.1"


def test_a_receiver_with_headers_says_once_that_a_sender_has_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mcast")
    with (
        open_fabric(Fabric.roce(2)) as backend,
        open_endpoint(backend, "10.0.0.1", sequence=True) as receiver,
        open_endpoint(backend, "10.0.0.2") as sender,
        receiver.join(GROUP) as member,
        sender.sender(GROUP) as group,
    ):
        group.send_batch([b"short", bytes(100), b"again"])
        assert member.recv(timeout=0.1) is None
        assert sum(receiver.stats().dropped.values()) == 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"::ffff:10.0.0.2 sends to ::ffff:{GROUP} without sequence headers, ")
    assert "Open both ends with sequence=True, or both without" in said


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
    with (
        open_fabric(Fabric.roce(2)) as backend,
        open_endpoint(backend, "10.0.0.1", sequence=sequenced) as receiver,
        open_endpoint(backend, "10.0.0.2", sequence=sequenced) as sender,
        receiver.join(GROUP) as member,
        sender.sender(GROUP) as group,
    ):
        group.send_batch([b"hello"] * 100)
        assert sum(member.recv(timeout=1) is not None for _ in range(100)) == 100
    assert caplog.records == []
