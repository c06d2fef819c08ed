"""The events of the port: its link, and its addresses."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mcast.api import Closed, Phase, PortEvent, PortState
from mcast.endpoint.policy import AddressChanged, Event, PortDown, PortUp
from mcast.endpoint.recovery import Restorer
from mcast.endpoint.station import Station

logger: logging.Logger = logging.getLogger("mcast")


class PortWatch:
    """Reads the events of the port, and reports them; `tell` takes an event for the user."""

    def __init__(self, station: Station, restorer: Restorer, tell: Callable[[Event], None]) -> None:
        self._station, self._restorer, self._tell = station, restorer, tell
        self._link_is_up = station.place.port.state is PortState.ACTIVE
        """As `PortUp` and `PortDown` have told."""

    def look(self) -> bool:
        """Handle the events of the port; return whether there were any."""
        if self._restorer.recovery is not None:  # the next queue pair starts with the state at that time
            return False
        try:
            events = self._station.qp.port_events()
        except Closed:
            self._station.require_open("step", Phase.EVENT)
            return False
        for event in events:
            self._on_event(event)
        return bool(events)

    def look_anew(self) -> None:
        """Look at the link itself, because the port's events went to a queue pair that was replaced
        meanwhile."""
        self._note_link(self._station.place.port.state is PortState.ACTIVE)

    def _on_event(self, event: PortEvent) -> None:
        port = self._station.port_name
        match event:
            case PortEvent.ERR | PortEvent.ACTIVE:
                self._note_link(event is PortEvent.ACTIVE)
            case PortEvent.GID_CHANGE:
                error = self._station.look_at_address()
                self._tell(AddressChanged(port, own=error is not None))
                if error is not None:
                    self._restorer.lose_all(error, reopen=True)
            case _:  # if memberships end because of it, a MULTICAST_ERROR follows
                logger.debug("%s: %s", self._station.name, event.name)

    def _note_link(self, up: bool) -> None:
        """Report the link's state if it is not the one that was last reported."""
        if up != self._link_is_up:
            self._link_is_up = up
            self._tell((PortUp if up else PortDown)(self._station.port_name))
