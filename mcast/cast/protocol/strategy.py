"""Strategies of a sender: when an object ends, and whether its promise was kept, as plain values."""

from __future__ import annotations

from typing import NamedTuple

from mcast.arguments.amounts import parse_int
from mcast.arguments.seconds import parse_seconds

_IDLE_FLUSHES = 2


class TransferState(NamedTuple):
    """Progress of an object.

    complete      number of receivers that have the object
    pending       number of receivers that take part and do not have it yet
    seconds       since the object began
    idle_flushes  number of FLUSHes in a row without a NACK; 0 until all is sent
    cycles        complete cycles of a carousel
    """

    complete: int
    pending: int
    seconds: float
    idle_flushes: int
    cycles: int = 0


class Strategy(NamedTuple):
    """End condition of an object, among receivers that answer and make progress.

    receivers  the object ends when this many receivers have it; None for all that take part
    seconds    maximum duration; None for as long as receivers make progress
    effort     True if the object ends when nobody sends NACKs any more
    carousel   True if the sender repeats the object in cycles and waits for no receiver
    cycles     maximum cycles of a carousel; None to repeat it until it is ended
    """

    receivers: int | None = None
    seconds: float | None = None
    effort: bool = False
    carousel: bool = False
    cycles: int | None = None

    @classmethod
    def of(cls, text: str) -> Strategy:
        """Parse `all`, `quorum:K`, `deadline:SECONDS` (or 500ms), `best-effort` or `carousel`.

        `carousel:3` ends after three cycles, `carousel:10min` after ten minutes. Raises ValueError otherwise.
        """
        kind, _, figure = text.partition(":")
        whole, timed = parse_int(figure), parse_seconds(figure, unit=kind != "deadline")
        if text in _WITHOUT_FIGURE:
            return _WITHOUT_FIGURE[text]()
        if kind == "quorum" and whole is not None:
            return quorum(whole)
        if kind == "deadline" and timed is not None:
            return deadline(timed)
        if kind == "carousel" and timed is not None:
            return carousel(seconds=timed)
        if kind == "carousel" and whole is not None:
            return carousel(whole)
        choices = "all, quorum:K, deadline:SECONDS, best-effort or carousel[:CYCLES or :10min]"
        raise ValueError(f"{text!r} is not a strategy: use {choices}")

    def is_done(self, state: TransferState) -> bool:
        """Return True if the object may end."""
        if self.cycles is not None and state.cycles >= self.cycles:
            return True
        waits = state.pending or self.carousel
        if not waits or (self.receivers is not None and state.complete >= self.receivers):
            return True
        if self.seconds is not None and state.seconds >= self.seconds:
            return True
        return self.effort and state.idle_flushes >= _IDLE_FLUSHES

    def is_met(self, state: TransferState, lost: int) -> bool:
        """Return True if the promise was kept.

        lost  number of receivers that were given up, or gave up
        """
        if self.carousel:
            return state.cycles > 0
        if self.receivers is not None:
            return state.complete >= self.receivers
        return self.effort or self.seconds is not None or not (state.pending or lost)


def all_receivers() -> Strategy:
    """End the object when all receivers have it; report those that die or make no progress by name."""
    return Strategy()


def quorum(receivers: int) -> Strategy:
    """End the object when that many receivers have it. Raises ValueError below 1."""
    if receivers < 1:
        raise ValueError(f"a quorum of {receivers} receivers: at least 1")
    return Strategy(receivers=receivers)


def deadline(seconds: float) -> Strategy:
    """End the object after that many seconds, or when all have it. Raises ValueError below 0."""
    if not seconds >= 0:
        raise ValueError(f"a deadline of {seconds:g} s: at least 0")
    return Strategy(seconds=seconds)


def best_effort() -> Strategy:
    """End the object when no receiver requests more repairs."""
    return Strategy(effort=True)


def carousel(cycles: int | None = None, seconds: float | None = None) -> Strategy:
    """Repeat the object in cycles, for receivers that join at any time and need not be able to send.

    cycles   maximum cycles; None to repeat until the call is cancelled, or Ctrl-C ends it
    seconds  maximum duration; None for no limit

    The promise is kept when all has been sent once. Raises ValueError for less than 1 cycle or for no time.
    """
    if cycles is not None and cycles < 1:
        raise ValueError(f"a carousel of {cycles} cycles: at least 1")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"a carousel for {seconds:g} s: more than 0")
    return Strategy(carousel=True, cycles=cycles, seconds=seconds)


_WITHOUT_FIGURE = {"all": all_receivers, "best-effort": best_effort, "carousel": carousel}
"""Name of a strategy without a figure -> its constructor."""
