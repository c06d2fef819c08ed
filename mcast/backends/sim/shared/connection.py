"""A client's end of the socket: one request at a time, and what the calls of a process sleep on."""

from __future__ import annotations

import array
import errno as E
import math
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from mcast.api import Headed, Phase, QpError, mcast_error
from mcast.backends.sim.shared import frames, posts
from mcast.backends.sim.shared.door import AT_ONCE, reach
from mcast.backends.sim.shared.memory import SharedMemory
from mcast.backends.sim.shared.rings import RingWriter
from mcast.backends.sim.shared.watch import Waits
from mcast.interrupts import Lock, interruptible, take_interrupt, uninterrupted

PATIENCE = 60.0
"""Seconds that a request waits for a server that does not answer, one that was stopped, say."""

LOOK_AGAIN = 1.0
"""The longest sleep in one go, in seconds: a signal that comes just before it is taken so much later. A
request that has waited for so long may be ended by Ctrl-C."""

MOMENT = 0.02
"""Seconds for which a call whose own time is over waits for its answer all the same. A server that runs has
as long as LOOK_AGAIN: a call that must not wait asks it, too."""

LOOK_FOR_END = 0.001
"""Seconds after which a sender looks again whether the server has ended."""

ENDED = "the fabric is served no more"

MOST_BY_SOCKET = 64
"""Single messages that follow a frame by the socket, until they go by the pipe again."""
_UNOPENED = b'[%d,"this process has no descriptor left for the answer",null]' % E.EMFILE
_MAKE_ROOM = frames.AskFor(op="make_room").model_dump_json().encode()
_READ = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)


class Gone(Exception):
    """The server has ended, or does not answer."""


class Unknown(Exception):
    """The server does not know the object of the request: it was closed there meanwhile."""


class Late(Exception):
    """The call's own time is over, and the server has not answered yet; `sent`: though it has the request."""

    sent = False


Then = Callable[[int, bytes], None]
"""What takes an answer that comes late: its kind and its text. It is called in the connection's lock."""


def drop(kind: int, text: bytes) -> None:
    """Nobody wants the answer."""


class Reply(NamedTuple):
    """An answer: its value, what followed it, and a descriptor, which is the caller's."""

    value: Any
    tail: bytes
    descriptor: int | None


