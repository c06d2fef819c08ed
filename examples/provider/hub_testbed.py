"""The hub's test bed for the conformance suite: the evidence is read from the hub's own tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address

from hub_mcast import HubBackend
from mcast.api import Feature, Gid, Observer, Testbed


class HubObserver(Observer):
    """Reads the hub's own tables."""

    def __init__(self, backend: HubBackend) -> None:
        self._network = backend.network
        self._ports = dict(zip(backend.network.addresses, backend.network.ports, strict=True))

    def group_ports(self, group: Gid) -> frozenset[IPv4Address]:
        return frozenset(address for address in self._ports if group in self.port_memberships(address))

    def group_exists(self, group: Gid) -> bool:
        return bool(self.group_ports(group))

    def port_memberships(self, port: IPv4Address) -> frozenset[Gid]:
        return frozenset(+self._network.members[self._ports[port].index])

    def leftovers(self) -> tuple[str, ...]:
        found = [f"QP {qp.number}" for qp in self._network.queue_pairs]
        for address, port in self._ports.items():
            found += [
                f"{group} attached on {port.name}" for group in self._network.queue_pairs.attached(port)
            ]
            found += [f"membership of {group} on {port.name}" for group in self.port_memberships(address)]
        return tuple(found)

    def attached(self, port: IPv4Address, group: Gid) -> frozenset[int]:
        attached = self._network.queue_pairs.attached(self._ports[port])
        return frozenset(qp.number for qp in attached.get(group, ()))

    def qkey_violations(self, port: IPv4Address) -> int:
        return self._ports[port].qkey_violations


_COPIES = (
    "each message is copied into a slot, which so needs room for the largest one, and is kept at the end"
)
DEVIATIONS = dict.fromkeys(
    [
        "test_a_batch_is_also_columns_and_one_memory[registered memory]",
        "test_receive_slots_put_the_payloads_into_the_users_memory",
        "test_receive_memory_ends_whatever_is_there",
        *(
            f"test_view_never_shows_another_message[{view}-{of}-slots]"
            for view in ("slice", "view", "cast", "array")
            for of in ("payload", "memory")
        ),
    ],
    _COPIES,
)
"""Test of the suite -> how the hub differs. Each of them has to fail."""


class HubTestbed(Testbed):
    """The ports of a new hub."""

    deviations = DEVIATIONS
    features = frozenset({Feature.ATTACH_TABLE, Feature.QKEY_VIOLATIONS, Feature.DROP_COUNTERS})

    def __init__(self, backend: HubBackend) -> None:
        self.backend, self.observer = backend, HubObserver(backend)
        self.ports = backend.network.addresses


@contextmanager
def testbed() -> Iterator[Testbed]:
    with HubBackend() as backend:
        yield HubTestbed(backend)
