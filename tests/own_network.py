"""A network for a test alone: what it sends nobody else hears, and it hears nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mcast.backends.net import hostnet
from mcast.backends.net.namespace import Namespace, namespace_lock


def _can_make_namespaces() -> bool:
    try:
        Namespace().close()
    except PermissionError:
        return False
    return True


CAN_MAKE_NAMESPACES = _can_make_namespaces()
needs_namespaces = pytest.mark.skipif(
    not CAN_MAKE_NAMESPACES, reason="making network namespaces takes CAP_SYS_ADMIN: run as root"
)


@contextmanager
def private_network() -> Iterator[None]:
    """Move the calling thread into a network namespace with a loopback interface alone.

    What the thread starts is there, too. Raises PermissionError where no namespace may be made.
    """
    made = Namespace()
    try:
        with made.entered():
            hostnet.run("ip", "link", "set", "lo", "up")
            yield
    finally:
        made.close()


@pytest.fixture
def own_network() -> Iterator[None]:
    """Give the test a network namespace; where none may be made, the host's, one test at a time."""
    with private_network() if CAN_MAKE_NAMESPACES else namespace_lock():
        yield
