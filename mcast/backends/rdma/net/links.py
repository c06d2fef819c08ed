"""Notices changes of network interfaces: the only way to learn of an Ethernet port's new MTU."""

from __future__ import annotations

import atexit
import os
import socket
from contextlib import suppress

from mcast.api import Guard

_RTMGRP_LINK = 1


class Links:
    """Listens to the kernel (rtnetlink) without a thread: `changes` reads the messages that have come."""

    def __init__(self) -> None:
        self._lock = Guard("listener to network interfaces").lock
        self._socket: socket.socket | None = None
        self._pid = 0
        self._changes = 0

    def changes(self) -> int:
        """A number that differs after a change."""
        with self._lock:
            before = self._changes
            self._changes = before + 1  # an exception in between may have read what nobody sees then
            if not self._read():
                self._changes = before
            return self._changes

    def _read(self) -> bool:
        """Read what has come; True if there was a change, or may have been."""
        listener = self._socket
        try:
            if listener is None or self._pid != os.getpid():  # a fork reads from one of its own
                self._listen()
                return True
            listener.recv(65536)
            self._drain(listener)
        except BlockingIOError:
            return False
        except OSError:  # it cannot be opened, or messages were lost
            pass
        return True

    def _drain(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            while listener.recv(65536):
                pass

    def _listen(self) -> None:
        self.close()
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        made.setblocking(False)
        made.bind((0, _RTMGRP_LINK))
        self._socket, self._pid = made, os.getpid()

    def close(self) -> None:
        """Stop listening, until the next call of `changes`."""
        listener, self._socket = self._socket, None
        if listener is not None:
            listener.close()


links: Links = Links()
atexit.register(links.close)  # else Python would warn that nobody has closed it
