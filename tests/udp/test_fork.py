"""A fork shares its parent's sockets and epoll objects: it uses none of them, and closes without harm."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from mcast import Broken, open_backend, open_endpoint
from mcast.backends.udp.watcher import NAME

GROUP = "239.1.1.1"
BOUND = 30

pytestmark = pytest.mark.usefixtures("own_network")


def in_a_fork(act: Callable[[], None]) -> int:
    """Return 0 if `act` returned in a child."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork_closes_without_harm() -> None:
    """The parent's thread, memberships and sleeping receives are as before."""
    with (
        open_backend("udp") as backend,
        open_endpoint(backend, "127.0.0.1") as endpoint,
        endpoint.join(GROUP) as group,
    ):

        def close_all() -> None:
            for call in (lambda: group.send(b"x"), lambda: group.recv(0), backend.devices):
                with pytest.raises(Broken, match=f"belongs to process {os.getppid()}"):
                    call()
            endpoint.close()
            backend.close()

        assert in_a_fork(close_all) == 0
        assert NAME in [thread.name for thread in threading.enumerate()]
        used = time.process_time()
        assert group.recv(1.0) is None
        assert time.process_time() - used < 0.5, "a receive polls a descriptor that stays readable"
        with open_endpoint(backend, "127.0.0.1") as other, other.sender(GROUP) as sender:
            sender.send(b"still here")
            message = group.recv(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"still here"


def test_fork_opens_another_backend() -> None:
    """What the child opens itself works beside the parent's."""

    def exchange() -> None:
        with open_endpoint("udp", "127.0.0.1") as own, own.join(GROUP) as group:
            with open_endpoint("udp", "127.0.0.1") as other, other.sender(GROUP) as sender:
                sender.send(b"from the child")
            assert group.recv(BOUND) is not None

    with open_endpoint("udp", "127.0.0.1") as endpoint, endpoint.join(GROUP) as group:
        assert in_a_fork(exchange) == 0
        assert group.recv(BOUND) is not None
