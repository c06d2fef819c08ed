"""The core of an endpoint: its parts, and the events that concern several of them.

A call that takes time is an `Operation`: a generator that yields a `Step`, what to post and until when to
wait; it is resumed when something may have happened (with a batch, if messages were received), and looks
again. `blocking.py` carries operations out by blocking, `awaiting.py` by awaiting. Both hold the endpoint's
guard while they resume one, and neither holds it while it waits or posts. Nothing here waits for the
network, but for the SA on InfiniBand (0.25 s at most) and for the server of a served fabric.
"""

from __future__ import annotations

import errno as E
import logging
from collections import Counter
from collections.abc import Callable
from random import Random

from mcast.api import Backend, CmEvent, CmEventType, McastError, Phase, QpError, Refused, mcast_error
from mcast.endpoint.events import EventQueue, PortWatch
from mcast.endpoint.membership import SEQUENCE_COUNTS, Change, EndpointGroup
from mcast.endpoint.memberships import Memberships
from mcast.endpoint.policy import GaveUp, LoopbackPolicy, Lost, Rejoined
from mcast.endpoint.ports import LocalPort
from mcast.endpoint.probes import Prober, Probing
from mcast.endpoint.receive_buffer import ReceiveBuffer
from mcast.endpoint.receiving import Demux, Receiving
from mcast.endpoint.recovery import Rejoiner
from mcast.endpoint.resources import PortResources
from mcast.endpoint.sending import Sending
from mcast.endpoint.settings import Settings, check_device_limits
from mcast.endpoint.stats import EndpointStats
from mcast.endpoint.waiting import Waiting, call_provider

logger: logging.Logger = logging.getLogger("mcast")