class Connection:
    """Attached to the server at `path`. Raises OSError where none is, McastError if it refuses.

    May be used from several threads. A request is done or not done: one that is given up, for its server does
    not answer or by Ctrl-C, ends the connection, and with it all that the server had for this process.

    A call with a timeout of its own gives the time of its `end` (of `time.monotonic`), after which Late is
    raised. A request with an `owner`, the number of the object that it is about, is not lost by that: the
    answer is kept, and the same request, made again, takes it. Of one with `then`, that is called with the
    answer once it is here, whatever call meets it. Without either nobody wants the answer.
    """

    def __init__(self, path: Path, attach: frames.AttachTo, patience: float = PATIENCE) -> None:
        self._patience = patience
        self.pid: int = os.getpid()
        self.forked: bool = False
        """Whether this is a fork, as calls ask that have no time for a system call."""
        self.lost: bool = False
        self.why: str = ENDED
        """Whether the server has ended, and what is known of that."""
        self._buffers: list[bytearray] = []
        self._numbers = count()
        self._answers: dict[int, tuple[int, bytes, bytes, int | None]] = {}
        self._late: dict[tuple[int, bytes], int] = {}
        """Owner and text of a request -> its number, if somebody will take the answer."""
        self._depth = 0  # of calls in each other, all but the outermost made by a signal's handler
        self._unawaited: dict[int, Then] = {}
        """The numbers of requests whose answers no call waits for -> what takes the answer."""
        self._untold: deque[bytes] = deque()
        self.sent: int = 0
        self._read = 0
        """Frames that were sent, and those of them that the server is known to have read."""
        self._by_socket = 0
        """Single messages that the socket had to take since this waited for the server."""
        self._looked = 0.0
        self._hang_up = select.poll()
        self._lock = Lock()
        self._whole = uninterrupted(self._lock)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.memory: SharedMemory = SharedMemory()  # last, for nothing but `close` frees it
        try:
            try:
                reach(self._socket, path, patience)
            except BlockingIOError:
                raise TimeoutError(E.ETIMEDOUT, self.silence(), str(path)) from None
            self.fd: int = self._socket.fileno()
            self._hang_up.register(self.fd, 0)
            self._attach(attach)
        except Gone:
            self.close()
            if self.why != ENDED:
                raise TimeoutError(E.ETIMEDOUT, self.why, str(path)) from None
            raise ConnectionRefusedError(
                E.ECONNREFUSED, "the server does not let this process in", str(path)
            ) from None
        except BaseException:
            self.close()
            raise

    def _attach(self, attach: frames.AttachTo) -> None:
        """Attach, and give the server a ring."""
        ring, text = self.memory.ring, attach.model_dump_json().encode()
        enclosed = () if ring is None else (ring.fd,)
        reply = self.ask_raw("attach", text, "attach", Phase.OPEN, enclosed=enclosed)
        self.fabric: frames.AttachedTo = reply.value
        if ring is not None:
            ring.forget_descriptor()
        if reply.descriptor is not None:
            self.memory.take_page(reply.descriptor)

    @contextmanager
    def _whole_by(self, end: float | None, moment: float = MOMENT) -> Iterator[None]:
        """Hold the lock; see `enter`."""
        with uninterrupted():
            enter(self._lock, end, moment)
            try:
                yield
            finally:
                self._lock.release()

    def post(
        self, payload: bytes | memoryview | Headed, frame: Callable[[int], bytes], end: float | None = None
    ) -> bool:
        """Write into the ring, and send the frame that says where; False without a ring.

        Raises Gone; Late, and then nothing is sent.
        """
        ring = self.memory.ring
        if ring is None or os.getpid() != self.pid:
            return False
        with self._whole_by(end) if self._depth or end is not None else self._whole:
            if self.lost:
                raise Gone
            place = ring.put(payload)
            if place is None and (place := self._put_later(ring, payload, end)) is None:
                return False
            try:
                self._send_post(frame(place), end)
            except Late:
                ring.take_back(place, payload)
                raise
        return True

    def _send_post(self, frame: bytes, end: float | None) -> None:
        try:
            if self._untold or not self._send_now(frame):
                self._send(frame, (), self._wait(end))
        except Late:
            raise
        except OSError as error:
            self.lose()
            raise Gone from error
        except BaseException:  # what is in the ring is not sent
            self.lose()
            raise

    def _make_room(self, ring: RingWriter, end: float | None = None) -> None:
        """Wait until the server has taken all that was posted. Raises Gone, Late."""
        ring.allow(self._exchange("make_room", _MAKE_ROOM, end=end, owner=0)[1])

    def _put_later(
        self, ring: RingWriter, payload: bytes | memoryview | Headed, end: float | None = None
    ) -> int | None:
        """Where the bytes lie, once there is room for them; None if there never is. Raises Gone, Late."""
        self._make_room(ring, end)
        return ring.put(payload)

    def post_one(self, head: bytes, payload: bytes) -> bool:
        """The same with one message, by the pipe; False, too, while `post` has to keep the order.

        The server takes the messages of the pipe before frames that it reads later. So while it may have
        frames to read, messages go by the socket, too. Raises Gone.
        """
        memory = self.memory
        ring = memory.ring
        if ring is None or self.forked:
            return False
        with self._whole_by(None) if self._depth else self._whole:
            if self.lost or self._untold or memory.posts < 0:
                return False
            if self.sent != self._read and not self._has_read_all(ring):
                return False
            if (now := time.monotonic()) > self._looked + LOOK_FOR_END:
                self._look_for_end(now)
            place = ring.put(payload)
            if place is None and (place := self._put_later(ring, payload)) is None:
                return False
            post = posts.pack_one(head, place, len(payload))
            while True:
                try:
                    os.write(memory.posts, post)
                    return True
                except BlockingIOError:
                    self._make_room(ring)

    def _has_read_all(self, ring: RingWriter) -> bool:
        """Whether the server is known to have read all frames. Every `MOST_BY_SOCKET` times this waits until
        it has, because a message costs half as much by the pipe. Raises Gone.
        """
        self._by_socket += 1
        if self._by_socket >= MOST_BY_SOCKET:
            self._by_socket = 0
            self._make_room(ring)
        return self.sent == self._read

    def _look_for_end(self, now: float) -> None:
        """The pipe does not tell of the server's end. Raises Gone."""
        self._looked = now
        if self._hang_up.poll(0):
            self.lose()
            raise Gone

    def take_posts(self, pipe: int) -> None:
        """The pipe has come, which is this object's. The caller keeps Ctrl-C away."""
        with self._lock:
            if self.lost:
                os.close(pipe)
            else:
                self.memory.take_posts(pipe)

    def ask(
        self,
        request: frames.AnyRequest,
        call: str,
        phase: Phase,
        arguments: dict[str, object] | None = None,
        end: float | None = None,
        owner: int | None = None,
        then: Then | None = None,
    ) -> Reply:
        """Send a request and take its answer. Raises the McastError that it is, Unknown, Gone, and Late."""
        op: str = request.op
        text = request.model_dump_json().encode()
        return self.ask_raw(op, text, call, phase, arguments, end=end, owner=owner, then=then)

    def ask_raw(
        self,
        op: str,
        text: bytes,
        call: str,
        phase: Phase,
        arguments: dict[str, object] | None = None,
        tail: bytes = b"",
        enclosed: Sequence[int] = (),
        end: float | None = None,
        owner: int | None = None,
        then: Then | None = None,
    ) -> Reply:
        """The same with a request that is text already, what follows it, and descriptors that go with it."""
        self.require_process(call, phase)
        moment = MOMENT if then is None else LOOK_AGAIN  # what changes something is not refused lightly
        with self._whole_by(end, moment):
            if self.lost:
                raise Gone
            kind, value, rest, descriptor = self._exchange(op, text, tail, enclosed, end, owner, then)
            if self._untold:
                self.tell_what_waits()
        if kind != frames.REFUSED:
            return Reply(value, rest, descriptor)
        refusal: frames.RefusedCall = value
        if refusal.status is not None:
            raise QpError(refusal.status, call, phase, arguments)
        if refusal.errno == E.EBADF:
            raise Unknown
        raise mcast_error(refusal.errno, call, phase, arguments, refusal.detail)

    def _exchange(
        self,
        op: str,
        text: bytes,
        tail: bytes = b"",
        enclosed: Sequence[int] = (),
        end: float | None = None,
        owner: int | None = None,
        then: Then | None = None,
    ) -> tuple[int, Any, bytes, int | None]:
        """Each answer has the number of its request: a signal's handler may ask inside of another request,
        and then takes the answers to both.
        """
        key = None if owner is None else (owner, text)
        self._depth += 1
        try:
            late, sent, wait = None if key is None else self._late.pop(key, None), 0, self._wait(end)
            if late is not None:
                number = late
            else:
                number, sent = self._next_number(), self.sent + 1
                self._send(frames.pack(text, tail, number=number), enclosed, wait)
            try:
                # One step, because another thread that sees the server's end drops what is here.
                while (answer := self._answers.pop(number, None)) is None:
                    self._sleep(wait, select.POLLIN)
                    self._receive()
            except Late as error:
                error.sent = True
                if key is None:
                    self._unawaited[number] = then or drop
                else:
                    self._late[key] = number
                raise
            kind, found, rest, descriptor = answer
            self._read = max(self._read, sent)
            if self._depth > 1 and self._answers:
                self._wake_outer()
            return kind, parse("refused" if kind == frames.REFUSED else op, found), rest, descriptor
        except Late:
            raise
        except (OSError, ValueError) as error:
            self.lose()
            raise Gone from error
        except BaseException:  # nobody would take the answer
            self.lose()
            raise
        finally:
            self._depth -= 1

    def _wake_outer(self) -> None:
        """Ask for an answer that nobody wants.

        The call that a handler interrupted may sleep until its own answer comes, which was taken here.
        """
        number = self._next_number()
        self._unawaited[number] = drop
        if not self._send_now(frames.pack(_SEED, number=number)):
            del self._unawaited[number]

    def _next_number(self) -> int:
        """One that no request has whose answer is still to come, or lies here."""
        number = next(self._numbers) & 0xFFFF
        if self._late or self._unawaited:
            taken = {*list(self._late.values()), *list(self._unawaited)}
            while number in taken:
                number = next(self._numbers) & 0xFFFF
        return number

    def _wait(self, end: float | None) -> _Wait:
        return _Wait(self._patience, end)

    def _sleep(self, wait: _Wait, event: int) -> None:
        """Sleep until the socket is ready, or a while. Raises Late; OSError when the patience is over."""
        if wait.is_over(self._is_stopped):
            raise Late
        if not wait.until(self._socket.fileno(), event):
            self.why = self.silence()
            raise OSError(E.ETIMEDOUT, self.why)

    def _send(self, frame: bytes, enclosed: Sequence[int], wait: _Wait) -> None:
        if not self._untold and self._send_now(frame, enclosed):
            return
        while not self._flush() or not self._send_now(frame, enclosed):
            self._sleep(wait, select.POLLOUT)

    def _send_now(self, frame: bytes, enclosed: Sequence[int] = ()) -> bool:
        try:
            if enclosed:
                sent_along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", enclosed))]
                self._socket.sendmsg([frame], sent_along, AT_ONCE)
            else:
                self._socket.send(frame, AT_ONCE)
        except BlockingIOError:
            return False
        self.sent += 1
        return True

    def _flush(self) -> bool:
        """Send what had no room before; whether it has now."""
        with suppress(IndexError):  # a signal's handler, or what another thread tells, may send the last one
            while True:
                frame = self._untold.popleft()
                if not self._send_now(frame):
                    self._untold.appendleft(frame)
                    return False
        return True

    def _receive(self) -> None:
        """Take an answer, if one is there."""
        buffer = self._buffers.pop() if self._buffers else bytearray(frames.MOST_FRAME)
        descriptors = array.array("i")
        try:
            try:
                size, ancillary, _, _ = self._socket.recvmsg_into([buffer], socket.CMSG_SPACE(4), _READ)
            except BlockingIOError:
                return
            for _, _, data in ancillary:
                descriptors.frombytes(data[: len(data) - len(data) % 4])
            if not size:
                raise OSError(E.EPIPE, "the server has ended")
            kind, number, text, tail = frames.unpack(memoryview(buffer)[:size])
            if (then := self._unawaited.pop(number, None)) is not None:
                then(kind, bytes(text))
            elif kind == frames.IN_FILE:  # the kernel drops the file where this process may open no more
                found = os.pread(descriptors[0], int(bytes(text)), 0) if descriptors else _UNOPENED
                self._answers[number] = (frames.OK if descriptors else frames.REFUSED, found, b"", None)
            else:
                descriptor = descriptors.pop(0) if descriptors else None
                self._answers[number] = (kind, bytes(text), bytes(tail), descriptor)
        finally:
            self._buffers.append(buffer)
            for descriptor in descriptors:
                os.close(descriptor)

    def _server(self) -> int:
        """The server's process; 0 where that cannot be known."""
        about = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("iII", about)[0]
        return pid

    def _is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self._server()}/stat").read_bytes()  # where its name may be no text
            return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")
        except OSError:
            return False

    def silence(self, waited: float | None = None) -> str:
        """Why there is no answer, after so many seconds; None: after all of the patience."""
        pid = self._server()
        server = f"the server of the fabric, process {pid}," if pid > 0 else "the server of the fabric"
        if self._is_stopped():
            return f"{server} is stopped: let it go on by `kill -CONT {pid}`"
        return f"{server} has not answered for {self._patience if waited is None else waited:g} s"

    def tell(self, request: frames.AnyRequest) -> None:
        """Send what is not answered, now or with the next request; nothing if the server has gone."""
        if not self.lost and os.getpid() == self.pid:
            frame = frames.pack(request.model_dump_json().encode())
            try:
                if not self._flush() or not self._send_now(frame):
                    self._untold.append(frame)
            except OSError:
                self.lost = True

    def tell_later(self, request: frames.AnyRequest) -> None:
        """Send with the next request what could not be sent in time; nobody wants the answer.

        The connection's lock need not be had: another thread may hold it while the server is silent.
        """
        number = self._next_number()
        self._unawaited[number] = drop
        self._untold.append(frames.pack(request.model_dump_json().encode(), number=number))

    def tell_what_waits(self) -> None:
        """Send what had no room before, as far as there is room now."""
        with suppress(OSError):  # which the next request meets again
            self._flush()

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
        if os.getpid() != self.pid:
            return  # the socket is the parent's, too
        self.lost = True
        self._drop()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """The server ends what is left. The caller keeps Ctrl-C away."""
        with self._lock:
            self.lost = True
            self._drop()
            self._socket.close()
            self.memory.close()

    def _drop(self) -> None:
        """Nobody takes the answers that are here, unless a call of another thread takes its own just now."""
        for number in list(self._answers):
            self._drop_one(number)
        self._late.clear()

    def _drop_one(self, number: int) -> bool:
        """Whether the answer was here."""
        answer = self._answers.pop(number, None)
        if answer is not None and answer[3] is not None:
            os.close(answer[3])
        return answer is not None

    def has_answered(self, sent: int) -> bool:
        """Whether the first `sent` frames are answered: the server answers in order."""
        return self._read >= sent

    def is_late(self, owner: int, request: frames.AnyRequest) -> bool:
        """Whether the answer to the request is still to be taken."""
        return bool(self._late) and (owner, request.model_dump_json().encode()) in self._late

    def forget(self, owner: int) -> None:
        """The owner is closed: it asks no more. The caller keeps Ctrl-C away."""
        if not self._late:
            return
        with self._lock:
            for key, number in list(self._late.items()):
                if key[0] == owner:
                    self._late.pop(key, None)  # another thread may have seen the server's end
                    if not self._drop_one(number):
                        self._unawaited[number] = drop

    def after_fork(self) -> None:
        """In a child."""
        self.forked = True


