"""What a client polls: readable while an event or a message waits for it, and once the server has ended."""

from __future__ import annotations

import socket
from collections.abc import Callable

DESCRIPTORS = 2
"""Of a flag, in the server."""


class Flag:
    """The two ends of a pair of sockets; a byte lies in the client's while `look` says so.

    Not an eventfd: its O_NONBLOCK is the same for all who hold it, so a client that takes it away could make
    the server wait. Here each call says for itself that it does not wait, and whatever a client does to its
    end harms only itself.
    """

    theirs: socket.socket

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._shown = False
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.show()

    def show(self) -> None:
        """Look, and make the client's end readable or not."""
        readable = self._look()
        if readable != self._shown and self.theirs.fileno() >= 0:
            self._shown = readable
            try:
                if readable:
                    self._ours.send(b"\1", socket.MSG_DONTWAIT)
                else:
                    self.theirs.recv(1, socket.MSG_DONTWAIT)
            except OSError:  # the client has read it, or shut it down
                pass

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()
