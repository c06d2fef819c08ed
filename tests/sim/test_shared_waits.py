"""A wait of a served fabric looks before it sleeps, where what it waits for has just come quickly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcast.backends.sim.shared import watch
from mcast.backends.sim.shared.watch import LOOK_NS, SHORT_NS, Found, Waits

HERE: Found = [(3, 1)]


class Loop:
    """Waits on a clock that only this moves; what is waited for comes at `due`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.due = self.looks = self.sleeps = 0
        self.waits = Waits()
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic_ns=lambda: self.now))
        monkeypatch.setattr(watch, "os", SimpleNamespace(sched_yield=self.others))

    def others(self) -> None:
        self.now += 1_000

    def look(self) -> Found:
        self.looks += 1
        return HERE if self.now >= self.due else []

    def sleep(self) -> Found:
        self.sleeps += 1
        self.now = max(self.now, self.due)
        return HERE

    def wait(self, ns: int) -> tuple[int, int]:
        """For what comes after so long: how often this has looked and slept meanwhile."""
        self.due, self.looks, self.sleeps = self.now + ns, 0, 0
        assert self.waits.until(self.look, self.sleep) == HERE
        assert self.now >= self.due
        return self.looks, self.sleeps


def test_who_is_answered_quickly_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    assert loop.wait(SHORT_NS - 1) == (0, 1)
    assert loop.wait(0) == (1, 0)
    assert loop.wait(50_000) == (51, 0)


def test_who_waits_long_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    assert loop.wait(SHORT_NS) == (0, 1)
    assert loop.wait(SHORT_NS) == (0, 1)


def test_a_look_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.wait(0)
    assert loop.wait(SHORT_NS) == (LOOK_NS // 1_000 + 1, 1)
    assert loop.wait(0) == (0, 1)
