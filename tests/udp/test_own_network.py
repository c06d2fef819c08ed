"""Tests beside each other do not hear each other; where they share a network, they take turns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mcast import open_endpoint
from mcast.backends.net.namespace import namespace_lock
from mcast.conformance.helpers import BOUND

from ..own_network import needs_namespaces, private_network
from ..waiting import until

GROUP = "239.1.1.1"
WAITS = (
    "from mcast.backends.net.namespace import namespace_lock\n"
    "print('asks', flush=True)\n"
    "with namespace_lock():\n"
    "    print('has it', flush=True)\n"
)


@needs_namespaces
def test_another_network_is_not_heard() -> None:
    """One group on one address, in two network namespaces."""
    with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.join(GROUP) as group:
        with private_network(), open_endpoint("udp", bind="127.0.0.1") as stranger:
            stranger.sender(GROUP).send(b"from elsewhere")
        group.send(b"from here")
        message = group.recv(BOUND)
        assert message is not None
        assert bytes(message.payload) == b"from here"


@needs_namespaces
def test_a_shared_network_has_one_user_at_a_time() -> None:
    with private_network():  # of which no other test holds the lock
        with namespace_lock():
            other = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True)
            assert other.stdout is not None
            assert other.stdout.readline() == "asks\n"
            until(lambda: is_blocked(other.pid))
        assert other.communicate(timeout=BOUND)[0] == "has it\n"


def is_blocked(pid: int) -> bool:
    """Return True if the process waits for a lock."""
    found = Path("/proc/locks").read_text()
    return re.search(rf"-> FLOCK .* {pid} ", found) is not None
