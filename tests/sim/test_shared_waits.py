"""A wait of a served fabric looks before it sleeps, where what it waits for has just come quickly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mcast.backends.sim.shared import watch
from mcast.backends.sim.shared.watch import LONGEST_PAUSE, LOOK, PAUSE, SHORT, Waits


class Loop:
    """Waits on a clock that only this moves; what is waited for comes at `due`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.due = 1000.0
        self.others = 0.0
        """Seconds for which other processes take the processor from a look."""
        self.looked = False
        self.waits = Waits()
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(watch, "readable_soon", self.look)

    def look(self, seconds: float, *descriptors: int) -> bool:
        assert descriptors == (3, 4)
        self.looked = True
        self.now = max(self.now, min(self.due, self.now + seconds)) + self.others
        return self.now >= self.due

    def sleep(self) -> str:
        self.now = max(self.now, self.due)
        return "what came"

    def looks(self, seconds: float) -> bool:
        """Wait for what comes after so long: whether this has looked before it slept."""
        self.due, self.looked = self.now + seconds, False
        found = self.waits.until(self.sleep, 3, 4)
        assert found == "what came" or (found is None and self.looked)
        assert self.now >= self.due
        return self.looked


def test_who_is_answered_quickly_looks_for_the_next_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    assert [loop.looks(seconds) for seconds in (SHORT / 2, 0, LOOK / 2, LOOK * 1.5, 0)] == [
        False,
        True,
        True,
        True,
        True,
    ]


def test_who_waits_long_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.looks(0)
    assert [loop.looks(seconds) for seconds in (SHORT, SHORT, 0, 0)] == [True, False, False, True]


def test_where_others_take_the_processor_nobody_looks_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look gives the processor away, and gets it back a time slice later."""
    loop = Loop(monkeypatch)
    loop.looks(0)
    loop.others = SHORT
    assert loop.looks(LOOK / 2)
    loop.others = 0.0
    assert not any(loop.looks(LOOK / 2) for _ in range(round(PAUSE / LOOK)))
    loop.now += PAUSE
    assert [loop.looks(LOOK / 2) for _ in range(2)] == [True, True]


def test_where_others_take_the_processor_each_time_the_pause_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.looks(0)
    loop.others = SHORT
    pauses: list[float] = []
    for _ in range(20):
        begun = loop.now
        while not loop.looks(LOOK / 2):
            pass
        pauses.append(round(loop.now - begun, 6))
    assert pauses == sorted(pauses)
    assert pauses[1] == pytest.approx(PAUSE, abs=2 * SHORT)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE, abs=2 * SHORT)
    loop.others = 0.0
    loop.now += 3 * LONGEST_PAUSE
    loop.looks(0)
    loop.others = SHORT
    assert loop.looks(LOOK / 2)
    loop.now += PAUSE
    loop.looks(0)
    assert loop.looks(LOOK / 2)
