"""Whether a network interface has changed, which is the only way to notice an Ethernet port's new MTU."""

from __future__ import annotations

import os
import socket

from mcast.interrupts import Lock

_RTMGRP_LINK = 1


class Links:
    """Listens to the kernel (rtnetlink) without a thread: `changes` reads the messages that have come."""

    def __init__(self) -> None:
        self._lock = Lock(None)
        self._fd = -1  # no object, which would warn at the process's end that nobody has closed it
        self._pid = 0
        self._changes = 0

    def changes(self) -> int:
        """A number that differs after a change."""
        with self._lock:
            try:
                self._read()
            except OSError:  # it cannot be opened, or messages were lost
                self._changes += 1
            return self._changes

    def _read(self) -> None:
        if self._pid != os.getpid():  # a fork reads from one of its own
            self._listen()
            self._changes += 1
        try:
            while os.read(self._fd, 65536):
                self._changes += 1
        except BlockingIOError:
            pass

    def _listen(self) -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as made:
            made.setblocking(False)
            made.bind((0, _RTMGRP_LINK))
            inherited, self._fd, self._pid = self._fd, made.detach(), os.getpid()
        if inherited >= 0:
            os.close(inherited)


links: Links = Links()