_SEED = frames.AskFor(op="seed").model_dump_json().encode()
"""A request that is quickly answered, and changes nothing."""


class _Wait:
    """A wait for the server: whole at first, as a system call is, and then one that Ctrl-C ends.

    `end`: when the time of the call is over that waits. It waits that long, whatever the patience.
    """

    def __init__(self, patience: float, end: float | None) -> None:
        self._begun, self._end = time.monotonic(), end
        self._patience = patience if end is None else math.inf

    def is_over(self, is_stopped: Callable[[], bool]) -> bool:
        """Whether the call's own time is over, and the server has had a moment besides."""
        over = -1.0 if self._end is None else time.monotonic() - self._end
        return over >= LOOK_AGAIN or (over >= MOMENT and is_stopped())

    def until(self, fd: int, event: int) -> bool:
        """Sleep until the descriptor is ready, at most for LOOK_AGAIN; whether to go on waiting."""
        waited = time.monotonic() - self._begun
        if waited >= self._patience:
            return False
        poller = select.poll()
        poller.register(fd, event)
        left = min(self._patience - waited, LOOK_AGAIN)
        if self._end is not None:
            left = min(left, max(self._end - time.monotonic(), MOMENT))
        left *= 1000
        if waited < LOOK_AGAIN:
            poller.poll(left)
        else:
            with interruptible():
                poller.poll(left)
        return True


