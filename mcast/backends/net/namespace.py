"""Network namespaces for threads of this process, and the lock of those who have to share one."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_CURRENT = "/proc/thread-self/ns/net"


class Namespace:
    """A new network namespace, in which no interface is up.

    It lives until `close`, and as long as a thread or a socket is in it.

    Raises PermissionError without CAP_SYS_ADMIN.
    """

    def __init__(self) -> None:
        before = _open()
        try:
            _call("unshare", _CLONE_NEWNET)
            self._own = _open()
            _call("setns", before, _CLONE_NEWNET)
        finally:
            os.close(before)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread into the namespace for as long as the `with` lasts.

        Threads and processes that it starts meanwhile are in it, too, and stay.
        """
        before = _open()
        try:
            _call("setns", self._own, _CLONE_NEWNET)
            try:
                yield
            finally:
                _call("setns", before, _CLONE_NEWNET)
        finally:
            os.close(before)

    def close(self) -> None:
        """Give the namespace up."""
        os.close(self._own)


@contextmanager
def namespace_lock() -> Iterator[None]:
    """Wait until nobody else who asks for this is in the calling thread's network namespace.

    The lock is one on the namespace itself, so it holds for all users and all processes.
    """
    here = _open()
    try:
        fcntl.flock(here, fcntl.LOCK_EX)
        yield
    finally:
        os.close(here)


def _open() -> int:
    return os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
