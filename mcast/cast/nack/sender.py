"""The sender of objects to a group, without I/O and clock: messages and times go in, messages come out.

What comes out is bytes, or a `Run`: pieces whose bytes the driver has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from mcast.cast.nack.backoff import RoundTrip, patience
from mcast.cast.nack.header import printable
from mcast.cast.nack.members import BEHIND, Attendance, Lot, Member
from mcast.cast.nack.messages import (
    ALL,
    DONE,
    HOLDS,
    LARGEST,
    LEFT,
    MOST_ADMITTED,
    MOST_AROUND,
    MOST_METADATA,
    MOST_ROOM,
    MOST_ROUND_TRIP,
    MOST_SPARE,
    MOST_WIDTH,
    OF_A_MEMBER,
    UNTOLD,
    WHOLE,
    Admit,
    Behind,
    Bye,
    Describe,
    Enter,
    Have,
    Lack,
    Offer,
    Over,
    Sealed,
    Spoken,
    micros,
    packed,
    piece_size,
)
from mcast.cast.nack.outgoing import Outgoing, Rounds, Terms
from mcast.cast.nack.rate import BURST, FEW, TOLERATED, Rate, Window
from mcast.cast.nack.repairs import Run
from mcast.cast.nack.stragglers import Stragglers
from mcast.cast.nack.strategy import Standing, Strategy

_SAID = 3
"""How often what nobody confirms is said."""

_SAID_TOGETHER = 2
"""The same of objects that go round together, of which most are small, and whose next round says it again."""

_MOMENT = 0.002
"""Seconds in which receivers are admitted together."""

_DESCRIBED = 8
"""An object is described again every so many blocks, for those that have lost the description."""

_SEALS = 4
"""So many blocks the SEAL after a block describes: so many in a row must be lost before a receiver has to
ask for one."""

_INVITING = 4
"""At most one message in so many invites, however slow the pace is: the others bring the object."""

_QUIET = 4
"""Few receivers, which are asked often, are asked so often in vain before their silence counts."""

_FREE, _SHARE = 4096, 8
"""On account of one receiver so many pieces are repaired, and so many times what has been sent."""

_BITS = (LARGEST - 64) * 8 // 2
"""How many receivers one message has bits for."""


class Manners(NamedTuple):
    """How a sender deals with time, in seconds.

    offer    between two invitations
    silence  for which a receiver that is asked may be silent
    stall    for which a receiver may stand still while others wait for it
    trip     the longest round trip that is believed
    """

    offer: float = 0.1
    peer_timeout: float = 10.0
    stall: float = 60.0
    trip: float = 0.25


class Thing(NamedTuple):
    """What is said of an object before its bytes: `size` is None where only the end tells."""

    size: int | None = None
    name: str = ""
    metadata: bytes = b""


class ReceiverReport(NamedTuple):
    """What became of one object at one receiver.

    name, address  the receiver's
    whole    whether it has the object
    seconds  when it said so, since the object was begun; inf if it did not
    asks     how many requests it sent
    asked    for how many pieces
    why      why it does not have the object; empty if it has
    number   the receiver's, by which several objects of a session are told to be one receiver's
    """

    name: str
    address: str
    whole: bool
    seconds: float
    asks: int
    asked: int
    why: str
    number: int


class Settled(NamedTuple):
    """How one object ended: its number, whether the strategy's promise was kept, and each receiver's account.

    pieces  of the object
    repairs  how many pieces, of data and of parity, were sent to repair losses
    parity  whether parity could be sent
    spared  how many pieces were not sent, because all receivers had them from an earlier run
    rounds  how often a carousel has sent the whole object
    digest  the object's, as the receivers were told; None if they were not, because it was cut short
    """

    object: int
    strategy_met: bool
    pieces: int
    repairs: int
    parity: bool
    receivers: tuple[ReceiverReport, ...]
    spared: int = 0
    cycles: int = 0
    digest: bytes | None = None


class ObjectSender:
    """One end: invites receivers, and sends them one object after another."""

    def __init__(
        self,
        session: int,
        name: str,
        largest: int,
        now: float,
        manners: Manners = Manners(),  # noqa: B008  (immutable)
        limit: float = inf,
        nonce: int = 0,
    ) -> None:
        self.session: int = session
        self.largest: int = largest
        self.nonce: int = nonce
        self.members: Attendance = Attendance()
        self.rate: Rate = Rate(limit)
        self.outgoing: Outgoing | None = None
        """The object on its way; of those that go round together, the one whose turn it is."""
        self._circle: list[Outgoing] = []
        self.settled: list[Settled] = []
        """Objects that have ended; the driver takes them away."""
        self.rejected: Counter[str] = Counter[str]()
        self._manners = manners
        self._trip = RoundTrip(min(manners.trip, MOST_ROUND_TRIP))
        self._rounds = Rounds()
        self._window = Window()
        self._stragglers: Stragglers | None = None
        """Of the object on its way, unless it goes round: nobody holds that up."""
        self._plan = _Plan(now, printable(name))

    # --- what the driver does --------------------------------------------------------------------

    def begin(
        self,
        now: float,
        strategy: Strategy,
        size: int | None = None,
        name: str = "",
        metadata: bytes = b"",
        width: int = MOST_WIDTH,
        spare: int = MOST_SPARE,
    ) -> Describe:
        """Begin the next object, of `size` bytes or of a length that is not known.

        Returns how it is cut. Without parity, which `spare` 0 means, pieces are repeated. Raises ValueError
        if an object is on its way, if the metadata is too long, or for a carousel of unknown length.
        """
        (about,) = self.begin_all(now, strategy, [Thing(size, name, metadata)], width, spare)
        return about

    def begin_all(
        self,
        now: float,
        strategy: Strategy,
        things: Sequence[Thing],
        width: int = MOST_WIDTH,
        spare: int = MOST_SPARE,
    ) -> list[Describe]:
        """As `begin`; of a carousel several objects, which go round together, each in its turn."""
        if self.outgoing is not None:
            raise ValueError("the object before is still on its way")
        if not 0 < len(things) <= (MOST_AROUND if strategy.carousel else 1):
            raise ValueError(f"{len(things):,} objects in a carousel: from 1 to {MOST_AROUND:,}")
        for thing in things:
            if len(thing.metadata) > MOST_METADATA:
                raise ValueError(f"{len(thing.metadata)} bytes of metadata: at most {MOST_METADATA}")
            if strategy.carousel and thing.size is None:
                raise ValueError("a carousel sends the object again and again: its size must be known before")
        self.members.begin(now, not strategy.carousel)
        largest = min([self.largest, *(member.largest for member in self.members if member.lives)])
        abouts = [
            Describe(
                self.session,
                self._plan.objects + place,
                UNTOLD if thing.size is None else thing.size,
                piece_size(largest),
                width,
                spare,
                len(things) if strategy.carousel else 0,
                place,
                printable(thing.name),
                thing.metadata,
            )
            for place, thing in enumerate(things)
        ]
        self._plan.objects += len(abouts)
        if strategy.carousel:
            self.rate.pace = self.rate.limit  # nobody reports losses
        self._plan.judged = False
        self._circle, self._rounds = [Outgoing(about, Terms(strategy, now)) for about in abouts], Rounds()
        self.outgoing = self._circle[0]
        self._stragglers = None if strategy.carousel else Stragglers(strategy, now)
        self._widen()
        for _ in range(_SAID):  # all that follows is lost on an end that has not heard it
            self._plan.say(now, packed(abouts[0]))
        return abouts

    @property
    def admits(self) -> bool:
        """Whether a receiver has yet to be told that it takes part: it takes no piece before."""
        return self._plan.admits

    @property
    def room(self) -> int:
        """How many blocks of the object may be offered now."""
        return 0 if self.outgoing is None else self.outgoing.room

    def offer(self, sealed: Sealed) -> None:
        """The next block is there, and stays readable until the object's `low` is beyond it."""
        assert self.outgoing is not None
        self.outgoing.offer(sealed)

    def end(self, digest: bytes) -> None:
        """The object has no more blocks; the digest is that of all its bytes."""
        if self.outgoing is not None:
            self.outgoing.digest = digest

    def abandon(self, now: float) -> None:
        """Send no more of the object: those that do not have it are left behind."""
        if self.outgoing is not None:
            self._settle(self.outgoing, now, "the sender has given the object up")

    def close(self, now: float, why: str = "") -> None:
        """End the session: all are told."""
        self._plan.often(packed(Bye(self.session, ALL, printable(why))), now, self._round_trip)
        self.abandon(now)  # said after the BYE, whose reason is the better one
        self._plan.closed = True

    @property
    def over(self) -> bool:
        """Whether the session has ended, and all has been said."""
        return self._plan.closed and self._plan.at == inf

    # --- what comes ------------------------------------------------------------------------------

    def hears(self, spoken: Spoken, address: str, now: float) -> None:
        """Take in a message of a receiver."""
        if self._plan.closed or spoken.session != self.session:
            return
        if isinstance(spoken, Enter):
            self._on_enter(spoken, address, now)
        elif isinstance(spoken, OF_A_MEMBER):
            member = self.members.get(spoken.member)
            if member is None:
                self.rejected["not a receiver of this session"] += 1
            elif not member.lives:
                self._part(member)
            elif isinstance(spoken, Have) and spoken.state in (LEFT, DONE):
                self._on_leave(member, spoken, now)
            else:
                member.heard = now
                member.waited = inf
                self._window.answered(member.number, spoken.stamp)
                outgoing = self.outgoing
                if outgoing is None or spoken.object != outgoing.about.object or outgoing.about.around:
                    return
                if isinstance(spoken, Have) and spoken.state == HOLDS:
                    self._on_holds(outgoing, member, spoken.base, now)
                elif member.owes:
                    self._on_answer(outgoing, member, spoken, now)
                elif member.state == BEHIND:  # it has not heard so, or it would be silent
                    behind = Behind(self.session, outgoing.about.object, member.index, 1)
                    self._plan.part(member.number, packed(behind))

    def _on_enter(self, enter: Enter, address: str, now: float) -> None:
        member = self.members.get(enter.member)
        if member is None:
            outgoing = self.outgoing
            sent = outgoing.sent if outgoing else 0
            waits = outgoing is not None and not outgoing.about.around
            part = waits and outgoing is not None and not outgoing.low and sent < enter.room
            member = self.members.enter(enter, address, sent, part, now)
            if member is None:
                bye = packed(Bye(self.session, enter.member, "there is no place for more"))
                self._plan.part(enter.member, bye)
                return
            if outgoing is not None:
                self._widen()
        if member.lives:
            member.nonce = enter.nonce
            member.waited = inf  # who has not heard the admission cannot answer, and is not silent
            self._plan.admit(member, now)
        else:
            self._part(member)

    def _on_leave(self, member: Member, have: Have, now: float) -> None:
        outgoing, done = self.outgoing, have.state == DONE and member.owes
        if done and outgoing is not None and have.object == outgoing.about.object:
            self._on_answer(outgoing, member, have._replace(state=WHOLE), now)
        member.words = have.words
        self._give_up(member, Lot.LEFT)

    def _on_holds(self, outgoing: Outgoing, member: Member, held: int, now: float) -> None:
        """A receiver seems to have blocks from an earlier run. Whether that is so is found out there."""
        if not member.part and outgoing.low <= held and outgoing.sent <= held + member.room:
            self.members.joins(member, outgoing.low, now)
            self._widen()
        if member.owes:
            # What comes late says more than what came before; what it takes back was not lost on the way.
            self.members.holds(member, held if member.held is None else min(member.held, held))
            member.judged = max(member.judged, outgoing.sent)
            outgoing.held = self.members.held()

    def _on_answer(self, outgoing: Outgoing, member: Member, spoken: Lack | Have, now: float) -> None:
        early = isinstance(spoken, Have) and spoken.state == WHOLE and not outgoing.all_sent
        if early or spoken.base > outgoing.sent or spoken.stamp > micros(now):
            self.rejected["an answer to what was not sent"] += 1
            return
        if spoken.stamp:
            self._trip.measured(now - spoken.stamp / 1e6 - spoken.held / 1e6)
        self.members.has(member, spoken.base, now)
        if isinstance(spoken, Have):
            self.members.answer(member, spoken.state, spoken.words, now)
            if not member.owes:
                self._window.answered(member.number, inf)
            if self.members.low() != outgoing.low or self._done(outgoing, now):
                self._plan.judged = False
        else:
            self._on_lack(outgoing, member, spoken, now)

    def _on_lack(self, outgoing: Outgoing, member: Member, lack: Lack, now: float) -> None:
        self._rounds.news()
        late = not member.asks
        member.asks += 1
        at = now + (self._round_trip if self._rounds.at < inf else self._patience)
        lost = charged = 0
        width, repairs = outgoing.about.width, outgoing.repairs
        for want in lack.wants:
            gone = want.missing and want.block < outgoing.low  # the seals of all blocks are kept
            if gone or want.block >= outgoing.sent or want.missing >> width:
                self.rejected["a request for what was not sent"] += 1
                continue
            needs = want.need or want.missing.bit_count()
            if late and want.block >= member.judged:  # what was sent before it listened is no loss
                late = want.missing.bit_count() == outgoing.pieces_of(want.block)
                member.judged = want.block + 1
            fresh = want.block >= member.judged
            lost += needs if fresh else repairs.lost(want, member.stamp, lack.stamp)
            more = repairs.asked(want, lack.stamp, at)
            member.asked += needs if more else 0
            charged += more
        span = (outgoing.sent - member.judged) * width + repairs.sent(member.stamp, lack.stamp)
        if lost >= _FREE // width and span:
            part = min(1.0, lost / span)
            self.rate.lost(part)
            if part > TOLERATED:
                member.loss, member.lossy = part, now
        member.judged, member.stamp = outgoing.sent, max(member.stamp, lack.stamp)
        member.charged += charged
        if member.charged > _FREE + _SHARE * (outgoing.pieces + outgoing.spared):
            self._give_up(member, Lot.GREEDY)

    # --- what is said ----------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """When to ask `messages` again, unless a message comes or a block is offered."""
        found = self._plan.at if self._plan.judged else self._plan.now
        outgoing = self.outgoing
        if outgoing is None:
            return found if self._plan.closed else min(found, self._plan.offer)
        paced = min(outgoing.repairs.at, self._rounds.at)
        ready = min(self._window.due, self.rate.next(self._plan.now) if self._window.room else inf)
        found = min(found, max(paced, ready), self._plan.offer)
        found = min(found, self._ends_at(outgoing))
        if self._stragglers is not None:
            found = min(found, self._stragglers.at)
        if self._plan.runs or outgoing.about.around or not outgoing.waits:
            found = min(found, ready)
        return found

    @staticmethod
    def _ends_at(outgoing: Outgoing) -> float:
        strategy, begun = outgoing.terms
        return inf if strategy.seconds is None else begun + strategy.seconds

    def messages(self, now: float, most: int = BURST) -> list[bytes | Run]:
        """What to send now, in order: bytes as they are, and runs of pieces; some `most` messages."""
        plan, outgoing = self._plan, self.outgoing
        plan.now = now
        if outgoing is not None and self._stragglers is not None:
            self._leave_behind(outgoing, self._stragglers, now)
        out: list[bytes | Run] = list(
            plan.pop(now, self.session, packed(outgoing.about) if outgoing else b"")
        )
        if outgoing is not None and (not plan.judged or now >= self._ends_at(outgoing)):
            self._judge(outgoing, now)
            outgoing = self.outgoing
        if now >= plan.offer and not plan.closed:
            inviting = [self._invitation(now)]
            if outgoing is not None and outgoing.about.around:  # for those that come now
                inviting += [packed(outgoing.about), packed(outgoing.flush(*self._pulse(now), 0, 0))]
            out += inviting
            plan.offer = now + max(self._manners.offer, _INVITING * len(inviting) / self.rate.pace)
        if outgoing is not None and outgoing.about.around:
            if allowed := min(most, self.rate.allowed(now)):
                self._go_round(outgoing, out, allowed, now)
            self.rate.judge(now, self._round_trip)
        elif outgoing is not None:
            before, allowed = outgoing.pieces, int(min(most, self.rate.allowed(now), self._window.room))
            self.rate.judge(now, self._round_trip)
            if allowed:
                self._repair(outgoing, now)
                allowed = self._runs(outgoing, out, allowed, now)
                self._fresh(outgoing, out, allowed, now)
            if outgoing.waits and not plan.runs:
                # A source that has nothing for the moment is not the end: its next block says as much.
                ends = outgoing.all_sent or outgoing.full
                if outgoing.pieces > before and not ends:
                    self._rounds.end()
                self._rounds.begin(now if ends else now + 3 * self._patience)
                if allowed > 0 and now >= self._rounds.at:
                    self._ask(outgoing, out, now)
            else:
                self._rounds.end()
        self._spent(out)
        if outgoing is not None and not outgoing.about.around:
            questions = self._questions(outgoing, now)
            self._spent(questions)
            out += questions
        return out

    def _spent(self, said: Sequence[bytes | Run]) -> None:
        messages = sum(one.pieces if isinstance(one, Run) else 1 for one in said)
        self.rate.spent(messages)
        self._window.spent(messages)

    def _questions(self, outgoing: Outgoing, now: float) -> list[bytes]:
        """Ask all what they have taken, if it is time for that, or again those that are waited for."""
        asked = set[int]()
        if self._window.asks:
            asked = {member.number for member in self.members if member.owes}
            self._window.asked(micros(now), asked)
        asked |= self._window.waits(now, self._patience)
        if not asked:
            return []
        bits = self.members.bits(lambda it: it.number in asked)
        return [packed(outgoing.flush(*self._pulse(now), first, part)) for first, part in _parts(bits)]

    def _go_round(self, outgoing: Outgoing, out: list[bytes | Run], allowed: int, now: float) -> None:
        """What the pace allows of a carousel, up to the end of a round."""
        while allowed > 0 and (run := outgoing.next(allowed, now)) is not None:
            out.append(run)
            allowed -= run.pieces
            if outgoing.between:
                out.append(packed(outgoing.seal(run.block, *self._pulse(now))))
        if outgoing.turned():
            last = [packed(outgoing.flush(*self._pulse(now), 0, 0))]
            if outgoing.sent:
                last.append(packed(outgoing.seal(outgoing.sent - 1, *self._pulse(now))))
            together = len(self._circle) > 1
            out += last * (_SAID_TOGETHER if together else _SAID)  # there may be no other round to bring it
            self._plan.judged = False
            if together:
                self.outgoing = self._circle[(outgoing.about.place + 1) % len(self._circle)]
                out += [packed(self.outgoing.about)] * _SAID_TOGETHER

    def _invitation(self, now: float) -> bytes:
        number = self._plan.objects if self.outgoing is None else self._circle[0].about.object
        return packed(Offer(self.session, number, *self._pulse(now), self.nonce, self._plan.name))

    @property
    def _round_trip(self) -> float:
        """Seconds of the longest round trip. That of a slow receiver keeps no repair from the others for
        longer than the strategy allows."""
        longest = inf if self._stragglers is None else self._stragglers.longest(self._plan.now)
        return min(self._trip.seconds, longest)

    @property
    def _patience(self) -> float:
        """Seconds in which the requests for the same come."""
        return patience(len(self.members)) * self._round_trip

    def _pulse(self, now: float) -> tuple[int, int, int]:
        """The stamp, the number of receivers, the round trip."""
        return micros(now), len(self.members), micros(self._round_trip)

    def _repair(self, outgoing: Outgoing, now: float) -> None:
        if now >= outgoing.repairs.at and not self._plan.runs:
            self._plan.runs, self._plan.seals = outgoing.repairs.take()
            self._plan.taken = now
            self._rounds.news()

    def _runs(self, outgoing: Outgoing, out: list[bytes | Run], allowed: int, now: float) -> int:
        """Repairs that the pace allows. How many messages are still allowed."""
        runs = self._plan.runs
        while runs and allowed > 0:
            run = runs.pop(0)
            if run.pieces > allowed:
                runs.insert(0, Run(run.block, run.first + allowed, run.pieces - allowed))
                run = run._replace(pieces=allowed)
            out.append(run)
            allowed -= run.pieces
            outgoing.repaired += run.pieces
            if not runs:
                outgoing.repairs.gone(micros(now))
                outgoing.sent_at += now - self._plan.taken  # who waits for repairs does not stand still
        return allowed

    def _fresh(self, outgoing: Outgoing, out: list[bytes | Run], allowed: int, now: float) -> None:
        if not self._plan.runs and self._plan.seals:
            out += [packed(outgoing.seal(block, *self._pulse(now))) for block in self._plan.seals]
            self._plan.seals = []
        while allowed > 0 and not self._plan.runs:
            if outgoing.spare():
                while outgoing.spare():
                    pass
                out.append(packed(outgoing.seal(outgoing.sent - 1, *self._pulse(now))))
                outgoing.sent_at = now
                self._plan.judged = False  # the next blocks are wanted at once, not after the next question
            if (run := outgoing.next(allowed, now)) is None:
                break
            out.append(run)
            allowed -= run.pieces
            if outgoing.between:
                out.append(packed(outgoing.seal(run.block, *self._pulse(now), _SEALS)))
                if outgoing.sent % _DESCRIBED == 0:
                    out.append(packed(outgoing.about))

    def _widen(self) -> None:
        if self.outgoing is not None:
            self.outgoing.window = min(self.members.room() or MOST_ROOM, MOST_ROOM)
            self._window.fit(self.members.queue())
            self.outgoing.held = self.members.held()

    def _ask(self, outgoing: Outgoing, out: list[bytes | Run], now: float) -> None:
        """Ask what is missing; name those that do not answer, and give up those that never do.

        Few are named at once, but have as long to answer as many.
        """
        wait, manners = 3 * self._patience, self._manners
        names = self._rounds.turn(now, wait, max(0.5, wait))
        target = outgoing.sent if outgoing.all_sent or not outgoing.full else outgoing.low + 1
        asked, few = 0, self.members.owing <= FEW
        if names and not (few and 0 < self._rounds.quiet < _QUIET):
            self._wait_for(outgoing, target, now, manners)
        if names:
            out.append(packed(outgoing.about))
        if names or few:
            asked = self.members.bits(lambda it: it.owes and (outgoing.all_sent or it.base < target))
        if outgoing.sent:
            out.append(packed(outgoing.seal(outgoing.sent - 1, *self._pulse(now))))
        out += [packed(outgoing.flush(*self._pulse(now), first, bits)) for first, bits in _parts(asked)]
        self._plan.judged = False

    def _wait_for(self, outgoing: Outgoing, target: int, now: float, manners: Manners) -> None:
        waits = outgoing.all_sent or outgoing.full
        for member in [*self.members]:
            if not member.owes or (not outgoing.all_sent and member.base >= target):
                continue
            if member.waited == inf:
                member.waited = now
            if now - member.waited > manners.peer_timeout:
                self._give_up(member, Lot.SILENT)
            elif waits and now - max(member.moved, outgoing.sent_at) > manners.stall:
                self._give_up(member, Lot.STILL)

    def _give_up(self, member: Member, lot: Lot) -> None:
        self.members.give_up(member, lot)
        self._window.answered(member.number, inf)
        self._part(member)
        self._widen()
        self._plan.judged = False

    def _leave_behind(self, outgoing: Outgoing, stragglers: Stragglers, now: float) -> None:
        """Go on without the receivers that hold up others for longer than the strategy allows."""
        members = self.members
        awaited, slowed = self._window.awaited, self.rate.slowed
        slow = stragglers.look(now, outgoing, members.whole, members, awaited, slowed)
        if stragglers.asks:
            for first, part in _parts(_bits(stragglers.asks)):
                self._plan.say(now, packed(outgoing.flush(*self._pulse(now), first, part)))
        if not slow:
            return
        for member in slow:
            members.answer(member, BEHIND, stragglers.words, now)
            self._window.answered(member.number, inf)
        for first, part in _parts(_bits(slow)):
            behind = packed(Behind(self.session, outgoing.about.object, first, part))
            self._plan.often(behind, now, self._round_trip)
        # Pace and round trip were those of the slow ones.
        self.rate.restart()
        self._trip = RoundTrip(min(self._manners.trip, MOST_ROUND_TRIP))
        self._widen()
        self._plan.judged = False

    def _part(self, member: Member) -> None:
        words = f"given up: this receiver {member.lot.value}"
        self._plan.part(member.number, packed(Bye(self.session, member.number, words)))

    def _judge(self, outgoing: Outgoing, now: float) -> None:
        """Whether the object is done with."""
        self._plan.judged = True
        if not outgoing.about.around:
            low = self.members.low()
            outgoing.low = outgoing.sent if low is None else max(outgoing.low, low)
            outgoing.repairs.forget(outgoing.low)
        if self._done(outgoing, now):
            self._settle(outgoing, now, "the strategy did not wait for this receiver")

    def _done(self, outgoing: Outgoing, now: float) -> bool:
        quiet = self._rounds.quiet if outgoing.all_sent and self._rounds.at < inf else 0
        seconds = now - outgoing.terms.begun
        cycles = self._circle[-1].cycles
        standing = Standing(self.members.whole, self.members.owing, seconds, quiet, cycles)
        return outgoing.terms.strategy.done(standing)

    def _settle(self, outgoing: Outgoing, now: float, behind: str) -> None:
        members = self.members
        strategy, begun = outgoing.terms
        lost = sum(member.part and not member.owes and member.state != WHOLE for member in members)
        accounts = tuple(_account(member, begun, behind) for member in members if member.part)
        for one in self._circle:
            standing = Standing(members.whole, members.owing, now - begun, 0, one.cycles)
            self.settled.append(
                Settled(
                    one.about.object,
                    strategy.is_met(standing, lost) and one.all_sent,
                    one.pieces + one.spared,
                    one.repaired,
                    one.about.spare > 0,
                    accounts,
                    one.spared,
                    one.cycles,
                    one.digest if one.all_sent else None,
                )
            )
        whole = members.bits(lambda it: it.part and it.state == WHOLE)
        for first, bits in _parts(whole):
            over = packed(Over(self.session, self._plan.objects - 1, first, bits))
            self._plan.often(over, now, self._round_trip)
        self.outgoing, self._circle, self._plan.runs, self._plan.seals = None, [], [], []
        self._rounds.end()
        members.end()