def enter(lock: Lock, end: float | None, moment: float = MOMENT) -> None:
    """Take the lock, which another thread may have for as long as the server is silent. Raises Late.

    The caller keeps Ctrl-C away, which may end the wait here: nothing is done yet.
    """
    while True:
        left = LOOK_AGAIN if end is None else max(end - time.monotonic(), 0.0) + moment
        if lock.acquire(True, min(left, LOOK_AGAIN)):
            return
        if left <= LOOK_AGAIN and end is not None:
            raise Late
        take_interrupt()


def parse(op: str, text: bytes) -> Any:
    """The value of an answer to `op`. Raises ValueError."""
    return frames.answer(op).validate_json(text)


class Beacon:
    """A descriptor that is readable while `look` says so, and somebody listens. May be used from several
    threads.
    """

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look, self._rings, self._lock = look, False, Lock()
        self._listeners = 0
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def listen(self) -> None:
        """Somebody polls the descriptor from now on, until `leave`."""
        with self._lock:
            self._listeners += 1
            self._show()

    def leave(self) -> None:
        with self._lock:
            self._listeners -= 1

    def show(self) -> None:
        """What `look` looks at has changed: system calls that are spared while nobody listens."""
        if self._listeners:
            with self._lock:
                self._show()

    def _show(self) -> None:
        # Again after each change, because a signal's handler may have changed what was looked at meanwhile.
        while (rings := self._look()) != self._rings and self._fd >= 0:
            self._rings = rings
            if rings:
                os.eventfd_write(self._fd, 1)
            else:
                os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            os.close(self._fd)
            self._fd = -1


