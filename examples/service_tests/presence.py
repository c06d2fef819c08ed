"""A small service: each host announces itself to a group, and knows which of the others are alive."""

from __future__ import annotations

from contextlib import suppress

import mcast

GROUP = "239.7.2.1"
INTERVAL = 1.0
"""Seconds from one announcement to the next."""
MAX_AGE = 4.5 * INTERVAL
"""Seconds after which a host that has not been heard is taken for dead: three announcements may be lost."""
PREFIX = b"alive "


class Presence:
    """One host's end of the service. `outages` has the seconds of each loss of its membership."""

    def __init__(self, backend: str, bind: str, name: str) -> None:
        self.name = name
        self.outages: list[float] = []
        self._heard: dict[str, float] = {}
        self._announce_at = 0.0
        self._endpoint = mcast.open_endpoint(backend, bind, loopback=mcast.LoopbackPolicy.FILTER)
        self._group = self._endpoint.join(GROUP)

    @property
    def alive(self) -> set[str]:
        """The names of the other hosts that have been heard lately."""
        now = self._endpoint.now()
        return {name for name, heard in self._heard.items() if now - heard < MAX_AGE}

    def step(self, seconds: float) -> None:
        """Announce this host if that is due; then listen for so many seconds."""
        end = self._endpoint.now() + seconds
        if self._endpoint.now() >= self._announce_at:
            self._announce_at = self._endpoint.now() + INTERVAL
            with suppress(mcast.McastError):  # while the membership is lost; the next one may get through
                self._group.send(PREFIX + self.name.encode(), timeout=0)
        while message := self._group.recv(timeout=max(0.0, end - self._endpoint.now())):
            payload = bytes(message.payload)
            if payload.startswith(PREFIX):
                self._heard[payload.removeprefix(PREFIX).decode(errors="replace")] = self._endpoint.now()
        while event := self._endpoint.next_event():
            if isinstance(event, mcast.Rejoined):
                self.outages.append(event.outage)

    def close(self) -> None:
        self._endpoint.close()
