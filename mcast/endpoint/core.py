"""The core of an endpoint: what a user asks of it, what is due, and where messages belong.

It never waits. What takes time is an `Operation`: a generator that yields a `Wait`, is resumed when
something may have happened (with a batch, if messages were received), and looks again. `blocking.py` runs
operations by blocking, `awaiting.py` by awaiting. Whoever calls holds the endpoint's lock, but while waiting.
"""

from __future__ import annotations

import errno as E
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from math import inf
from operator import countOf
from random import Random
from typing import Any, NamedTuple, TypeVar

from typing_extensions import Buffer

from mcast.api import (
    Backend,
    Batch,
    Closed,
    CmEvent,
    CmEventType,
    Destination,
    McastError,
    MembershipLost,
    Message,
    Phase,
    PortEvent,
    PortState,
    QpError,
    QueuePair,
    mcast_error,
)
from mcast.contract.batch import CopiedBatch
from mcast.endpoint import probe, sequence
from mcast.endpoint.inbox import ChosenBatch, Inbox, copied
from mcast.endpoint.membership import GROUP_COUNTS, SEQUENCE_COUNTS, Change, EndpointGroup, GroupState
from mcast.endpoint.policy import (
    AddressChanged,
    Event,
    GaveUp,
    LoopbackPolicy,
    LoopbackReport,
    Lost,
    PortDown,
    PortUp,
    ReceiveQueueLow,
    Rejoined,
)
from mcast.endpoint.ports import Place
from mcast.endpoint.probe import PROBE_SIZE, Kind, Peer
from mcast.endpoint.probing import ECHOES_MAX, Prober, unanswered
from mcast.endpoint.recovery import Restorer
from mcast.endpoint.settings import Settings, refuse_beyond_device
from mcast.endpoint.station import Station
from mcast.endpoint.stats import EndpointStats
from mcast.interrupts import uninterrupted
from mcast.wire.addresses import Gid, McastAddress

logger = logging.getLogger("mcast")

P = TypeVar("P")
T = TypeVar("T")

_LEFT = GroupState.LEFT

BATCH = 64
"""Messages that one receive call takes, where the user does not say."""

EVENTS_KEPT = 1024
"""Events that wait for `next_event`; further ones push out the oldest, and are counted."""

ASK_FIRST, ASK_MAX = 0.02, 1.0
"""Seconds between two probes of `ready`: doubled from the first up to the last."""


class Wait(NamedTuple):
    """What an operation waits for: any change, at the latest at `until` (None: never), or `max` messages."""

    until: float | None
    max: int = BATCH


Operation = Generator[Wait, Batch | None, T]

Post = Callable[[EndpointGroup, QueuePair, Destination, P, int | None, float | None], T]
"""`Session.send` and `Session.send_one`: what to send to whom with what, immediate, timeout."""


