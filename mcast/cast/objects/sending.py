"""The sending end: its turns, and the report of an object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from errno import ETIMEDOUT
from itertools import accumulate
from math import inf
from secrets import randbits
from typing import NamedTuple

from pydantic import BaseModel
from typing_extensions import Buffer

from mcast.api import Phase, TimedOut
from mcast.arguments.copies import reduce_with_copies
from mcast.arguments.seconds import check_seconds
from mcast.cast.nack import parity
from mcast.cast.nack.closed import CLOSED, STRANGERS, letters_of
from mcast.cast.nack.header import VERSION, Rejected
from mcast.cast.nack.members import Member
from mcast.cast.nack.messages import MOST_SPARE, MOST_WIDTH, UNTOLD, Enter, piece_size
from mcast.cast.nack.payload import Frames
from mcast.cast.nack.repairs import Run
from mcast.cast.nack.sender import Manners, ObjectSender, ReceiverReport, Settled, Thing
from mcast.cast.nack.strategy import Strategy
from mcast.cast.objects.bytes_in import metadata_of
from mcast.cast.objects.bytes_out import FromMemory, Origin, Outflow, Sendable, origin_of
from mcast.cast.objects.turns import HEARD, Seat, Turns, messages_of, others
from mcast.endpoint.waiting import Step, call_user

_NAP = 0.01
"""Seconds until a pipe that had no bytes is asked again."""
_HEED = 0.1
"""Seconds within which `stop` is not_ignored, however slow the pace is."""


class Object(NamedTuple):
    """One of several objects: what is sent, and what goes with it, as `mcast.cast.send` has it."""

    data: Sendable
    name: str = ""
    metadata: bytes | BaseModel = b""

    def __reduce__(self) -> tuple[object, ...]:
        return reduce_with_copies(self)


class ObjectReport(NamedTuple):
    """What became of one object.

    name, size   as the receivers were told; the size in bytes, None for a stream that was cut short
    digest       the BLAKE3 digest of the object's bytes, with which each receiver compared what it has; None
                 if the object was cut short, by a deadline or `stop`, before the receivers were told
    strategy_met  whether the strategy's promise was kept
    seconds      from the first message of the object until the sender was done with it
    segments     how many the object has, each sent once in a message
    repairs      how many pieces, of data and of parity, were sent besides: to repair losses, or by a carousel
    parity       whether losses could be repaired by parity; otherwise pieces were repeated
    receivers    each that took part: whether and when it had the object, what it asked for, why it has not;
                 none for a carousel, which nobody answers
    refused      messages that changed nothing, by reason, since the session began: strangers', replayed ones
    skipped      how many of the pieces were not sent, because all receivers had them from an earlier run
    cycles       how often a carousel has sent the whole object
    offered      how many bytes were read and offered to the receivers: fewer than `size` if it was cut short
    """

    name: str
    size: int | None
    digest: bytes | None
    strategy_met: bool
    seconds: float
    segments: int
    repairs: int
    parity: bool
    receivers: tuple[ReceiverReport, ...]
    refused: dict[str, int]
    skipped: int = 0
    cycles: int = 0
    offered: int = 0


class Progress(NamedTuple):
    """How far a sender is.

    name       of the object on its way; None while receivers are waited for
    size       of the object, in bytes, or of all that go round together; None where only the end will tell
    done       how many bytes each receiver has; of a carousel, how many this round has sent
    receivers  how many take part
    """

    name: str | None
    size: int | None
    done: int
    receivers: int


class ObjectsOut:
    """One session of a sender, which takes any number of objects.

    memory  about how many bytes of an object are kept for repairs, and so how far the sender goes ahead
    rate    the most bytes a second, inf: as fast as the receivers can
    progress  is called when the sender has come further
    """

    def __init__(
        self,
        seat: Seat,
        memory: int,
        rate: float,
        peer_timeout: float,
        key: bytes | None,
        progress: Callable[[Progress], object] | None = None,
    ) -> None:
        if not rate > 0:
            raise ValueError(f"rate is {rate}: bytes a second, more than 0")
        self._seat = seat
        self._letters = letters_of(key)
        largest = seat.largest - self._letters.around
        block = piece_size(largest) * MOST_WIDTH
        self._room = max(4, memory // block)
        manners = Manners(peer_timeout=check_seconds(peer_timeout, "peer_timeout"))
        limit = rate / seat.largest
        nonce = randbits(64)
        self.core: ObjectSender = ObjectSender(
            seat.number, seat.name, largest, seat.now(), manners, limit, nonce
        )
        self._letters.begin(seat.number, nonce)
        self._frames = Frames(largest)
        self._outflow: Outflow | None = None
        self._round: tuple[int, ...] = ()
        """Of objects that go round together, how many bytes come before each, and how many there are."""
        self._progress = progress
        self._told = Progress(None, None, 0, 0)
        self._stopped = False

    @property
    def receivers(self) -> list[Member]:
        """Those that take part now."""
        return [member for member in self.core.members if member.lives]

    def wait_for_receivers(
        self, receivers: int | None, timeout: float | None, call: str = "session.wait_for_receivers"
    ) -> Turns[int]:
        """Wait until so many receivers take part, or let in those that come within `timeout` seconds.

        Returns how many there are. Raises TimedOut, in the name of the call, if they are too few.
        """
        if receivers is None and timeout is None:
            raise ValueError(f"{call}: say how many receivers to wait for, or a timeout, or both")
        if timeout is not None:
            timeout = check_seconds(timeout)
        end = inf if timeout is None else self._seat.now() + timeout
        core = self.core
        while (here := core.members.living) < (inf if receivers is None else receivers) or core.admits:
            if self._seat.now() >= end and receivers is None:
                break
            if self._seat.now() >= end and here < (receivers or 0):
                raise TimedOut(
                    ETIMEDOUT,
                    call,
                    Phase.RECV,
                    detail=f"{here} of {receivers} receivers take part after {timeout:g} s: is cast.receive "
                    f"running on the others, in the same group?{self._of_keys()}",
                )
            yield from self._turn(end)
        return core.members.living

    def _of_keys(self) -> str:
        """A hint, if it may be the keys or the versions that differ."""
        told = [
            f" {count} messages were {why}."
            for why in (CLOSED, STRANGERS, VERSION)
            if (count := self.core.rejected[why])
        ]
        return "".join(told)

    def send(
        self, data: Sendable, strategy: Strategy, name: str, metadata: bytes | BaseModel
    ) -> Turns[ObjectReport]:
        """Send one object to all that take part; done when the strategy says so."""
        (report,) = yield from self.send_all([Object(data, name, metadata)], strategy)
        return report

    def send_all(self, objects: Sequence[Object], strategy: Strategy) -> Turns[tuple[ObjectReport, ...]]:
        """As `send`; of a carousel several objects, which go round together."""
        if strategy.carousel and self.core.rate.limit == inf:
            raise ValueError("a carousel needs a rate: nobody answers, so nothing else slows it down")
        core, begun = self.core, self._seat.now()
        core.abandon(begun)  # an object that an error has ended
        core.settled.clear()
        with ExitStack() as stack:
            stack.callback(self._forget)
            several = len(objects) > 1
            origins = [self._opened(stack, one.data, strategy.carousel, several) for one in objects]
            things = [
                Thing(origin.size, one.name, metadata_of(one.metadata))
                for origin, one in zip(origins, objects, strict=True)
            ]
            spare = MOST_SPARE if parity.available() else 0
            abouts = core.begin_all(begun, strategy, things, spare=spare)
            outflows = [Outflow(*both) for both in zip(origins, abouts, strict=True)]
            for outflow in outflows:
                stack.callback(outflow.close)
                if several:
                    outflow.rest()
            self._round = (0, *accumulate(thing.size or 0 for thing in things)) if several else ()
            while not (core.settled or self._stopped):
                assert core.outgoing is not None
                outflow = outflows[core.outgoing.about.place]
                if self._outflow is not None and self._outflow is not outflow:
                    self._outflow.rest()
                self._outflow = outflow
                ready = outflow.offer(core)
                yield from self._turn(self._seat.now() + (_HEED if ready else _NAP))
            core.abandon(self._seat.now())  # if it is not settled
            settled, core.settled = core.settled, []
            took = self._seat.now() - begun
        return tuple(self._report(outflow, one, took) for outflow, one in zip(outflows, settled, strict=True))

    def _opened(self, stack: ExitStack, data: Sendable, again: bool, rests: bool) -> Origin:
        """Where the bytes of an object come from; the stack closes that."""
        origin = origin_of(data)
        stack.callback(origin.close)
        if isinstance(origin, FromMemory) and not self._letters.around:  # else each message is made anew
            origin.lend = self._seat.lend
        if again and not origin.again():
            raise ValueError(
                "a carousel sends the object again and again: give a buffer, a path, or a file that can seek "
                "and has a known size"
            )
        if rests:
            origin.rest()
        return origin

    def _forget(self) -> None:
        """Nothing is on its way any more."""
        self._stopped, self._outflow, self._round = False, None, ()

    def _report(self, outflow: Outflow, settled: Settled, took: float) -> ObjectReport:
        about = outflow.about
        of_stream = None if settled.digest is None else outflow.size
        return ObjectReport(
            about.name,
            of_stream if about.size == UNTOLD else about.size,
            settled.digest,
            settled.strategy_met,
            took,
            settled.pieces,
            settled.repairs,
            settled.parity,
            settled.receivers,
            dict(self.core.rejected),
            settled.spared,
            settled.cycles,
            outflow.size,
        )

    def stop(self) -> None:
        """End the object that is on its way as it stands, or the next one if there is none."""
        self._stopped = True

    def close(self, why: str) -> Turns[None]:
        """End the session: the receivers are told."""
        self.core.close(self._seat.now(), why)
        while not self.core.over:
            yield from self._turn(inf)

    def _turn(self, until: float) -> Turns[None]:
        core = self.core
        said = self._written(core.messages(self._seat.now()))
        # What comes after the end is not waited for: perhaps nobody says anything any more.
        ended = core.over or core.settled
        heard = yield Step(self._seat.now() if ended else min(until, core.due), HEARD, said)
        now = self._seat.now()
        for message, address in messages_of(others(heard)):
            try:
                spoken = self._letters.read(message, address)
            except Rejected as rejected:
                core.rejected[str(rejected)] += 1
                continue
            if isinstance(spoken, Enter) and spoken.room > self._room:
                spoken = spoken._replace(room=self._room)  # the sender keeps what is under way in memory
            core.hears(spoken, address, now)
        self._tell()

    def _written(self, out: list[bytes | Run]) -> Iterator[Sequence[Buffer] | memoryview]:
        """What the core says, in batches that are made when their turn comes.

        That is what comes before the pieces, the pieces, and the rest.
        """
        runs = [one for one in out if isinstance(one, Run)]
        first = out.index(runs[0]) if runs else len(out)
        words: list[Buffer] = [one for one in out[:first] if not isinstance(one, Run)]
        rest: list[Buffer] = [one for one in out[first:] if not isinstance(one, Run)]
        if words:
            yield self._letters.written(words)
        if self._outflow is not None:
            yield from map(self._letters.written, self._outflow.framed(runs, self._frames))
        if rest:
            yield self._letters.written(rest)

    def _tell(self) -> None:
        if self._progress is None:
            return
        now = Progress(None, None, 0, self.core.members.living)
        if self.core.outgoing is not None and self._outflow is not None:
            about = self._outflow.about
            size, before = None if about.size == UNTOLD else about.size, 0
            if self._round:
                before, size = self._round[about.place], self._round[-1]
            now = now._replace(name=about.name, size=size, done=before + self._outflow.done)
        if now != self._told:
            self._told = now
            call_user(self._progress, now)
