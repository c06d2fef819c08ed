"""What the server of a fabric does for one client: its requests, and what it has open.

A request is carried out in the fabric's lock and never waits; what is wrong with it is answered, and what is
no request at all ends the session. The end of a session is what the kernel does when a process ends.
"""

from __future__ import annotations

import errno as E
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple, TypeVar

from mcast.api import McastError, Phase, QpError, QpState, mcast_error
from mcast.backends.model.cm import QueuedEvent
from mcast.backends.model.times import NS
from mcast.backends.sim.backend import (
    ASK_WHY_SECONDS,
    SimBackend,
    SimCmId,
    SimEventChannel,
    SimQueuePair,
)
from mcast.backends.sim.clock import Clock
from mcast.backends.sim.core.groups import group_table
from mcast.backends.sim.fabric import Fabric
from mcast.backends.sim.shared import frames, posts
from mcast.backends.sim.shared.arrivals import Arrivals, Pump
from mcast.backends.sim.shared.flag import DESCRIPTORS, Flag
from mcast.backends.sim.shared.posting import OnePost, Posted, Posting, PostRun
from mcast.backends.sim.shared.tap import TapFeed
from mcast.backends.sim.shared.watch import needs_descriptors
from mcast.backends.sim.trace.events import Entry, Trace
from mcast.errors.cause import Cause

T = TypeVar("T")

MOST_CHANNELS, MOST_IDS, MOST_GROUPS = 1024, 16_384, 65_536
"""Of one client: event channels; ids, and with them queue pairs; groups that its ids are in."""
MOST_DESTINATIONS = 16_384
"""Of one queue pair, which has an address handle for each."""
MOST_TAPS = 8
"""Of all clients, because each one has every event written for it."""
MOST_RECEIVES = 256 << 20
"""Bytes that all receives of one client hold at most."""


class Later(NamedTuple):
    """An answer that comes later: `begin` is given what to call with it."""

    begin: Callable[[Callable[[object], None]], None]


class Answer(NamedTuple):
    """What is sent back: a frame's text and tail, a descriptor."""

    value: object
    tail: bytes = b""
    descriptor: int | None = None


class _Channel(NamedTuple):
    channel: SimEventChannel
    flag: Flag
    ids: set[int]


class _Id(NamedTuple):
    number: int
    id: SimCmId
    channel: int
    qps: set[int]
    """One, or none. A number is never used again: a late request must not meet the next queue pair."""


class _Qp:
    """A queue pair, what it receives, the word of the ring that counts it, and what its receives hold."""

    def __init__(
        self, qp: SimQueuePair, arrivals: Arrivals, word: int, made: tuple[int, int], siblings: set[int]
    ) -> None:
        self.qp, self.arrivals, self.word, self.made, self.siblings = qp, arrivals, word, made, siblings
        self.bytes = made[0] * made[1]


