"""A client's request socket: one request at a time, each answered within the timeout.

Threads take turns by a lock. A server that has not answered when the time is over, because it was stopped,
say, counts as one that has ended: the connection is lost, and everything that was opened by it. So no call
waits longer than the timeout.

An exception of a signal's handler may end a request at any moment:

- While it waits for its answer, the connection stays usable. The request may have been carried out, and its
  answer is skipped later: nobody waits for its number any more.
- Between two steps that belong together (bytes that were sent, and are noted as sent), the guard's `amid`
  stays set. The next call finds it, and the connection is lost, as by the server's end.

A descriptor that comes with an answer has an owner at once: one call into C stores what `recvmsg` returns,
and another one the file or socket that is made of it. The connection keeps these until `release_file`, and
closes what is left.

A request that a handler or a finalizer makes amid another one of its thread is refused. What needs no answer
is queued there, and sent by the next request.
"""

from __future__ import annotations

import array
import errno as E
import os
import select
import socket
import stat
import time
from collections import deque
from contextlib import suppress
from functools import partial
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from mcast.api import Guard, Phase, QpError, ReentrantCall, mcast_error
from mcast.backends.sim.served import frames
from mcast.backends.sim.served.listener import connect, peer_of

DEFAULT_TIMEOUT = 5.0
"""Seconds that a request waits for its answer."""

ENDED = "the server of the fabric has ended"
_BROKEN = "a call was interrupted in the middle of a request to the fabric's server"
_AMID = "this thread is in the middle of another call of this backend: call it after that"

_ANCILLARY_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)


class ServerGone(Exception):
    """The server has ended, or has not answered in time."""


class UnknownObject(Exception):
    """The server does not know the object of the request, because another thread has closed it meanwhile."""


class Reply(NamedTuple):
    """An answer: its value, its payloads, and the socket or FileIO that came with it, or None."""

    value: Any
    tail: bytes
    file: Any


