"""Calls that find no file descriptor left, and lists that change while they are sent, break nothing."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address
from time import monotonic

import pytest

import mcast
from mcast.api import BackendUnavailable, McastError
from mcast.conformance.helpers import BOUND

from ..own_network import needs_namespaces
from ..waiting import descriptors, until
from .test_calls import Pair
from .test_calls import pair as pair
from .test_offloads import GROUP

_SO_RCVBUFFORCE = 33


@contextmanager
def no_descriptors(but: int = 0) -> Iterator[None]:
    """Take all file descriptors that this process may have, but so many."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, limits[0]), limits[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(but):
            os.close(taken.pop())
        yield
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("left", range(4))
def test_opening_without_descriptors(pair: Pair, left: int) -> None:
    """Opening takes four, and with fewer leaves none open."""
    before = descriptors()
    with no_descriptors(but=left), pytest.raises(BackendUnavailable, match="ulimit -n"):
        mcast.open_backend("udp")
    assert descriptors() <= before
    with no_descriptors(but=4):
        mcast.open_backend("udp").close()


def test_groups_without_descriptors(pair: Pair) -> None:
    """The table says what it could not read."""
    with no_descriptors():
        groups = pair[0]._owner.channel.backend.groups()
    assert "joined: [Errno 24]" in groups.unseen[0]


def test_event_channel_without_descriptors(pair: Pair) -> None:
    """The call is refused, and the backend goes on."""
    backend = pair[0]._owner.channel.backend
    with no_descriptors(), pytest.raises(McastError, match="ulimit -n") as caught:
        backend.event_channel()
    assert caught.value.errno == errno.EMFILE
    backend.event_channel().close()


def test_resolve_without_descriptors(pair: Pair) -> None:
    channel = pair[0]._owner.channel
    cm_id = channel.create_id()
    with no_descriptors(), pytest.raises(McastError, match="ulimit -n"):
        cm_id.resolve_addr(IPv4Address(GROUP))
    assert channel.backend.devices()


def test_overflow_without_descriptors(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """The overflow is counted at once, and the warning comes when a descriptor is free again."""
    qp, to = pair
    for one in qp.path.groups.sockets:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    with no_descriptors():
        for _ in range(64):
            qp.send_one(to, b"x" * 4000)
        assert qp.counters.dropped_no_receive
        assert not caplog.records
    assert qp.counters.dropped_no_receive
    assert "buffer of its socket was full" in caplog.text


@needs_namespaces
def test_port_event_without_descriptors(pair: Pair) -> None:
    """What the kernel reports of an interface is read later."""
    qp, _ = pair
    backend = qp._owner.channel.backend
    host = backend.network.hosts
    change = subprocess.Popen(["sh", "-c", "read x; ip addr add 10.0.0.1/32 dev lo"], stdin=subprocess.PIPE)
    assert change.stdin is not None
    with no_descriptors():
        change.stdin.write(b"\n")
        change.stdin.flush()
        assert change.wait(BOUND) == 0
        until(lambda: bool(host._unread))
        backend.devices()
    change.stdin.close()
    assert IPv4Address("10.0.0.1") in [
        one for device in backend.devices() for one in device.ports[0].addresses
    ]


@pytest.mark.parametrize("imm", [None, 7])
def test_list_that_shrinks_while_it_is_sent(pair: Pair, imm: int | None) -> None:
    """What was in the list when the call began, or a part of it, is sent; the backend is not broken."""
    qp, to = pair
    payloads, over = [b"x" * 1000] * 500, threading.Event()

    def change() -> None:
        while not over.is_set():
            del payloads[5:]
            over.wait(1e-5)
            payloads.extend([b"x" * 1000] * 495)
            over.wait(1e-5)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        end = monotonic() + 0.5
        while monotonic() < end:
            qp.send(to, payloads, imm)
    finally:
        over.set()
        thread.join(BOUND)