class ClientSession:
    """One client: a backend on its hosts, and numbers for all that it opens.

    `ring` is the descriptor of the ring that the client came with, which is this object's from now on;
    `posted` is what to call when there is something to `look` at.
    """

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        hosts: frozenset[int],
        pump: Pump,
        ring: int | None,
        posted: Callable[[], object],
    ) -> None:
        self._pump, self._posted = pump, posted
        self.fabric: Fabric = fabric
        self.hosts: frozenset[int] = hosts
        self._posting = Posting(ring, pump.page)
        self.backend: SimBackend = SimBackend(fabric, name, hosts)
        self.run: PostRun | None = None
        """What was posted last, and may go on."""
        self._numbers = count(1)
        self._channels: dict[int, _Channel] = {}
        self._ids: dict[int, _Id] = {}
        self._number_of: dict[SimCmId, int] = {}
        self._qps: dict[int, _Qp] = {}
        self._tap: TapFeed | None = None
        self._joined = 0
        """Groups that the ids are in, each id counted."""
        self._held = 0
        """Bytes that the receives of all queue pairs hold."""

    @property
    def _clock(self) -> Clock:
        return self.fabric.clock

    def close(self) -> None:
        """The process has ended: everything is destroyed, every group left."""
        self.carry()
        with self._clock:
            self.backend._close()
            self._end_tap()
            for channel in self._channels.values():
                channel.flag.close()
            for qp in self._qps.values():
                qp.arrivals.close()
            self._posting.leave(self._pump.watch)
            for kept in (self._channels, self._ids, self._number_of, self._qps):
                kept.clear()

    def handle(self, request: Any, tail: memoryview) -> Answer | Later | None:
        """Carry out a request; None is answered with nothing. Raises McastError, ValueError."""
        with self._clock:
            method = _METHODS[request.op]
            found = method(self, request, tail)
            self._pump.flush()
            return found

    def look(self, most: int | None = None) -> None:
        """Take what was posted into the pipe, so many posts at most. Raises ValueError for what is none."""
        if (pipe := self._posting.pipe) is not None:
            self._post(pipe.read(most or pipe.most))

    def post(self, frame: memoryview) -> None:
        """Take what was posted without a question. Raises ValueError for what no client posts.

        A single message is carried out with those that follow it, by `carry`. A failure shows where that of a
        device does: in the state of the queue pair.
        """
        if len(frame) == posts.ONE:
            self._post(iter([posts.unpack_one(frame)]))
        else:
            self.carry()
            self._carry_out(self._posting.take(frame))

    def _post(self, posted: Iterator[OnePost]) -> None:
        while (post := next(posted, None) if self.run is None else self.run.take(posted)) is not None:
            self.carry()
            head, place, length = post
            route = self._posting.route(head)
            if route is None:
                self._carry_out(self._posting.take(memoryview(posts.pack_one(head, place, length))))
            elif (most := self._most_of(route[0], length)) is not None:
                self.run = PostRun(head, *route, place, length, self._posting.stop(place, length), most)

    def _carry_out(self, posted: Posted) -> None:
        longest = max(posted.lengths, default=0)
        if self._most_of(posted.qp, longest) is not None:
            wire, core = self.fabric.parts.wire, self._qps[posted.qp].qp.core
            with self._clock.call:
                payloads = self._posting.payloads(posted.place, posted.lengths)
                wire.send(core, posted.to, payloads, posted.imm, longest)

    def _most_of(self, qp: int, length: int) -> int | None:
        """Bytes of a message of the queue pair; None if another thread has closed that meanwhile.

        Raises ValueError for a longer message.
        """
        known = self._qps.get(qp)
        if known is None:
            return None
        most = known.qp.core.port.mtu
        if length > most:
            raise ValueError("a message is larger than the MTU")
        return most

    def carry(self) -> None:
        """Carry out the messages that were posted one by one: before anything else that the client asks for,
        and before others have their turn. The turn's end settles the clock.
        """
        run, self.run = self.run, None
        if run is None:
            return
        wire, core, lengths = self.fabric.parts.wire, self._qps[run.qp].qp.core, run.lengths
        with self._clock.call:
            payloads = self._posting.payloads(run.place, lengths)
            if wire.is_told:  # a trace has each send
                for index, length in enumerate(lengths):
                    wire.send(core, run.to, payloads[index : index + 1], None, length)
            else:
                wire.send(core, run.to, payloads, None, max(lengths))

    # --- the backend -------------------------------------------------------------------------

    def _devices(self, request: Any, tail: memoryview) -> Answer:
        return Answer(self.backend.devices())

    def _groups(self, request: Any, tail: memoryview) -> Answer:
        return Answer(group_table(self.fabric.parts, self.hosts))

    def _seed(self, request: Any, tail: memoryview) -> Answer:
        return Answer(self.backend.new_seed())

    def _port_counters(self, request: frames.PortCounters, tail: memoryview) -> Answer:
        return Answer(self.backend.port_counters(request.device, request.port_num))

    # --- what happens on the fabric ----------------------------------------------------------

    def _introduction(self, request: Any, tail: memoryview) -> Answer:
        introduction = self.fabric.parts.introduction()
        return Answer(str(Trace(Entry(0, event) for event in introduction)))

    def _begin_tap(self, request: Any, tail: memoryview) -> Answer:
        parts = self.fabric.parts
        _bound(len(parts.log.listeners), MOST_TAPS, "taps", "tap", Phase.OPEN)
        if self._tap is not None:
            raise mcast_error(E.EBUSY, "tap", Phase.OPEN, None, "this process taps the fabric already")
        with needs_descriptors("the server", "tap", Phase.OPEN):
            self._tap = TapFeed(self._clock)
        parts.listen(self._tap.note)
        return Answer(None, descriptor=self._tap.theirs)

    def _end_tap(self, request: Any = None, tail: memoryview | None = None) -> Answer:
        """Answered with how many packets had no room."""
        tap, self._tap = self._tap, None
        if tap is None:
            return Answer(0)
        self.fabric.parts.unlisten(tap.note)
        tap.close()
        return Answer(tap.lost)

    # --- channels and events -----------------------------------------------------------------

    def _open_channel(self, request: Any, tail: memoryview) -> Answer:
        _bound(len(self._channels), MOST_CHANNELS, "event channels", "event_channel", Phase.OPEN)
        channel = self.backend.event_channel()
        assert isinstance(channel, SimEventChannel)
        with self._or_undone(channel, "event_channel", Phase.OPEN):
            flag = Flag(lambda: bool(channel.unread))
        channel.tell(flag.show)
        number = next(self._numbers)
        self._channels[number] = _Channel(channel, flag, set())
        return Answer(number, descriptor=flag.theirs.fileno())

    @contextmanager
    def _or_undone(self, made: SimEventChannel | SimQueuePair, call: str, phase: Phase) -> Iterator[None]:
        """Get the descriptors of what was made, or take that back: one client has half of the server's."""
        try:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // (2 * DESCRIPTORS)
            _bound(len(self._channels) + len(self._qps), most, "channels and queue pairs", call, phase)
            with needs_descriptors("the server", call, phase):
                yield
        except McastError:
            made._close()
            raise

    def _close_channel(self, request: frames.OnChannel, tail: memoryview) -> Answer:
        known = self._known(self._channels, request.channel)
        for number in list(known.ids):
            self._forget_id(self._ids[number])
        known.channel._close()
        known.flag.close()
        del self._channels[request.channel]
        return Answer(None)

    def _get_event(self, request: frames.OnChannel, tail: memoryview) -> Answer | Later:
        """The next event. If the SA has refused, the answer waits for what it says of that."""
        channel = self._known(self._channels, request.channel).channel
        event = channel.take()
        if event is None:
            return Answer(None)
        answers: list[tuple[Cause, ...]] = []

        def begin(answer: Callable[[object], None]) -> None:
            def once(found: tuple[Cause, ...]) -> None:
                if not answers:
                    answers.append(found)
                    answer(self._heard(event, found))

            if not event.errno or not event.id.ask_why(event, once):
                once(())
            elif not answers:
                self._clock.call_later(round(ASK_WHY_SECONDS * NS), lambda: once(()))

        return Later(begin)

    def _heard(self, event: QueuedEvent, found: tuple[Cause, ...]) -> frames.HeardEvent:
        context = None if event.membership is None else event.membership.context
        assert context is None or isinstance(context, int)
        owner = event.id.owner
        assert isinstance(owner, SimCmId)
        number = self._number_of.get(owner, 0)
        return frames.HeardEvent(
            event.type, event.status, event.errno, context, number, event.ud, event.detail, found
        )

    # --- ids ---------------------------------------------------------------------------------

    def _create_id(self, request: frames.CreateId, tail: memoryview) -> Answer:
        _bound(len(self._ids), MOST_IDS, "ids", "create_id", Phase.OPEN)
        known = self._known(self._channels, request.channel)
        cm_id = known.channel._create_id(request.port_space)
        assert isinstance(cm_id, SimCmId)
        number = next(self._numbers)
        self._ids[number] = _Id(number, cm_id, request.channel, set())
        self._number_of[cm_id] = number
        known.ids.add(number)
        return Answer(number)

    def _place_of(self, known: _Id) -> Answer:
        interface = known.id.core.interface
        pkey = None if interface is None else interface.pkey
        return Answer(frames.IdPlace(known.id.device, known.id.link_layer, pkey))

    def _place(self, request: frames.OnId, tail: memoryview) -> Answer:
        return self._place_of(self._known(self._ids, request.id))

    def _bind(self, request: frames.BindId, tail: memoryview) -> Answer:
        known = self._known(self._ids, request.id)
        known.id._bind_addr(request.src)
        return self._place_of(known)

    def _resolve(self, request: frames.Resolve, tail: memoryview) -> Answer:
        known = self._known(self._ids, request.id)
        known.id._resolve_addr(request.dst.value(), request.src, 0)
        return self._place_of(known)

    def _join(self, request: frames.JoinGroup, tail: memoryview) -> Answer:
        known = self._known(self._ids, request.id).id
        _bound(self._joined, MOST_GROUPS, "groups", request.call, Phase.JOIN)
        address: Any = None if request.addr is None else request.addr.value()
        before = len(known.core.groups)
        known._join_multicast(address, request.context, request.call, request.mask, request.flags)
        self._joined += len(known.core.groups) - before
        return Answer(None)

    def _leave(self, request: frames.LeaveGroup, tail: memoryview) -> Answer:
        known = self._known(self._ids, request.id).id
        before = len(known.core.groups)
        known._leave_multicast(request.addr.value())
        self._joined += len(known.core.groups) - before
        return Answer(None)

    def _destroy(self, request: frames.OnId, tail: memoryview) -> Answer:
        known = self._known(self._ids, request.id)
        self._forget_id(known)
        return Answer(None)

    def _forget_id(self, known: _Id) -> None:
        for number in list(known.qps):
            self._forget_qp(number)
        self._joined -= len(known.id.core.groups)
        known.id._close()
        del self._ids[known.number], self._number_of[known.id]
        self._channels[known.channel].ids.discard(known.number)

    # --- queue pairs ---------------------------------------------------------------------

    def _create_qp(self, request: frames.CreateQp, tail: memoryview) -> Answer:
        known, init = self._known(self._ids, request.id), request.init
        interface = known.id.core.interface
        mtu = 0 if interface is None else interface.port.mtu
        receives = init.max_recv_wr, mtu if init.max_recv_size is None else init.max_recv_size
        self._hold(receives[0] * receives[1], "create_qp", Phase.CREATE_QP)
        qp = known.id._create_qp(init)
        assert isinstance(qp, SimQueuePair)
        core = qp.core
        with self._or_undone(qp, "create_qp", Phase.CREATE_QP):
            word, counted = self._posting.take_word()
            try:
                arrivals = Arrivals(core, self._pump, self._clock, counted)
            except OSError:
                self._posting.free_word(word)
                raise
        number = next(self._numbers)
        self._qps[number] = made = _Qp(qp, arrivals, word, receives, known.qps)
        known.qps.add(number)
        self._held += made.bytes
        answer = frames.MadeQp(number, core.number, core.port.mtu, *receives, core.stamps, word)
        return Answer(answer, descriptor=arrivals.theirs.fileno())

    def _hold(self, more: int, call: str, phase: Phase) -> None:
        if self._held + more > MOST_RECEIVES:
            detail = f"the receives of one process hold {MOST_RECEIVES >> 20} MiB at most on a served fabric"
            raise mcast_error(E.ENOMEM, call, phase, None, f"{detail}: post fewer, or smaller ones")

    def _close_qp(self, request: frames.OnQp, tail: memoryview) -> Answer:
        self._known(self._qps, request.qp)
        self._forget_qp(request.qp)
        return Answer(None)

    def _forget_qp(self, number: int) -> None:
        known = self._qps.pop(number, None)
        if known is not None:
            known.siblings.discard(number)
            known.qp._close()
            known.arrivals.close()
            self._posting.free_word(known.word)
            self._held -= known.bytes

    def _look(self, request: frames.OnQp, tail: memoryview) -> Answer:
        known = self._settled(request.qp)
        return Answer(frames.QpLook(known.qp.core.state, known.qp.core.counters))

    def _settled(self, number: int) -> _Qp:
        """The queue pair, with all receives posted that were given back."""
        known = self._known(self._qps, number)
        known.arrivals.receives.settle()
        return known

    def _attachments(self, request: frames.OnQp, tail: memoryview) -> Answer:
        return Answer(tuple(self._known(self._qps, request.qp).qp.core.attached.items()))

    def _port_events(self, request: frames.OnQp, tail: memoryview) -> Answer:
        known = self._known(self._qps, request.qp)
        news = frames.QpNews(known.qp.port_events(), known.qp.core.error)
        known.arrivals.looked()
        return Answer(news)

    def _modify(self, request: frames.ModifyQp, tail: memoryview) -> Answer:
        known = self._known(self._qps, request.qp)
        known.qp._modify(request.state)
        if request.state is QpState.RESET:
            known.arrivals.forget_unsent()
        self._pump.page.change()
        return Answer(None)

    def _attach_mcast(self, request: frames.AttachQp, tail: memoryview) -> Answer:
        self._known(self._qps, request.qp).qp._attach_mcast(request.gid, request.lid)
        return Answer(None)

    def _detach_mcast(self, request: frames.AttachQp, tail: memoryview) -> Answer:
        self._known(self._qps, request.qp).qp._detach_mcast(request.gid, request.lid)
        return Answer(None)

    def _send(self, request: frames.SendBurst, tail: memoryview) -> Answer:
        qp, lengths = self._known(self._qps, request.qp).qp, request.lengths
        if sum(lengths) != len(tail):
            raise ValueError(f"payloads of {sum(lengths)} bytes came as {len(tail)}")
        if lengths and max(lengths) > qp.core.port.mtu:
            raise ValueError("a message is larger than the MTU")
        _bound(len(qp.core.handles), MOST_DESTINATIONS, "destinations of a queue pair", "send", Phase.SEND)
        payloads, start = [], 0
        for length in lengths:
            payloads.append(bytes(tail[start : start + length]))
            start += length
        to = frames.destination_of(request.to)
        qp._send(to, payloads, request.imm, 0)
        pipe = self._posting.open_pipe(self._pump.watch, self._posted)
        return Answer(self._posting.sent(to), descriptor=pipe)

    def _make_room(self, request: Any, tail: memoryview) -> Answer:
        return Answer(self._posting.make_room())

    def _ring(self, request: frames.WantRing, tail: memoryview) -> Answer:
        found = self._known(self._qps, request.qp).arrivals.receives.ring(request.ring)
        return Answer(None, descriptor=found)

    def _payloads(self, request: frames.WantPayloads, tail: memoryview) -> Answer:
        found = self._known(self._qps, request.qp).arrivals.receives.payloads(request.first, request.count)
        tail_there = b"".join(found)
        if len(tail_there) > frames.MOST_PAYLOAD:
            raise ValueError("more payloads than a frame holds")
        return Answer(None, tail_there)

    def _give_back(self, request: frames.GiveBack, tail: memoryview) -> None:
        known = self._qps.get(request.qp)
        if known is not None:  # else it was closed meanwhile, which is nobody's fault
            known.arrivals.receives.give_back(request.count)

    def _repost(self, request: frames.Repost, tail: memoryview) -> Answer:
        known = self._settled(request.qp)
        if request.receives and (error := known.qp.core.error) is not None:
            raise QpError(error, "register", Phase.REGISTER)
        depth, room = receives = request.receives or known.made
        more = depth * room - known.bytes
        self._hold(more, "register", Phase.REGISTER)
        if not request.receives:
            known.arrivals.forget_unsent()
            known.qp.core.repost_own(*receives)
            known.arrivals.receives.restart()
        elif failed := known.qp.core.repost(*receives):
            raise mcast_error(failed, "register", Phase.REGISTER, {"recv_slot": room})
        known.bytes += more
        self._held += more
        return Answer(None)

    def _known(self, kept: dict[int, T], number: int) -> T:
        if number not in kept:
            raise mcast_error(E.EBADF, "request", Phase.OPEN, None, "it is closed")
        return kept[number]


