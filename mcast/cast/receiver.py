"""The receiver's end of the protocol."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

from typing_extensions import Buffer

from mcast.cast.packets import (
    EVERYBODY,
    UNKNOWN_SIZE,
    WINDOW,
    Ask,
    Close,
    Data,
    Done,
    End,
    Hello,
    Join,
    Packet,
    Reason,
    Report,
    Verdict,
    Welcome,
    encode,
    heard,
    printable,
)

_OFFERS, _OFFERS_OF_ONE = 64, 4
"""How many transfers that have not begun are remembered, and how many of one address.

So one address cannot push out the transfers of others. The first transfer that begins is received.
"""

_FAREWELLS = 3

_LINGER = 2.0
"""How many seconds a receiver that is done still answers a sender that has not heard so."""

_STALL, _PAUSE = 60.0, 3600.0
"""How many seconds a sender may owe pieces that it has announced, and how many its source may give nothing.

After that the receiver gives the sender up, whatever else it sends.
"""

_BUSY = "the receiver takes another file"


_ALONE = 3
"""How often a receiver asks the sender alone to take part. Then it asks, and answers, through the group:
not every network brings a unicast message from one port of a host to another (K-FABRIC-6)."""


class _Offer(NamedTuple):
    """A transfer that has not begun, and the address that offers it.

    way    how its sender can be answered alone; None: the group is answered
    heard  how often it was offered
    """

    hello: Hello
    address: str
    way: object
    heard: int


class FileReceiver:
    """The receiver's end, without I/O.

    Give it received messages with `hears`, and fetch the file's bytes with `take`. When it is `storable` and
    all bytes are in their place call `stored`; call `fail` at any time. `messages(now)` returns the messages
    to send now: call it after each received message, and by `due` at the latest (None: nothing is due), until
    `over`.

    number   this receiver's number, from `number_at`
    name     what the sender shows of this receiver
    room     how many unread messages the receiver can hold
    largest  the largest message that it can receive, in bytes
    silence  how many seconds the sender may be silent before it is given up
    """

    def __init__(self, number: int, name: str, room: int, largest: int, silence: float) -> None:
        self.rejected: Counter[str] = Counter[str]()
        self.pieces: int = 0
        self.bytes: int = 0
        self.doubles: int = 0
        self.highest: int = 0
        self.failure: str = ""
        self.sender: str = ""
        self.address: str = ""
        self.size: int | None = None
        self.complete: bool = False
        self.verified: bool = False
        self.over: bool = False
        self.missed_one: bool = False
        self.due: float | None = None
        self._number, self._name, self._largest, self._silence = number, printable(name), largest, silence
        self._window = self._told_room = min(room, WINDOW)
        self._offers: dict[int, _Offer] = {}
        self._session = self._serial = 0
        self._ending = False
        self._until = self._fed = self._even = self._last = 0.0
        self._hash = hashlib.sha256()
        self._early: dict[int, bytes] = {}
        self._ready: deque[bytes] = deque()
        self._done: Done | None = None
        self._reports = False
        self._alone: list[tuple[Any, bytes]] = []
        self._out: dict[Packet, int] = {}  # packet to send -> how often, however often it was asked for

    @property
    def welcome(self) -> bool:
        """Whether this receiver takes part in a transfer."""
        return bool(self._session)

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of all bytes before the first missing piece."""
        return self._hash.hexdigest()

    @property
    def lost(self) -> list[range]:
        """The numbers of the pieces that were sent, as far as is known, and have not arrived."""
        gaps, start = [], self.pieces
        for number in [*sorted(self._early), self.highest]:
            if number > start:
                gaps.append(range(start, number))
            start = number + 1
        return gaps

    @property
    def _room(self) -> int:
        return self._window - len(self._ready)

    @property
    def untaken(self) -> bool:
        """Whether bytes wait for `take`."""
        return bool(self._ready)

    @property
    def storable(self) -> bool:
        """Whether all bytes have arrived, their digest is the sender's, and `take` has returned them."""
        return self.complete and not self._ready and not self._done

    def take(self) -> bytes:
        """The next bytes of the file; empty if none are there now."""
        return self._ready.popleft() if self._ready else b""

    def stored(self, now: float) -> None:
        """Note that all bytes are in their place, and tell the sender."""
        self.verified = True
        self._finish(Verdict.VERIFIED, now)

    def fail(self, words: str, told: str = "") -> None:
        """End the transfer because nothing more can be stored. The sender is told `words`, or only `told`."""
        if not self.over and not self._done:
            self.failure = words
            self._out, self._reports = {}, False
            self._refuse([self._session] if self._session else [*self._offers], told or words)
        self.over = True

    def _refuse(self, sessions: list[int], words: str) -> None:
        """Tell the senders of these sessions, often enough that they need not ask again."""
        for session in sessions:
            self._out[Done(session, self._number, Verdict.FAILED, printable(words))] = _FAREWELLS

    def messages(self, now: float) -> list[bytes]:
        """The messages to send now, in order. Sets `due`."""
        self._look(now)
        if self._session and now >= self._limit and not self.over:
            self._run_out(now)
        if self._told_room < self._window // 4 and self._room >= self._window // 2:
            self._reports = True  # the sender waits for room
        if self._reports:
            self._out[self._report()] = 1
        out, self._out, self._reports = self._out, {}, False
        self.due = self._next_due
        group: list[bytes] = []
        for packet, times in out.items():
            way = self._way_of(packet)
            repeated = [encode(packet)] * times
            if way is None:
                group += repeated
            else:
                self._alone += [(way, message) for message in repeated]
        return group

    def answers(self) -> list[tuple[Any, bytes]]:
        """The messages to send to one end alone, each with its `way`; ask for them after `messages`."""
        alone, self._alone = self._alone, []
        return alone

    def _way_of(self, packet: Packet) -> object:
        """How the sender that the packet is for hears it alone; None: it may not, and the group is told."""
        offer = self._offers.get(packet.session)
        tried = packet.session == self._session or isinstance(packet, Join)
        return offer.way if offer is not None and tried else None

    @property
    def _next_due(self) -> float | None:
        return self._limit if self._session and self._limit < inf else None

    @property
    def _owed(self) -> bool:
        """Whether the sender has announced pieces that have not arrived."""
        return self._ending or self.highest > self.pieces

    @property
    def _limit(self) -> float:
        """The time at which the receiver gives up the sender, or stops answering it, if nothing more is
        heard.

        Never while a whole file is being stored, because that no longer depends on the sender.
        """
        if self._done:
            return self._until
        return inf if self.complete else min(self._until, self._even + _STALL, self._fed + _PAUSE)

    def _look(self, now: float) -> None:
        """Note the time since when the sender owes pieces."""
        if self.complete or not self._room:
            self._fed = self._even = now
        elif not self._owed:
            self._even = now

    def _run_out(self, now: float) -> None:
        if self._done:
            self.over = True
        elif now >= self._until:
            self._part(f"the sender fell silent for {self._silence:g} s")
        elif self._owed:
            self._part(f"the sender announced pieces and did not send them for {_STALL:g} s")
        else:
            self._part(f"the sender had nothing new for {_PAUSE:g} s")

    # --- what is heard ---------------------------------------------------------------------------

    def hears(self, message: Buffer, address: str, now: float, way: object = None) -> None:
        """Take a received message; `address` is where it came from, as text.

        `way` is anything by which the caller can answer the sender alone; None if that cannot be.
        """
        packet = heard(message, address, self.rejected)
        if packet is None or isinstance(packet, Join | Report | Done) or self.over:
            return  # answers of other receivers
        if self._session not in (0, packet.session):
            self._on_another(packet)
        elif isinstance(packet, Welcome | Close) and not self._is_meant(packet):
            pass
        elif isinstance(packet, Hello):
            self._on_hello(packet, address, now, way)
        elif packet.session in self._offers:
            takes = _DONE if self._done else _RECEIVING if self._session else _OFFERED
            takes[type(packet)](self, packet, now)
        else:
            self.missed_one |= isinstance(packet, Data)
        if self._session == packet.session and not self._done:
            self._until = now + self._silence
        self._look(now)
        self.due = now if self._out or self._reports else self._next_due

    def _is_meant(self, packet: Welcome | Close) -> bool:
        everybody = isinstance(packet, Close) and packet.receiver == EVERYBODY
        return everybody or packet.receiver == self._number

    def _on_another(self, packet: Packet) -> None:
        """Count a message of another transfer than this receiver's."""
        self.rejected["another transfer"] += 1
        if isinstance(packet, Welcome) and self._is_meant(packet):
            # Once, because that sender was told before, and questions shall not multiply messages.
            self._out.setdefault(Done(packet.session, self._number, Verdict.FAILED, _BUSY), 1)

    def _on_hello(self, packet: Hello, address: str, now: float, way: object) -> None:
        if self._session:
            return  # an offer that came late
        if packet.session not in self._offers:
            same = [session for session, offer in self._offers.items() if offer.address == address]
            if len(same) >= _OFFERS_OF_ONE:
                self._forget(same[0])
            elif len(self._offers) >= _OFFERS:
                self._forget(next(iter(self._offers)))
        before = self._offers.get(packet.session)
        heard = 1 if before is None else before.heard + 1
        self._offers[packet.session] = _Offer(packet, address, way if heard <= _ALONE else None, heard)
        self._join(packet, now)

    def _forget(self, session: int) -> None:
        """Forget a transfer that is offered no more."""
        del self._offers[session]
        self._out.pop(self._join_of(session), None)

    def _join_of(self, session: int) -> Join:
        return Join(session, self._number, self._window, self._largest, self._name)

    def _join(self, packet: Hello | Ask | End, now: float) -> None:
        """Ask to take part; again, if what the sender said, or the answer, was lost."""
        self._out[self._join_of(packet.session)] = 1

    def _on_welcome(self, packet: Welcome, now: float) -> None:
        offer = self._offers.pop(packet.session)
        hello = offer.hello
        self.address = offer.address
        self.size = None if hello.size == UNKNOWN_SIZE else hello.size
        self.sender = hello.name
        self._session, self._fed = packet.session, now
        self._refuse([*self._offers], _BUSY)
        self._offers = {packet.session: offer}

    def _on_no_offer(self, packet: Close, now: float) -> None:
        self.missed_one |= packet.reason is Reason.TOO_LATE
        self._forget(packet.session)

    def _say_again(self, packet: Packet, now: float) -> None:
        """Repeat that the transfer is done, because the sender has not heard so."""
        assert self._done is not None
        self._out[self._done] = 1
        self._until = min(now + _LINGER, self._last)

    def _leave(self, packet: Close, now: float) -> None:
        self.over = True

    def _ignore(self, packet: Packet, now: float) -> None:
        pass

    def _on_close(self, packet: Close, now: float) -> None:
        self._part(f"the sender stopped: {packet.text or packet.reason.name.lower()}")

    def _part(self, why: str) -> None:
        """The sender is gone. If nothing has arrived wait for another one, if a part has arrived fail."""
        if self.complete:
            return
        if self.pieces or self._early:
            self.fail(why)
        else:
            del self._offers[self._session]
            self._session = self._serial = self.highest = 0
            self._ending = self._reports = False

    def _on_ask(self, packet: Ask, now: float) -> None:
        self.highest = max(self.highest, min(packet.pieces, self.pieces + WINDOW))
        self._serial = packet.serial
        self._reports = True

    def _on_data(self, packet: Data, now: float) -> None:
        if packet.number < self.pieces or packet.number in self._early:
            self.doubles += 1
        elif packet.number >= self.pieces + self._room or self.complete:
            self.rejected["a piece there is no room for"] += 1
        else:
            self.highest = max(self.highest, packet.number + 1)
            self._early[packet.number] = packet.piece
            while self.pieces in self._early:
                piece = self._early.pop(self.pieces)
                self._hash.update(piece)
                self._ready.append(piece)
                self.pieces += 1
                self.bytes += len(piece)
                self._fed = self._even = now
            if self.size is not None and self.bytes > self.size:
                self.fail(f"more came than the {self.size:,} bytes that the sender has announced")

    def _report(self) -> Report:
        bitmap = sum(1 << (number - self.pieces) for number in self._early)
        self._told_room = self._room
        return Report(self._session, self._number, self._serial, self.pieces, self._room, bitmap)

    def _on_end(self, packet: End, now: float) -> None:
        self._ending = True
        if (packet.pieces, packet.size) != (self.pieces, self.bytes):
            self.rejected["an end before the end"] += 1
        elif self.size not in (None, packet.size):
            self.fail(f"the sender announced {self.size:,} bytes, and {packet.size:,} came")
        elif self.complete or self._hash.digest() == packet.sha256:
            self.complete = True
            self._reports = True  # says that this receiver is there while the bytes are being stored
        else:
            self.failure = f"SHA-256 is {self.digest[:16]}..., the sender's is {packet.sha256.hex()[:16]}..."
            self._finish(Verdict.DIFFERS, now)

    def _finish(self, verdict: Verdict, now: float) -> None:
        self._done = Done(self._session, self._number, verdict, "")
        self._out[self._done] = 1
        self._until, self.due = now + _LINGER, now
        self._last = now + max(_LINGER, self._silence)


_Takes = dict[type[Packet], Callable[[FileReceiver, Any, float], None]]
"""What a receiver does with each kind of a sender's message, HELLO apart."""

_OFFERED: _Takes = {
    Welcome: FileReceiver._on_welcome,
    Data: FileReceiver._ignore,
    Ask: FileReceiver._join,
    End: FileReceiver._join,
    Close: FileReceiver._on_no_offer,
}
_RECEIVING: _Takes = {
    Welcome: FileReceiver._ignore,
    Data: FileReceiver._on_data,
    Ask: FileReceiver._on_ask,
    End: FileReceiver._on_end,
    Close: FileReceiver._on_close,
}
_DONE: _Takes = {
    Welcome: FileReceiver._ignore,
    Data: FileReceiver._say_again,
    Ask: FileReceiver._say_again,
    End: FileReceiver._say_again,
    Close: FileReceiver._leave,
}
