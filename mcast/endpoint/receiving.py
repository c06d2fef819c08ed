"""Receiving: the messages on their way from the queue pair to the calls that ask for them.

Probes, duplicates and own messages that are filtered are sorted out, and everything is counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, SupportsIndex

from mcast.api import Batch, CopiedBatch, McastError, Message, QpError, Reentered, Refused
from mcast.endpoint import sequence
from mcast.endpoint.inbox import ChosenBatch, Kept, copied
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.memberships import Memberships
from mcast.endpoint.numbering import missing
from mcast.endpoint.policy import Event, MessagesMissing, ReceiveQueueLow
from mcast.endpoint.probes import ECHOES_MAX, Prober
from mcast.endpoint.recovery import Restorer
from mcast.endpoint.sequence import HEADER_SIZE
from mcast.endpoint.station import Station
from mcast.endpoint.waiting import BATCH, Operation, Step, Waiting, asked
from mcast.wire import probe
from mcast.wire.addresses import Gid
from mcast.wire.probe import PROBE_SIZES


class LowWater:
    """How few of `depth` receives may be free until the user is told, and how often to look.

    An eighth: a sender of objects keeps three quarters of a queue filled (`mcast.cast.nack.rate.Window`), to
    which some answers of the other members come. That is as it should be.
    """

    def __init__(self, depth: int) -> None:
        self._warn_at = depth // 8
        self._every = depth // 4
        self.left: int = depth // 4
        """Messages until the next look at the queue."""

    def is_due(self, messages: int) -> bool:
        """Whether to look at the queue now that so many messages more were received.

        A queue that has run low had three quarters of its depth in messages, all of which are received later:
        to look once in a quarter is enough.
        """
        self.left -= messages
        if self.left > 0:
            return False
        self.left = self._every
        return self._warn_at > 0

    def has_fallen(self, free: int) -> bool:
        """Whether to report that only `free` receives were free at some time.

        The next report comes at half as many.
        """
        if free >= self._warn_at:
            return False
        self._warn_at = free // 2
        return True


logger: logging.Logger = logging.getLogger("mcast")


_OWN = "own message"


class CountDrops(Protocol):
    """Counts messages that the user does not get."""

    def __call__(self, group: EndpointGroup | None, reason: str, messages: int = 1, /) -> None: ...


def _has_one(batch: Batch) -> bool:
    """Whether one queue pair has sent all messages of the batch, which costs less to find out than a look at
    each."""
    first = batch[0]
    return batch.count_from(first.source, first.src_qp) == len(batch)


class Sorter:
    """Sorts messages; probes are answered here.

    by_mgid    MGID -> group, for the groups that are joined
    filtering  True if own messages are kept from the user
    sequenced  True if messages have sequence headers, None if they may have: these are delivered with theirs
    drop       counts messages that the user does not get, with their group (None: of no group) and the reason
    tell       takes an event for the user
    """

    def __init__(
        self,
        by_mgid: Mapping[Gid, EndpointGroup],
        prober: Prober,
        filtering: bool,
        sequenced: bool | None,
        drop: CountDrops,
        tell: Callable[[MessagesMissing], None],
    ) -> None:
        self._by_mgid, self._prober, self._drop, self._tell = by_mgid, prober, drop, tell
        self.filtering: bool = filtering
        self.sequenced: bool = bool(sequenced)
        self._told = sequenced is None
        """Whether nothing is left to say of a sender that differs from this end in its headers."""
        self._stray_sources = sequence.Sources()
        self.judges: bool = filtering or self.sequenced
        """Whether each message must be looked at."""

    def filter_own(self, filtering: bool) -> None:
        """Begin or end to keep own messages from the user."""
        self.filtering = filtering
        self.judges = filtering or self.sequenced

    def wanted(self, batch: Batch) -> tuple[Sequence[int], list[Message]]:
        """The places of the messages of the batch that are the user's, and these with the user's payloads."""
        self._prober.echoes_left = ECHOES_MAX
        lengths = batch.lengths
        if not self.judges_in(batch, lengths):
            return range(len(lengths)), list(batch)
        if not self.sequenced and PROBE_SIZES.isdisjoint(lengths) and batch[0].from_self and _has_one(batch):
            for mgid, own in Counter(batch.groups).items():
                self._drop(self._by_mgid.get(mgid), _OWN, own)
            return (), []
        judged = [self._judge(message) for message in batch]
        places = [place for place, kept in enumerate(judged) if kept is not None]
        return places, [kept for kept in judged if kept is not None]

    def answer(self, batch: Batch) -> None:
        """Answer the probes in the batch, and do nothing with the other messages."""
        self._prober.echoes_left = ECHOES_MAX
        if PROBE_SIZES.isdisjoint(batch.lengths):
            return
        for message in batch:
            if (found := probe.parse(message.payload)) is not None:
                self._prober.take(found, message)

    def judges_in(self, batch: Batch, lengths: Sequence[int]) -> bool:
        """Whether each message of a batch that is not empty, with payloads of these lengths, must be looked
        at."""
        if self.sequenced or not PROBE_SIZES.isdisjoint(lengths):
            return True
        return self.filtering and (batch[0].from_self or not _has_one(batch))

    def look(self, message: Message) -> None:
        """Say once that a sender has sequence headers, which an endpoint without them delivers as payload."""
        if self.sequenced or self._told:
            return
        if isinstance(sequence.parse(message.payload), sequence.SequenceHeader):
            self._told = True
            logger.warning(
                "%s: %s sends to %s with sequence headers, and this endpoint has sequence=False: each "
                "payload begins with a header of %d bytes. Open both ends with sequence=True, or both "
                "without",
                self._prober.whose,
                message.source,
                message.group,
                sequence.HEADER_SIZE,
            )

    def _judge(self, message: Message) -> Message | None:
        """The message as the user shall see it, or None if it is not the user's. A probe is answered here."""
        probed = probe.parse(message.payload)
        group = self._by_mgid.get(message.group)
        if probed is not None:
            self._prober.take(probed, message)
            return None
        if self.filtering and message.from_self:
            self._drop(group, _OWN)
            return None
        if not self.sequenced:
            return message
        sources = self._stray_sources if group is None else group.sources
        found = sources.take(message.source, message.src_qp, message.payload)
        if isinstance(found, sequence.Refusal):
            self._drop(group, found.value)
            if found in (sequence.Refusal.SHORT, sequence.Refusal.MAGIC) and not self._told:
                self._told = True
                logger.warning(
                    "%s: %s sends to %s without sequence headers, and this endpoint has sequence=True: such "
                    "messages are not delivered. Open both ends with sequence=True, or both without",
                    self._prober.whose,
                    message.source,
                    message.group,
                )
            return None
        if found.missing and group is not None:
            for gap in missing(group.address, message, found):
                self._tell(gap)
        return message._replace(payload=message.payload[sequence.HEADER_SIZE :], number=found.number)


