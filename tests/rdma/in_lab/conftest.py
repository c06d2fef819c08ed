"""One fabric and its peers for the tests that need real devices."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from time import monotonic, sleep

import pytest

from mcast.api import DeviceInfo, McastAddress, PortSpace, Testbed
from mcast.backends.rdma import PROVIDER
from mcast.backends.rdma.infiniband_bed import InfinibandTestbed
from mcast.backends.rdma.net.ipoib import interfaces_of
from mcast.wire.addresses import Gid
from mcast.wire.mapping import infiniband_mgid

BOUND = 60.0
"""Seconds; the longest that a command or a change may take, never a delay."""


def sh(script: str) -> None:
    """Run a script of the shell, which must succeed."""
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, f"{script}: {done.stderr}"


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds."""
    end = monotonic() + BOUND
    while not condition():
        assert monotonic() < end, what
        sleep(0.1)


def devices() -> tuple[DeviceInfo, ...]:
    """The devices that can be used now."""
    with PROVIDER.open() as backend:
        return backend.devices()


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
    """Name of the port that a message came from, in commands: by its address, or else by its GID."""
    return str(bed._where[port].gid if isinstance(bed, InfinibandTestbed) else port)
