"""A client's end of the socket: one request at a time, and what the calls of a process sleep on."""

from __future__ import annotations

import array
import errno as E
import mmap
import os
import select
import socket
import struct
import threading
from pathlib import Path
from typing import Any, NamedTuple

from mcast.api import Phase, QpError, mcast_error
from mcast.backends.sim.shared import frames
from mcast.interrupts import Lock, interruptible, uninterrupted

PATIENCE = 60
"""Seconds that a request waits for a server that does not answer, one that was stopped, say."""

LOOK_AGAIN = 1.0
"""The longest sleep in one go, in seconds: a signal that comes just before it is taken so much later."""


class Gone(Exception):
    """The server has ended, or does not answer."""


class Unknown(Exception):
    """The server does not know the object of the request: it was closed there meanwhile."""


class Reply(NamedTuple):
    """An answer: its value, what followed it, and a descriptor, which is the caller's."""

    value: Any
    tail: bytes
    descriptor: int | None


class Connection:
    """AttachedTo to the server at `path`. Raises OSError where none is, McastError if it refuses.

    May be used from several threads.
    """

    def __init__(self, path: Path, attach: frames.AttachTo) -> None:
        self.path, self.pid = path, os.getpid()
        self.lost = False
        self._buffer = bytearray(frames.MOST_FRAME)
        self._asked = self._answered = 0
        self._answers: dict[int, tuple[int, bytes, bytes, int | None]] = {}
        self._whole = uninterrupted(Lock())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PATIENCE, 0))
            self._socket.connect(str(path))
            self.fd = self._socket.fileno()
            self.fabric: frames.AttachedTo = self.ask(attach, "attach", Phase.OPEN).value
        except Gone:
            self._socket.close()
            raise ConnectionRefusedError(
                E.ECONNREFUSED, "the server does not let this process in", str(path)
            ) from None
        except BaseException:
            self._socket.close()
            raise

    def ask(
        self,
        request: frames._Request,
        call: str,
        phase: Phase,
        arguments: dict[str, object] | None = None,
        tail: bytes = b"",
    ) -> Reply:
        """Send a request and take its answer. Raises the McastError that it is, Unknown, and Gone."""
        op: str = request.op  # type: ignore[attr-defined]  # each one has it
        return self.ask_raw(op, request.model_dump_json().encode(), call, phase, arguments, tail)

    def ask_raw(
        self,
        op: str,
        text: bytes,
        call: str,
        phase: Phase,
        arguments: dict[str, object] | None = None,
        tail: bytes = b"",
    ) -> Reply:
        """The same with a request that is text already."""
        self.require_process(call, phase)
        with self._whole:
            if self.lost:
                raise Gone
            kind, value, rest, descriptor = self._exchange(op, frames.pack(text, tail))
        if kind != frames.REFUSED:
            return Reply(value, rest, descriptor)
        refusal: frames.RefusedCall = value
        if refusal.status is not None:
            raise QpError(refusal.status, call, phase, arguments)
        if refusal.errno == E.EBADF:
            raise Unknown
        raise mcast_error(refusal.errno, call, phase, arguments, refusal.detail)

    def _exchange(self, op: str, frame: bytes) -> tuple[int, Any, bytes, int | None]:
        """The answers come in the order of the requests. A signal's handler may ask inside of another
        request, and then takes its answer, too.
        """
        try:
            self._socket.send(frame, socket.MSG_NOSIGNAL)
            self._asked += 1
            mine = self._asked
            while mine not in self._answers:
                answer = self._receive()
                self._answered += 1
                self._answers[self._answered] = answer
            kind, text, tail, descriptor = self._answers.pop(mine)
            return kind, _parse("refused" if kind == frames.REFUSED else op, text), tail, descriptor
        except (OSError, ValueError) as error:
            self.lose()
            raise Gone from error

    def _receive(self) -> tuple[int, bytes, bytes, int | None]:
        descriptors: list[int] = []
        size, ancillary, _, _ = self._socket.recvmsg_into([self._buffer], socket.CMSG_SPACE(4))
        for _, _, data in ancillary:
            descriptors += array.array("i", data[: len(data) - len(data) % 4])
        descriptor = descriptors[0] if descriptors else None
        if not size:
            raise OSError(E.EPIPE, "the server has ended")
        kind, text, tail = frames.unpack(memoryview(self._buffer)[:size])
        if kind != frames.IN_FILE or descriptor is None:
            return kind, bytes(text), bytes(tail), descriptor
        try:
            with mmap.mmap(descriptor, int(bytes(text)), access=mmap.ACCESS_READ) as mapped:
                return frames.OK, bytes(mapped), b"", None
        finally:
            os.close(descriptor)

    def tell(self, request: frames._Request) -> None:
        """Send what is not answered; nothing if the server has gone."""
        if not self.lost and os.getpid() == self.pid:
            try:
                self._socket.send(frames.pack(request.model_dump_json().encode()), socket.MSG_NOSIGNAL)
            except OSError:
                self.lost = True

    def require_process(self, call: str, phase: Phase) -> None:
        """Raise EBADF in a fork: both would read each other's answers."""
        if os.getpid() != self.pid:
            detail = (
                f"opened in process {self.pid}, used in its fork {os.getpid()}: open the backend in the "
                "process that uses it (multiprocessing: start method 'spawn')"
            )
            raise mcast_error(E.EBADF, call, phase, None, detail)

    def lose(self) -> None:
        """Nothing can be asked any more, and what polls the socket sees that."""
        self.lost = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """The server ends what is left."""
        with self._whole:
            self.lost = True
            self._socket.close()


def _parse(op: str, text: bytes) -> Any:
    return frames.ANSWERS.get(op, frames.NOTHING).validate_json(text)


class Sleep:
    """What calls of one backend sleep on besides descriptors: another thread's change here.

    Each sleeper has an eventfd of its own while it sleeps.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free: list[int] = []
        self._asleep: set[int] = set()

    def until(self, readable: list[int], seconds: float | None) -> None:
        """Sleep until one of these is readable, until `wake`, or so many seconds; maybe less."""
        bell = self._take()
        try:
            poller = select.poll()
            poller.register(bell, select.POLLIN)
            for fd in readable:
                if fd >= 0:  # else it was closed meanwhile
                    poller.register(fd, select.POLLIN)
            longest = LOOK_AGAIN if seconds is None else min(seconds, LOOK_AGAIN)
            with interruptible():
                poller.poll(max(0.0, longest) * 1000)
        finally:
            self._give(bell)

    def _take(self) -> int:
        with self._lock:
            bell = self._free.pop() if self._free else os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._asleep.add(bell)
        return bell

    def _give(self, bell: int) -> None:
        with self._lock:
            self._asleep.discard(bell)
            try:
                os.eventfd_read(bell)
            except BlockingIOError:
                pass
            self._free.append(bell)

    def wake(self) -> None:
        """Everybody looks again."""
        with self._lock:
            for bell in self._asleep:
                os.eventfd_write(bell, 1)

    def close(self) -> None:
        """Free what nobody sleeps on."""
        with self._lock:
            free, self._free = self._free, []
        for bell in free:
            os.close(bell)
