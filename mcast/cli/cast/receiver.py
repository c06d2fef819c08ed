"""The receiver's end of the protocol."""

from __future__ import annotations

import hashlib
from collections import Counter, deque

from typing_extensions import Buffer

from mcast.cli.cast.packets import (
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
    Rejected,
    Report,
    Verdict,
    Welcome,
    decode,
    encode,
    printable,
)

_OFFERS = 16
"""So many transfers that have not begun are remembered; the first that begins is received."""

_FAREWELLS = 3

_LINGER = 2.0
"""How long a receiver that is done still answers a sender that has not heard it, in seconds."""


class FileReceiver:
    """Feed it what is heard with `hears`; fetch the file's bytes with `take`; once it is `complete` and all
    bytes are where they belong say `stored`, or `fail` at any time.

    `messages(now)` is what to send now; call it again after each message heard and by `due` at the latest
    (None: nothing is due), until `over`.

    number   a random number other than 0, which names this receiver
    room     how many messages it can hold that have not been read
    largest  the largest message it can receive
    silence  how long the sender may be silent before it is given up, in seconds
    """

    def __init__(self, number: int, name: str, room: int, largest: int, silence: float) -> None:
        self.rejected = Counter[str]()
        self.pieces = self.bytes = self.doubles = self.highest = 0
        self.failure = self.sender = self.address = ""
        self.size: int | None = None
        self.complete = self.verified = self.over = False
        self.missed_one = False
        self.due: float | None = None
        self._number, self._name, self._largest, self._silence = number, printable(name), largest, silence
        self._window = self._told_room = min(room, WINDOW)
        self._offers: dict[int, tuple[Hello, str]] = {}
        self._session = self._serial = 0
        self._until = 0.0
        self._hash = hashlib.sha256()
        self._early: dict[int, bytes] = {}
        self._ready: deque[bytes] = deque()
        self._done: Done | None = None
        self._out: list[Packet] = []

    @property
    def welcome(self) -> bool:
        """Whether it is part of a transfer."""
        return bool(self._session)

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes before the first piece that lacks, in hex."""
        return self._hash.hexdigest()

    @property
    def lost(self) -> list[range]:
        """The numbers of the pieces that were sent, as far as is known, and have not come."""
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
        """Whether all bytes have come, are the sender's, and were taken."""
        return self.complete and not self._ready and not self._done

    def take(self) -> bytes:
        """The next bytes of the file; empty if none are there now."""
        return self._ready.popleft() if self._ready else b""

    def stored(self, now: float) -> None:
        """All bytes are where they belong."""
        self.verified = True
        self._finish(Verdict.VERIFIED, now)

    def fail(self, words: str) -> None:
        """Nothing more can be stored, or is wanted; the sender is told why."""
        if not self.over and not self._done:
            self.failure = words
            sessions = [self._session] if self._session else [*self._offers]
            left = [Done(session, self._number, Verdict.FAILED, printable(words)) for session in sessions]
            self._out = [*left * _FAREWELLS]  # nobody asks again
        self.over = True

    def messages(self, now: float) -> list[bytes]:
        """The messages to send now, in order; moves `due`."""
        if self._session and now >= self._until and not self.over:
            self._part(f"the sender fell silent for {self._silence:g} s")
        if self._told_room < self._window // 4 and self._room >= self._window // 2:
            self._report()  # it waits for that
        out, self._out = self._out, []
        self.due = self._until if self._session else None
        return [encode(packet) for packet in out]

    # --- what is heard ---------------------------------------------------------------------------

    def hears(self, message: Buffer, address: str, now: float) -> None:
        """Take a message; `address` is where it came from, in words."""
        try:
            packet = decode(message)
        except Rejected as why:
            self.rejected[str(why)] += 1
            return
        if isinstance(packet, Join | Report | Done) or self.over:
            return  # the answers of the others
        if self._session not in (0, packet.session):
            self.rejected["another transfer"] += 1
        elif isinstance(packet, Hello):
            self._on_hello(packet, address)
        elif packet.session not in self._offers:
            self.missed_one |= isinstance(packet, Data)
        elif isinstance(packet, Welcome | Close):
            if packet.receiver in (EVERYBODY, self._number):
                self._on_welcome(packet) if isinstance(packet, Welcome) else self._on_close(packet)
        elif self._session:
            self._on_transfer(packet, now)
        elif isinstance(packet, Ask | End):
            self._join(packet.session)  # what it said, or the answer, was lost
        if not self._done:
            self._until = now + self._silence
        self.due = now if self._out else self._until if self._session else None

    def _on_hello(self, packet: Hello, address: str) -> None:
        if self._session:
            return  # it came late
        while len(self._offers) >= _OFFERS and packet.session not in self._offers:
            del self._offers[next(iter(self._offers))]
        self._offers[packet.session] = packet, address
        self._join(packet.session)

    def _join(self, session: int) -> None:
        self._out.append(Join(session, self._number, self._window, self._largest, self._name))

    def _on_welcome(self, packet: Welcome) -> None:
        if not self._session:
            hello, self.address = self._offers[packet.session]
            self.sender, self.size = hello.name, None if hello.size == UNKNOWN_SIZE else hello.size
            self._session = packet.session

    def _on_close(self, packet: Close) -> None:
        if not self._session:
            self.missed_one |= packet.reason is Reason.TOO_LATE
            del self._offers[packet.session]
        elif self._done:
            self.over = True
        else:
            self._part(f"the sender stopped: {packet.text or packet.reason.name.lower()}")

    def _part(self, why: str) -> None:
        """The sender is gone: wait for another if nothing has come of this one."""
        if self.highest or self.complete:
            self.fail(why)
        else:
            self._offers.pop(self._session)
            self._session = 0

    def _on_transfer(self, packet: Packet, now: float) -> None:
        if self._done:
            self._out.append(self._done)
            self._until = now + _LINGER
        elif isinstance(packet, Data):
            self._on_data(packet)
        elif isinstance(packet, Ask):
            self.highest = max(self.highest, min(packet.pieces, self.pieces + WINDOW))
            self._serial = packet.serial
            self._report()
        elif isinstance(packet, End):
            self._on_end(packet, now)

    def _on_data(self, packet: Data) -> None:
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

    def _report(self) -> None:
        bitmap = sum(1 << (number - self.pieces) for number in self._early)
        self._told_room = self._room
        self._out.append(Report(self._session, self._number, self._serial, self.pieces, self._room, bitmap))

    def _on_end(self, packet: End, now: float) -> None:
        if (packet.pieces, packet.size) != (self.pieces, self.bytes):
            self.rejected["an end before the end"] += 1
        elif self.complete or self._hash.digest() == packet.sha256:
            self.complete = True
            self._report()  # still there, while the bytes are on their way
        else:
            self.failure = f"SHA-256 is {self.digest[:16]}..., the sender's {packet.sha256.hex()[:16]}..."
            self._finish(Verdict.DIFFERS, now)

    def _finish(self, verdict: Verdict, now: float) -> None:
        self._done = Done(self._session, self._number, verdict, "")
        self._out.append(self._done)
        self._until, self.due = now + _LINGER, now
