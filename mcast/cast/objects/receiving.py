"""The receiving end: the sessions of all senders in a group, and its turns."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from math import inf
from pathlib import Path
from random import SystemRandom
from secrets import randbits
from typing import NamedTuple

from pydantic import BaseModel
from typing_extensions import Buffer

from mcast.api import Series
from mcast.arguments.copies import reduce_with_copies
from mcast.arguments.seconds import check_seconds
from mcast.cast.files import Sink, native
from mcast.cast.nack import parity
from mcast.cast.nack.arriving import Ready
from mcast.cast.nack.closed import CLOSED, STRANGERS, letters_of
from mcast.cast.nack.header import TEXT, VERSION, Rejected
from mcast.cast.nack.messages import (
    MOST_ROOM,
    MOST_WIDTH,
    UNTOLD,
    Bye,
    Describe,
    Flush,
    Offer,
    Seal,
    Sealed,
    Spoken,
    piece_size,
)
from mcast.cast.nack.payload import BlockPlace, Digest
from mcast.cast.nack.receiver import TOGETHER, ObjectReceiver, Self
from mcast.cast.nack.shape import Shape
from mcast.cast.objects.bytes_in import (
    Offered,
    ReceiveTarget,
    Target,
    ToBuffer,
    ToMemory,
    ToNew,
    sink_at,
    sink_of,
)
from mcast.cast.objects.runs import Pieces, in_runs
from mcast.cast.objects.turns import HEARD, Seat, Turns, kept, messages_of, others, told_of
from mcast.endpoint.waiting import Step, call_user

logger: logging.Logger = logging.getLogger("mcast")

MOST_SESSIONS = 16
"""In the sessions of so many senders a receiver takes part at once."""
MOST_OF_ADDRESS = 4
"""So many of them may be at one address, so that one host cannot take all places."""

MAX_PAST = 1024
"""Maximum number of sessions that are remembered after they have ended here, or whose sender is silent.

One more pushes out the oldest of the address that has the most.

