"""The test bed on a host's own Ethernet ports, where no switch tells what it has heard."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Any

import pytest

from mcast.api import Gid
from mcast.backends.net import hostnet
from mcast.backends.rdma import roce_bed
from mcast.backends.rdma.roce_bed import REPORTED, RoceObserver, RocePort

HERE, GROUP = IPv4Address("10.0.0.1"), IPv4Address("239.1.1.1")


def test_member_counts_after_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member counts once the kernel has had time to report it."""
    now, members = 100.0, set[IPv4Address]()
    nothing: Any = None
    monkeypatch.setattr(roce_bed, "own_objects", dict)
    monkeypatch.setattr(roce_bed, "monotonic", lambda: now)
    monkeypatch.setattr(hostnet, "igmp_memberships", lambda: {"eth0": members})
    observer = RoceObserver(nothing, {HERE: RocePort("rxe0", 1, "eth0", nothing, nothing)})
    group = Gid(GROUP)
    assert not observer.group_ports(group)
    members |= {GROUP}
    for _ in range(2):  # a member that left has to be reported anew
        assert observer.group_exists(group)
        assert not observer.group_ports(group)
        now += 2 * REPORTED
        assert observer.group_ports(group) == {HERE}
        members -= {GROUP}
        assert not observer.group_ports(group)
        members |= {GROUP}
