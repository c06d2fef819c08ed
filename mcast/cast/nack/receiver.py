"""The receiver of one sender's objects, without I/O and clock: messages and times in, messages out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from random import Random
from typing import Any, NamedTuple

from mcast.cast.nack.arriving import Arriving, Ready
from mcast.cast.nack.asking import Asking
from mcast.cast.nack.backoff import LEAST_ROUND_TRIP, spread
from mcast.cast.nack.circle import Circle
from mcast.cast.nack.header import printable
from mcast.cast.nack.messages import (
    ALL,
    BROKEN,
    DONE,
    HOLDS,
    LEFT,
    MOST_ROUND_TRIP,
    OPEN,
    UNDECIDED,
    WANT_BYTES,
    WANTS_AT,
    WHOLE,
    Admit,
    Behind,
    Bye,
    Describe,
    Enter,
    Flush,
    Have,
    Lack,
    Offer,
    Over,
    Seal,
    Spoken,
    micros,
    packed,
)
from mcast.cast.nack.shape import Shape

TOGETHER = 32
"""So many objects that go round together may be there in part: each has a file or memory of its own."""


class Self(NamedTuple):
    """What a receiver is: number, name, blocks that it can hold, longest message, whether it uses parity.

    silence  how many seconds the sender may be silent
    stall    how many seconds the sender may speak without sending what is missing: so long at least where an
             object goes round
    nonce    random, and of this session alone
    queue    how many messages its receive queue holds; 0: that is not said
    stores   True: an object is whole when `stored` says that it is in its place, and not before
    together  so many objects that go round together may be there in part
    """

    number: int
    name: str
    room: int
    largest: int
    parity: bool
    peer_timeout: float = 10.0
    stall: float = 60.0
    stores: bool = False
    nonce: int = 0
    together: int = TOGETHER
    queue: int = 0


class Ended(NamedTuple):
    """How an object ended here: `about` it, whether it is `whole` and right, and in `words` why it is not."""

    about: Describe
    whole: bool
    words: str


class _Pulse:
    """What a receiver knows of its sender's time and group."""

    __slots__ = ("at", "heard", "members", "round_trip", "stamp")

    def __init__(self, now: float) -> None:
        self.stamp = 0
        self.at = self.heard = now
        self.round_trip, self.members = LEAST_ROUND_TRIP, 1

    def beats(self, spoken: Offer | Seal | Flush, now: float) -> None:
        if spoken.stamp >= self.stamp:
            self.stamp, self.at = spoken.stamp, now
            self.members = max(1, spoken.members)
            self.round_trip = min(max(spoken.round_trip / 1e6, LEAST_ROUND_TRIP), MOST_ROUND_TRIP)

    def held(self, now: float) -> int:
        """For how many µs the last stamp has been here."""
        return min(micros(now - self.at), (1 << 32) - 1)


