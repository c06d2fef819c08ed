"""The events of an endpoint: those that wait for `next_event`, and those of the port that cause some.

A sender can cause one `MessagesMissing` with each of its messages. So these have a queue of their own, in
which each source has a limited share: they push out no other event, and fill no log.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

from mcast.api import Closed, Phase, PortEvent, PortState, Refused
from mcast.endpoint.policy import AddressChanged, Event, MessagesMissing, PortDown, PortUp
from mcast.endpoint.recovery import Rejoiner
from mcast.endpoint.resources import PortResources
from mcast.endpoint.waiting import Operation, Waiting, call_provider
from mcast.wire.addresses import Gid

logger: logging.Logger = logging.getLogger("mcast")

MAX_EVENTS = 1024
"""Maximum number of events that wait for `next_event`.

A further one pushes out the oldest, which is counted.
"""

MAX_MISSING = 1024
"""Maximum number of `MessagesMissing` that wait beside them. A further one pushes out the oldest, too."""

MAX_MISSING_OF_SOURCE = 128
"""Maximum number of `MessagesMissing` of one GID that wait. A further one is counted, and not queued."""


class EventQueue:
    """The events that nobody has fetched yet, and how many of each kind there were."""

    def __init__(self, resources: PortResources, waiting: Waiting) -> None:
        self._resources, self._waiting = resources, waiting
        self._queued: deque[tuple[int, Event]] = deque()
        self._missing: deque[tuple[int, MessagesMissing]] = deque()
        """Each event with its number in the order of all."""
        self._missing_of: Counter[Gid] = Counter()
        self._last = 0
        self.counts: Counter[type[Event]] = Counter()
        self.dropped: int = 0

    def __len__(self) -> int:
        return len(self._queued) + len(self._missing)

    def report(self, event: Event) -> None:
        """Queue the event, count and log it."""
        self.counts[type(event)] += 1
        self._last += 1
        self._waiting.dirty = True
        if isinstance(event, MessagesMissing):
            self._report_missing(event)
            return
        if len(self._queued) >= MAX_EVENTS:
            self._queued.popleft()
            self.dropped += 1
        self._queued.append((self._last, event))
        logger.warning("%s: %s", self._resources.name, event)

    def _report_missing(self, event: MessagesMissing) -> None:
        count = self.counts[MessagesMissing]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th ..., which are few however many there are
            so_far = "" if count == 1 else f" ({count} such gaps so far)"
            logger.warning("%s: %s%s", self._resources.name, event, so_far)
        if self._missing_of[event.source] >= MAX_MISSING_OF_SOURCE:
            self.dropped += 1
            return
        if len(self._missing) >= MAX_MISSING:
            self._pop_missing()
            self.dropped += 1
        self._missing.append((self._last, event))
        self._missing_of[event.source] += 1

    def pop(self) -> Event:
        """Take the oldest event. There must be one."""
        if not self._missing or (self._queued and self._queued[0][0] < self._missing[0][0]):
            return self._queued.popleft()[1]
        return self._pop_missing()

    def _pop_missing(self) -> MessagesMissing:
        event = self._missing.popleft()[1]
        self._missing_of[event.source] -= 1
        if not self._missing_of[event.source]:
            del self._missing_of[event.source]
        return event

    def next_event(self, timeout: float | None) -> Operation[Event | None]:
        """The next event; None when `timeout` seconds have passed."""
        return self._next_event(self._waiting.deadline(timeout))

    def _next_event(self, deadline: float | None) -> Operation[Event | None]:
        yield from self._waiting.until(lambda: len(self) > 0, deadline, at_least_once=True)
        return self.pop() if self else None


class PortWatch:
    """Reads the events of the port, and reports them; `report` takes an event for the user."""

    def __init__(self, resources: PortResources, rejoiner: Rejoiner, report: Callable[[Event], None]) -> None:
        self._resources, self._rejoiner, self._report = resources, rejoiner, report
        self._link_is_up = resources.local_port.port.state is PortState.ACTIVE
        """Link state that the last `PortUp` or `PortDown` reported."""

    def poll(self) -> bool:
        """Handle the events of the port; return whether there were any."""
        if self._rejoiner.recovery is not None:  # the next queue pair starts with the state at that time
            return False
        try:
            events = call_provider(self._resources.qp.port_events)
        except Refused as refused:
            self._resources.require_open("step", Phase.EVENT)
            if not isinstance(refused.error, Closed):
                raise
            return False
        for event in events:
            self._on_event(event)
        return bool(events)

    def refresh(self) -> None:
        """Read the state of the link itself.

        The port's events went to a queue pair that was replaced meanwhile.
        """
        self._note_link(self._resources.local_port.port.state is PortState.ACTIVE)

    def _on_event(self, event: PortEvent) -> None:
        port = self._resources.port_name
        match event:
            case PortEvent.ERR | PortEvent.ACTIVE:
                self._note_link(event is PortEvent.ACTIVE)
            case PortEvent.GID_CHANGE:
                error = self._resources.check_address()
                self._report(AddressChanged(port, own=error is not None))
                if error is not None:
                    self._rejoiner.lose_all(error, reopen=True)
            case _:  # if memberships end because of it, a MULTICAST_ERROR follows
                logger.debug("%s: %s", self._resources.name, event.name)

    def _note_link(self, up: bool) -> None:
        """Report the link's state if it is not the one that was last reported."""
        if up != self._link_is_up:
            self._link_is_up = up
            self._report((PortUp if up else PortDown)(self._resources.port_name))
