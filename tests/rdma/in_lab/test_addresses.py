"""Addresses that an interface gains or loses: which of them an endpoint can send from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import pytest

from mcast.api import AddressNotAvailable, Gid, Message
from mcast.backends.rdma import PROVIDER
from mcast.endpoint.blocking import open_endpoint

from .conftest import devices, sh, until

GROUP = "239.80.1.2"


@contextmanager
def address(change: str, undo: str, at: str, present: bool) -> Iterator[None]:
    """Change addresses, and wait until a port has the GID of `at`, or none has; then undo it."""

    def shows() -> bool:
        return Gid(ip_address(at)) in [one for device in devices() for one in device.ports[0].gids.values()]

    sh(change)
    try:
        until(lambda: shows() is present, change)
        yield
    finally:
        sh(undo)
        until(lambda: shows() is not present, undo)


def test_a_link_local_ipv4_address_sends() -> None:
    at = "169.254.7.7"
    with (
        address(f"ip addr add {at}/16 dev e1", f"ip addr del {at}/16 dev e1", at, present=True),
        PROVIDER.open() as backend,
        open_endpoint(backend, at) as endpoint,
        open_endpoint(backend, "10.77.0.2") as other,
    ):
        member, sender = other.join(GROUP), endpoint.sender(GROUP)
        heard: list[Message] = []

        def receives() -> bool:  # not before the bridge has learnt of the member
            sender.send(b"hello")
            heard.extend(filter(None, [member.recv(timeout=0.5)]))
            return bool(heard)

        until(receives, "nothing arrives")
        assert (bytes(heard[0].payload), heard[0].source.ipv4) == (b"hello", ip_address(at))


@pytest.mark.parametrize("how", ["join", "sender"])
def test_a_port_with_ipv6_gids_alone_is_refused(how: str) -> None:
    at = "10.77.0.2"
    name = next(one.name for one in devices() if ip_address(at) in one.ports[0].addresses)
    with (
        address(f"ip addr del {at}/24 dev e2", f"ip addr add {at}/24 dev e2", at, present=False),
        PROVIDER.open() as backend,
        open_endpoint(backend, device=name) as endpoint,
    ):
        with pytest.raises(AddressNotAvailable, match="cannot send to an IPv4 group"):
            getattr(endpoint, how)(GROUP)
        assert endpoint.next_event(0) is None
