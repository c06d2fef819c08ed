"""A link that goes down and comes back: the switch knows the group again, and messages come again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mcast import Endpoint, Lost, Membership, PortDown, PortUp, Rejoined, RejoinPolicy, open_endpoint
from mcast.api import Gid, QpError, Testbed
from mcast.backends.udp.testbed import udp_testbed
from mcast.conformance.helpers import BOUND

from ..own_network import needs_namespaces
from ..waiting import until
from .conftest import Host

pytestmark = needs_namespaces
GROUP = "239.1.2.3"
POLICY = RejoinPolicy(first=0.01, maximum=0.05)


@pytest.fixture
def bridge() -> Iterator[Testbed]:
    """Ports on a bridge that snoops."""
    with udp_testbed() as made:
        yield made


def test_a_switch_knows_the_group_again(bridge: Testbed) -> None:
    """The endpoint is told of its link; the kernel reports its groups when the link is back."""
    gid, port = Gid(f"::ffff:{GROUP}"), bridge.ports[1]
    with pair(bridge) as (sender, receiver), receiver.join(GROUP) as group, sender.sender(GROUP) as out:
        until(lambda: bridge.observer.group_ports(gid) == {port})
        with bridge.link_down(port):
            assert isinstance(receiver.next_event(BOUND), PortDown)
            until(lambda: not bridge.observer.group_ports(gid))
            out.send(b"lost")
        assert isinstance(receiver.next_event(BOUND), PortUp)
        until(lambda: bridge.observer.group_ports(gid) == {port})
        out.send(b"heard")
        assert payload(group) == b"heard"
        assert receiver.stats().lost == 0


def test_a_sender_without_a_link_rejoins(bridge: Testbed) -> None:
    """A send that cannot leave ends the queue pair, as on a device, and the endpoint restores it."""
    with pair(bridge) as (sender, receiver), receiver.join(GROUP) as there, sender.join(GROUP) as group:
        with bridge.link_down(bridge.ports[0]):
            with pytest.raises(QpError):
                group.send(b"lost")
            assert {type(sender.next_event(BOUND)) for _ in range(3)} == {Lost, Rejoined, PortDown}
        assert isinstance(sender.next_event(BOUND), PortUp)
        group.send(b"heard")
        assert payload(there) == b"heard"
        assert sender.stats().rejoins == 1


@contextmanager
def pair(bridge: Testbed) -> Iterator[tuple[Endpoint, Endpoint]]:
    """An endpoint on the first port, and one on the second."""
    first, second = (open_endpoint(bridge.backend, str(bridge.ports[port]), rejoin=POLICY) for port in (0, 1))
    with first, second:
        yield first, second


def payload(group: Membership) -> bytes | None:
    message = group.recv(BOUND)
    return None if message is None else bytes(message.payload)


def test_loopback_alone_is_a_warning(hosts: tuple[Host, Host]) -> None:
    """Nothing else is up: an endpoint that was given no address says that it reaches no other host."""
    opens = "import mcast; mcast.open_endpoint('udp').close()"
    command = f'{sys.executable} -c "{opens}" 2>&1'
    assert hosts[0].run("sh", "-c", command) == ""
    hosts[0].run("ip", "link", "set", "eth0", "down")
    assert "only loopback is usable" in hosts[0].run("sh", "-c", command)
