"""Receiving: messages on their way from the queue pair to the calls that ask for them.

A batch that the queue pair returns takes one of two ways. `take_batch` hands it to the caller, leased and
without a copy, where the caller may have all of it, and `take` one message, copied once; otherwise `route`
copies the messages into the receive buffer, one queue for each group, where each call finds its own. `Demux`
removes probes, duplicates and filtered own messages on both ways; it inspects single messages only if a
header, the filter or a length demands it.

The buffer is emptied before the queue pair is polled, so messages keep their order. A group whose queue is
full loses new messages, which are counted as drops: the queue pair must go on for the others. All of this
runs under the endpoint's guard.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, SupportsIndex

from mcast.api import Batch, CopiedBatch, McastError, Message, QpError, ReentrantCall, Refused
from mcast.endpoint import sequence
from mcast.endpoint.membership import EndpointGroup, GroupState
from mcast.endpoint.memberships import Memberships
from mcast.endpoint.numbering import missing
from mcast.endpoint.policy import Event, MessagesMissing, ReceiveQueueLow
from mcast.endpoint.probes import MAX_ECHOES, Prober
from mcast.endpoint.receive_buffer import FilteredBatch, ReceiveBuffer, copied
from mcast.endpoint.recovery import Rejoiner
from mcast.endpoint.resources import PortResources
from mcast.endpoint.sequence import HEADER_SIZE
from mcast.endpoint.waiting import DEFAULT_BATCH, Operation, Step, Waiting, call_provider
from mcast.wire import probe
from mcast.wire.addresses import Gid
from mcast.wire.probe import PROBE_SIZES


class LowWater:
    """Low-water mark of a receive queue of `depth` receives, and the number of messages between two checks.

    An eighth: a sender of objects keeps three quarters of a queue filled
    (`mcast.cast.protocol.rate.Window`), to which some answers of the other members come.
    """

    def __init__(self, depth: int) -> None:
        self._warn_at = depth // 8
        self._every = depth // 4
        self.left: int = depth // 4
        """Messages until the next look at the queue."""

    def is_due(self, messages: int) -> bool:
        """Return True if the queue must be checked, now that `messages` more were received.

        A queue that has run low had three quarters of its depth in messages, all of which are received later:
        to look once in a quarter is enough.
        """
        self.left -= messages
        if self.left > 0:
            return False
        self.left = self._every
        return self._warn_at > 0

    def has_fallen(self, free: int) -> bool:
        """Return True if the user must be told that only `free` receives were free at some time.

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
    """Return True if one queue pair has sent all messages of the batch.

    Cheaper than a test of each message.
    """
    first = batch[0]
    return batch.count_from(first.source, first.src_qp) == len(batch)