class Sleep:
    """What calls of one backend sleep on besides descriptors: another thread's change here.

    Each sleeper has an eventfd of its own while it sleeps.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[int] = []
        self._asleep: dict[int, bool] = {}
        """The eventfds of those who sleep, and whether they ring."""
        self._pollers: dict[int, tuple[list[int], select.poll]] = {}
        """What was slept on last with each of the eventfds, and what polls that: it knows numbers alone."""
        self._closed = False
        self.waits: Waits = Waits()
        """Of sleeps before which one may look."""

    def until(self, readable: list[int], seconds: float | None) -> None:
        """Sleep until one of these is readable, until `wake`, or so many seconds; maybe less."""
        bell = self._take()
        try:
            poller = self._poller(bell, readable)
            longest = LOOK_AGAIN if seconds is None else min(seconds, LOOK_AGAIN)
            with interruptible():
                poller.poll(max(0.0, longest) * 1000)
        finally:
            self._give(bell)

    def _poller(self, bell: int, readable: list[int]) -> select.poll:
        """What polls the bell and these: the one of the last sleep there, if that was on the same."""
        known = self._pollers.get(bell)
        if known is not None and known[0] == readable:
            return known[1]
        poller = select.poll()
        for fd in (bell, *readable):
            if fd >= 0:  # else it was closed meanwhile
                poller.register(fd, select.POLLIN)
        self._pollers[bell] = readable, poller
        return poller

    def _take(self) -> int:
        with self._lock:
            bell = self._free.pop() if self._free else os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._asleep[bell] = False
        return bell

    def _give(self, bell: int) -> None:
        with self._lock:
            if self._asleep.pop(bell):
                with suppress(BlockingIOError):  # a signal's handler came before the ring
                    os.eventfd_read(bell)
            if self._closed:
                self._pollers.pop(bell, None)
                os.close(bell)
            else:
                self._free.append(bell)

    def wake(self) -> None:
        """Everybody looks again."""
        with self._lock:
            for bell, rings in list(self._asleep.items()):
                if not rings:
                    self._asleep[bell] = True
                    os.eventfd_write(bell, 1)

    def after_fork(self) -> None:
        """In a child: those who sleep are the parent's threads, which nobody else may ring."""
        self._asleep = dict.fromkeys(self._asleep, True)

    def close(self) -> None:
        """Free the descriptors, each once nobody sleeps on it."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for bell in free:
            os.close(bell)
