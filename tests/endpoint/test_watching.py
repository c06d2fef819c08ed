"""Looks at what an endpoint hears, at even times of a fabric's clock."""

from __future__ import annotations

import json
from itertools import count, islice

import pytest

from mcast.backends.sim import Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Messages
from mcast.endpoint.blocking import open_endpoint
from mcast.endpoint.policy import PortDown, PortUp
from mcast.endpoint.watching import samples

GROUP = "239.1.1.1"


def test_each_look_has_what_came_since_the_last() -> None:
    fabric = Fabric.roce(ports=2)
    with (
        open_fabric(fabric) as backend,
        open_endpoint(backend, "10.0.0.2", receive_depth=64) as member,
        open_endpoint(backend, "10.0.0.1", sequence=True) as other,
        fabric.rules.when(Messages(nth=[3]), Drop()),
    ):
        member.join(GROUP)
        sender = other.sender(GROUP)
        seen = samples(member, 2.0, count=3)
        for sizes in ([10] * 8, [100], []):
            sender.send_batch(list(map(bytes, sizes)))
            sample = next(seen)
            assert sample.seconds == pytest.approx(2.0)
            (group,) = sample.groups
            arrived = len(sizes) - (len(sizes) > 3)
            assert group.rates.messages_per_second == pytest.approx(arrived / 2)
            assert (group.group, group.sequence.gaps, sample.dropped) == (GROUP, 1, {})
            assert sample.stats.receive_depth == 64
        assert (group.rates.messages, [one.source for one in group.sources]) == (8, ["10.0.0.1"])
        assert next(seen, None) is None


def test_sample_covers_a_pause_of_the_machine() -> None:
    """A look has what came while the machine stood still."""
    with (
        open_fabric(Fabric.roce(ports=2)) as backend,
        open_endpoint(backend, "10.0.0.2") as member,
        open_endpoint(backend, "10.0.0.1") as other,
    ):
        member.join(GROUP)
        other.sender(GROUP).send_batch([b"x"] * 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "now", count().__next__)  # each look at the clock comes a second later
            (sample,) = samples(member, 0.5, count=1)
    assert sample.groups[0].rates.messages == 3


def test_events_are_told_once_and_a_look_is_json() -> None:
    fabric = Fabric.roce(ports=1)
    with open_fabric(fabric) as backend, open_endpoint(backend) as member:
        member.join(GROUP)
        seen = samples(member, 0.5)
        fabric.set_link(fabric.ports[0], False)
        fabric.set_link(fabric.ports[0], True)
        first, second = islice(seen, 2)
    assert [type(event) for event in first.events] == [PortDown, PortUp]
    assert second.events == ()
    shown = json.loads(json.dumps(first.as_dict()))
    assert shown["events"] == list(map(str, first.events))
    assert (shown["groups"][0]["group"], shown["groups"][0]["gaps"]) == (GROUP, None)
    assert (shown["groups"][0]["sources"], shown["groups"][0]["forgotten_sources"]) == ([], 0)
    assert shown["receive_queue"] == {"depth": 512, "free": 512, "low_water": 512, "empty": 0}