_LEFT = GroupState.LEFT

SELDOM = 64 * BATCH
"""One of so many messages is looked at in the long run, because a look costs as much as several messages."""


def note_silence(station: Station) -> None:
    """A receive has waited in vain: log once if nobody else can be heard on the backend."""
    if not station.is_silence_noted and (why := station.backend.solitude()):
        station.is_silence_noted = True
        logger.warning("%s: nothing came: %s", station.name, why)


def require_count(max: int) -> None:
    """Raise TypeError or ValueError for what is no number of messages to wait for."""
    if not isinstance(max, SupportsIndex):
        raise TypeError(f"max is {max!r}: give an int, how many messages a batch may have")
    if max < 1:
        raise ValueError(f"max is {max}: a batch has 1 or more messages")


class Receiving:
    """Receives for the calls of an endpoint.

    tell         takes an event for the user
    on_qp_error  takes the error of a queue pair that went into ERR, and may raise it
    """

    def __init__(
        self,
        station: Station,
        restorer: Restorer,
        memberships: Memberships,
        waiting: Waiting,
        kept: Kept,
        sorter: Sorter,
        tell: Callable[[Event], None],
        on_qp_error: Callable[[QpError], None],
    ) -> None:
        self._station, self._restorer, self._memberships = station, restorer, memberships
        self._waiting, self._sorter = waiting, sorter
        self.kept: Kept = kept
        self._tell, self._on_qp_error = tell, on_qp_error
        self._low_water = LowWater(station.settings.receive_depth)
        self._due, self._every = 1, BATCH
        """How many messages more may come until one is looked at: the first, and then ever fewer, down to one
        of SELDOM."""
        self.bytes: int = 0
        self.batches: int = 0
        """What was received for the user: bytes, and calls to the queue pair that gave something."""
        self._batches_before = -1
        """The value of `batches` when `answer` was called last; -1 before that."""

    def recv(self, group: EndpointGroup | None, timeout: float | None) -> Operation[Message | None]:
        """The next message of the group, or of any group; None when `timeout` seconds have passed."""
        return self._recv(group, self._waiting.deadline(timeout))

    def _recv(self, group: EndpointGroup | None, deadline: float | None) -> Operation[Message | None]:
        waited = False
        while True:
            message = self.kept.pop(group)
            if message is not None:
                return message
            self._memberships.require_receiving(group)
            if waited and self._waiting.is_over(deadline):
                note_silence(self._station)
                return None
            yield from self._waiting.wait(deadline)
            waited = True

    def take(self, group: EndpointGroup | None) -> Message | None:
        """The next message of the group, or of any group, if one is here; None if not.

        Where no message has to be looked at, one is received by itself, copied once and kept nowhere: without
        a filter and sequence headers only its length can make it a probe, and with one membership it is
        hardly another group's. All other messages come in batches, which are sorted.
        """
        if self.kept.count and (message := self.kept.pop(group)) is not None:
            return message
        station = self._station
        roster = station.roster
        if roster.ended or (group is not None and group.state is _LEFT):
            self._memberships.require_receiving(group)
        if not self._sorter.judges and (group is None or roster.members == 1):
            try:
                message = None if self._restorer.recovery is not None else station.qp.recv_one(0.0)
            except (McastError, Reentered) as error:
                self._on_error(error)
                return None
            if message is None:
                return None
            owner, size = roster.by_mgid.get(message.group), len(message.payload)
            if size not in PROBE_SIZES and (group is None or owner is group):
                self.batches += 1
                self.bytes += size
                if owner is not None:
                    owner.counts.received += 1
                    owner.counts.received_bytes += size
                self._due -= 1
                if self._due <= 0:
                    self._look(message)
                low_water = self._low_water
                low_water.left -= 1
                if low_water.left <= 0 and low_water.is_due(0):
                    self._watch_queue()
                return message
            self.route(CopiedBatch([message]))
            if (message := self.kept.pop(group)) is not None:
                return message
        batch = self.poll(BATCH)
        if batch is None:
            return None
        self.route(batch)
        return self.kept.pop(group)

    def poll(self, max: int) -> Batch | None:
        """The messages that wait at the queue pair; None if there are none (then its descriptor is armed), or
        while it is in ERR."""
        if self._restorer.recovery is not None:
            return None
        try:
            batch = self._station.qp.recv(max, 0.0)
        except (McastError, Reentered) as error:
            self._on_error(error)
            return None
        return batch or None

    def _on_error(self, error: McastError | Reentered) -> None:
        """Refuse the call with an error of the queue pair, unless that will be reset."""
        if not isinstance(error, QpError):
            raise Refused(error)
        self._on_qp_error(error)

    def take_batch(self, max: int, group: EndpointGroup | None = None) -> Batch | None:
        """1..max messages of the group, or of all groups, if any are here, leased if they come from the queue
        pair; None if none are."""
        if self.kept.count and (kept := self._kept_batch(max, group)) is not None:
            return kept
        if self._station.roster.ended or (group is not None and group.state is _LEFT):
            self._memberships.require_receiving(group)
        batch = self.poll(max)
        if batch is None:
            return None
        return self._sift(batch) if group is None else self._chosen(batch, max, group)

    def take_in(self, max: int = BATCH) -> None:
        """Receive the messages that wait at the queue pair, and keep them for the calls that ask for them."""
        batch = self.poll(max)
        if batch is not None:
            self.route(batch)

    def answer(self, keep: bool, leaves: bool = False) -> None:
        """Answer the probes that wait at the queue pair of a program that sends, and does not receive.

        If messages were received since the last call, probes were answered then, and a look is not needed;
        nor at the first call, unless the program `leaves` and has never received.
        Other messages that wait are kept for a later receive as far as there is room. Without `keep`, at the
        end of an endpoint, they are dropped, and all probes are answered.
        """
        before = self._batches_before if not leaves else max(self._batches_before, 0)
        if self.batches == before or not keep:
            for _ in range(self._station.settings.receive_depth // BATCH + 1):
                batch = self.poll(BATCH) if self._station.qp.may_have_messages else None
                if batch is None:
                    break
                self.batches += 1
                self._waiting.news = True
                with batch:
                    if not keep:
                        self._sorter.answer(batch)
                    elif not self._discard(batch):
                        self._sort(batch)
        self._batches_before = self.batches

    def _discard(self, batch: Batch) -> bool:
        """Drop a batch whole, if it has no probe and there is no room for any of its messages."""
        only, lengths = self._station.roster.only_group, batch.lengths
        if only is None or not only.inbox.is_full or self._sorter.judges_in(batch, lengths):
            return False
        self._memberships.drop(only, "nobody asked for it in time", len(lengths))
        return True

    def put_back(self, found: Message | Batch) -> None:
        """Keep the messages of a call that was cancelled; the next call that asks gets them first."""
        if isinstance(found, Message):
            messages = [found]
        else:
            with found:
                messages = list(map(copied, found))
        self.kept.put_back(messages)
        self._waiting.news = True

    def recv_batch(
        self, max: int, timeout: float | None, group: EndpointGroup | None = None
    ) -> Operation[Batch]:
        """As `take_batch`, after waiting; an empty batch when `timeout` seconds have passed."""
        return self._recv_batch(max, self._waiting.deadline(timeout), group)

    def _recv_batch(self, max: int, deadline: float | None, group: EndpointGroup | None) -> Operation[Batch]:
        waited = False
        while True:
            if (kept := self._kept_batch(max, group)) is not None:
                return kept
            self._memberships.require_receiving(group)
            if waited and self._waiting.is_over(deadline):
                note_silence(self._station)
                return CopiedBatch()
            batch = yield Step(deadline, max)
            waited = True
            if batch and (chosen := self._chosen(batch, max, group)) is not None:
                return chosen

    def _kept_batch(self, max: int, group: EndpointGroup | None) -> Batch | None:
        if not self.kept.count:
            return None
        messages = [message for _ in range(max) if (message := self.kept.pop(group)) is not None]
        return CopiedBatch(messages) if messages else None

    def _chosen(self, batch: Batch, max: int, group: EndpointGroup | None) -> Batch | None:
        """The user's messages of a batch that is not empty; where others than the group's are among them,
        each is kept for those that ask for it, and the group's are copies."""
        if group is None or (
            group.destination is not None and batch.groups.count(group.destination.gid) == len(batch)
        ):
            return self._sift(batch)
        self.route(batch)
        return self._kept_batch(max, group)

    def _sift(self, batch: Batch) -> Batch | None:
        """The user's messages of a batch that is not empty: the same batch if all are, None if none are."""
        lengths, sorter = batch.lengths, self._sorter
        self.batches += 1
        if not sorter.judges_in(batch, lengths):
            count, size, owner = len(lengths), sum(lengths), self._station.roster.only_group
            self.bytes += size
            if owner is not None:
                owner.counts.received += count
                owner.counts.received_bytes += size
            else:
                self._count_by_group(batch.groups, lengths)
            self._due -= count
            if self._due <= 0:
                self._look(next(iter(batch)))
            if self._low_water.is_due(count):
                self._watch_queue()
            return batch
        self._waiting.news = True
        places, messages = self._wanted(batch)
        if self._low_water.is_due(len(lengths)):
            self._watch_queue()
        if len(messages) == len(lengths) and not self._sorter.sequenced:
            return batch
        chosen = ChosenBatch(batch, messages, places, HEADER_SIZE if self._sorter.sequenced else 0)
        if messages:
            return chosen
        chosen.release()
        return None

    def _count_by_group(self, groups: Iterable[Gid], lengths: Iterable[int]) -> None:
        for mgid, size in zip(groups, lengths, strict=True):
            owner = self._station.roster.by_mgid.get(mgid)
            if owner is not None:
                owner.counts.received += 1
                owner.counts.received_bytes += size

    def route(self, batch: Batch) -> None:
        """Keep copies of the user's messages for the calls that ask for them, and release the batch."""
        count = len(batch)
        if not count:
            return
        self.batches += 1
        self._waiting.news = True
        with batch:
            self._sort(batch)
        if self._low_water.is_due(count):
            self._watch_queue()

    def _sort(self, batch: Batch) -> None:
        # A call of its own, because no variable here may keep a part of a payload when the lease ends.
        for message in self._wanted(batch)[1]:
            if not self.kept.put(message):
                group = self._station.roster.by_mgid.get(message.group)
                self._memberships.drop(group, "nobody asked for it in time")

    def _wanted(self, batch: Batch) -> tuple[Sequence[int], list[Message]]:
        """The messages of the batch that are the user's, counted, and before them their places in it."""
        places, wanted = self._sorter.wanted(batch)
        for message in wanted:
            group = self._station.roster.by_mgid.get(message.group)
            size = len(message.payload)
            self.bytes += size
            if group is not None:
                group.counts.received += 1
                group.counts.received_bytes += size
        self._due -= len(wanted)
        if self._due <= 0:
            self._look(wanted[0])
        return places, wanted

    def _look(self, message: Message) -> None:
        self._due, self._every = self._every, min(2 * self._every, SELDOM)
        self._sorter.look(message)

    def _watch_queue(self) -> None:
        """Warn when the receive queue has run low."""
        if self._station.closed:
            return
        low = asked(getattr, self._station.qp, "counters").recv_low_water
        if self._low_water.has_fallen(low):
            self._tell(ReceiveQueueLow(low, self._station.settings.receive_depth))
