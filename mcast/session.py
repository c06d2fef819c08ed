"""The core of an endpoint: its id and QP, its groups, what is due, and where messages belong.

It never waits. What takes time is an `Operation`: a generator that yields a `Wait`, is resumed when
something may have happened (with a batch, if messages were received), and looks again. `endpoint.py` runs
operations by blocking, `aio.py` by awaiting. Whoever calls holds the endpoint's lock, but while waiting.
"""

from __future__ import annotations

import errno as E
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf
from operator import countOf
from random import Random
from typing import Any, NamedTuple, TypeVar

from typing_extensions import Buffer

from mcast import probe, sequence
from mcast.addresses import Gid, McastAddress
from mcast.api import (
    Backend,
    Batch,
    Closed,
    CmEvent,
    CmEventType,
    CmId,
    Destination,
    InvalidArgument,
    JoinAttrEx,
    McastError,
    MembershipLost,
    Message,
    MessageTooLarge,
    NotSupported,
    Phase,
    QpCounters,
    QpError,
    QpInit,
    QueuePair,
    TimedOut,
    mcast_error,
)
from mcast.group import GROUP_COUNTS, SEQUENCE_COUNTS, Group, GroupState, Quest, Recovery
from mcast.inbox import ChosenBatch, CopiedBatch, Inbox, copied
from mcast.policy import (
    Event,
    GaveUp,
    LoopbackPolicy,
    LoopbackReport,
    Lost,
    ReceiveQueueLow,
    Rejoined,
    RejoinPolicy,
)
from mcast.ports import Place
from mcast.probe import PROBE_SIZE, Kind, Peer, Probe
from mcast.settings import Settings, refuse_beyond_device
from mcast.stats import EndpointStats, GroupStats, SourceStats

__all__ = [
    "EndpointStats",
    "Event",
    "GaveUp",
    "Group",
    "GroupStats",
    "LoopbackPolicy",
    "LoopbackReport",
    "Lost",
    "Operation",
    "Peer",
    "ReceiveQueueLow",
    "RejoinPolicy",
    "Rejoined",
    "Session",
    "Settings",
    "SourceStats",
    "Wait",
]

logger = logging.getLogger("mcast")

T = TypeVar("T")

_LEFT = GroupState.LEFT

BATCH = 64
"""Messages that one receive call takes, where the user does not say."""

EVENTS_KEPT = 1024
"""Events that wait for `next_event`; further ones push out the oldest, and are counted."""

ASK_FIRST, ASK_MAX = 0.02, 1.0
"""Seconds between two probes of `ready`: doubled from the first up to the last."""


ECHOES_MAX = 16
"""Probes of one batch that are answered: each may make every member receive; whoever asks will ask again."""


NO_GID = Gid(bytes(16))

NUDGED = {4: "224.0.0.1", 6: "ff02::1"}
"""IP version -> a group that always can be resolved; nothing is joined or sent."""


class Wait(NamedTuple):
    """What an operation waits for: any change, at the latest at `until` (None: never), or `max` messages."""

    until: float | None
    max: int = BATCH