class Demux:
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
        report: Callable[[MessagesMissing], None],
    ) -> None:
        self._by_mgid, self._prober, self._drop, self._report = by_mgid, prober, drop, report
        self.filtering: bool = filtering
        self.sequenced: bool = bool(sequenced)
        self._warned = sequenced is None
        """True if the log has named a sender that differs from this endpoint in its sequence headers."""
        self._stray_sources = sequence.Sources()
        self.inspects_all: bool = filtering or self.sequenced
        """True if each message must be inspected."""

    def filter_own(self, filtering: bool) -> None:
        """Begin or end to keep own messages from the user."""
        self.filtering = filtering
        self.inspects_all = filtering or self.sequenced

    def filter(self, batch: Batch) -> tuple[Sequence[int], list[Message]]:
        """The places of the messages of the batch that are the user's, and these with the user's payloads."""
        self._prober.echoes_left = MAX_ECHOES
        lengths = batch.lengths
        if not self.must_inspect(batch, lengths):
            return range(len(lengths)), list(batch)
        if not self.sequenced and PROBE_SIZES.isdisjoint(lengths) and batch[0].from_self and _has_one(batch):
            for mgid, own in Counter(batch.groups).items():
                self._drop(self._by_mgid.get(mgid), _OWN, own)
            return (), []
        inspected = [self._inspect(message) for message in batch]
        indices = [place for place, kept in enumerate(inspected) if kept is not None]
        return indices, [kept for kept in inspected if kept is not None]

    def answer(self, batch: Batch) -> None:
        """Answer the probes in the batch, and do nothing with the other messages."""
        self._prober.echoes_left = MAX_ECHOES
        if PROBE_SIZES.isdisjoint(batch.lengths):
            return
        for message in batch:
            if (found := probe.parse(message.payload)) is not None:
                self._prober.take(found, message)

    def must_inspect(self, batch: Batch, lengths: Sequence[int]) -> bool:
        """Return True if each message of a batch must be inspected.

        The batch is not empty; its payloads have these lengths.
        """
        if self.sequenced:
            return True
        if not PROBE_SIZES.isdisjoint(lengths):
            places = (place for place, length in enumerate(lengths) if length in PROBE_SIZES)
            if any(probe.parse(batch[place].payload) is not None for place in places):
                return True
        if not self.filtering:
            return False
        return batch[0].from_self or not (_has_one(batch) or self._prober.sent_none_of(batch))

    def check_headers(self, message: Message) -> None:
        """Say once that a sender has sequence headers, which an endpoint without them delivers as payload."""
        if self.sequenced or self._warned:
            return
        if isinstance(sequence.parse(message.payload), sequence.SequenceHeader):
            self._warned = True
            logger.warning(
                "%s: %s sends to %s with sequence headers, and this endpoint has sequence=False: each "
                "payload begins with a header of %d bytes. Open both ends with sequence=True, or both "
                "without",
                self._prober.endpoint_name,
                message.source,
                message.group,
                sequence.HEADER_SIZE,
            )

    def _inspect(self, message: Message) -> Message | None:
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
            if found in (sequence.Refusal.SHORT, sequence.Refusal.MAGIC) and not self._warned:
                self._warned = True
                logger.warning(
                    "%s: %s sends to %s without sequence headers, and this endpoint has sequence=True: such "
                    "messages are not delivered. Open both ends with sequence=True, or both without",
                    self._prober.endpoint_name,
                    message.source,
                    message.group,
                )
            return None
        if found.missing and group is not None:
            for gap in missing(group.address, message, found):
                self._report(gap)
        return message._replace(payload=message.payload[sequence.HEADER_SIZE :], number=found.number)


_LEFT = GroupState.LEFT

MAX_SAMPLE_INTERVAL = 64 * DEFAULT_BATCH
"""One of so many messages is looked at in the long run, because a look costs as much as several messages."""


QUIET_TIME = 10.0
"""Seconds without a message after which a receive in vain names what may keep others from being heard."""