class EndpointCore:
    """The parts of an endpoint, each with a subject of its own, and the events that concern several of them.

    `now` gives monotonic seconds on the clock that the driver waits by. `find_port` finds the port again
    after its device was lost, or raises ValueError while it is not there.
    """

    def __init__(
        self,
        backend: Backend,
        local_port: LocalPort,
        find_port: Callable[[], LocalPort],
        settings: Settings,
        now: Callable[[], float],
    ) -> None:
        check_device_limits(settings, local_port)
        random = Random(backend.new_seed() if settings.seed is None else settings.seed)
        self.waiting: Waiting = Waiting(now, lambda batch: self.receiving.route(batch))
        waiting = self.waiting
        self.resources: PortResources = PortResources(backend, local_port, find_port, settings)
        resources = self.resources
        self.events: EventQueue = EventQueue(resources, waiting)
        report = self.events.report
        self._channel, group_index = resources.channel, resources.group_index
        self.rejoiner: Rejoiner = Rejoiner(resources, random, now, report)
        rejoiner = self.rejoiner
        buffer = ReceiveBuffer(group_index.groups, group_index.by_mgid, settings.receive_depth)
        self.memberships: Memberships = Memberships(resources, rejoiner, waiting, buffer, random)
        members = self.memberships
        prober = Prober(resources, rejoiner, members.drop)
        filtering = settings.loopback is not LoopbackPolicy.ON
        demux = Demux(group_index.by_mgid, prober, filtering, settings.sequence, members.drop, report)
        self.receiving: Receiving = Receiving(
            resources, rejoiner, members, waiting, buffer, demux, report, self.on_qp_error
        )
        self.sending: Sending = Sending(resources, members, waiting, self.on_qp_error)
        self.probing: Probing = Probing(resources, members, waiting, prober, demux)
        self.port: PortWatch = PortWatch(resources, rejoiner, report)

    def answer(self, keep: bool, leaves: bool = False) -> None:
        """Answer the probes that wait, where the program does not receive.

        Errors are raised by the next call.
        """
        if not self.resources.is_closed:
            try:
                self.receiving.answer(keep, leaves)
            except Refused as refused:
                logger.debug("%s: probes were not answered: %s", self.resources.name, refused.error)

    def is_idle(self) -> bool:
        """Return True if `step` has nothing to do. May be called without the driver's lock."""
        channel = self._channel
        return not (self.resources.closed or self.rejoiner.busy or channel.closed or channel.pending)

    def step(self) -> bool:
        """Handle the events that have arrived, and do the steps that are due.

        Returns True if there was anything.
        """
        self.resources.require_open("step", Phase.EVENT)
        happened = self.port.poll()  # the port's event explains what follows, so it comes first
        while call_provider(getattr, self._channel, "pending"):
            event = call_provider(self._channel.get_event, 0)
            if event is None:
                break
            happened = True
            self.on_event(event)
        if self.rejoiner.busy and self.rejoiner.due() <= self.waiting.now():
            happened = True
            before = self.resources.id
            self.rejoiner.recover()
            if self.resources.id is not before:
                self.port.refresh()
        return happened

    def on_event(self, event: CmEvent) -> None:
        """Handle an event that was read."""
        if event.id is not self.resources.id:  # the id of `wake`, which has served its purpose
            if event.id is not None:
                self.resources.destroy(event.id)
            return
        group = event.context
        match event.type:
            case CmEventType.DEVICE_REMOVAL | CmEventType.ADDR_CHANGE:
                self.rejoiner.lose_all(_error_of(event), reopen=True)
            case _ if self.rejoiner.reopen:
                why = "its membership ends with the id"
                logger.debug("%s: event %s ignored: %s", self.resources.name, event.type.name, why)
            case CmEventType.MULTICAST_JOIN if isinstance(group, EndpointGroup):
                assert event.ud is not None
                self.rejoiner.on_joined(group, event.ud.destination)
            case CmEventType.MULTICAST_ERROR if isinstance(group, EndpointGroup):
                self.rejoiner.transition(group, Change.REFUSED, _error_of(event))
            case _:
                logger.debug("%s: event %s ignored", self.resources.name, event.type.name)

    def on_qp_error(self, error: QpError) -> None:
        """Handle a queue pair that went into ERR.

        With a policy it will be reset, without one the caller gets the error.
        """
        self.rejoiner.on_qp_error(error)
        self.waiting.dirty = True

    def recover_lost_event(self) -> None:
        """Start again with a new id, because an event may have been lost when a call was interrupted.

        Only while something is restored, a call waits by taking events.
        """
        detail = "an event was lost when a call was interrupted"
        error = mcast_error(E.ENETRESET, "get_event", Phase.EVENT, None, detail)
        self.rejoiner.lose_all(error, reopen=True)

    def snapshot(self) -> EndpointStats:
        """Everything that was counted so far."""
        resources, counters = self.resources, self.resources.counters()
        groups = tuple(group.snapshot() for group in resources.group_index.groups.values())
        dropped: Counter[str] = Counter(self.memberships.dropped)
        for group in groups:
            dropped.update(group.dropped)
        silent = {
            "no receive was free": counters.dropped_no_receive,
            "larger than a receive": counters.dropped_too_long,
            "wrong Q_Key": counters.dropped_qkey,
            "larger than the MTU": counters.dropped_mtu,
            "dropped by a reset": counters.dropped_reset,
            "invalid completion": counters.dropped_invalid,
        }
        left, numbered = self.memberships.left, bool(resources.settings.sequence)
        sums = {
            field: left[field] + sum(getattr(group, field) for group in groups)
            for field in ("sent_bytes", "sent_batches", "joins", *(SEQUENCE_COUNTS if numbered else ()))
        } | ({} if numbered else dict.fromkeys(SEQUENCE_COUNTS))
        return EndpointStats(
            backend=resources.backend.name,
            device=resources.local_port.device.name,
            port_num=resources.local_port.port.port_num,
            qp_num=None if resources.qp.closed else resources.qp.qp_num,
            sent=counters.sent,
            received=counters.received,
            received_bytes=self.receiving.bytes,
            received_batches=self.receiving.batches,
            receive_depth=resources.settings.receive_depth,
            receive_free=counters.recv_free,
            receive_low_water=counters.recv_low_water,
            receive_empty=counters.recv_empty,
            dropped=dropped | {reason: count for reason, count in silent.items() if count is not None},
            probes=self.probing.prober.posted,
            lost=self.events.counts[Lost],
            rejoins=self.events.counts[Rejoined],
            gave_up=self.events.counts[GaveUp],
            events_dropped=self.events.dropped,
            groups=groups,
            port_counters=resources.port_counters(),
            **sums,
        )


def _error_of(event: CmEvent) -> McastError:
    """The error that an event reports."""
    try:
        event.check()
    except McastError as error:
        return error
    return mcast_error(E.ENETRESET, "event", Phase.EVENT, {"event": event.type.name})
