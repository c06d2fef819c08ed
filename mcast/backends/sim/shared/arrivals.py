"""The server's side of what a client's queue pair receives: headers, which go out as soon as there is room.

Messages are not asked for. Their headers go into a socket, whose other end the client polls and reads; they
wait in the queue of the queue pair while that socket is full. A receive stays taken until the client gives it
back, by a count in its own ring, which is looked at when a message arrives.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mcast.backends.model.qp import Burst, Header, Qp
from mcast.backends.sim.clock import Clock
from mcast.backends.sim.shared import frames, posts
from mcast.backends.sim.shared.door import AT_ONCE
from mcast.backends.sim.shared.rings import MASK, Page, RingPayloads
from mcast.backends.sim.shared.watch import ServerWatch

BUFFER = 64 << 10
"""Bytes that the kernel keeps of the headers that a client does not read; it counts them generously."""


class Pump:
    """Lets arrivals tell of what has come: at the end of a turn of the server's loop, at once for others.

    Called with the fabric's lock.
    """

    def __init__(self, watch: ServerWatch, page: Page) -> None:
        self.watch: ServerWatch = watch
        self.page: Page = page
        self.turn: int = 0
        self._due: dict[Arrivals, None] = {}
        self._in_turn = False

    def begin(self) -> None:
        """A turn of the loop: more may come."""
        self._in_turn = True
        self.turn += 1

    def end(self) -> None:
        """Tell of what has come."""
        self._in_turn = False
        self.flush()

    def note(self, arrivals: Arrivals) -> None:
        """Something has come there."""
        self._due[arrivals] = None
        if not self._in_turn:
            self.flush()

    def flush(self) -> None:
        due, self._due = self._due, {}
        for arrivals in due:
            arrivals.tell()


class _Out(NamedTuple):
    """Messages that the client was told of, and has not given back; `end` numbers the one after them."""

    payloads: Sequence[bytes]
    start: int
    stop: int
    end: int


class Receives:
    """Which receives of a queue pair hold messages that its client was told of and has not given back.

    `counted` reads the client's count of those that it gave back; None: the client says so.
    """

    def __init__(self, core: Qp, counted: Callable[[], int] | None) -> None:
        self._core, self._counted = core, counted
        self._given = 0 if counted is None else counted()
        self.told: int = 0
        self._returned = 0
        self._out: deque[_Out] = deque()

    def tell(self, payloads: Sequence[bytes], start: int, stop: int) -> None:
        """The client is told of messages start..stop of a send."""
        self.told += stop - start
        self._out.append(_Out(payloads, start, stop, self.told))

    def settle(self) -> None:
        """Post the receives again that the client counts as given back."""
        if self._counted is not None and (now := self._counted()) != self._given:
            count, self._given = (now - self._given) & MASK, now
            self.give_back(count)

    def give_back(self, count: int) -> None:
        """So many; never more than the client was told of."""
        count = min(count, self.told - self._returned)
        self._returned += count
        self._core.free += count
        while self._out and self._out[0].end <= self._returned:
            self._out.popleft()

    def untell(self, first: int) -> None:
        """The client has heard of no message from that number on: their receives are posted again."""
        while self._out and self._out[-1].end > first:
            _, start, stop, _ = self._out.pop()
            self.told -= stop - start
            self._core.free += stop - start

    def restart(self) -> None:
        """All receives were posted anew: nothing that the client was told of holds one any more."""
        if self._counted is not None:
            self._given = self._counted()
        self._returned = self.told
        self._out.clear()

    def payloads(self, first: int, count: int) -> list[bytes]:
        """Messages that the client was told of, by their number. Raises ValueError for others."""
        found: list[bytes] = []
        for payloads, start, stop, end in self._out:
            begin = end - (stop - start)
            if begin <= first < end:
                start += first - begin
                found += payloads[start : min(stop, start + count - len(found))]
                first = end
            if len(found) == count:
                return found
        raise ValueError(f"no {count} messages from number {first} are out")

    def ring(self, number: int) -> int | None:
        """The descriptor of a ring that holds one of the messages; None for any other."""
        for payloads, *_ in self._out:
            outbox = payloads.outbox if isinstance(payloads, RingPayloads) else None
            if outbox is not None and outbox.number == number:
                return outbox.fd
        return None

    def forget(self) -> None:
        """The client asks for none of them any more."""
        self._out.clear()


class Arrivals:
    """What one queue pair has received; `counted` as in `Receives`."""

    theirs: socket.socket

    def __init__(self, core: Qp, pump: Pump, clock: Clock, counted: Callable[[], int] | None) -> None:
        self._pump, self._clock = pump, clock
        self.core: Qp = core
        self.receives: Receives = Receives(core, counted)
        self._unsent: bytes | None = None
        self._look_told = False
        self._waits = False
        self._header: tuple[Header | None, bytes] = None, b""
        """Of the last message, and what the client is told of it."""
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.setblocking(False)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        core.on_readable = self._come
        if counted is not None:
            core.refill = self.receives.settle

    def _come(self) -> None:
        if self.core.error is not None:
            self._pump.page.change()  # its posts would be lost
        self._pump.note(self)

    # --- telling -----------------------------------------------------------------------------

    def tell(self) -> None:
        """Send the headers of what is there, as far as the client's socket takes them."""
        core = self.core
        while self._ours.fileno() >= 0:
            if self._unsent is None and (found := core.take(posts.MOST_TOLD)):
                self._unsent = self._frame(found)
            if self._unsent is None and not self._look_told and (core.news or core.error is not None):
                self._unsent, self._look_told = posts.LOOK, True
            if self._unsent is None:
                break
            try:
                self._ours.send(self._unsent, AT_ONCE)
            except BlockingIOError:
                break
            except OSError:  # it has shut its end down, to its own harm
                self._unsent = None
                break
            self._unsent = None
            if not core.readable and not core.news:
                break
        if self._waits or self._unsent is not None:
            self._wait(self._unsent is not None)

    def _frame(self, found: list[tuple[Burst, int, int]]) -> bytes:
        first, told = self.receives.told, []
        for burst, start, stop in found:
            payloads, header = burst.payloads, burst.header
            ring = place = 0
            if isinstance(payloads, RingPayloads):
                lengths: Sequence[int] = payloads.lengths[start:stop]
                if payloads.outbox is not None:
                    ring, place = payloads.outbox.number, payloads.place_of(start)
            else:
                lengths = list(map(len, payloads[start:stop]))
            self.receives.tell(payloads, start, stop)
            last, text = self._header
            if header is not last:
                text = frames.pack_header(header.source, header.group, header.src_qp, header.slid)
                self._header = header, text
            told.append(posts.Told(text, ring, place, burst.at, burst.imm, self.core.is_own(header), lengths))
        return posts.pack_told(first, told)

    def _wait(self, waits: bool) -> None:
        """Go on when the client has read something."""
        if waits != self._waits and self._ours.fileno() >= 0:
            self._waits = waits
            if waits:
                self._pump.watch.add(self._ours.fileno(), self.go_on, select.EPOLLOUT)
            else:
                self._pump.watch.remove(self._ours.fileno())

    def forget_unsent(self) -> None:
        """What the client's socket had no room for goes with what waits behind that."""
        if self._unsent is not None and self._unsent != posts.LOOK:
            told = self.receives.told
            self.receives.untell(posts.unpack_told(self._unsent)[0])
            self.core.dropped_reset += told - self.receives.told
            self._unsent = None

    def go_on(self) -> None:
        """The client's socket has room again."""
        with self._clock:
            self.tell()

    def looked(self) -> None:
        """The client has asked for what it was told to look at."""
        self._look_told = False
        self._pump.note(self)

    def close(self) -> None:
        self._wait(False)
        self.core.on_readable = self.core.refill = None
        self._ours.close()
        self.theirs.close()
        self.receives.forget()