Operation = Generator[Wait, Batch | None, T]


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
        self.backend, self.settings, self.now = backend, settings, now
        self.place, self._find_place = place, find_place
        refuse_beyond_device(settings, place)
        self.closed = False
        self.random = Random(backend.new_seed() if settings.seed is None else settings.seed)
        self.channel = backend.event_channel()
        self.groups: dict[McastAddress, Group] = {}
        self.by_mgid: dict[Gid, Group] = {}
        self._only_group: Group | None = None
        """The group of every message, if there is just one."""
        self.strays = Inbox(settings.receive_depth)
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.totals: Counter[str] = Counter()
        self.received_bytes = self.received_batches = 0
        self.kept = 0
        """Messages in the inboxes, those of strays included."""
        self.news = False
        """Whether a call has changed what others wait for; who wakes them clears it."""
        self.dropped: Counter[str] = Counter()
        self.quests: dict[int, Quest] = {}
        self.recovery: Recovery | None = None
        """Of the id and QP, or of the QP alone; while it is set the QP is not used."""
        self.reopen = False
        self.before_qp_closes: Callable[[], None] = lambda: None
        self.filtering = settings.loopback is not LoopbackPolicy.ON
        self._judges = self.filtering or settings.sequence
        """Whether each message must be looked at."""
        self._rewrites = settings.sequence or settings.max_message is not None
        self._ended = False
        """Whether a group is gone or all is closed: who receives must be told."""
        self.blocking_loopback = False
        self._restoring = False
        """Whether something may be in recovery; `due` finds out."""
        self._counting = threading.Lock()
        self._asked = 0
        self._echoes_left = 0
        self._arrivals = self._members = self._singles = 0
        self._past = QpCounters(0, 0, 0, 0, 0, 0, settings.receive_depth)
        self._warn_at = settings.receive_depth // 4
        self._backlog = min(BATCH, self._warn_at)
        self._stray_sources = sequence.Sources()
        self.id: CmId
        self.qp: QueuePair
        try:
            self._open_id()
        except BaseException:
            self.channel.close()
            raise

    # --- the id and its QP -------------------------------------------------------------------

    def _open_id(self) -> None:
        """A new id on the endpoint's port, with a QP that receives."""
        cm_id = self.channel.create_id()
        try:
            cm_id.bind_addr(self.place.address)
            self.qp = self._make_qp(cm_id)
        except BaseException:
            cm_id.destroy()
            raise
        self.id = cm_id

    def _make_qp(self, cm_id: CmId) -> QueuePair:
        """With the device keeping own messages back, if that is wanted and it can."""
        settings = self.settings
        most = settings.max_message
        init = QpInit(
            max_recv_wr=settings.receive_depth,
            max_send_wr=settings.send_depth,
            max_recv_size=None if most is None else max(most + settings.header_size, PROBE_SIZE),
        )
        if settings.loopback is LoopbackPolicy.OFF:
            try:
                qp = cm_id.create_qp(init.model_copy(update={"block_loopback": True}))
            except (NotSupported, InvalidArgument):
                logger.info("%s does not keep own messages back: a filter does", self.place.device.name)
            else:
                self.blocking_loopback = True
                return qp
        self.blocking_loopback = False
        return cm_id.create_qp(init)

    def close(self) -> None:
        """Leave every group, free everything. Idempotent."""
        if not self.closed:
            self.closed = self._ended = True
            for group in self.groups.values():
                group.state = GroupState.LEFT
            with suppress(McastError):  # in a fork nothing can be asked
                self._past = self._counters()
            self.before_qp_closes()
            self.channel.close()

    def require_open(self, call: str, phase: Phase) -> None:
        if self.closed:
            raise Closed("Endpoint", call, phase)

    @property
    def usable_qp(self) -> QueuePair | None:
        """The QP, None while it is in ERR or its device is away."""
        return self.qp if self.recovery is None else None

    # --- time and events ---------------------------------------------------------------------

    def due(self) -> float:
        """When `step` has something to do by itself; inf: when an event comes."""
        if not self._restoring:
            return inf
        recoveries = [self.recovery, *(group.recovery for group in self.groups.values())]
        dues = [one.due for one in recoveries if one is not None]
        self._restoring = bool(dues)
        return min(dues, default=inf)

    def is_quiet(self) -> bool:
        """Whether `step` has nothing to do; may be asked without the driver's lock."""
        if self.closed:
            self.require_open("step", Phase.EVENT)
        return not self._restoring and not self.channel.pending

    def step(self) -> bool:
        """Take in events, do what is due; whether there was anything."""
        self.require_open("step", Phase.EVENT)
        happened = False
        while self.channel.pending and (event := self.channel.get_event(0)) is not None:
            happened = True
            self.on_event(event)
        if self._restoring and self.due() <= self.now():
            happened = True
            self._recover()
        return happened

    def on_event(self, event: CmEvent) -> None:
        """Take in an event that was read."""
        if event.id is not self.id:  # of a nudge, which has done its work
            if event.id is not None:
                event.id.destroy()
            return
        group = event.context
        match event.type:
            case CmEventType.MULTICAST_JOIN if isinstance(group, Group):
                assert event.ud is not None
                self._on_joined(group, event.ud.destination)
            case CmEventType.MULTICAST_ERROR if isinstance(group, Group):
                self._on_join_error(group, _error_of(event))
            case CmEventType.DEVICE_REMOVAL | CmEventType.ADDR_CHANGE:
                self._lose_all(_error_of(event), reopen=True)
            case _:
                logger.debug("event %s passed over", event.type.name)

    def _on_joined(self, group: Group, destination: Destination) -> None:
        known = self.by_mgid.get(destination.gid)
        if known is not None and known is not group:
            self._refuse_collision(group, known, destination)
            return
        group.destination = destination
        self.by_mgid[destination.gid] = group
        self._note_groups()
        group.joins += 1
        if group.state is GroupState.LOST:
            self._on_rejoined(group)
        group.state = GroupState.JOINED

    def _refuse_collision(self, group: Group, known: Group, destination: Destination) -> None:
        """Two addresses of one MGID: messages could not be told apart, and a leave would end both."""
        detail = f"{group.address} and {known.address} have the MGID {destination.gid}: join one of them"
        error = mcast_error(E.EADDRINUSE, "join", Phase.JOIN, {"group": group.address}, detail)
        self._leave_quietly(group)
        if not known.send_only:
            self.qp.attach_mcast(destination.gid, destination.dlid)
        self._end(group, error)

    def _end(self, group: Group, error: McastError) -> None:
        """The membership is lost for good: whoever receives from it is told."""
        group.error, group.state, group.recovery, group.told = error, GroupState.GONE, None, False
        self._ended = True

    def _on_rejoined(self, group: Group) -> None:
        recovery = group.recovery
        assert recovery is not None
        group.recovery, group.error = None, None
        group.rejoins += 1
        self.totals["rejoins"] += 1
        self._tell(Rejoined(group.address, self.now() - recovery.since, recovery.attempts))

    def _on_join_error(self, group: Group, error: McastError) -> None:
        if group.state is GroupState.JOINING:
            self._end(group, error)
        elif group.state is GroupState.JOINED:
            self._lose(group, error)
        elif group.state is GroupState.LOST and group.recovery is not None:
            self._failed(group, group.recovery, error)

    # --- loss and recovery -------------------------------------------------------------------

    def _lose(self, group: Group, error: McastError, needs_join: bool = True) -> None:
        """A membership is gone: tell, and plan to get it back."""
        self.totals["lost"] += 1
        self._restoring = True
        group.error, group.told = error, False
        self._tell(Lost(group.address, error))
        policy = self.settings.rejoin
        if policy is None:
            self._end(group, error)
        else:
            now = self.now()
            group.state = GroupState.LOST
            group.recovery = Recovery(now, now + policy.delay(1, self.random), needs_join)

    def _lose_all(self, error: McastError, reopen: bool) -> None:
        """The QP is of no use any more; with `reopen` the id and every membership neither."""
        self._restoring = self.news = True
        for group in self.groups.values():
            if group.state is GroupState.JOINED:
                self._lose(group, error, needs_join=reopen)
            elif group.state is GroupState.JOINING and reopen:
                self._end(group, error)
            if group.recovery is not None and not group.recovery.needs_join:
                group.recovery.due = inf  # once the QP is back
        if reopen:
            self._need_reopening()
        if self.recovery is None:
            now, policy = self.now(), self.settings.rejoin
            due = inf if policy is None else now + policy.delay(1, self.random)
            self.recovery = Recovery(now, due)

    def _need_reopening(self) -> None:
        """Only a new id will do, and every membership is joined there anew."""
        self.reopen = True
        for group in self.groups.values():
            if group.recovery is not None:
                group.recovery.due, group.recovery.needs_join = inf, True

    def on_qp_error(self, error: QpError) -> None:
        """The QP went into ERR: with a policy it is reset, else the error is the caller's."""
        if self.settings.rejoin is None:
            raise error
        if self.recovery is None:
            self._lose_all(error, reopen=False)

    def _recover(self) -> None:
        """Do the attempts that are due."""
        now = self.now()
        if self.recovery is not None and self.recovery.due <= now:
            self._restore_qp(self.recovery)
        for group in self.groups.values():
            if group.recovery is not None and group.recovery.due <= now:
                self._rejoin(group, group.recovery)

    def _restore_qp(self, recovery: Recovery) -> None:
        """Reset the QP; or a new id and a new QP on the same address, and every group joined there."""
        recovery.attempts += 1
        try:
            if self.reopen:
                self._replace_id()
            else:
                self.qp.reset()
        except McastError as error:
            self._need_reopening()  # what cannot be reset is replaced
            if not self._plan_next(recovery):
                for group in self.groups.values():
                    if group.recovery is not None:
                        self._give_up(group, error, recovery.attempts)
            return
        self.reopen, self.recovery = False, None
        for group in self.groups.values():
            if group.recovery is None or group.recovery.due < inf:
                continue
            group.recovery.attempts = recovery.attempts
            if group.recovery.needs_join:
                group.recovery.attempts -= 1  # the same attempt goes on
                self._rejoin(group, group.recovery)
            else:
                self._on_rejoined(group)
                group.state = GroupState.JOINED

    def _replace_id(self) -> None:
        if not self.id.closed:
            self._past = self._counters()
            self.before_qp_closes()
            with suppress(McastError):  # the device is gone, and refuses what belongs to it
                self.id.destroy()
        try:
            self.place = self._find_place()
        except ValueError as absent:
            raise mcast_error(E.EADDRNOTAVAIL, "bind_addr", Phase.BIND, None, str(absent)) from None
        self._open_id()

    def _rejoin(self, group: Group, recovery: Recovery) -> None:
        recovery.attempts += 1
        recovery.due = inf  # the outcome is an event
        self._leave_quietly(group)
        try:
            self.id.join_multicast_ex(_attr(group), group)
        except McastError as error:
            self._failed(group, recovery, error)

    def _failed(self, group: Group, recovery: Recovery, error: McastError) -> None:
        """An attempt failed: plan the next, or give up."""
        group.error = error
        if not self._plan_next(recovery):
            self._give_up(group, error, recovery.attempts)

    def _plan_next(self, recovery: Recovery) -> bool:
        """Say when the next attempt is due; False if there shall be none."""
        policy, now = self.settings.rejoin, self.now()
        assert policy is not None
        if policy.give_up_after is not None and now - recovery.since >= policy.give_up_after:
            recovery.due = inf
            return False
        recovery.due = now + policy.delay(recovery.attempts + 1, self.random)
        return True

    def _give_up(self, group: Group, error: McastError, attempts: int) -> None:
        self._end(group, error)
        self.totals["gave_up"] += 1
        self._tell(GaveUp(group.address, error, attempts))

    def _tell(self, event: Event) -> None:
        if len(self.events) == EVENTS_KEPT:
            self.totals["events_dropped"] += 1
        self.events.append(event)
        self.news = True
        level = logging.INFO if isinstance(event, Rejoined) else logging.WARNING
        logger.log(level, "%s", event)

    # --- joining and leaving -----------------------------------------------------------------

    def join(
        self, group_name: Any, send_only: bool, timeout: float | None, settle: float
    ) -> Operation[Group]:
        """Join, and wait until it is joined; nothing is left behind if that fails, ends or is cancelled."""
        self.require_open("join", Phase.JOIN)
        address = McastAddress.of(group_name)
        deadline = self._deadline(timeout)
        if self.reopen:
            detail = f"the device of {self.place.address} is away, and looked for as the rejoin policy says"
            raise mcast_error(E.ENODEV, "join", Phase.JOIN, {"group": address}, detail)
        self._refuse_beyond_limits(address)
        stream = self.random.getrandbits(64)
        group = Group(address, send_only, self.settings.receive_depth, stream)
        self.id.join_multicast_ex(_attr(group), group)
        self.groups[address] = group
        self._members += not send_only
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

    def _refuse_beyond_limits(self, address: McastAddress) -> None:
        device = self.place.device
        about = {"group": address, "device": device.name}
        if not device.max_mcast_grp or not device.max_mcast_qp_attach:
            detail = f"{device.name} has no multicast: choose another device"
            raise mcast_error(E.ENOSYS, "join", Phase.JOIN, about, detail)
        if len(self.groups) >= device.max_mcast_grp and address not in self.groups:
            detail = f"{device.name} allows {device.max_mcast_grp} groups (max_mcast_grp): leave one first"
            raise mcast_error(E.ENOMEM, "join", Phase.JOIN, about, detail)

    def leave(self, group: Group) -> None:
        """End the membership, whatever its state. Idempotent."""
        if group.state is GroupState.LEFT:
            return
        group.state = GroupState.LEFT
        if self.groups.get(group.address) is group:
            del self.groups[group.address]
            self._members -= not group.send_only
            self.totals.update({f"left {field}": getattr(group, field) for field in GROUP_COUNTS})
            self.totals.update({f"left {field}": group.sources.total(field) for field in SEQUENCE_COUNTS})
            self.dropped.update(group.dropped)
        self._leave_quietly(group)
        self.kept -= group.inbox.clear()

    def nudge(self) -> None:
        """Cause an event, so that a thread that sleeps in a receive looks again."""
        cm_id = self.channel.create_id()
        try:
            cm_id.resolve_addr(NUDGED[self.place.address.version], self.place.address)
        except McastError as error:
            cm_id.destroy()
            logger.debug("no nudge: %s", error)

    def _leave_quietly(self, group: Group) -> None:
        """Leave, if the stack still knows the membership."""
        if group.destination is not None and self.by_mgid.get(group.destination.gid) is group:
            del self.by_mgid[group.destination.gid]
            self._note_groups()
        try:
            self.id.leave_multicast(group.address)
        except McastError as error:
            logger.debug("leaving %s: %s", group.address, error)

    def _note_groups(self) -> None:
        self._only_group = next(iter(self.by_mgid.values())) if len(self.by_mgid) == 1 else None

    def require_joined(self, group: Group, call: str, phase: Phase) -> None:
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

    @property
    def max_message_size(self) -> int:
        """The largest payload in bytes: what one MTU carries, or less if the user said so."""
        mtu = self.place.port.active_mtu if self.qp.closed else self.qp.max_message_size
        limit = mtu - self.settings.header_size
        return limit if self.settings.max_message is None else min(limit, self.settings.max_message)

    def route_to(self, group: Group, timeout: float | None) -> Operation[tuple[QueuePair, Destination]]:
        """The QP and the destination to send with, once the group is joined."""
        deadline = self._deadline(timeout)
        yield from self._until(lambda: group.state is not GroupState.LOST, deadline)
        self.require_joined(group, "send", Phase.SEND)
        if group.state is GroupState.LOST:
            detail = f"the membership was lost, and not restored within {timeout} s: {group.error}"
            raise mcast_error(E.ETIMEDOUT, "send", Phase.SEND, {"group": group.address}, detail)
        assert group.destination is not None
        return self.qp, group.destination

    def send(
        self,
        group: Group,
        qp: QueuePair,
        destination: Destination,
        payloads: list[Buffer],
        imm: int | None,
        timeout: float | None,
    ) -> int:
        """Post the messages, numbered if they shall be; the driver's lock is not needed."""
        count = len(payloads)
        if self._rewrites:
            size = self._send_rewritten(group, qp, destination, payloads, imm, timeout)
        else:
            plain = countOf(map(type, payloads), bytes) == count
            size = sum(map(len if plain else _size, payloads))  # type: ignore[arg-type]
            qp.send(destination, payloads, imm, timeout)
        with self._counting:
            group.sent += count
            group.sent_bytes += size
            group.sent_batches += 1
        return count

    def send_one(
        self,
        group: Group,
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
        qp.send_one(destination, payload, imm, timeout)
        with self._counting:
            group.sent += 1
            group.sent_bytes += size
            group.sent_batches += 1

    def _send_rewritten(
        self,
        group: Group,
        qp: QueuePair,
        destination: Destination,
        payloads: list[Buffer],
        imm: int | None,
        timeout: float | None,
    ) -> int:
        """Send within the user's limit, and with headers if the messages shall be numbered; the bytes."""
        sizes = list(map(_size, payloads))
        limit = self.max_message_size
        for index, size in enumerate(sizes):
            if size > limit:
                raise MessageTooLarge(size, limit, index)
        if self.settings.sequence:
            with group.sending:
                numbers = range(group.next_number, group.next_number + len(payloads))
                group.next_number = numbers.stop
                headers = (sequence.pack(group.stream, number) for number in numbers)
                numbered = [b"".join(pair) for pair in zip(headers, payloads, strict=True)]
                qp.send(destination, numbered, imm, timeout)
        else:
            qp.send(destination, payloads, imm, timeout)
        return sum(sizes)

    # --- receiving ---------------------------------------------------------------------------

    def recv(self, group: Group | None, timeout: float | None) -> Operation[Message | None]:
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

    def pop(self, group: Group | None) -> Message | None:
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
        inboxes = [self.strays, *(group.inbox for group in self.groups.values())]
        return (inbox for inbox in inboxes if len(inbox))

    def take(self, group: Group | None) -> Message | None:
        """The next message of the group, or of any, if it is here; None: it is not.

        A message that nobody need look at is received by itself, copied once and kept nowhere: without a
        filter and numbers only its length can make it a probe, and with one membership it can hardly be
        another's. Anything else comes in batches, which are sorted.
        """
        if self.kept and (message := self.pop(group)) is not None:
            return message
        if self._ended or (group is not None and group.state is _LEFT):
            self.require_receiving(group)
        if not self._judges and (group is None or self._members == 1):
            try:
                message = None if self.recovery is not None else self.qp.recv_one(0)
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
        if self.recovery is not None:
            return None
        try:
            batch = self.qp.recv(max, 0)
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
        if self._ended:
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
        messages = [found] if isinstance(found, Message) else [copied(message) for message in found]
        for message in reversed(messages):
            group = self.by_mgid.get(message.group)
            inbox = self.strays if group is None else group.inbox
            inbox.put_back(self._arrivals, message)
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

    def require_receiving(self, group: Group | None) -> None:
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
            count, size, owner = len(lengths), sum(lengths), self._only_group
            self.received_bytes += size
            if owner is not None:
                owner.received += count
                owner.received_bytes += size
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
        self._echoes_left = ECHOES_MAX
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
            self._on_probe(found, message)
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

    def _drop(self, group: Group | None, reason: str) -> None:
        (self.dropped if group is None else group.dropped)[reason] += 1

    def _watch_queue(self) -> None:
        """Warn when the receive queue has run low: for a batch that shows a backlog, or as many calls."""
        if self.closed:
            return
        low = self.qp.counters.recv_low_water
        if low < self._warn_at:
            self._warn_at = low // 2
            self._backlog = min(BATCH, self._warn_at)
            self._tell(ReceiveQueueLow(low, self.settings.receive_depth))

    # --- probes ------------------------------------------------------------------------------

    def probe_loopback(self, group: Group, timeout: float) -> Operation[bool]:
        """Whether the device returns one's own message within `timeout` s; a needless filter ends."""
        self.require_joined(group, "probe_loopback", Phase.SEND)
        quest, number = self._new_quest()
        try:
            self._ask(group, Kind.SELF, number)
            yield from self._until(lambda: quest.heard_self, self._deadline(timeout))
        finally:
            del self.quests[number]
        if self.blocking_loopback:
            self.filtering = quest.heard_self
            self._judges = self.filtering or self.settings.sequence
        return quest.heard_self

    def ready(self, group: Group, members: int, timeout: float | None) -> Operation[frozenset[Peer]]:
        """Ask until `members` others have answered. Raises TimedOut that says who has."""
        self.require_joined(group, "ready", Phase.SEND)
        deadline = self._deadline(timeout)
        quest, number = self._new_quest()
        pause, ask_at = ASK_FIRST, self.now()
        try:
            while len(quest.peers) < members:
                now = self.now()
                if self._is_over(deadline):
                    raise self._unanswered(group, quest, members, timeout)
                if now >= ask_at:
                    self._ask(group, Kind.ASK_ALONE if group.send_only else Kind.ASK, number)
                    ask_at, pause = now + pause, min(pause * 2, ASK_MAX)
                    continue
                yield from self._wait(ask_at if deadline is None else min(ask_at, deadline))
        finally:
            del self.quests[number]
        return frozenset(quest.peers)

    def _new_quest(self) -> tuple[Quest, int]:
        self._asked = number = (self._asked + 1) & 0xFFFFFFFF
        quest = self.quests[number] = Quest()
        return quest, number

    def _ask(self, group: Group, kind: Kind, number: int) -> None:
        self.require_joined(group, "ready", Phase.SEND)
        if group.state is GroupState.JOINED and group.destination is not None:
            me = Peer(self.place.port.gids.get(group.destination.sgid_index, NO_GID), self.qp.qp_num)
            with suppress(TimedOut, Closed):  # another one follows
                self._post(group.destination, Probe(kind, number, me))

    def _post(self, destination: Destination, what: Probe) -> None:
        """Send a probe, without waiting."""
        qp = self.usable_qp
        if qp is None:
            return
        try:
            qp.send(destination, [what.pack()], timeout=0)
            self.totals["probes"] += 1
        except QpError as error:
            self.on_qp_error(error)

    def _is_me(self, peer: Peer) -> bool:
        """QP numbers alone do not tell: those of equal hosts are often the same."""
        return peer.qp_num == self.qp.qp_num and peer.gid in self.place.port.gids.values()

    def _on_probe(self, found: Probe, message: Message) -> None:
        group = self.by_mgid.get(message.group)
        if found.kind is Kind.ECHO:
            quest = self.quests.get(found.number)
            if quest is not None and self._is_me(found.asker) and not message.from_self:
                quest.peers.add(Peer(message.source, message.src_qp))
        elif message.from_self:
            quest = self.quests.get(found.number)
            if quest is not None:
                quest.heard_self = True
        elif found.kind is not Kind.SELF and group is not None and group.destination is not None:
            if self._echoes_left <= 0:
                self._drop(group, "probe: too many at once")
                return
            self._echoes_left -= 1
            alone = found.kind is Kind.ASK_ALONE
            destination = group.destination.reply_to(message) if alone else group.destination
            asker = Peer(message.source, message.src_qp)
            try:
                self._post(destination, Probe(Kind.ECHO, found.number, asker))
            except QpError:
                raise
            except McastError as error:
                self._drop(group, "probe: no room for an echo")
                logger.debug("no echo: %s", error)

    def _unanswered(self, group: Group, quest: Quest, members: int, timeout: float | None) -> McastError:
        who = ", ".join(f"{peer.gid} QP {peer.qp_num}" for peer in sorted(quest.peers)) or "nobody"
        detail = f"{len(quest.peers)} of {members} members answered within {timeout} s: {who}"
        if group.send_only:
            detail += (
                "; they answer a sender by unicast, which Soft-RoCE loses within one network namespace: "
                "join as a Membership there, or use settle="
            )
        return mcast_error(E.ETIMEDOUT, "ready", Phase.RECV, {"group": group.address}, detail)

    # --- what a user asks for ----------------------------------------------------------------

    def next_event(self, timeout: float | None) -> Operation[Event | None]:
        """The next event, None when `timeout` s have passed."""
        yield from self._until(lambda: bool(self.events), self._deadline(timeout), at_least_once=True)
        return self.events.popleft() if self.events else None

    def loopback_report(self) -> LoopbackReport:
        """What is in force for own messages."""
        return LoopbackReport(self.settings.loopback, self.blocking_loopback, self.filtering)

    def _counters(self) -> QpCounters:
        """Of all QPs so far: sums, but what is free now, and the lowest low water."""
        if self.id.closed or self.qp.closed:
            return self._past
        return _added(self._past, self.qp.counters)

    def _port_counters(self) -> Mapping[str, int]:
        return self.backend.port_counters(self.place.device.name, self.place.port.port_num)

    def snapshot(self) -> EndpointStats:
        """Everything counted, now."""
        counters = self._counters()
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
        totals = {field: self.totals[field] for field in ("lost", "rejoins", "gave_up")}
        return EndpointStats(
            backend=self.backend.name,
            device=self.place.device.name,
            port_num=self.place.port.port_num,
            qp_num=None if self.qp.closed else self.qp.qp_num,
            sent=counters.sent,
            received=counters.received,
            received_bytes=self.received_bytes,
            received_batches=self.received_batches,
            receive_depth=self.settings.receive_depth,
            receive_free=counters.recv_free,
            receive_low_water=counters.recv_low_water,
            receive_empty=counters.recv_empty,
            dropped=dropped | {reason: count for reason, count in silent.items() if count is not None},
            probes=self.totals["probes"],
            events_dropped=self.totals["events_dropped"],
            groups=groups,
            port_counters={} if self.backend.closed else self._port_counters(),
            **sums,
            **totals,
        )

    # --- waiting -----------------------------------------------------------------------------

    def _deadline(self, timeout: float | None) -> float | None:
        """When the time is over; -inf for a poll, which needs no clock."""
        if timeout is None:
            return None
        return self.now() + timeout if timeout > 0 else -inf

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


def _attr(group: Group) -> JoinAttrEx:
    make = JoinAttrEx.send_only if group.send_only else JoinAttrEx.full_member
    return make(group.address)


def _error_of(event: CmEvent) -> McastError:
    """The error that an event reports."""
    try:
        event.check()
    except McastError as error:
        return error
    return mcast_error(E.ENETRESET, "event", Phase.EVENT, {"event": event.type.name})


def _loss(error: McastError, group: Group, call: str, phase: Phase) -> McastError:
    """What a call raises once the membership is lost for good."""
    detail = f"the membership of {group.address} was lost, and is not restored: {error}"
    lost = MembershipLost(E.ENETRESET, call, phase, {"group": group.address}, detail)
    lost.__cause__ = error
    return lost


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


def _added(past: QpCounters, now: QpCounters) -> QpCounters:
    """The counters of all QPs so far: sums, but what is free now, and the lowest low water."""

    def plus(one: int | None, other: int | None) -> int | None:
        return None if one is None or other is None else one + other

    return QpCounters(
        past.sent + now.sent,
        past.received + now.received,
        plus(past.dropped_no_receive, now.dropped_no_receive),
        plus(past.dropped_too_long, now.dropped_too_long),
        plus(past.dropped_qkey, now.dropped_qkey),
        now.recv_free,
        min(past.recv_low_water, now.recv_low_water),
        past.recv_empty + now.recv_empty,
    )
