"""The sender's end of the protocol."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

from typing_extensions import Buffer

from mcast.cast.packets import (
    EVERYBODY,
    MALFORMED,
    MOST_RECEIVERS,
    OVERHEAD,
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

COPIES = 512
"""The most copies that are in flight to all receivers together.

On software devices each copy waits in a queue of the host, which silently drops what is beyond 1000
(net.core.netdev_max_backlog).
"""

_WINDOWS = range(16, 257)
"""The sizes that a window may have, in pieces."""

_FIRST_MISSES = 256
"""How many missed copies are forgiven each receiver, so that an unlucky beginning does not end its
transfer."""

_SMALLEST = 256
"""The smallest MTU there is, in bytes.

A receiver that claims less is refused, because all pieces would shrink to that.
"""

MOST_OF_ONE = 16
"""The most receivers at one address; further ones come too late, as beyond MOST_RECEIVERS.

So an end that invents receivers fills neither the memory nor the places of others.
"""


class Patience(NamedTuple):
    """The protocol's times, in seconds, and its bounds.

    wait     how long to wait for the wanted number of receivers
    gather   how long to wait for more receivers after the first, where no number is wanted
    silence  how long an end may be silent before it is given up
    stall    how long a receiver that answers may take less than a smallest window
    repairs  how often a piece is sent again to one receiver
    misses   how many copies a receiver may miss for each piece that was sent, on average; see _FIRST_MISSES
    hello    how often HELLO is sent
    retry, slowest_retry  how long to wait for an answer before asking again: the first time, and at most
    farewells  how often the last CLOSE is sent
    copies   the most copies of pieces that are under way to all receivers together
    """

    wait: float = 60.0
    gather: float = 1.0
    silence: float = 10.0
    stall: float = 60.0
    repairs: int = 20
    misses: int = 2
    hello: float = 0.1
    retry: float = 0.02
    slowest_retry: float = 0.5
    farewells: int = 3
    copies: int = COPIES


def widest(receivers: int, copies: int = COPIES) -> int:
    """The largest window for that many receivers, in pieces."""
    return max(_WINDOWS[0], min(copies // (receivers + 1), _WINDOWS[-1]))


class Fate(Enum):
    """How a transfer went for a receiver."""

    RECEIVING = "receiving"
    VERIFIED = "verified"
    DIFFERS = "got a copy that differs"
    FAILED = "failed"
    SILENT = "fell silent"
    STALLED = "read nothing more"
    LOST = "lost pieces"
    DEAF = "does not hear the sender"


_GIVEN_UP = {Fate.SILENT, Fate.STALLED, Fate.LOST, Fate.DEAF}
_FATES = {Verdict.VERIFIED: Fate.VERIFIED, Verdict.DIFFERS: Fate.DIFFERS, Verdict.FAILED: Fate.FAILED}


class ReceiverState:
    """A receiver as the sender knows it.

    fate      how the transfer went so far
    has       how many pieces the receiver has, all from 0 on
    repaired  how many copies were sent again because the receiver missed them
    lost      the pieces that the receiver missed as often as a piece is repaired
    joined    when the receiver last asked to take part
    way       how it can be answered alone; None: through the group
    words     why the receiver failed, in its own words
    """

    def __init__(self, number: int, name: str, address: str, room: int, largest: int, now: float) -> None:
        self.number: int = number
        self.name: str = name
        self.address: str = address
        self.largest: int = largest
        self.fate: Fate = Fate.RECEIVING
        self.words: str = ""
        self.has = self.repaired = 0
        self.lost: tuple[int, ...] = ()
        self.answered = 0
        self._mark = 0
        self.limit: int = room
        self.joined = now
        self.heard: float = now
        self.moved: float = now
        self.way: object = None
        self.misses: dict[int, _Misses] = {}

    @property
    def live(self) -> bool:
        """Whether the receiver still takes part."""
        return self.fate is Fate.RECEIVING

    def look(self, owes: bool, now: float) -> None:
        """Note when the receiver last moved: took a smallest window of pieces, or of room for pieces, or owed
        nothing."""
        taken = self.has + self.limit
        if not owes or taken - self._mark >= _WINDOWS[0]:
            self._mark = taken
            self.moved = now


class _Misses(NamedTuple):
    """How often a receiver missed a piece. Its last lost copy was sent before the ASK with serial `asked`."""

    times: int = 0
    asked: int = 0


class _Piece:
    """A piece that some receiver lacks; the serials of the first ASKs after its last two sendings, 0 for
    none."""

    __slots__ = ("asked", "asked_before", "message")

    def __init__(self, message: bytes) -> None:
        self.message, self.asked, self.asked_before = message, 0, 0

    def missed_by(self, serial: int) -> int:
        """The sending that did not arrive, if the answer to the ASK `serial` lacks the piece; 0: none is
        known."""
        return next((asked for asked in (self.asked, self.asked_before) if 0 < asked <= serial), 0)


class _Phase(Enum):
    GATHER = "gather"
    SEND = "send"
    FINISH = "finish"
    FAREWELL = "farewell"
    OVER = "over"


class FileSender:
    """The sender's end, without I/O.

    Give it pieces with `offer` while it `wants` some, then call `end`; give it received messages with
    `hears`. `messages(now)` returns the messages to send now: call it after each received message, and by
    `due` at the latest, until `over`.

    session   the transfer's number, from `number_at`
    name      the file's sender, as receivers show it
    size      the size of the file in bytes; None if unknown
    largest   the largest message that can be sent, in bytes
    wanted    how many receivers to wait for; None: for any that join, at least one
    patience  the times and bounds of the protocol
    now       the time, in seconds
    """

    def __init__(
        self,
        session: int,
        name: str,
        size: int | None,
        largest: int,
        wanted: int | None = None,
        patience: Patience = Patience(),  # noqa: B008  (immutable)
        now: float = 0.0,
    ) -> None:
        self.peers: dict[int, ReceiverState] = {}
        self.rejected: Counter[str] = Counter[str]()
        self.size = size
        self.pieces: int = 0
        self.bytes: int = 0
        self.repeated: int = 0
        self.failure: str = ""
        self.due: float | None = now
        self._session, self._wanted, self._patience = session, wanted, patience
        self._hello = Hello(session, UNKNOWN_SIZE if size is None else size, printable(name))
        self._hash, self._ended = hashlib.sha256(), False
        self._phase = _Phase.GATHER
        self._deadline = self._wait_ends = now + patience.wait
        self._largest = largest
        self._kept: dict[int, _Piece] = {}  # the pieces from the first one that some receiver lacks
        self._kept_bytes = 0
        self._fresh: deque[int] = deque()  # the numbers of those that were not sent yet
        self._repair: dict[int, None] = {}  # the numbers of those that have to be sent again
        self._alone: list[tuple[Any, bytes]] = []
        self._addresses = Counter[str]()
        self._lossy = self._reported = False
        self._control: dict[Packet, object] = {}  # packets to send once, however often they were asked for
        self._widest = self._window = _WINDOWS[0]
        self._serial = self._since_ask = self._judged = 0
        self._retry_at, self._retry, self._asked_at = now, patience.retry, now
        self._farewells, self._goodbye = 0, b""

    @property
    def over(self) -> bool:
        """Whether everything was said."""
        return self._phase is _Phase.OVER

    @property
    def started(self) -> bool:
        """Whether the transfer has begun, and no further receiver may join."""
        return self._phase is not _Phase.GATHER

    @property
    def piece(self) -> int:
        """The longest piece that every receiver can take, in bytes."""
        return min([self._largest, *(peer.largest for peer in self.peers.values())]) - OVERHEAD

    @property
    def wants(self) -> int:
        """How many pieces may be offered now."""
        self._take_in()
        sending = self._phase is _Phase.SEND and not self._ended
        return max(0, 2 * self._window - len(self._kept)) if sending else 0

    @property
    def placed(self) -> int:
        """How many pieces every live receiver has."""
        return min((peer.has for peer in self._live()), default=self.pieces)

    @property
    def placed_bytes(self) -> int:
        """How many bytes every live receiver has."""
        return self.bytes - self._kept_bytes

    @property
    def _sent(self) -> int:
        """How many pieces have been sent at least once."""
        return self._fresh[0] if self._fresh else self.pieces

    @property
    def digest(self) -> str:
        """SHA-256 of all that was offered, in hex."""
        return self._hash.hexdigest()

    def offer(self, pieces: Iterable[bytes]) -> None:
        """Take the next pieces of the file, each 1..`piece` bytes."""
        for piece in pieces:
            self._hash.update(piece)
            self._kept[self.pieces] = _Piece(encode(Data(self._session, self.pieces, piece)))
            self._fresh.append(self.pieces)
            self.pieces += 1
            self.bytes += len(piece)
            self._kept_bytes += len(piece)

    def end(self) -> None:
        """Note that there are no more pieces. Aborts if they are fewer bytes than were announced."""
        if self.size is not None and self.bytes != self.size:
            self.abort(f"the file has changed: {self.bytes:,} of its {self.size:,} bytes could be read")
        self._ended = True

    def abort(self, words: str) -> None:
        """Stop, and tell every receiver why."""
        self.failure = self.failure or words
        self._part(Reason.ABORTED, words)

    # --- what is heard ---------------------------------------------------------------------------

    def hears(self, message: Buffer, address: str, now: float, way: object = None) -> None:
        """Take a received message; `address` is where it came from, as text.

        `way` is anything by which the caller can answer its sender alone, if the message came to this end
        alone; else None.
        """
        packet = None if self.over else heard(message, address, self.rejected)
        if packet is None:
            return
        if packet.session != self._session:
            self.rejected["another transfer"] += 1
        elif isinstance(packet, Join):
            self._on_join(packet, address, now, way)
        elif isinstance(packet, Report | Done):
            self._on_answer(packet, now)
        else:
            self.rejected["a sender's message"] += 1

    def _on_join(self, packet: Join, address: str, now: float, way: object) -> None:
        smallest = min(_SMALLEST, self._largest)
        if packet.largest < smallest or packet.room < _WINDOWS[0] or packet.receiver == EVERYBODY:
            self.rejected[MALFORMED] += 1
            return
        peer = self.peers.get(packet.receiver)
        if peer is None and self._phase is _Phase.GATHER and self._has_place(address):
            if self._wanted is None and not self.peers:
                self._deadline = min(self._deadline, now + self._patience.gather)
            room = min(packet.room, WINDOW)
            peer = ReceiverState(packet.receiver, packet.name, address, room, packet.largest, now)
            self.peers[packet.receiver] = peer
            self._addresses[address] += 1
        if peer is None:
            self._control[Close(self._session, packet.receiver, Reason.TOO_LATE, "")] = way
        else:
            peer.joined, peer.way = now, way
            self._control[Welcome(self._session, packet.receiver)] = way
        self.due = now

    def _has_place(self, address: str) -> bool:
        return len(self.peers) < MOST_RECEIVERS and self._addresses[address] < MOST_OF_ONE

    def _on_answer(self, packet: Report | Done, now: float) -> None:
        peer = self.peers.get(packet.receiver)
        if peer is None:
            self.rejected["not a receiver of this transfer"] += 1
        elif not self.started:
            if isinstance(packet, Done):  # the receiver has left before the beginning
                del self.peers[packet.receiver]
                self._addresses[peer.address] -= 1
                if not self.peers:
                    self._deadline = self._wait_ends
        elif peer.live:
            peer.heard = self.due = now
            self._on_report(peer, packet) if isinstance(packet, Report) else self._on_done(peer, packet)
        elif peer.fate in _GIVEN_UP:
            self._tell_given_up(peer)
            self.due = now

    def _on_report(self, peer: ReceiverState, packet: Report) -> None:
        if packet.next > self._sent or packet.serial > self._serial or packet.bitmap & 1:
            self.rejected["a report of what was not sent"] += 1
            return
        peer.answered = max(peer.answered, packet.serial)
        if packet.next >= peer.has:  # otherwise an older report has overtaken nothing, and says less
            peer.has = packet.next
            peer.limit = max(peer.limit, packet.next + min(packet.room, WINDOW))
        lossy = False
        for number in range(packet.next, min(self._sent, packet.next + WINDOW)):
            asked = self._kept[number].missed_by(packet.serial) if number in self._kept else 0
            if not asked or packet.bitmap >> (number - packet.next) & 1:
                continue
            before = peer.misses.get(number, _Misses())
            if before.asked < asked:
                peer.misses[number] = _Misses(before.times + 1, asked)
                peer.repaired += 1
            if asked == self._kept[number].asked and number not in self._repair:
                self._repair[number] = None
                lossy = True
        hopeless = [n for n, missed in peer.misses.items() if missed.times > self._patience.repairs]
        if hopeless or peer.repaired > _FIRST_MISSES + self._patience.misses * self._sent:
            peer.lost = tuple(hopeless or peer.misses)
            self._give_up(peer, Fate.LOST)
        peer.misses = {number: missed for number, missed in peer.misses.items() if number >= peer.has}
        self._lossy |= lossy
        self._reported = True

    def _on_done(self, peer: ReceiverState, packet: Done) -> None:
        if packet.verdict is not Verdict.FAILED and self._phase is not _Phase.FINISH:
            self.rejected["done before the end"] += 1
            return
        peer.fate, peer.words = _FATES[packet.verdict], packet.text
        self._widen()
        self._forget()

    def _steer(self, lossy: bool) -> None:
        """Halve the window once for all losses of a round trip; open it for an ASK whose answers show no
        loss."""
        if lossy and self._judged < self._serial:
            self._judged = self._serial
            self._window = max(_WINDOWS[0], self._window // 2)
        answered = min((peer.answered for peer in self._live()), default=0)
        if not lossy and self._judged < answered:
            self._judged = answered
            self._window = min(self._widest, self._window + max(1, self._window // 8))

    def _forget(self) -> None:
        placed = self.placed
        for number in [*self._kept]:
            if number >= placed:
                break
            self._kept_bytes -= len(self._kept.pop(number).message) - OVERHEAD
            self._repair.pop(number, None)

    def _give_up(self, peer: ReceiverState, fate: Fate) -> None:
        peer.fate = fate
        self._tell_given_up(peer)
        self._widen()
        self._forget()

    def _tell_given_up(self, peer: ReceiverState) -> None:
        words = f"the receiver {peer.fate.value}"
        self._control[Close(self._session, peer.number, Reason.GIVEN_UP, words)] = peer.way

    def _live(self) -> list[ReceiverState]:
        return [peer for peer in self.peers.values() if peer.live]

    # --- what is sent ----------------------------------------------------------------------------

    def messages(self, now: float) -> list[bytes]:
        """The messages to send now, in order. Sets `due`."""
        self._take_in()
        if self.started and self._phase in (_Phase.SEND, _Phase.FINISH):
            self._drop_the_dead(now)
            if not self._live():
                self._part(Reason.COMPLETE, "")
        out = _STEPS[self._phase](self, now)
        control, self._control = self._control, {}
        group: list[bytes] = []
        for packet, way in control.items():
            if way is None:
                group.append(encode(packet))
            else:
                self._alone.append((way, encode(packet)))
        return group + out

    def answers(self) -> list[tuple[Any, bytes]]:
        """The messages to send to one end alone, each with its `way`; ask for them after `messages`."""
        alone, self._alone = self._alone, []
        return alone

    def _take_in(self) -> None:
        """Judge all reports since the last time together, because each look at them asks every receiver."""
        if self._reported:
            self._steer(self._lossy)
            self._forget()
            self._lossy = self._reported = False

    def _gather(self, now: float) -> list[bytes]:
        enough = len(self.peers) >= self._wanted if self._wanted else False
        if enough or (now >= self._deadline and self._wanted is None and self.peers):
            self._start(now)
            return []
        if now >= self._deadline:
            wanted = self._wanted or 1
            self.abort(f"{len(self.peers)} of {wanted} receivers joined within {self._patience.wait:g} s")
            return self._say_farewell(now)
        if now >= self._retry_at:
            self._retry_at = now + self._patience.hello
            self._control[self._hello] = None
        self.due = min(self._retry_at, self._deadline)
        return []

    def _start(self, now: float) -> None:
        self._phase, self.due, self._retry_at = _Phase.SEND, now, now
        self._widen()
        self._window = self._widest
        for peer in self.peers.values():
            peer.heard = peer.moved = now

    def _widen(self) -> None:
        """Set the widest window for the receivers that take part."""
        self._widest = widest(len(self._live()), self._patience.copies)

    def _send(self, now: float) -> list[bytes]:
        out = []
        urgent = bool(self._repair)
        for number in self._next():
            piece = self._kept[number]
            piece.asked, piece.asked_before = self._serial + 1, piece.asked
            out.append(piece.message)
            self._since_ask += 1
            if self._since_ask >= self._window // 2:
                self._retry = self._patience.retry
                out.append(self._ask(now))
        if self._since_ask and (urgent or not self._fresh or self._all_answered):
            self._retry = self._patience.retry
            out.append(self._ask(now))
        elif now >= self._retry_at:
            # An answer was lost, or the source or a slow reader pauses, which must not look like silence.
            self._retry = min(2 * self._retry, self._patience.slowest_retry)
            out.append(self._ask(now))
        if self._ended and not self._kept:
            self._phase, self._retry_at, self._retry = _Phase.FINISH, now, self._patience.retry
        self.due = self._retry_at
        return out

    def _next(self) -> Iterator[int]:
        """The pieces to send now: missed ones, then new ones, as many as the window and every receiver's room
        allow."""
        repair, self._repair = self._repair, {}
        self.repeated += len(repair)
        yield from repair
        limit = min([self.placed + self._window, *(peer.limit for peer in self._live())])
        while self._fresh and self._fresh[0] < limit:
            yield self._fresh.popleft()

    @property
    def _all_answered(self) -> bool:
        return all(peer.answered == self._serial for peer in self._live())

    def _ask(self, now: float) -> bytes:
        if self._all_answered:
            self._asked_at = now
        self._serial += 1
        self._since_ask = 0
        self._retry_at = now + self._retry
        return encode(Ask(self._session, self._sent, self._serial))

    def _finish(self, now: float) -> list[bytes]:
        if now < self._retry_at:
            self.due = self._retry_at
            return []
        self._asked_at = min(self._asked_at, now)
        self._retry_at = self.due = now + self._retry
        self._retry = min(2 * self._retry, self._patience.slowest_retry)
        return [encode(End(self._session, self.pieces, self.bytes, self._hash.digest()))]

    def _drop_the_dead(self, now: float) -> None:
        finish = self._phase is _Phase.FINISH
        for peer in self._live():
            peer.look(finish or peer.has < self._sent or peer.limit <= self._sent, now)
            owes = finish or peer.answered < self._serial
            silent_since = max(peer.heard, self._asked_at)
            if owes and now - silent_since > self._patience.silence:
                self._give_up(peer, Fate.DEAF if peer.joined > silent_since else Fate.SILENT)
            elif now - peer.moved > max(self._patience.stall, self._patience.silence):
                self._give_up(peer, Fate.STALLED)

    def _part(self, reason: Reason, words: str) -> None:
        if self._phase not in (_Phase.FAREWELL, _Phase.OVER):
            self._phase, self._farewells = _Phase.FAREWELL, self._patience.farewells
            self._goodbye = encode(Close(self._session, EVERYBODY, reason, printable(words)))
            self._retry_at = self.due = 0.0

    def _say_farewell(self, now: float) -> list[bytes]:
        if now < self._retry_at:
            self.due = self._retry_at
            return []
        if not self._farewells:
            self._phase, self.due = _Phase.OVER, None
            return []
        self._farewells -= 1
        self._retry_at = self.due = now + self._patience.retry
        return [self._goodbye]


_STEPS: dict[_Phase, Callable[[FileSender, float], list[bytes]]] = {
    _Phase.GATHER: FileSender._gather,
    _Phase.SEND: FileSender._send,
    _Phase.FINISH: FileSender._finish,
    _Phase.FAREWELL: FileSender._say_farewell,
    _Phase.OVER: lambda sender, now: [],
}
