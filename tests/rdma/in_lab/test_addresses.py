"""Addresses that an interface gains or loses: which of them an endpoint can send from."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from time import monotonic, sleep

import pytest

from mcast.api import AddressNotAvailable, DeviceInfo
from mcast.backends.rdma import PROVIDER
from mcast.endpoint.blocking import open_endpoint

BOUND = 60.0
GROUP = "239.80.1.2"


def sh(script: str) -> None:
    done = subprocess.run(["sh", "-ec", script], capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, f"{script}: {done.stderr}"


def until(condition: Callable[[], bool], what: str) -> None:
    end = monotonic() + BOUND
    while not condition():
        assert monotonic() < end, what
        sleep(0.1)


def devices() -> tuple[DeviceInfo, ...]:
    with PROVIDER.open() as backend:
        return backend.devices()


@contextmanager
def address(change: str, undo: str, at: str, present: bool) -> Iterator[None]:
    """Change the addresses of an interface, and wait until a device shows `at`, or none; then undo it."""

    def shows() -> bool:
        return ip_address(at) in [one for device in devices() for one in device.ports[0].addresses]

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
        member = other.join(GROUP)
        endpoint.join(GROUP).ready(timeout=BOUND)
        endpoint.groups[0].send(b"hello")
        message = member.recv(timeout=BOUND)
        assert message is not None
        assert (bytes(message.payload), message.source.ipv4) == (b"hello", ip_address(at))


@pytest.mark.parametrize("how", ["join", "sender"])
def test_a_port_with_ipv6_gids_alone_is_refused(how: str) -> None:
    at = "10.77.0.2"
    name = next(one.name for one in devices() if ip_address(at) in one.ports[0].addresses)
    with (
        address(f"ip addr del {at}/24 dev e2", f"ip addr add {at}/24 dev e2", at, present=False),
        PROVIDER.open() as backend,
        open_endpoint(backend, device=name) as endpoint,
    ):
        with pytest.raises(AddressNotAvailable, match="is no source for an IPv4 group"):
            getattr(endpoint, how)(GROUP)
        assert endpoint.next_event(0) is None