class ObjectReceiver:
    """One end: takes part in the session of one sender."""

    def __init__(self, session: int, who: Self, random: Random, now: float) -> None:
        self.session: int = session
        self.who: Self = who
        self.index: int | None = None
        """The place in the sender's bitmaps; None before the sender has admitted this end."""
        self.over: bool = False
        """Whether the session has ended."""
        self.why: str = ""
        """Why it has ended; empty if the sender has ended it for all."""
        self.silent: bool = False
        """Whether it has ended because the sender was silent: it goes on if the sender is heard again."""
        self.ended: list[Ended] = []
        """Objects that have ended; the driver takes them away."""
        self.rejected: Counter[str] = Counter[str]()
        self.beside: dict[int, ObjectReceiver] = {}
        """Of objects that go round together, those that this end takes besides its own, by number."""
        self._random = random
        self._pulse, self._moved = _Pulse(now), now
        self._circle: Circle | None = None
        self._asking = Asking(random)
        self._now: tuple[Describe, Arriving] | None = None
        self._last = -1
        self._first = True  # whether the next object is the first one since this end takes part
        self._late = False  # whether the first piece of an object may be one of its middle
        self._state = UNDECIDED
        self._answers = _Answers()

    @property
    def arriving(self) -> Arriving | None:
        """The object that is arriving, or has arrived last."""
        return self._now and self._now[1]

    @property
    def about(self) -> Describe | None:
        """What the sender says of that object."""
        return self._now and self._now[0]

    # --- what comes ------------------------------------------------------------------------------

    def resumes(self, paused: float) -> None:
        """The driver listens again, after so many seconds, which are no silence of the sender's."""
        self._pulse.heard += paused
        for one in self.all_receivers():
            one._moved += paused

    def all_receivers(self) -> Iterator[ObjectReceiver]:
        """This end, and those of the objects that go round with its own."""
        yield self
        yield from self.beside.values()

    def hears(self, spoken: Spoken, now: float) -> None:
        """Take in a message, other than a piece, of this session."""
        if self.over or spoken.session != self.session:
            return
        if isinstance(spoken, Lack):
            self._on_lack(spoken, now)
        elif (step := _STEPS.get(type(spoken))) is not None:
            self._pulse.heard = now
            of = self.beside.get(spoken.object, self) if isinstance(spoken, Seal | Flush) else self
            step(of, spoken, now)

    def takes(self, object_: int, block: int, first: int, count: int, now: float) -> int:
        """A bit for each new piece among first..first+count-1 of a block, which the driver keeps from now."""
        if object_ in self.beside:
            return self.beside[object_].takes(object_, block, first, count, now)
        self._pulse.heard = now
        arriving = self._takes_part(object_)
        if arriving is None:
            return 0
        if not arriving.begun and self._late:
            arriving.since = block
        new = arriving.takes(block, first, count)
        if new and not self._mute:  # what finds no place is dropped, and may come again for ever
            self._moved, self._asking.unsaid = now, 0
        if self._asking.due is None and arriving.lacking:
            self._wake(now)
        return new

    def holds(self, blocks: int, now: float) -> None:
        """The driver's disk seems to have the first blocks of the object that was just described.

        Each comes out of `ready` without a piece, in order, when its digest is known.
        """
        arriving = self.arriving
        if arriving is not None and self._state == UNDECIDED and blocks:
            arriving.hold(blocks)
            self._hold(now + spread(self._random, self._pulse.members))

    def scatters(self) -> None:
        """The driver can put each block of the object that was just described into its place as it comes."""
        if self.arriving is not None:
            self.arriving.scatter()

    def dropped(self) -> list[int]:
        """Blocks of the current object of which nothing is kept any more: the driver drops their pieces."""
        if self._now is None or not self._now[1].dropped:
            return _NO_BLOCK
        found, self._now[1].dropped = self._now[1].dropped, []
        return found

    def ready(self) -> list[Ready]:
        """The blocks of the current object to decode and check, each once; `checked` takes the outcome."""
        if self._now is None or not self._now[1].ready:
            return _NONE
        found, self._now[1].ready = self._now[1].ready, []
        return found

    def checked(self, block: int, right: bool, now: float) -> None:
        """The driver has compared a block that was ready with its digest."""
        arriving = self.arriving
        if arriving is None or self._state != UNDECIDED:
            return
        held = arriving.held.active and block == arriving.held.base
        if not right and held:
            arriving.wrong(block)
            self._hold(now)
            return
        if not right:
            self.rejected["a block that differs from its digest"] += 1
            if not arriving.wrong(block):
                self.fail("a block differs from its digest, again and again", now)
            return
        before = arriving.base
        arriving.right(block)
        self._moved = now
        if self._circle is not None:
            self._circle.news(now)
        half = max(1, self.who.room // 2)
        if arriving.whole:
            self._complete(now)
        elif before // half != arriving.base // half:
            self._answer(now)

    @property
    def storable(self) -> bool:
        """Whether all of the current object is there, and `stored` is waited for, or `fail`."""
        return self._lacks and self._now is not None and self._now[1].whole

    @property
    def digest(self) -> bytes | None:
        """The digest of the current object, by its sender; None before that is said."""
        return self._now and self._now[1].digest

    def stored(self, now: float) -> None:
        """The driver has put the object into its place."""
        if self.storable:
            self._settle(WHOLE, "", now)

    @property
    def late(self) -> bool:
        """Whether this end came too late for the object, which was the first that it heard of."""
        return self._late and self._now is not None and self._now[1].gone and not self._now[1].base

    def fail(self, words: str, now: float) -> None:
        """Give up the current object: the sender is told why."""
        if self._now is not None and self._state == UNDECIDED:
            self._settle(BROKEN, words, now)

    def leave(self, why: str) -> None:
        """End the session here."""
        for one in self.all_receivers():
            if not one.over:
                one._behind(why or "the sender has ended the session")
                one.over = True
                one.why = why

    def rest(self) -> None:
        """Keep what has ended, and nothing else, until the silent sender is heard again."""
        self.beside.clear()
        self._asking, self._answers = Asking(self._random), _Answers(self._answers.words)
        if self._now is not None:
            self._now[1].forget()

    def returns(self, nonce: int, now: float) -> None:
        """The sender is heard again after `rest`: take part anew in what has not ended here."""
        self.who = self.who._replace(nonce=nonce)
        self.index, self.over, self.why, self.silent = None, False, "", False
        self._first, self._pulse = True, _Pulse(now)
        if self._circle is not None:
            self._circle.returns(now)

    # --- what is said ----------------------------------------------------------------------------

    def parting(self, words: str, now: float) -> list[bytes]:
        """What to say to leave the session, until the sender confirms it: `over` is True then."""
        if self.over or self.index is None:
            return []
        state = DONE if self._state == WHOLE else LEFT
        return [packed(self._has(now)._replace(state=state, words=printable(words)))]

    @property
    def done(self) -> bool:
        """Whether the object has ended here, and the driver has heard of it."""
        return self._state != UNDECIDED and not self.ended

    @property
    def satisfied(self) -> bool:
        """Whether all of what goes round has ended here, or is given up."""
        return self._circle is not None and self._circle.over

    @property
    def owes(self) -> bool:
        """Whether the sender has not been told yet what has become of the object."""
        return not self.over and self._answers.have < inf

    @property
    def due(self) -> float:
        """When to ask `messages` again, unless a message comes."""
        if self.over:
            return inf
        asking = inf if self._asking.due is None else self._asking.due
        unseen = inf if self._circle is None else self._circle.due(self.who.stall)
        return min(
            asking, self._answers.due, self._pulse.heard + self.who.peer_timeout, self._stalled, unseen
        )

    def messages(self, now: float) -> list[bytes]:
        """What to send now."""
        if self.over or now < self.due:
            return []
        if now >= self._pulse.heard + self.who.peer_timeout:
            self.leave(f"the sender was silent for {self.who.peer_timeout:g} s")
            self.silent = True
            return []
        if now >= self._stalled:
            self.fail(self._hopeless or f"{self._idle} for {self.who.stall:g} s", now)
        if self._circle is not None and now >= self._circle.due(self.who.stall):
            self._circle.given_up = True
        said = [packed(spoken) for spoken in self._answers.pop(now, self._entry, self._has, self._held)]
        arriving = self.arriving
        if arriving is not None and self._asking.due is not None and now >= self._asking.due:
            most = (self.who.largest - WANTS_AT) // WANT_BYTES
            trip, members = self._pulse.round_trip, self._pulse.members
            wants = self._asking.ask(arriving.wants(), now, trip, members, most) if self._lacks else ()
            if wants:
                stamp, held = self._pulse.stamp, self._pulse.held(now)
                base, me = arriving.base, self.who.number
                if arriving.held.active:  # a sender that has not heard so would not heed what follows
                    said.append(packed(self._held(now)))
                said.append(packed(Lack(self.session, arriving.number, me, base, stamp, held, wants)))
            if self._lacks and arriving.lacking:
                self._wake(now)
        return said

    def _entry(self, now: float) -> Spoken:
        who = self.who
        stamp, name = self._pulse.stamp, printable(who.name)
        return Enter(
            self.session, who.number, who.room, who.largest, who.parity, stamp, who.nonce, who.queue, name
        )

    def _has(self, now: float) -> Have:
        arriving = self.arriving
        number, base = (0, 0) if arriving is None else (arriving.number, arriving.base)
        stamp, held = self._pulse.stamp, self._pulse.held(now)
        words = self._answers.words
        return Have(self.session, number, self.who.number, base, stamp, held, self._state, words)

    def _held(self, now: float) -> Have:
        held = 0 if self.arriving is None else self.arriving.held.until
        return self._has(now)._replace(base=held, state=HOLDS)

    # --- the steps -------------------------------------------------------------------------------

    @property
    def _lacks(self) -> bool:
        """Whether the current object may still become whole here."""
        return self._now is not None and self._state == UNDECIDED and not self._now[1].gone

    @property
    def _mute(self) -> bool:
        """Whether nobody waits for a word about the current object: it goes round and round."""
        return self._now is not None and self._now[0].around > 0

    @property
    def _stalled(self) -> float:
        """When the sender has sent nothing that is missing for too long; inf if nothing is missing.

        What goes round may take any time to come again: rounds count, too.
        """
        waits = self._lacks and not self.storable and (not self._mute or self._hopeless)
        return self._moved + self.who.stall if waits else inf

    @property
    def _idle(self) -> str:
        taking = self.arriving is not None and self.arriving.taking
        return (
            "the program or disk here took nothing" if taking else "the sender sent nothing that is missing"
        )

    @property
    def _hopeless(self) -> str:
        return "" if self.arriving is None else self.arriving.hopeless

    def _takes_part(self, number: int) -> Arriving | None:
        """The object of that number, while it is arriving."""
        if self._now is None or self._state != UNDECIDED:
            return None
        return self._now[1] if self._now[1].number == number else None

    def _wake(self, now: float) -> None:
        self._asking.wake(now, self._pulse.round_trip, self._pulse.members)

    def _answer(self, now: float) -> None:
        if not self._mute:
            self._answers.have = min(self._answers.have, now + spread(self._random, self._pulse.members))

    def _hold(self, at: float) -> None:
        if not self._mute:
            self._answers.hold = at

    def _complete(self, now: float) -> None:
        if not self.who.stores:
            self._settle(WHOLE, "", now)

    def _settle(self, state: int, words: str, now: float) -> None:
        self._end(state, words)
        self._answer(now)
        if self._circle is not None:
            self._circle.news(now)

    def _end(self, state: int, words: str) -> None:
        """The object has ended here, once: what follows of it, also after a silence, changes nothing."""
        if self._now is not None and self._state == UNDECIDED:
            self._state, self._answers.words = state, printable(words)
            self._asking.due, self._answers.hold = None, inf
            self.ended.append(Ended(self._now[0], state == WHOLE, words))
            if self._circle is not None:
                self._now[1].drop_all()
                self._circle.ends(self._now[1].number)

    def _behind(self, words: str) -> None:
        """The sender goes on without this end, which keeps what has all come."""
        if not self.storable:
            self._end(BROKEN, words)

    def _on_offer(self, offer: Offer, now: float) -> None:
        self._pulse.beats(offer, now)
        if self._now is not None and offer.object > self._now[1].number:
            self._turns_away()
        self._last = max(self._last, offer.object - 1)
        if self._circle is not None and self._circle.reaches(offer.object):
            self._circle.invited += 1
        elif self.index is None and self._answers.enter == inf:
            self._answers.enter = now + spread(self._random, 1000)

    def _turns_away(self) -> None:
        for one in self.all_receivers():
            one._behind("left behind: the sender has turned to the next object")

    def _on_admit(self, admit: Admit, now: float) -> None:
        if self.index is None:
            index, nonce = admit.indexes.get(self.who.number, (None, None))
            if index is not None and nonce == self.who.nonce:
                self.index, self._answers.enter = index, inf

    def _on_describe(self, about: Describe, now: float) -> None:
        if (self.index is None and not about.around) or about.object <= self._last:
            return
        if self._circle is not None and self._circle.reaches(about.object):
            if self._circle.has(about):
                self._take_beside(self._circle, about, now)
            else:
                self.rejected["an object that does not go round with the others"] += 1
            return
        if self._now is not None and about.object <= self._now[1].number:
            return
        if any(one.storable for one in self.all_receivers()):  # the next object waits: it is described again
            return
        self._turns_away()
        self._circle = Circle(about, self.who.room, now) if about.around else None
        if self._circle is not None:
            self._circle.described(about.object, now)
        self._take(about, now)

    def _take(self, about: Describe, now: float) -> None:
        self._late, self._first = self._first, False
        arriving = Arriving(about.object, Shape.of(about), self.who.room, self.who.parity, self._circle)
        self._now, self._state, self._moved = (about, arriving), UNDECIDED, now
        self._answers.words = ""
        if about.around:
            self._answers.enter = self._answers.have = inf
        if arriving.whole:
            self._complete(now)

    def _take_beside(self, circle: Circle, about: Describe, now: float) -> None:
        """Take another object of those that go round, unless it has ended here.

        Where too many are there in part, the newest makes room: the others lose nothing, and end some time.
        """
        if not circle.described(about.object, now) or about.object == self._number:
            return
        for number in [number for number, one in self.beside.items() if one.done]:
            del self.beside[number]
        if about.object in self.beside:
            return
        if sum(one._lacks for one in self.all_receivers()) >= self.who.together:
            partly = [number for number, one in self.beside.items() if one._lacks and not one.storable]
            if len(partly) < 2:
                return
            arriving = self.beside.pop(partly[-1]).arriving
            if arriving is not None:
                arriving.drop_all()
        one = self.beside[about.object] = ObjectReceiver(self.session, self.who, self._random, now)
        one._pulse, one._circle = self._pulse, circle
        one._take(about, now)

    @property
    def _number(self) -> int:
        """The number of the object; below all numbers before there is one."""
        return -1 if self._now is None else self._now[1].number

    def _on_seal(self, seal: Seal, now: float) -> None:
        self._pulse.beats(seal, now)
        arriving = self._takes_part(seal.object)
        if arriving is None:
            return
        if not arriving.begun and self._late:
            arriving.since = seal.block
        arriving.sent(0, OPEN, seal.low)
        if not arriving.seal(seal.block, seal.blocks):
            self.rejected["a block that the object cannot have"] += 1
        self._after(arriving, now)

    def _on_flush(self, flush: Flush, now: float) -> None:
        self._pulse.beats(flush, now)
        arriving = self._takes_part(flush.object)
        if arriving is not None:
            if flush.waits:
                arriving.since = 0
            arriving.sent(flush.blocks, flush.total, flush.low, flush.digest)
            if arriving.whole:
                self._complete(now)
            self._after(arriving, now)
        if self.index is not None and flush.asked << flush.first >> self.index & 1:
            self._answer(now)

    def _after(self, arriving: Arriving, now: float) -> None:
        if self._lacks:
            if self._asking.due is None and arriving.lacking:
                self._wake(now)
        elif self._state == UNDECIDED:
            came = "came too late for the object" if self.late else "lacks what the sender has no more"
            self._settle(BROKEN, f"left behind: this receiver {came}", now)

    def _on_lack(self, lack: Lack, now: float) -> None:
        arriving = self._takes_part(lack.object)
        if arriving is not None and lack.member != self.who.number and self._asking.due is not None:
            for want in lack.wants:
                if arriving.lacks(want.block):
                    self._asking.heard(want, now, self._pulse.round_trip, self._pulse.members)

    def _on_over(self, over: Over, now: float) -> None:
        for one in self.all_receivers():
            if one._now is not None and over.object >= one._number:
                words = "left behind: the sender does not wait for this receiver"
                one._behind("the carousel has ended" if one._mute else words)
                one._answers.have = inf
        self._last = max(self._last, over.object)

    def _on_behind(self, behind: Behind, now: float) -> None:
        named = self.index is not None and behind.slow << behind.first >> self.index & 1
        if named and behind.object == self._number:
            self._behind("left behind: this receiver is too slow for what the sender promises")

    def _on_bye(self, bye: Bye, now: float) -> None:
        if bye.member == ALL:
            self.leave(bye.words and f"the sender has ended the session: {bye.words}")
        elif bye.member == self.who.number:
            self.leave(bye.words)


class _Answers:
    """What a receiver says without lacking anything, and when."""

    __slots__ = ("enter", "have", "hold", "words")

    def __init__(self, words: str = "") -> None:
        self.enter = self.have = self.hold = inf
        self.words = words

    @property
    def due(self) -> float:
        return min(self.enter, self.have, self.hold)

    def pop(self, now: float, *speak: Callable[[float], Spoken]) -> list[Spoken]:
        enter, have, hold = speak
        said = []
        if now >= self.enter:
            self.enter = inf
            said.append(enter(now))
        if now >= self.have:
            self.have = inf
            said.append(have(now))
        if now >= self.hold:
            self.hold = inf
            said.append(hold(now))
        return said


_NONE: list[Ready] = []
_NO_BLOCK: list[int] = []

_STEPS: dict[type[Spoken], Callable[[ObjectReceiver, Any, float], None]] = {
    Offer: ObjectReceiver._on_offer,
    Admit: ObjectReceiver._on_admit,
    Describe: ObjectReceiver._on_describe,
    Seal: ObjectReceiver._on_seal,
    Flush: ObjectReceiver._on_flush,
    Over: ObjectReceiver._on_over,
    Bye: ObjectReceiver._on_bye,
    Behind: ObjectReceiver._on_behind,
}