class Connection:
    """Attached to the server at `path`. Raises OSError where none is, McastError if it refuses."""

    def __init__(self, path: Path, host: object, bind: object, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.timeout: float = timeout
        self.pid: int = os.getpid()
        self.lost: bool = False
        self.why: str = ENDED
        self._guard = Guard("connection")
        self.lock: Any = self._guard.lock
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._reader = frames.FrameReader(self._receive, frames.MAX_ANSWER)
        self._out = bytearray()
        self._queued: deque[bytes] = deque()
        self._numbers = count(1)
        self._received: deque[Any] = deque()
        """Results of `recvmsg`, until their descriptors are in `_files`."""
        self._files: deque[Any] = deque()
        self._held_files: dict[Any, None] = {}
        """Files of answers, until they are handed over."""
        try:
            try:
                connect(self._socket, path, timeout)
                self.fabric: frames.Attached = self.ask("attach", (frames.VERSION, host, bind)).value
            except BlockingIOError:
                text = f"the server of the fabric does not accept connections: {os.strerror(E.EAGAIN)}"
                raise TimeoutError(E.ETIMEDOUT, text, str(path)) from None
            except ServerGone:
                if self.why == ENDED:
                    text = "the server closed the connection before it answered"
                    raise ConnectionRefusedError(E.ECONNREFUSED, text, str(path)) from None
                raise TimeoutError(E.ETIMEDOUT, self.why, str(path)) from None
        except BaseException:
            self.close()
            raise

    # --- requests ----------------------------------------------------------------------------

    def ask(
        self,
        name: str,
        arguments: tuple[Any, ...] = (),
        call: str = "",
        about: dict[str, object] | None = None,
        tail: bytes = b"",
    ) -> Reply:
        """Send a request and return its answer. Raises the McastError that it is, Unknown, and Gone."""
        op, call = frames.OPERATIONS[name], call or name
        self.require_process(call, op.phase)
        if self.in_request:
            raise ReentrantCall(_AMID)
        number = next(self._numbers)
        request = frames.encode_request(name, number, arguments, tail)
        if len(request) > frames.MAX_REQUEST:
            detail = f"one call takes {frames.MAX_REQUEST >> 20} MiB at most on a served fabric: send less"
            raise mcast_error(E.ENOMEM, call, op.phase, about, detail)
        with self.lock:
            frame, file = self._exchange(number, request)
        self.flush()
        if frame.kind == frames.ANSWER:
            return Reply(frames.adapter(op.answer).validate_json(frame.text), frame.tail, file)
        refusal: frames.Refusal = frames.adapter(frames.Refusal).validate_json(frame.text)
        if refusal.status is not None:
            raise QpError(refusal.status, call, op.phase, about)
        if refusal.errno == E.EBADF:
            raise UnknownObject
        raise mcast_error(refusal.errno, call, op.phase, about, refusal.detail)

    @property
    def in_request(self) -> bool:
        """Return True in a handler or finalizer amid a request of this thread."""
        found: bool = self.lock._is_owned()
        return found

    def _exchange(self, number: int, request: bytes) -> tuple[frames.Frame, Any]:
        end = time.monotonic() + self.timeout
        while True:
            frame = self._step(request, reads=True)
            request = b""
            if frame is None:
                self._wait(end - time.monotonic())
                continue
            file = self._files[0] if self._files else None
            if file is not None:
                self._held_files[file] = None
                self._files.popleft()
            if frame.number in (number, 0):  # 0: a refusal to attach, whatever is asked
                return frame, file
            if file is not None:  # of an answer that nobody waits for any more
                file.close()
                self.release_file(file)

    def _wait(self, left: float) -> None:
        """Sleep until the next step can do something. Raises Gone when the time is over."""
        if (fd := self._socket.fileno()) < 0:
            raise ServerGone
        poller = select.poll()
        poller.register(fd, select.POLLIN | (select.POLLOUT if self._out else 0))
        if left <= 0 or not poller.poll(left * 1000):
            self.mark_lost(self._timeout_reason())
            raise ServerGone

    def _step(self, request: bytes, reads: bool) -> frames.Frame | None:
        """Send what the socket takes, and read a frame if it is there. Raises Gone."""
        if self._guard.amid:
            self.mark_lost(_BROKEN)
        if self.lost:
            raise ServerGone
        self._guard.amid = "a request"
        while self._queued:
            self._out += self._queued.popleft()
        self._out += request
        try:
            self._send()
            frame = self._reader.read() if reads else None
        except (OSError, EOFError, frames.FrameError) as error:
            if isinstance(error, OSError) and error.errno is None:  # of a handler
                raise
            self.mark_lost(self.why)
            raise ServerGone from error
        self._guard.amid = ""
        return frame

    def _send(self) -> None:
        while self._out:
            try:
                sent = self._socket.send(self._out, socket.MSG_NOSIGNAL)
            except (BlockingIOError, BrokenPipeError):  # after the latter a refusal may be there to read
                return
            del self._out[:sent]

    def _receive(self, size: int) -> bytes:
        self._received.extend(
            map(self._socket.recvmsg, (size,), (_ANCILLARY_BYTES,), (socket.MSG_CMSG_CLOEXEC,))
        )
        data: bytes = self._received[-1][0]
        for fd in self._descriptors():
            self._files.extend(map(_owner_of(fd), (fd,)))
        self._received.clear()
        return data

    def _descriptors(self) -> list[int]:
        """Return the descriptors of `_received`."""
        fds: list[int] = []
        for _, ancillary, _, _ in self._received:
            for level, kind, found in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += array.array("i", found[: len(found) - len(found) % 4])
        return fds

    def release_file(self, file: Any) -> None:
        """The file of an answer has another owner, or is closed."""
        self._held_files.pop(file, None)

    def tell(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Send a request that has no answer, now or with the next one; nothing if the server has ended."""
        if not self.lost and os.getpid() == self.pid:
            self._queued.append(frames.encode_request(name, 0, arguments))
            self.flush()

    def flush(self) -> None:
        """Send what was queued and what has found no room, but amid a request, which does that itself."""
        if (self._queued or self._out) and not self.lost and not self.in_request:
            with self.lock, suppress(ServerGone):
                self._step(b"", reads=False)

    # --- the end -----------------------------------------------------------------------------

    @property
    def is_broken(self) -> bool:
        """Return True if an exception in the middle of a request has ended the connection."""
        return self.lost and self.why == _BROKEN

    def require_process(self, call: str, phase: Phase) -> None:
        """Raise EBADF in a fork: both processes would read each other's answers."""
        if os.getpid() != self.pid:
            detail = (
                f"opened in process {self.pid}, used in its fork {os.getpid()}: open the backend in the "
                "process that uses it (multiprocessing: start method 'spawn')"
            )
            raise mcast_error(E.EBADF, call, phase, None, detail)

    def _timeout_reason(self) -> str:
        """Return why there is no answer."""
        pid = peer_of(self._socket)
        server = f"the server of the fabric, process {pid}," if pid > 0 else "the server of the fabric"
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()  # in which its name may be no text
            if stat.rpartition(b")")[2].split()[0] in (b"T", b"t"):
                return f"{server} is stopped: resume it by `kill -CONT {pid}`"
        except OSError:
            pass
        return f"{server} has not answered for {self.timeout:g} s"

    def mark_lost(self, why: str) -> None:
        """Nothing can be asked any more; the server ends what is left."""
        if os.getpid() != self.pid:
            return  # the socket is the parent's, too
        if not self.lost:
            self.why = why
            self.lost = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def closed(self) -> bool:
        """Return True after `close`."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """Free the descriptors."""
        self.mark_lost(self.why)
        self.lost = True
        owned = {file.fileno() for file in self._files}
        for fd in self._descriptors():
            if fd not in owned:  # an exception came between
                self._files.extend(map(_owner_of(fd), (fd,)))
        self._received.clear()
        for file in (*self._files, *self._held_files):
            file.close()
        self._files.clear()
        self._held_files.clear()
        self._socket.close()


def _owner_of(fd: int) -> Any:
    """Return the type, implemented in C, that owns a descriptor: a socket, or the file of a pipe."""
    if stat.S_ISSOCK(os.fstat(fd).st_mode):
        return partial(socket.SocketType, socket.AF_UNIX, socket.SOCK_STREAM, 0)
    return FileIO