class Session:
    """See the module. `now` gives monotonic seconds on the clock that the driver waits by.

    `find_place` finds the place again after its device was lost; ValueError while it is not there.
    """

    def __init__(
        self,
        backend: Backend,
        place: Place,
        find_place: Callable[[], Place],
        settings: Settings,
        now: Callable[[], float],
    ) -> None:
        refuse_beyond_device(settings, place)
        self.settings, self.now = settings, now
        self.closed = False
        self.random = Random(backend.new_seed() if settings.seed is None else settings.seed)
        self.station = station = Station(backend, place, find_place, settings)
        self.channel, self.groups, self.by_mgid = station.channel, station.groups, station.by_mgid
        self.restorer = Restorer(station, self.random, now, self._tell)
        self.prober = Prober(station, self.restorer, self._drop)
        self.strays = Inbox(settings.receive_depth)
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.told: Counter[type[Event]] = Counter()
        self.totals: Counter[str] = Counter()
        self.received_bytes = self.received_batches = 0
        self.kept = 0
        """Messages in the inboxes, those of strays included."""
        self.news = False
        """Whether a call has changed what others wait for; who wakes them clears it."""
        self.dropped: Counter[str] = Counter()
        self.filtering = settings.loopback is not LoopbackPolicy.ON
        self._judges = self.filtering or settings.sequence
        """Whether each message must be looked at."""
        self._rewrites = settings.sequence or settings.max_message is not None
        self._counting = threading.Lock()
        self._arrivals = self._singles = 0
        self._warn_at = settings.receive_depth // 4
        self._backlog = min(BATCH, self._warn_at)
        self._stray_sources = sequence.Sources()
        self._put_backs = 0
        self._link_is_up = place.port.state is PortState.ACTIVE
        """As `PortUp` and `PortDown` have told."""

    def close(self) -> None:
        """Leave every group, free everything. Idempotent."""
        self.closed = True
        self.station.close()

    def require_open(self, call: str, phase: Phase) -> None:
        if self.closed or self.channel.closed:  # whoever has closed it
            raise Closed("Endpoint", call, phase)

    @property
    def usable_qp(self) -> QueuePair | None:
        """The QP, None while it is in ERR or its device is away."""
        return self.station.qp if self.restorer.recovery is None else None

    # --- time and events ---------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Whether `step` has nothing to do; may be asked without the driver's lock."""
        if self.closed:
            self.require_open("step", Phase.EVENT)
        return not self.restorer.busy and not self.channel.pending

    def step(self) -> bool:
        """Take in events, do what is due; whether there was anything."""
        self.require_open("step", Phase.EVENT)
        happened = self.hear_port()  # why comes before what
        while self.channel.pending and (event := self.channel.get_event(0)) is not None:
            happened = True
            self.on_event(event)
        if self.restorer.busy and self.restorer.due() <= self.now():
            happened = True
            before = self.station.id
            self.restorer.recover()
            if self.station.id is not before:  # what the port told meanwhile, it told the old one
                self._note_link(self.station.place.port.state is PortState.ACTIVE)
        return happened

    def on_event(self, event: CmEvent) -> None:
        """Take in an event that was read."""
        if event.id is not self.station.id:  # of a nudge, which has done its work
            if event.id is not None:
                event.id.destroy()
            return
        group = event.context
        match event.type:
            case CmEventType.DEVICE_REMOVAL | CmEventType.ADDR_CHANGE:
                self.restorer.lose_all(_error_of(event), reopen=True)
            case _ if self.restorer.reopen:
                logger.debug("event %s passed over: its membership ends with the id", event.type.name)
            case CmEventType.MULTICAST_JOIN if isinstance(group, EndpointGroup):
                assert event.ud is not None
                self.restorer.on_joined(group, event.ud.destination)
            case CmEventType.MULTICAST_ERROR if isinstance(group, EndpointGroup):
                self.restorer.happens(group, Change.REFUSED, _error_of(event))
            case _:
                logger.debug("event %s passed over", event.type.name)

    def hear_port(self) -> bool:
        """Take in what the port tells; whether there was anything."""
        events = self._port_events()
        for event in events:
            self._on_port_event(event)
        return bool(events)

    def _port_events(self) -> tuple[PortEvent, ...]:
        qp = self.usable_qp
        if qp is None:  # the next one is on a port as that is by then
            return ()
        try:
            return qp.port_events()
        except Closed:
            self.require_open("step", Phase.EVENT)
            return ()

    def _on_port_event(self, event: PortEvent) -> None:
        port = self.station.port_name
        match event:
            case PortEvent.ERR | PortEvent.ACTIVE:
                self._note_link(event is PortEvent.ACTIVE)
            case PortEvent.GID_CHANGE:
                error = self.station.look_at_address()
                self._tell(AddressChanged(port, own=error is not None))
                if error is not None:
                    self.restorer.lose_all(error, reopen=True)
            case _:  # what it costs comes as MULTICAST_ERROR
                logger.debug("%s: %s", port, event.name)

    def _note_link(self, up: bool) -> None:
        """Tell of a link that is not as was told."""
        if up != self._link_is_up:
            self._link_is_up = up
            self._tell((PortUp if up else PortDown)(self.station.port_name))

    def on_qp_error(self, error: QpError) -> None:
        """The QP went into ERR: with a policy it is reset, else the error is the caller's."""
        with uninterrupted():
            self.restorer.on_qp_error(error)
            self.news = True

    def _tell(self, event: Event) -> None:
        if len(self.events) == EVENTS_KEPT:
            self.totals["events_dropped"] += 1
        self.events.append(event)
        self.told[type(event)] += 1
        self.news = True
        level = logging.INFO if isinstance(event, Rejoined | PortUp) else logging.WARNING
        logger.log(level, "%s", event)

    # --- joining and leaving -----------------------------------------------------------------

    def join(
        self, group_name: Any, send_only: bool, timeout: float | None, settle: float
    ) -> Operation[EndpointGroup]:
        """Join, and wait until it is joined; nothing is left behind if that fails, ends or is cancelled."""
        self.require_open("join", Phase.JOIN)
        require_seconds("settle", settle)
        address = McastAddress.of(group_name)
        deadline = self._deadline(timeout)
        if self.restorer.reopen:
            where = self.station.place.address
            detail = f"the device of {where} is away, and looked for as the rejoin policy says"
            raise mcast_error(E.ENODEV, "join", Phase.JOIN, {"group": address}, detail)
        stream = self.random.getrandbits(64)
        group = EndpointGroup(address, send_only, self.settings.receive_depth, stream)
        self.station.enter(group)
        try:
            yield from self._until(lambda: group.state is not GroupState.JOINING, deadline)
            if group.state is GroupState.JOINING:
                detail = f"no outcome within {timeout} s"
                raise mcast_error(E.ETIMEDOUT, "join", Phase.JOIN, {"group": address}, detail)
            self.require_joined(group, "join", Phase.JOIN)
            yield from self._until(lambda: False, self.now() + settle)
        except BaseException:
            self.leave(group)
            raise
        return group

    def leave(self, group: EndpointGroup) -> None:
        """End the membership, whatever its state. Idempotent."""
        if group.state is GroupState.LEFT:
            return
        if self.station.leave(group):
            self.totals.update({f"left {field}": getattr(group, field) for field in GROUP_COUNTS})
            self.totals.update({f"left {field}": group.sources.total(field) for field in SEQUENCE_COUNTS})
            self.dropped.update(group.dropped)
        self.kept -= group.inbox.clear()

    def require_joined(self, group: EndpointGroup, call: str, phase: Phase) -> None:
        """Raise what ended the membership, if something did."""
        self.require_open(call, phase)
        if group.state is GroupState.LEFT:
            raise Closed("membership", call, phase)
        if group.state is GroupState.GONE:
            group.told = True
            error = group.error
            assert error is not None
            raise _loss(error, group, call, phase) if group.joins else error

    # --- sending -----------------------------------------------------------------------------

    def route_to(
        self, group: EndpointGroup, timeout: float | None
    ) -> Operation[tuple[QueuePair, Destination]]:
        """The QP and the destination to send with, once the group is joined."""
        deadline = self._deadline(timeout)
        yield from self._until(lambda: group.state is not GroupState.LOST, deadline)
        self.require_joined(group, "send", Phase.SEND)
        if group.state is GroupState.LOST:
            detail = f"the membership was lost, and not restored within {timeout} s: {group.error}"
            raise mcast_error(E.ETIMEDOUT, "send", Phase.SEND, {"group": group.address}, detail)
        assert group.destination is not None
        return self.station.qp, group.destination

    def send(
        self,
        group: EndpointGroup,
        qp: QueuePair,
        destination: Destination,
        payloads: list[Buffer],
        imm: int | None,
        timeout: float | None,
    ) -> int:
        """Post the messages, numbered if they shall be; the driver's lock is not needed."""
        count = len(payloads)
        try:
            if self._rewrites:
                size = self._send_rewritten(group, qp, destination, payloads, imm, timeout)
            else:
                plain = countOf(map(type, payloads), bytes) == count
                size = sum(map(len if plain else _size, payloads))  # type: ignore[arg-type]
                qp.send(destination, payloads, imm, timeout)
        except McastError as error:
            if error.posted:
                self._count_sent(group, error.posted, sum(map(_size, payloads[: error.posted])))
            raise
        with self._counting:
            group.sent += count
            group.sent_bytes += size
            group.sent_batches += 1
        return count

    def _count_sent(self, group: EndpointGroup, count: int, size: int) -> None:
        with self._counting:
            group.sent += count
            group.sent_bytes += size
            group.sent_batches += 1

    def send_one(
        self,
        group: EndpointGroup,
        qp: QueuePair,
        destination: Destination,
        payload: Buffer,
        imm: int | None,
        timeout: float | None,
    ) -> None:
        """`send` with a batch of one, which needs no list where nothing is added and no limit is ours."""
        if self._rewrites:
            self.send(group, qp, destination, [payload], imm, timeout)
            return
        size = len(payload) if type(payload) is bytes else _size(payload)
        try:
            qp.send_one(destination, payload, imm, timeout)
        except McastError as error:
            if error.posted:
                self._count_sent(group, 1, size)
            raise
        with self._counting:
            group.sent += 1
            group.sent_bytes += size
            group.sent_batches += 1

    def _send_rewritten(
        self,
        group: EndpointGroup,
        qp: QueuePair,
        destination: Destination,
        payloads: list[Buffer],
        imm: int | None,
        timeout: float | None,
    ) -> int:
        """Send within the user's limit, and with headers if the messages shall be numbered; the bytes."""
        sizes = list(map(_size, payloads))
        limit = self.station.max_message_to(qp, destination)
        if sizes and max(sizes) > limit:
            raise qp.too_large(destination, sizes, limit)
        if self.settings.sequence:
            with group.sending:
                numbers = range(group.next_number, group.next_number + len(payloads))
                group.next_number = numbers.stop
                headers = (sequence.pack(group.stream, number) for number in numbers)
                numbered = [b"".join(pair) for pair in zip(headers, payloads, strict=True)]
                try:
                    qp.send(destination, numbered, imm, timeout)
                except McastError as error:
                    if group.next_number == numbers.stop:  # no handler of a signal has sent meanwhile
                        group.next_number = numbers.start + error.posted  # the others are free again
                    raise
        else:
            qp.send(destination, payloads, imm, timeout)
        return sum(sizes)

    # --- receiving ---------------------------------------------------------------------------

    def recv(self, group: EndpointGroup | None, timeout: float | None) -> Operation[Message | None]:
        """The next message of the group, or of any; None when `timeout` s have passed."""
        deadline = self._deadline(timeout)
        waited = False
        while True:
            message = self.pop(group)
            if message is not None:
                return message
            self.require_receiving(group)
            if waited and self._is_over(deadline):
                return None
            yield from self._wait(deadline)
            waited = True

    def pop(self, group: EndpointGroup | None) -> Message | None:
        """A message that is here already."""
        if not self.kept:
            return None
        if group is not None:
            inbox = group.inbox
        else:
            inbox = min(self._filled(), key=lambda one: one.next_arrival, default=self.strays)
        message = inbox.pop()
        self.kept -= message is not None
        return message

    def _filled(self) -> Iterator[Inbox]:
        return (inbox for inbox in self._inboxes() if len(inbox))

    def _inboxes(self) -> list[Inbox]:
        return [self.strays, *(group.inbox for group in self.groups.values())]

    def recount(self) -> None:
        """A receive was interrupted, it may be between taking a message from an inbox and counting it."""
        self.kept = sum(map(len, self._inboxes()))

    def take(self, group: EndpointGroup | None) -> Message | None:
        """The next message of the group, or of any, if it is here; None: it is not.

        A message that nobody need look at is received by itself, copied once and kept nowhere: without a
        filter and numbers only its length can make it a probe, and with one membership it can hardly be
        another's. Anything else comes in batches, which are sorted.
        """
        if self.kept and (message := self.pop(group)) is not None:
            return message
        station = self.station
        if station.ended or (group is not None and group.state is _LEFT):
            self.require_receiving(group)
        if not self._judges and (group is None or station.members == 1):
            try:
                message = None if self.restorer.recovery is not None else station.qp.recv_one(0)
            except QpError as error:
                self.on_qp_error(error)
                return None
            if message is None:
                return None
            owner, size = self.by_mgid.get(message.group), len(message.payload)
            if size != PROBE_SIZE and (group is None or owner is group):
                self.received_batches += 1
                self.received_bytes += size
                if owner is not None:
                    owner.received += 1
                    owner.received_bytes += size
                self._singles += 1
                if self._singles >= self._backlog:
                    self._singles = 0
                    self._watch_queue()
                return message
            self.route(CopiedBatch([message]))
            if (message := self.pop(group)) is not None:
                return message
        batch = self.poll(BATCH)
        if batch is None:
            return None
        self.route(batch)
        return self.pop(group)

    def poll(self, max: int) -> Batch | None:
        """What waits at the QP; None: nothing, and then its descriptor is armed, or the QP is not usable."""
        if self.restorer.recovery is not None:
            return None
        try:
            batch = self.station.qp.recv(max, 0)
        except QpError as error:
            self.on_qp_error(error)
            return None
        return batch or None

    def take_batch(self, max: int) -> Batch | None:
        """1..max messages of all groups, leased if they come from the QP, if any are here; None: none are."""
        if max < 1:
            raise ValueError(f"max is {max}: a batch has 1 or more messages")
        if self.kept:
            return self._kept_batch(max)
        if self.station.ended:
            self.require_receiving(None)
        batch = self.poll(max)
        return None if batch is None else self._sift(batch)

    def take_in(self, max: int = BATCH) -> None:
        """Receive for others than who calls: what waits at the QP goes where it belongs."""
        batch = self.poll(max)
        if batch is not None:
            self.route(batch)

    def put_back(self, found: Message | Batch) -> None:
        """Keep what was taken for a call that was cancelled: the next who asks gets it first."""
        if isinstance(found, Message):
            messages = [found]
        else:
            with found:
                messages = list(map(copied, found))
        for message in reversed(messages):
            group = self.by_mgid.get(message.group)
            inbox = self.strays if group is None else group.inbox
            self._put_backs -= 1
            inbox.put_back(self._put_backs, message)
        self.kept += len(messages)
        self.news = True

    def recv_batch(self, max: int, timeout: float | None) -> Operation[Batch]:
        """As `take_batch`, after a wait; empty: too late."""
        deadline = self._deadline(timeout)
        waited = False
        while True:
            if self.kept:
                return self._kept_batch(max)
            self.require_receiving(None)
            if waited and self._is_over(deadline):
                return CopiedBatch()
            batch = yield Wait(deadline, max)
            waited = True
            if batch and (sifted := self._sift(batch)) is not None:
                return sifted

    def _kept_batch(self, max: int) -> Batch:
        return CopiedBatch([message for _ in range(max) if (message := self.pop(None)) is not None])

    def require_receiving(self, group: EndpointGroup | None) -> None:
        """Raise the loss of the group; for all groups, of each group once."""
        self.require_open("recv", Phase.RECV)
        if group is not None:
            self.require_joined(group, "recv", Phase.RECV)
            return
        gone = [one for one in self.groups.values() if one.state is GroupState.GONE]
        untold = next((one for one in gone if not one.told), None)
        if untold is not None or (gone and len(gone) == len(self.groups)):
            self.require_joined(untold or gone[0], "recv", Phase.RECV)

    def _sift(self, batch: Batch) -> Batch | None:
        """A batch that is not empty, without what is not the user's, the same if all is; None: nothing is."""
        lengths = batch.lengths
        self.received_batches += 1
        if not (self._judges or PROBE_SIZE in lengths):
            count, size, owner = len(lengths), sum(lengths), self.station.only_group
            self.received_bytes += size
            if owner is not None:
                owner.received += count
                owner.received_bytes += size
            else:
                self._count_by_group(batch.groups, lengths)
            if count >= self._backlog:
                self._watch_queue()
            return batch
        self.news = True
        messages = self._wanted(batch)
        if len(messages) == len(lengths) and not self.settings.sequence:
            return batch
        chosen = ChosenBatch(batch, messages)
        if messages:
            return chosen
        chosen.release()
        return None

    def _count_by_group(self, groups: Iterable[Gid], lengths: Iterable[int]) -> None:
        for mgid, size in zip(groups, lengths, strict=True):
            owner = self.by_mgid.get(mgid)
            if owner is not None:
                owner.received += 1
                owner.received_bytes += size

    def route(self, batch: Batch) -> None:
        """Put copies of the messages where they belong, and give the receives back."""
        if not len(batch):
            return
        self.received_batches += 1
        self.news = True
        with batch:
            self._sort(batch)

    def _sort(self, batch: Batch) -> None:
        # A call of its own: no name here may hold a part of a payload when the lease ends.
        for message in self._wanted(batch):
            self._arrivals += 1
            group = self.by_mgid.get(message.group)
            inbox = self.strays if group is None else group.inbox
            if inbox.put(self._arrivals, message):
                self.kept += 1
            else:
                self._drop(group, "nobody asked for it in time")

    def _wanted(self, batch: Batch) -> list[Message]:
        """The messages of the batch that are the user's, counted, with the user's payloads."""
        wanted = list(batch)
        self.prober.echoes_left = ECHOES_MAX
        if self._judges or PROBE_SIZE in batch.lengths:
            wanted = [kept for message in wanted if (kept := self._judge(message)) is not None]
        for message in wanted:
            group = self.by_mgid.get(message.group)
            size = len(message.payload)
            self.received_bytes += size
            if group is not None:
                group.received += 1
                group.received_bytes += size
        if len(batch) >= self._backlog:
            self._watch_queue()
        return wanted

    def _judge(self, message: Message) -> Message | None:
        """The message as the user shall see it, or None. A probe is answered here."""
        found = probe.parse(message.payload)
        group = self.by_mgid.get(message.group)
        if found is not None:
            self.prober.take(found, message)
            return None
        if self.filtering and message.from_self:
            self._drop(group, "own message")
            return None
        if not self.settings.sequence:
            return message
        sources = self._stray_sources if group is None else group.sources
        refusal = sources.take(message.source, message.src_qp, message.payload)
        if refusal is not None:
            self._drop(group, refusal.value)
            return None
        return message._replace(payload=message.payload[sequence.HEADER_SIZE :])

    def _drop(self, group: EndpointGroup | None, reason: str) -> None:
        (self.dropped if group is None else group.dropped)[reason] += 1

    def _watch_queue(self) -> None:
        """Warn when the receive queue has run low: for a batch that shows a backlog, or as many calls."""
        if self.closed:
            return
        low = self.station.qp.counters.recv_low_water
        if low < self._warn_at:
            self._warn_at = low // 2
            self._backlog = min(BATCH, self._warn_at)
            self._tell(ReceiveQueueLow(low, self.settings.receive_depth))

    # --- probes ------------------------------------------------------------------------------

    def probe_loopback(self, group: EndpointGroup, timeout: float) -> Operation[bool]:
        """Whether the device returns one's own message within `timeout` s; a needless filter ends."""
        self.require_joined(group, "probe_loopback", Phase.SEND)
        with self.prober.quest() as (number, quest):
            self.prober.ask(group, Kind.SELF, number)
            yield from self._until(lambda: quest.heard_self, self._deadline(timeout))
        if self.station.blocking_loopback:
            self.filtering = quest.heard_self
            self._judges = self.filtering or self.settings.sequence
        return quest.heard_self

    def ready(self, group: EndpointGroup, members: int, timeout: float | None) -> Operation[frozenset[Peer]]:
        """Ask until `members` others have answered. Raises TimedOut that says who has."""
        self.require_joined(group, "ready", Phase.SEND)
        deadline = self._deadline(timeout)
        pause, ask_at = ASK_FIRST, self.now()
        with self.prober.quest() as (number, quest):
            while len(quest.peers) < members:
                now = self.now()
                if self._is_over(deadline):
                    raise unanswered(group, quest, members, timeout)
                if now >= ask_at:
                    self.require_joined(group, "ready", Phase.SEND)
                    self.prober.ask(group, Kind.ASK_ALONE if group.send_only else Kind.ASK, number)
                    ask_at, pause = now + pause, min(pause * 2, ASK_MAX)
                    continue
                yield from self._wait(ask_at if deadline is None else min(ask_at, deadline))
        return frozenset(quest.peers)

    def next_event(self, timeout: float | None) -> Operation[Event | None]:
        """The next event, None when `timeout` s have passed."""
        yield from self._until(lambda: bool(self.events), self._deadline(timeout), at_least_once=True)
        return self.events.popleft() if self.events else None

    def loopback_report(self) -> LoopbackReport:
        """What is in force for own messages."""
        policy = LoopbackPolicy(self.settings.loopback)
        return LoopbackReport(policy, self.station.blocking_loopback, self.filtering)

    def snapshot(self) -> EndpointStats:
        """Everything counted, now."""
        station, counters = self.station, self.station.counters()
        groups = tuple(group.snapshot() for group in self.groups.values())
        dropped: Counter[str] = Counter(self.dropped)
        for group in groups:
            dropped.update(group.dropped)
        silent = {
            "no receive was free": counters.dropped_no_receive,
            "larger than a receive": counters.dropped_too_long,
            "wrong Q_Key": counters.dropped_qkey,
        }
        sums = {
            field: self.totals[f"left {field}"] + sum(getattr(group, field) for group in self.groups.values())
            for field in ("sent_bytes", "sent_batches", "joins")
        } | {
            field: self.totals[f"left {field}"] + sum(getattr(group, field) for group in groups)
            for field in SEQUENCE_COUNTS
        }
        return EndpointStats(
            backend=station.backend.name,
            device=station.place.device.name,
            port_num=station.place.port.port_num,
            qp_num=None if station.qp.closed else station.qp.qp_num,
            sent=counters.sent,
            received=counters.received,
            received_bytes=self.received_bytes,
            received_batches=self.received_batches,
            receive_depth=self.settings.receive_depth,
            receive_free=counters.recv_free,
            receive_low_water=counters.recv_low_water,
            receive_empty=counters.recv_empty,
            dropped=dropped | {reason: count for reason, count in silent.items() if count is not None},
            probes=self.prober.posted,
            lost=self.told[Lost],
            rejoins=self.told[Rejoined],
            gave_up=self.told[GaveUp],
            events_dropped=self.totals["events_dropped"],
            groups=groups,
            port_counters=station.port_counters(),
            **sums,
        )

    # --- waiting -----------------------------------------------------------------------------

    def _deadline(self, timeout: float | None) -> float | None:
        """When the time is over; -inf for a poll, which needs no clock."""
        if timeout is None:
            return None
        if timeout > 0:
            return self.now() + timeout
        require_seconds("timeout", timeout)
        return -inf

    def _is_over(self, deadline: float | None) -> bool:
        return deadline is not None and (deadline == -inf or self.now() >= deadline)

    def _wait(self, until: float | None) -> Operation[None]:
        """Wait for a change; what was received meanwhile goes where it belongs."""
        batch = yield Wait(until)
        if batch is not None:
            self.route(batch)

    def _until(
        self, condition: Callable[[], bool], deadline: float | None, at_least_once: bool = False
    ) -> Operation[None]:
        """Wait until the condition holds, or the deadline has come."""
        while not condition():
            if not at_least_once and self._is_over(deadline):
                return
            at_least_once = False
            yield from self._wait(deadline)