def refusal_of(error: McastError) -> frames.RefusedCall:
    """The answer to a call that failed."""
    status = error.status if isinstance(error, QpError) else None
    return frames.RefusedCall(error.errno or E.EIO, error.detail, status)


def _bound(there: int, most: int, what: str, call: str, phase: Phase) -> None:
    if there >= most:
        detail = f"one process has {most} {what} at most on a served fabric: close some"
        raise mcast_error(E.ENOMEM, call, phase, None, detail)


_METHODS: dict[str, Callable[[ClientSession, Any, memoryview], Answer | Later | None]] = {
    "devices": ClientSession._devices,
    "groups": ClientSession._groups,
    "seed": ClientSession._seed,
    "port_counters": ClientSession._port_counters,
    "introduction": ClientSession._introduction,
    "tap": ClientSession._begin_tap,
    "untap": ClientSession._end_tap,
    "open_channel": ClientSession._open_channel,
    "close_channel": ClientSession._close_channel,
    "get_event": ClientSession._get_event,
    "create_id": ClientSession._create_id,
    "place": ClientSession._place,
    "bind": ClientSession._bind,
    "resolve": ClientSession._resolve,
    "join": ClientSession._join,
    "leave": ClientSession._leave,
    "destroy": ClientSession._destroy,
    "create_qp": ClientSession._create_qp,
    "close_qp": ClientSession._close_qp,
    "look": ClientSession._look,
    "attachments": ClientSession._attachments,
    "port_events": ClientSession._port_events,
    "modify": ClientSession._modify,
    "attach_mcast": ClientSession._attach_mcast,
    "detach_mcast": ClientSession._detach_mcast,
    "send": ClientSession._send,
    "make_room": ClientSession._make_room,
    "ring": ClientSession._ring,
    "payloads": ClientSession._payloads,
    "give_back": ClientSession._give_back,
    "repost": ClientSession._repost,
}
