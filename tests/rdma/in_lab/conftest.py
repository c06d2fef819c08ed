"""One fabric and its peers for the tests that need real devices."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from ipaddress import IPv4Address

import pytest

from mcast.api import McastAddress, PortSpace
from mcast.backends.rdma import PROVIDER
from mcast.backends.rdma.infiniband_bed import InfinibandTestbed
from mcast.backends.rdma.net.ipoib import interfaces_of
from mcast.contract.testbed import Testbed
from mcast.wire.addresses import Gid
from mcast.wire.mapping import infiniband_mgid

_KERNEL = tuple(int(number) for number in platform.release().split(".")[:2])

mckey_sends = pytest.mark.xfail(
    _KERNEL >= (6, 12),
    run=False,
    reason="mckey ends right after its last post; on Linux 6.12 Soft-RoCE has sent one of five messages then",
)


@pytest.fixture
def lab_bed() -> Iterator[Testbed]:
    """A fresh test bed; what a test leaves behind is its failure."""
    with PROVIDER.testbed() as bed:
        yield bed
        bed.backend.close()
        assert bed.observer.leftovers() == ()


def mgid_of(bed: Testbed, group: McastAddress) -> Gid:
    """The MGID that a PortSpace.UDP join of the group has on the fabric's ports."""
    if not isinstance(bed, InfinibandTestbed):
        return Gid(group.address)
    (interface,) = interfaces_of([bed._where[bed.ports[0]].gid])
    assert interface.broadcast is not None
    return infiniband_mgid(group.address, PortSpace.UDP, bytes(interface.broadcast))


def source_of(bed: Testbed, port: IPv4Address) -> str:
    """How commands name the port that a message came from: by its address, or else by its GID."""
    return str(bed._where[port].gid if isinstance(bed, InfinibandTestbed) else port)