class _Plan:
    """What a sender has to say besides pieces, and when."""

    def __init__(self, now: float, name: str) -> None:
        self.name = name
        self.objects = 0
        self.now = self.offer = self.taken = now
        self.runs: list[Run] = []
        self.seals: list[int] = []
        self.judged = True
        self.closed = False
        self._said: list[tuple[float, int, bytes]] = []
        self._admitted: dict[int, tuple[int, int]] = {}
        self._order = 0
        self._admit_at = inf
        self._byes: dict[int, bytes] = {}

    @property
    def admits(self) -> bool:
        """Whether a receiver is to be told that it takes part."""
        return self._admit_at < inf

    @property
    def at(self) -> float:
        """When the next of it is due."""
        due = self.now if self._byes else self._admit_at
        return min(due, self._said[0][0]) if self._said else due

    def say(self, at: float, message: bytes) -> None:
        """Say this once."""
        self._order += 1
        heappush(self._said, (at, self._order, message))

    def often(self, message: bytes, now: float, trip: float) -> None:
        """Say this some times, because nobody confirms it."""
        for turn in range(_SAID):
            self.say(now + turn * trip, message)

    def part(self, number: int, message: bytes) -> None:
        """Take leave of one receiver; once in a turn, however often it speaks."""
        if len(self._byes) < BURST:
            self._byes[number] = message

    def admit(self, member: Member, now: float) -> None:
        """Tell a receiver, and others that come in a moment, that they take part; and what is on its way."""
        self._admitted[member.number] = member.index, member.nonce
        self._admit_at = min(self._admit_at, now + _MOMENT)

    def pop(self, now: float, session: int, about: bytes) -> list[bytes]:
        """What is due."""
        out = list(self._byes.values())
        self._byes = {}
        if now >= self._admit_at:
            rows = list(self._admitted.items())
            starts = range(0, len(rows), MOST_ADMITTED)
            out += [packed(Admit(session, dict(rows[at : at + MOST_ADMITTED]))) for at in starts]
            out += [about] if about else []
            self._admitted, self._admit_at = {}, inf
        while self._said and self._said[0][0] <= now:
            out.append(heappop(self._said)[2])
        return out


def _parts(bits: int) -> list[tuple[int, int]]:
    """The bits in parts that fit into messages: first and bits; at least one part."""
    parts = [(first, bits >> first & (1 << _BITS) - 1) for first in range(0, bits.bit_length(), _BITS)]
    return [part for part in parts if part[1]] or [(0, 0)]


def _bits(members: Iterable[Member]) -> int:
    """Return a bit for each of these receivers, by its index."""
    bits = 0
    for member in members:
        bits |= 1 << member.index
    return bits


def _account(member: Member, begun: float, behind: str) -> ReceiverReport:
    whole = member.state == WHOLE
    why = "" if whole else member.words or (behind if member.lives else member.lot.value)
    seconds = member.whole_at - begun if whole else inf
    return ReceiverReport(
        member.name, member.address, whole, seconds, member.asks, member.asked, why, member.number
    )