def _error_of(event: CmEvent) -> McastError:
    """The error that an event reports."""
    try:
        event.check()
    except McastError as error:
        return error
    return mcast_error(E.ENETRESET, "event", Phase.EVENT, {"event": event.type.name})


def _loss(error: McastError, group: EndpointGroup, call: str, phase: Phase) -> McastError:
    """What a call raises once the membership is lost for good."""
    detail = f"the membership of {group.address} was lost, and is not restored: {error}"
    lost = MembershipLost(E.ENETRESET, call, phase, {"group": group.address}, detail)
    lost.__cause__ = error
    return lost


def require_seconds(name: str, seconds: float) -> None:
    """Refuse what is no number: no clock would ever come there."""
    if seconds != seconds:
        raise ValueError(f"{name} is {seconds}: give a number of seconds")


def as_list(payloads: Iterable[Buffer]) -> list[Buffer]:
    """Several payloads. Raises TypeError for a single one."""
    if type(payloads) is list:
        return payloads
    if isinstance(payloads, bytes | bytearray | memoryview | str):
        kind = type(payloads).__name__
        raise TypeError(
            f"send_batch takes several payloads, this is one {kind}: use send, or put it in a list"
        )
    return list(payloads)


def _size(payload: Buffer) -> int:
    """Bytes of a payload."""
    return len(payload) if type(payload) is bytes else memoryview(payload).nbytes
