"""Test bed of a provider for the conformance suite: ports to bind to, faults to cause, an observer.

Evidence takes another path than the call under test: the observer reads the fabric's own tables, not the
caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import Enum
from ipaddress import IPv4Address, IPv4Network, IPv6Address

from mcast.contract.backend import Backend
from mcast.wire.addresses import Gid


class Feature(Enum):
    """A fault that a test bed can cause, or evidence that it can show, beyond the contract.

    A test that needs a feature runs where the bed has it.
    """

    SECOND_PORT = "there is a second port"
    THIRD_PORT = "there is a third port"
    SWITCH_TABLE = "what the switch knows of groups can be read"
    ROUTES = "routes can be added"
    IPV6_SOURCE = "ports have IPv6 addresses"
    LINK = "links can be taken down"
    ADDRESS_REMOVAL = "an address can be removed"
    DEVICE_REMOVAL = "a device can be removed"
    SM_WITHOUT_SEND_ONLY = "the SM can be without send-only support"
    PARTITION = "a port's membership of its partition can be changed"
    NO_MULTICAST = "a device can be without multicast"
    ATTACH_TABLE = "the device's attach table can be read"
    IGMP_ON_WIRE = "IGMP messages on the wire are counted"
    QKEY_VIOLATIONS = "the port counts Q_Key violations"
    DROP_COUNTERS = "messages dropped by a QP are counted"
    MIXED_MTU = "ports can have different MTUs"


PORT_FEATURES = (Feature.SECOND_PORT, Feature.THIRD_PORT)
"""Features that follow from the number of ports; no bed declares them."""


class Observer(ABC):
    """Reads the fabric's own tables. A port is named by its IPv4 address."""

    @abstractmethod
    def group_ports(self, group: Gid) -> frozenset[IPv4Address]:
        """The ports that the fabric's tables now deliver the group to.

        With an SA: ports with a membership that receives. On RoCE: ports in the switch's snooping table.
        """

    def delivers_to(self, port: IPv4Address, group: Gid) -> bool:
        """Return True if the fabric's tables deliver the group to that port."""
        return port in self.group_ports(group)

    def forwards_from(self, port: IPv4Address, group: Gid) -> bool:
        """Return True if the fabric forwards messages of that port to the group now.

        InfiniBand: the SA answers a join before the switches' tables are written.
        """
        return True

    @abstractmethod
    def group_exists(self, group: Gid) -> bool:
        """Return True if the fabric knows the group; asked from a port that is not a member."""

    @abstractmethod
    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        """The groups that the host of that port records as joined on it (IGMP list, SA client)."""

    @abstractmethod
    def leftovers(self) -> tuple[str, ...]:
        """Ids, queue pairs, memberships and attachments that still exist, in words; () when all are freed."""

    def attached(self, port: IPv4Address, group: Gid) -> frozenset[int]:
        """The numbers of queue pairs attached to the group on that port's device (Feature.ATTACH_TABLE)."""
        raise NotImplementedError

    def igmp_reports(self, group: Gid) -> int:
        """Return the number of membership reports for the group seen on the wire (Feature.IGMP_ON_WIRE)."""
        raise NotImplementedError

    def qkey_violations(self, port: IPv4Address) -> int:
        """The port's counter of Q_Key violations (Feature.QKEY_VIOLATIONS)."""
        raise NotImplementedError

    def oversized(self, port: IPv4Address) -> int:
        """Return how many messages the port has dropped as larger than it takes (Feature.MIXED_MTU)."""
        raise NotImplementedError


class Testbed(ABC):
    """A fabric with at least one port, made for one test and removed after it."""

    __test__ = False

    features: frozenset[Feature]
    deviations: Mapping[str, str] = {}
    """Test name -> why the real stack differs from the suite's sentence.

    That test must then fail (strict).
    """

    backend: Backend
    observer: Observer
    ports: tuple[IPv4Address, ...]
    """IPv4 addresses of one or more ports, all on one fabric.

    Where there are fewer than a test uses, the test meets the first ones again, unless the test needs
    Feature.SECOND_PORT or Feature.THIRD_PORT, which the number of ports decides.
    """
    spare: int = 0
    """The index of the port whose device a test may remove or change (DEVICE_REMOVAL, NO_MULTICAST)."""

    def ipv6_of(self, port: IPv4Address) -> IPv6Address:
        """An IPv6 address of the same port (Feature.IPV6_SOURCE)."""
        raise NotImplementedError

    def route(self, network: IPv4Network, port: IPv4Address) -> AbstractContextManager[None]:
        """Inside the `with`, the host routes `network` to that port (Feature.ROUTES)."""
        raise NotImplementedError

    def link_down(self, port: IPv4Address) -> AbstractContextManager[None]:
        """Inside the `with`, the port's link is down (Feature.LINK)."""
        raise NotImplementedError

    def without_address(self, port: IPv4Address) -> AbstractContextManager[None]:
        """Inside the `with`, the port lacks its IPv4 address (Feature.ADDRESS_REMOVAL)."""
        raise NotImplementedError

    def remove_device(self, port: IPv4Address) -> None:
        """Remove the port's device for the rest of the test (Feature.DEVICE_REMOVAL)."""
        raise NotImplementedError

    def sm_without_send_only(self) -> AbstractContextManager[None]:
        """Inside the `with`, the SM refuses send-only members (Feature.SM_WITHOUT_SEND_ONLY)."""
        raise NotImplementedError

    def without_partition(self, port: IPv4Address) -> AbstractContextManager[None]:
        """Inside the `with`, the port's P_Key table lacks its address's partition (Feature.PARTITION)."""
        raise NotImplementedError

    def limited_member(self, port: IPv4Address) -> AbstractContextManager[None]:
        """Inside the `with`, the port is a limited member of its address's partition (Feature.PARTITION)."""
        raise NotImplementedError

    def largest_mtu(self, port: IPv4Address) -> AbstractContextManager[None]:
        """Give that port and the switches the largest MTU inside the `with` (Feature.MIXED_MTU).

        That is 4096; other ports have less.
        """
        raise NotImplementedError

    def without_multicast(self, port: IPv4Address) -> AbstractContextManager[None]:
        """Inside the `with`, the port's device has no multicast (Feature.NO_MULTICAST)."""
        raise NotImplementedError