One takes some KB, and 16 KB more if its sender cycles through 65,536 objects. Of ordinary objects, however
many the session has, the number of the last one is enough.
"""
_COMPARED = 8
"""So many blocks of an earlier run are compared in one turn."""
_NAP = 0.01
"""Seconds until a disk that is at work is asked again."""
_PARTINGS = 3
_PARTING = 0.02
"""How often a receiver says that it leaves, and how many seconds it waits for the sender to confirm."""


class Received(NamedTuple):
    """An object that is whole and right.

    offered  what its sender has said of it: name, metadata, sender
    size     in bytes
    digest   the BLAKE3 digest of the bytes, as `b3sum` prints it: the sender has said and reported the same
    data     the bytes: new memory, or the part of the caller's buffer that they fill; else None
    path     the file, where they went to one
    refused  messages that changed nothing, by reason, since `receive` was called: strangers', replayed ones
    """

    offered: Offered
    size: int
    digest: bytes
    data: bytearray | memoryview | None
    path: Path | None
    refused: dict[str, int]

    def __reduce__(self) -> tuple[object, ...]:
        return reduce_with_copies(self)


class Missed(NamedTuple):
    """An object that this receiver did not get.

    offered  what its sender has said of it
    why      why it did not become whole
    late     whether its beginning was gone when this receiver came
    part_file  the hidden file with what has come, from which the next `receive` into the same path goes on;
             None if nothing is kept
    """

    offered: Offered
    why: str
    late: bool = False
    part_file: Path | None = None


class _Arrival:
    """The object that is arriving from one sender."""

    def __init__(self, about: Describe, offered: Offered) -> None:
        self.offered = offered
        self.place: Target = None
        """What the caller has given for this object and perhaps for others, if that is no path."""
        self.sink: Sink | None = None
        self.path: Path | None = None
        self.size = 0
        self.digest = Digest()
        self._shape = Shape.of(about)
        self._blocks: dict[int, BlockPlace] = {}
        self._next = 0
        self._early: dict[int, tuple[memoryview, bytes | None]] = {}
        """Blocks whose turn has not come, each with its digest; None once `digest` has the block."""
        self._placed = False
        self.held: Ready | None = None
        """A block that an earlier run may have left, to be compared."""
        self.broken = False
        """Whether this end has given the object up, and does not go on with what has come."""
        self.around = about.around > 0
        self._put = set[int]()

    def takes(self, run: Pieces, new: int) -> None:
        """Take in the pieces of a run whose bit is set."""
        block = self._blocks.get(run.block)
        if block is None:
            block = self._blocks[run.block] = self._place_of(run.block)
        first, count, memory, begin, step, size = run[3:]
        if new == (1 << count) - 1 << first:
            block.put_all(first, count, memory, begin, step, size)
            return
        for place in range(first, first + count):
            if new >> place & 1:
                block.put_all(place, 1, memory, begin, step, size)
            begin += step

    def forget(self, blocks: list[int]) -> None:
        """Drop the pieces of blocks that come again."""
        for block in blocks:
            self._blocks.pop(block, None)

    def _place_of(self, block: int) -> BlockPlace:
        """Where a block goes: to its place in the object, or to memory of its own."""
        shape, most = self._shape, self._shape.begins(1)
        length = shape.length(block)
        memory = None
        if self.sink is not None and length is not None:
            memory = self.sink.place(shape.begins(block), length)
            self._placed = memory is not None
        if memory is None:
            memory = memoryview(bytearray(most if length is None else length))
        return BlockPlace(memory, shape.piece, shape.width)

    def whole(self, ready: Ready) -> bool:
        """Whether a block of which enough pieces are there could be put together; it is kept then.

        A block of an object that goes round is what its seal says then, and others are compared in turn.
        """
        block = self._blocks.pop(ready.block, None)
        if block is None:
            return False
        whole = (block.right if self.around else block.whole)(ready.sealed, ready.pieces)
        if whole is not None and self.scatters and not self._placed:
            assert self.sink is not None
            self.sink.put(self._shape.begins(ready.block), whole)
            self._put.add(ready.block)
        elif whole is not None:
            self._early[ready.block] = whole, ready.sealed.digest
        return whole is not None

    @property
    def scatters(self) -> bool:
        """Whether each block goes into its place as it comes."""
        return self.around and self.sink is not None and self.sink.scatters

    @property
    def blocks_left(self) -> int:
        """How many blocks an earlier run may have left; the last one of an object may be shorter."""
        left = 0 if self.sink is None else self.sink.left
        size, block = self._shape.size, self._shape.begins(1)
        if size is None or left < size:
            return left // block
        return (self._shape.blocks or 0) if left == size else 0

    def again(self, sealed: Sealed) -> bool:
        """Whether the next block is there already. If not, what came of those after it is dropped."""
        sink = self.sink
        data = b"" if sink is None else sink.again(sealed.size)
        if self.around:
            right = bytes(Digest(data)) == sealed.digest
        else:
            right = self.digest.goes_on(data, sealed.digest)
        if sink is None or not (right or sink.unlike):
            if not self.around:
                self._blocks.clear()
                self._early.clear()
            return False
        sink.skip(len(data))
        if self.around or not right:
            self.digest.update(data)
        self.size += len(data)
        self._next += 1
        return True

    @property
    def waits(self) -> bool:
        """Whether a block waits for a sink that is not ready, or is on the disk and not looked at yet."""
        return self._next in self._early or self._next in self._put

    def written(self) -> Iterator[tuple[int, bool]]:
        """Write the blocks in order, while the sink is ready.

        The number of each that is written whole, and of one that differs from its digest, and which it is.
        """
        sink = self.sink
        for _ in range(_COMPARED):
            if sink is None or self._next not in self._put:
                break
            found = sink.again(self._shape.length(self._next) or 0)
            sink.skip(len(found))
            self.digest.update(found)
            self.size += len(found)
            self._put.remove(self._next)
            self._next += 1
        while sink is not None and self._next in self._early:
            data, digest = self._early[self._next]
            if digest is not None and self.around:
                self.digest.update(data)
            elif digest is not None and not self.digest.goes_on(data, digest):
                del self._early[self._next]
                yield self._next, False
                return
            while data and sink.ready():
                part = data[: sink.most]
                if not self._placed:
                    sink.write(part)
                self.size += len(part)
                data = data[len(part) :]
            self._early[self._next] = data, None
            if data:
                return
            del self._early[self._next]
            self._next += 1
            yield self._next - 1, True

    def received(self, refused: dict[str, int]) -> Received:
        sink = self.sink
        data: bytearray | memoryview | None = None
        if isinstance(sink, ToMemory):
            data = sink.data
        elif isinstance(sink, ToNew):
            data = sink.taken()
        elif isinstance(sink, ToBuffer):
            data = sink.view[: self.size]
        return Received(self.offered, self.size, bytes(self.digest), data, self.path, refused)

    def close(self) -> None:
        self._blocks.clear()
        self._early.clear()
        if self.sink is not None:
            if not self.broken:
                self.sink.keep()
            self.sink.close()


class _Incoming:
    """The session of one sender, or one more of the objects that go round together in it."""

    def __init__(self, core: ObjectReceiver, name: str, address: str, nonce: int) -> None:
        self.core, self.address, self.name, self.nonce = core, address, name, nonce
        self.now: _Arrival | None = None
        self.begun: Describe | None = None
        self.whole: deque[Received] = deque()
        self.beside: dict[int, _Incoming] = {}
        """The others of the objects that go round together, by number."""

    def hears(self, spoken: Pieces | Spoken, now: float) -> Iterable[_Incoming]:
        """Take in a message. What it may have changed: this, or what is beside."""
        if isinstance(spoken, Pieces):
            of = self.beside.get(spoken.object, self)
            new = of.core.takes(spoken.object, spoken.block, spoken.first, spoken.pieces, now)
            if of.core.about is not None and of.core.about.around:
                for one in self.all_receivers():
                    if one.now is not None:
                        one.now.forget(one.core.dropped())  # first: one of these may come again at once
            if new and of.now is not None:
                of.now.takes(spoken, new)
            return (of,)
        self.core.hears(spoken, now)
        if isinstance(spoken, Seal | Flush):
            return (self.beside.get(spoken.object, self),)
        if self.beside.keys() != self.core.beside.keys():
            self._follow()
        return self.all_receivers()

    def _follow(self) -> None:
        """Take what the core takes, and drop what it has dropped."""
        for number in [*self.beside]:
            if number not in self.core.beside:
                self.beside.pop(number).drop()
        for number, core in self.core.beside.items():
            if number not in self.beside:
                self.beside[number] = _Incoming(core, self.name, self.address, self.nonce)

    def all_receivers(self) -> list[_Incoming]:
        """This, and what is beside."""
        return [self, *self.beside.values()]

    def drop(self) -> Path | None:
        """End what is arriving. The file that stays for another run, if one does."""
        arrival, self.now = self.now, None
        if arrival is None:
            return None
        arrival.close()
        return None if arrival.sink is None else arrival.sink.kept

    @property
    def stores(self) -> bool:
        """Whether a disk or a reader is at work on the object."""
        return self.core.storable or (self.now is not None and self.now.waits)

    def offered(self, about: Describe) -> Offered:
        size = None if about.size == UNTOLD else about.size
        return Offered(about.name, size, about.metadata, self.name, self.address, about.object)


class _Choice:
    """The one sender whose objects are taken, where one alone is to be heard."""

    def __init__(self, one_session: bool) -> None:
        self._one_session = one_session
        self._session: int | None = None
        self.ended = False
        """Whether that sender has ended its session."""

    @property
    def made(self) -> bool:
        """Whether it is known which sender that is."""
        return self._session is not None

    def other(self, session: int) -> bool:
        """Whether that is the session of another sender."""
        return self._session not in (None, session)

    def require(self, session: int) -> None:
        """A session begins an object. Raises OSError if that of another sender has before."""
        if self.other(session):
            raise OSError("this receiver takes what another sender sends")
        if self._one_session:
            self._session = session

    def missed(self, core: ObjectReceiver) -> None:
        """An object was missed. A receiver that came too late for the first one waits for another sender."""
        if core.late:
            self._session = None

    def over(self, session: int) -> None:
        """A session has ended."""
        self.ended = self.ended or session == self._session


class ObjectsIn:
    """All that a receiver hears of the senders in its group.

    into    where objects go
    missed  is called for each object that does not become whole here
    model   what the metadata of each object must be
    most    the largest object that is taken into new memory, in bytes
    memory  about how many bytes of each sender's object may be under way here
    alone   take the objects of one sender alone: the first that begins one
    progress  is called when more of an object has come, with how many bytes of it are right
    name    what the senders call this receiver; None: host and device
    """

    def __init__(
        self,
        seat: Seat,
        into: ReceiveTarget,
        missed: Callable[[Missed], object] | None,
        most: int,
        memory: int,
        peer_timeout: float,
        key: bytes | None,
        model: type[BaseModel] | None,
        one_session: bool = False,
        progress: Callable[[Offered, int], object] | None = None,
        name: str | None = None,
    ) -> None:
        if name is not None and not 0 < len(name.encode()) <= TEXT:
            raise ValueError(f"name={name!r}: a receiver's name has 1 to {TEXT} bytes")
        self.sessions: dict[int, _Incoming] = {}
        """The sessions in which this receiver takes part, by number."""
        if not (into is None or callable(into) or isinstance(into, os.PathLike | Sink)):
            sink_at(into).close()  # what no object could be written to is refused now
        self._seat, self._into, self._most, self._model = seat, into, most, model
        self._missed = missed
        self._letters = letters_of(key)
        largest = seat.largest - self._letters.around
        room = max(4, min(MOST_ROOM, memory // (piece_size(largest) * MOST_WIDTH)))
        able = parity.available()
        # What goes to one place comes one after another.
        together = TOGETHER if into is None or callable(into) else 1
        self._self = Self(
            seat.number,
            seat.name if name is None else name,
            room,
            largest,
            able,
            check_seconds(peer_timeout, "peer_timeout"),
            stores=True,
            together=together,
            queue=seat.queue,
        )
        self._past: OrderedDict[tuple[int, int], _Incoming | None] = OrderedDict()
        """Sessions in which this receiver takes no part any more, by number and nonce, the oldest first.

        None for one that has ended; else its sender is silent, and it goes on when that is heard again.
        """
        self._past_of: dict[tuple[int, int], str] = {}
        """The address of each of them."""
        self._whole: deque[Received] = deque()
        self._choice = _Choice(one_session)
        self._progress = progress
        self._held: list[tuple[Series, str]] = []
        self._paused = 0.0  # when the driver last stopped to listen
        self.rejected: Counter[str] = Counter()

    # --- the turns -------------------------------------------------------------------------------

    def next(self, timeout: float | None) -> Turns[Received | None]:
        """The next object that is whole; None when nothing has been under way for `timeout` seconds.

        With `one_session`, None when the sender has ended its session, and `timeout` until it begins.
        """
        now = self._seat.now
        if timeout is not None:
            timeout = check_seconds(timeout)
        since = now()
        for one in self.sessions.values():
            one.core.resumes(since - self._paused)
        try:
            while True:
                if self._whole:
                    return self._whole.popleft()
                if self._choice.ended:
                    return None
                if self._choice.made or any(one.now is not None for one in self._all()):
                    since = now()
                end = inf if timeout is None else since + timeout
                if now() >= end and timeout is not None:
                    return None
                yield from self._turn(end)
        finally:
            self._paused = now()

    def leave(self, why: str) -> Turns[None]:
        """Leave all sessions; their senders are told. What is not whole is dropped, as by `close`."""
        now = self._seat.now
        self.close()
        for _ in range(_PARTINGS):
            said = [words for one in self.sessions.values() for words in one.core.parting(why, now())]
            if not said:
                return
            end = now() + _PARTING
            while said or (now() < end and any(not one.core.over for one in self.sessions.values())):
                heard = yield Step(end, HEARD, self._written(said))
                said = []
                for message, address in messages_of(others(heard)):
                    with suppress(Rejected):
                        spoken = self._letters.read(message, address)
                        left = self.sessions.get(spoken.session)
                        if left is not None and isinstance(spoken, Bye):
                            left.core.hears(spoken, now())

    def close(self) -> None:
        """Drop what is not whole; of a file stays what another run can go on from."""
        for one in self._all():
            one.drop()

    def _turn(self, until: float) -> Turns[None]:
        now = self._seat.now()
        said = [message for one in self._all() for message in one.core.messages(now)]
        self._look(now)
        done = bool(self._whole) or self._choice.ended
        if done and not said:
            return
        there = [*self._all()]
        storing = any(one.stores for one in there)
        if any(one.now is not None and one.now.held for one in there):
            until = now
        due = min([until, now + _NAP if storing else inf, *(one.core.due for one in there)])
        # What follows a whole object waits until the caller has that one: both may go to one place.
        waits = bool(self._whole) or any(one.whole for one in there)
        at_once = done or (self._held and not waits)
        heard = yield Step(now if at_once else due, HEARD, self._written(said))
        now = self._seat.now()
        if waits:
            self._held += [(kept(series), address) for series, address in others(heard)]
            self._look(now)
            return
        held, self._held = self._held, []
        for spoken, address in in_runs(self._letters, chain(held, others(heard)), self._refuse):
            self._hear(spoken, address, now)
        self._look(now)

    def _written(self, said: Sequence[Buffer]) -> list[Sequence[Buffer] | memoryview]:
        return [self._letters.written(said)] if said else []

    def _all(self) -> Iterator[_Incoming]:
        """What comes of all sessions."""
        return (part for one in self.sessions.values() for part in one.all_receivers())

    def _warn(self, missed: Missed) -> None:
        name, address = missed.offered.name, missed.offered.address
        logger.warning("%s: the object %r of %s was missed: %s", self._seat.whose, name, address, missed.why)

    def _refuse(self, why: str, address: str) -> None:
        self.rejected[why] += 1
        if why in (CLOSED, STRANGERS, VERSION) and self.rejected[why] == 1:
            logger.warning("%s: a message of %s was refused: %s", self._seat.whose, address, why)

    # --- what comes ------------------------------------------------------------------------------

    def _hear(self, spoken: Pieces | Spoken, address: str, now: float) -> None:
        one = self.sessions.get(spoken.session)
        if one is None:
            if isinstance(spoken, Offer) and not self._choice.made:
                self._open(spoken, address, now)
            return
        for part in one.hears(spoken, now):
            if part.core.about is not None and part.begun is not part.core.about:
                self._settle(part)
                self._begin(part, part.core.about, now)
            if part.now is not None:
                self._check(part, part.now, now)

    def _open(self, offer: Offer, address: str, now: float) -> None:
        key = offer.session, offer.nonce
        past = self._past.get(key)
        if past is None and key in self._past:
            return
        here = sum(one.address == address for one in self.sessions.values())
        if len(self.sessions) >= MOST_SESSIONS or here >= MOST_OF_ADDRESS:
            self.rejected["an invitation to one session too many"] += 1
            return
        nonce = randbits(64)
        if past is None:
            who = self._self._replace(nonce=nonce)
            core = ObjectReceiver(offer.session, who, SystemRandom(), now)
            past = _Incoming(core, offer.name, address, offer.nonce)
        else:
            del self._past[key], self._past_of[key]
            past.core.returns(nonce, now)
        self._letters.begin(offer.session, offer.nonce)
        self.sessions[offer.session] = past
        past.core.hears(offer, now)

    def _remember(self, one: _Incoming) -> None:
        """Keep of a session that is over here what its sender could say again."""
        session = one.core.session
        if one.core.silent:
            self._letters.rest(session)
            one.core.rest()
            one.beside.clear()
        else:
            self._letters.end(session)
        self._past[session, one.nonce] = one if one.core.silent else None
        self._past_of[session, one.nonce] = one.address
        if len(self._past) > MAX_PAST:
            # Of the host with the most: one that ends sessions without number pushes out its own.
            ((most, _),) = Counter(self._past_of.values()).most_common(1)
            oldest = next(key for key in self._past if self._past_of[key] == most)
            del self._past[oldest], self._past_of[oldest]
            self._letters.forget(*oldest)

    def _begin(self, one: _Incoming, about: Describe, now: float) -> None:
        one.begun = about
        arrival = one.now = _Arrival(about, one.offered(about))
        try:
            self._choice.require(one.core.session)
            most = piece_size(self._self.largest)
            if about.piece > most:  # a block takes its memory with the first piece, however short that is
                raise ValueError(f"pieces of {about.piece:,} bytes: this receiver hears at most {most:,}")
            if self._model is not None:
                arrival.offered.read(self._model)
            place = self._into(arrival.offered) if callable(self._into) else self._into
            if not (place is None or isinstance(place, os.PathLike)):
                self._require_free(place)
                arrival.place = place
            sink = sink_of(place, arrival.offered.size, self._most)
            arrival.sink = sink
            if isinstance(place, os.PathLike):
                arrival.path = Path(native(place))
            sink.open()
            one.core.holds(arrival.blocks_left, now)
            if arrival.scatters:
                one.core.scatters()
        except OSError as error:
            self._fail(one, told_of(error), now)
        except ValueError as error:
            self._fail(one, str(error), now)

    @staticmethod
    def _fail(one: _Incoming, why: str, now: float) -> None:
        """Give up the object, whatever has come of it."""
        if one.now is not None:
            one.now.broken = True
        one.core.fail(why, now)

    def _require_free(self, place: Target) -> None:
        if any(other.now is not None and other.now.place is place for other in self._all()):
            raise OSError("another object is on its way into the same buffer")

    def _check(self, one: _Incoming, arrival: _Arrival, now: float) -> None:
        try:
            for ready in one.core.ready():
                if not ready.pieces:
                    arrival.held = ready
                elif not (whole := arrival.whole(ready)) or arrival.scatters:
                    one.core.checked(ready.block, whole, now)
        except OSError as error:
            self._fail(one, told_of(error), now)
        if arrival.waits:
            self._write(one, arrival, now)

    def _compare(self, one: _Incoming, arrival: _Arrival, now: float) -> None:
        """Compare some blocks of an earlier run with their digests."""
        try:
            for _ in range(_COMPARED):
                held, arrival.held = arrival.held, None
                if held is None:
                    break
                one.core.checked(held.block, arrival.again(held.sealed), now)
                self._check(one, arrival, now)
        except OSError as error:
            self._fail(one, told_of(error), now)
        if self._progress is not None:
            call_user(self._progress, arrival.offered, arrival.size)

    def _write(self, one: _Incoming, arrival: _Arrival, now: float) -> None:
        # A block counts as there when it is written, so that a slow reader of a pipe slows the sender down.
        try:
            for block, right in arrival.written():
                one.core.checked(block, right, now)
        except OSError as error:
            self._fail(one, told_of(error), now)
        if self._progress is not None:
            call_user(self._progress, arrival.offered, arrival.size)

    def _look(self, now: float) -> None:
        """Write on, put into place what has come whole, and hand out or drop what has ended."""
        for session, one in [*self.sessions.items()]:
            for part in one.all_receivers():
                self._look_at(part, now)
            if one.core.satisfied:  # the sender of what goes round may never end the session
                self._choice.over(session)
            if one.core.over and not any(part.core.storable for part in one.all_receivers()):
                for part in one.all_receivers():
                    part.drop()
                self._choice.over(session)
                del self.sessions[session]
                self._remember(one)

    def _look_at(self, one: _Incoming, now: float) -> None:
        core = one.core
        if one.now is not None and one.now.held is not None:
            self._compare(one, one.now, now)
        if one.now is not None and one.now.waits:
            self._write(one, one.now, now)
        sink = None if one.now is None else one.now.sink
        if core.storable and one.now is not None and sink is not None and not one.now.waits:
            try:
                if bytes(one.now.digest) != core.digest:
                    self._fail(one, sink.unlike or "the object differs from its digest", now)
                elif sink.commit():
                    core.stored(now)
            except OSError as error:
                self._fail(one, told_of(error), now)
        self._settle(one)
        if not core.owes:  # the sender knows: the caller may take its time
            self._whole += one.whole
            one.whole.clear()

    def _settle(self, one: _Incoming) -> None:
        for ended in one.core.ended:
            if ended.whole and one.now is not None:
                one.whole.append(one.now.received(dict(self.rejected)))
            kept = one.drop()
            if not ended.whole and not self._choice.other(one.core.session):
                self._choice.missed(one.core)
                missed = Missed(one.offered(ended.about), ended.words, one.core.late, kept)
                (self._missed or self._warn)(missed)
        one.core.ended.clear()