def log_isolation(resources: PortResources) -> None:
    """A receive has waited in vain: log once what keeps others from being heard, or may."""
    if resources.isolation_logged:
        return
    why = resources.backend.why_isolated()
    likely = "".join(f"\n{cause.shown('likely')}" for cause in resources.backend.suspicions(QUIET_TIME))
    if why or likely:
        resources.isolation_logged = True
        logger.warning("%s: no message arrived%s%s", resources.name, f": {why}" if why else "", likely)


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
        resources: PortResources,
        rejoiner: Rejoiner,
        memberships: Memberships,
        waiting: Waiting,
        buffer: ReceiveBuffer,
        demux: Demux,
        report: Callable[[Event], None],
        on_qp_error: Callable[[QpError], None],
    ) -> None:
        self._resources, self._rejoiner, self._memberships = resources, rejoiner, memberships
        self._waiting, self._demux = waiting, demux
        self.buffer: ReceiveBuffer = buffer
        self._report, self._on_qp_error = report, on_qp_error
        self._low_water = LowWater(resources.settings.receive_depth)
        self._due, self._every = 1, DEFAULT_BATCH
        """Messages until the next sample, and between two of them.

        A sample follows the first message, then twice as many each time, up to MAX_SAMPLE_INTERVAL.
        """
        self.bytes: int = 0
        self.batches: int = 0
        """Bytes received for the user, and calls to the queue pair that returned messages."""
        self._batches_before = -1
        """The value of `batches` when `answer` was called last; -1 before that."""

    def recv(self, group: EndpointGroup | None, timeout: float | None) -> Operation[Message | None]:
        """The next message of the group, or of any group; None when `timeout` seconds have passed."""
        return self._recv(group, self._waiting.deadline(timeout))

    def _recv(self, group: EndpointGroup | None, deadline: float | None) -> Operation[Message | None]:
        waited = False
        while True:
            message = self.buffer.pop(group)
            if message is not None:
                return message
            self._memberships.require_receiving(group)
            if waited and self._waiting.expired(deadline):
                log_isolation(self._resources)
                return None
            yield from self._waiting.wait(deadline)
            waited = True

    def take(self, group: EndpointGroup | None) -> Message | None:
        """The next message of the group, or of any group, if one is here; None if not.

        Where no message has to be looked at, one is received by itself, copied once and kept nowhere: without
        a filter and sequence headers only its length can make it a probe, and with one membership it is
        hardly another group's. All other messages come in batches, which are sorted.
        """
        if self.buffer.count and (message := self.buffer.pop(group)) is not None:
            return message
        resources = self._resources
        group_index = resources.group_index
        if group_index.ended or (group is not None and group.state is _LEFT):
            self._memberships.require_receiving(group)
        if not self._demux.inspects_all and (group is None or group_index.members == 1):
            try:
                message = None if self._rejoiner.recovery is not None else resources.qp.recv_one(0.0)
            except (McastError, ReentrantCall) as error:
                self._on_error(error)
                return None
            if message is None:
                return None
            owner, size = group_index.by_mgid.get(message.group), len(message.payload)
            if size not in PROBE_SIZES and (group is None or owner is group):
                self.batches += 1
                self.bytes += size
                if owner is not None:
                    owner.counts.received += 1
                    owner.counts.received_bytes += size
                self._due -= 1
                if self._due <= 0:
                    self._sample(message)
                low_water = self._low_water
                low_water.left -= 1
                if low_water.left <= 0 and low_water.is_due(0):
                    self._watch_queue()
                return message
            self.route(CopiedBatch([message]))
            if (message := self.buffer.pop(group)) is not None:
                return message
        batch = self.poll(DEFAULT_BATCH)
        if batch is None:
            return None
        self.route(batch)
        return self.buffer.pop(group)

    def poll(self, max: int) -> Batch | None:
        """Return the messages that wait at the queue pair.

        None if there are none (then its descriptor is armed), or while it is in ERR.
        """
        if self._rejoiner.recovery is not None:
            return None
        try:
            batch = self._resources.qp.recv(max, 0.0)
        except (McastError, ReentrantCall) as error:
            self._on_error(error)
            return None
        return batch or None

    def _on_error(self, error: McastError | ReentrantCall) -> None:
        """Refuse the call with an error of the queue pair, unless that will be reset."""
        if not isinstance(error, QpError):
            raise Refused(error)
        self._on_qp_error(error)

    def take_batch(self, max: int, group: EndpointGroup | None = None) -> Batch | None:
        """Return 1..max messages of the group, or of all groups; None if there are none.

        They are leased if they come from the queue pair.
        """
        if self.buffer.count and (kept := self._buffered_batch(max, group)) is not None:
            return kept
        if self._resources.group_index.ended or (group is not None and group.state is _LEFT):
            self._memberships.require_receiving(group)
        batch = self.poll(max)
        if batch is None:
            return None
        return self._sift(batch) if group is None else self._chosen(batch, max, group)

    def drain(self, max: int = DEFAULT_BATCH) -> None:
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
            for _ in range(self._resources.settings.receive_depth // DEFAULT_BATCH + 1):
                batch = self.poll(DEFAULT_BATCH) if self._resources.qp.may_have_messages else None
                if batch is None:
                    break
                self.batches += 1
                self._waiting.dirty = True
                with batch:
                    if not keep:
                        self._demux.answer(batch)
                    elif not self._discard(batch):
                        self._sort(batch)
        self._batches_before = self.batches

    def _discard(self, batch: Batch) -> bool:
        """Drop a batch whole, if it has no probe and there is no room for any of its messages."""
        only, lengths = self._resources.group_index.only_group, batch.lengths
        if only is None or not only.queue.is_full or self._demux.must_inspect(batch, lengths):
            return False
        self._memberships.drop(only, "queue full: not received in time", len(lengths))
        return True

    def put_back(self, found: Message | Batch) -> None:
        """Keep the messages of a call that was cancelled; the next call that asks gets them first."""
        if isinstance(found, Message):
            messages = [found]
        else:
            with found:
                messages = list(map(copied, found))
        self.buffer.put_back(messages)
        self._waiting.dirty = True

    def recv_batch(
        self, max: int, timeout: float | None, group: EndpointGroup | None = None
    ) -> Operation[Batch]:
        """Wait for what `take_batch` returns; return an empty batch when `timeout` seconds have passed."""
        return self._recv_batch(max, self._waiting.deadline(timeout), group)

    def _recv_batch(self, max: int, deadline: float | None, group: EndpointGroup | None) -> Operation[Batch]:
        waited = False
        while True:
            if (kept := self._buffered_batch(max, group)) is not None:
                return kept
            self._memberships.require_receiving(group)
            if waited and self._waiting.expired(deadline):
                log_isolation(self._resources)
                return CopiedBatch()
            batch = yield Step(deadline, max)
            waited = True
            if batch and (chosen := self._chosen(batch, max, group)) is not None:
                return chosen

    def _buffered_batch(self, max: int, group: EndpointGroup | None) -> Batch | None:
        if not self.buffer.count:
            return None
        messages = [message for _ in range(max) if (message := self.buffer.pop(group)) is not None]
        return CopiedBatch(messages) if messages else None

    def _chosen(self, batch: Batch, max: int, group: EndpointGroup | None) -> Batch | None:
        """Return the user's messages of a batch that is not empty.

        Where messages of other groups are among them, each of those is kept for the calls that ask for it,
        and the group's are copies.
        """
        if group is None or (
            group.destination is not None and batch.groups.count(group.destination.gid) == len(batch)
        ):
            return self._sift(batch)
        self.route(batch)
        return self._buffered_batch(max, group)

    def _sift(self, batch: Batch) -> Batch | None:
        """The user's messages of a batch that is not empty: the same batch if all are, None if none are."""
        lengths, demux = batch.lengths, self._demux
        self.batches += 1
        if not demux.must_inspect(batch, lengths):
            count, size, owner = len(lengths), sum(lengths), self._resources.group_index.only_group
            self.bytes += size
            if owner is not None:
                owner.counts.received += count
                owner.counts.received_bytes += size
            else:
                self._count_by_group(batch.groups, lengths)
            self._due -= count
            if self._due <= 0:
                self._sample(next(iter(batch)))
            if self._low_water.is_due(count):
                self._watch_queue()
            return batch
        self._waiting.dirty = True
        indices, messages = self._filter(batch)
        if self._low_water.is_due(len(lengths)):
            self._watch_queue()
        if len(messages) == len(lengths) and not self._demux.sequenced:
            return batch
        chosen = FilteredBatch(batch, messages, indices, HEADER_SIZE if self._demux.sequenced else 0)
        if messages:
            return chosen
        chosen.release()
        return None

    def _count_by_group(self, groups: Iterable[Gid], lengths: Iterable[int]) -> None:
        for mgid, size in zip(groups, lengths, strict=True):
            owner = self._resources.group_index.by_mgid.get(mgid)
            if owner is not None:
                owner.counts.received += 1
                owner.counts.received_bytes += size

    def route(self, batch: Batch) -> None:
        """Keep copies of the user's messages for the calls that ask for them, and release the batch."""
        count = len(batch)
        if not count:
            return
        self.batches += 1
        self._waiting.dirty = True
        with batch:
            self._sort(batch)
        if self._low_water.is_due(count):
            self._watch_queue()

    def _sort(self, batch: Batch) -> None:
        # A call of its own, because no variable here may keep a part of a payload when the lease ends.
        for message in self._filter(batch)[1]:
            if not self.buffer.put(message):
                group = self._resources.group_index.by_mgid.get(message.group)
                self._memberships.drop(group, "queue full: not received in time")

    def _filter(self, batch: Batch) -> tuple[Sequence[int], list[Message]]:
        """The messages of the batch that are the user's, counted, and before them their places in it."""
        indices, wanted = self._demux.filter(batch)
        for message in wanted:
            group = self._resources.group_index.by_mgid.get(message.group)
            size = len(message.payload)
            self.bytes += size
            if group is not None:
                group.counts.received += 1
                group.counts.received_bytes += size
        self._due -= len(wanted)
        if self._due <= 0:
            self._sample(wanted[0])
        return indices, wanted

    def _sample(self, message: Message) -> None:
        self._due, self._every = self._every, min(2 * self._every, MAX_SAMPLE_INTERVAL)
        self._demux.check_headers(message)

    def _watch_queue(self) -> None:
        """Warn when the receive queue has run low."""
        if self._resources.closed:
            return
        low = call_provider(getattr, self._resources.qp, "counters").recv_low_water
        if self._low_water.has_fallen(low):
            self._report(ReceiveQueueLow(low, self._resources.settings.receive_depth))
