"""What a sender does with slow receivers, as a value: when an object is done with, and whether it is kept."""

from __future__ import annotations

from typing import NamedTuple

from mcast.arguments.amounts import parse_int
from mcast.arguments.seconds import parse_seconds

_IDLE_FLUSHES = 2


class TransferState(NamedTuple):
    """How an object stands.

    whole    how many receivers have the object
    others   how many take part and do not have it yet
    seconds  since the object was begun
    quiet    how many times in a row nobody has answered the question what is missing; 0 until all is sent
    cycles   how often a carousel has sent all of it
    """

    complete: int
    pending: int
    seconds: float
    idle_flushes: int
    cycles: int = 0


class Strategy(NamedTuple):
    """What is waited for, of the receivers that are neither silent nor stand still.

    receivers  so many have the object; None: all that take part
    seconds    the object takes at most so long; None: as long as receivers make progress
    effort     True: the sender waits only for those that ask
    carousel   True: the sender waits for nobody, and sends the object round and round
    cycles     a carousel goes round at most so often; None: until it is ended
    """

    receivers: int | None = None
    seconds: float | None = None
    effort: bool = False
    carousel: bool = False
    cycles: int | None = None

    @classmethod
    def of(cls, text: str) -> Strategy:
        """What `all`, `quorum:K`, `deadline:SECONDS` (or 500ms), `best-effort` or `carousel` says.

        A carousel may have a bound: `carousel:3` goes round three times, `carousel:10min` for ten minutes.

        Raises ValueError for others.
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
        choices = "all, quorum:K, deadline:SECONDS, best-effort and carousel[:ROUNDS or :10min]"
        raise ValueError(f"{text!r} is no strategy: there are {choices}")

    def is_done(self, state: TransferState) -> bool:
        """Whether the sender may turn to the next object."""
        if self.cycles is not None and state.cycles >= self.cycles:
            return True
        waits = state.pending or self.carousel
        if not waits or (self.receivers is not None and state.complete >= self.receivers):
            return True
        if self.seconds is not None and state.seconds >= self.seconds:
            return True
        return self.effort and state.idle_flushes >= _IDLE_FLUSHES

    def is_met(self, state: TransferState, lost: int) -> bool:
        """Whether the promise was kept; `lost` receivers were given up, or gave up."""
        if self.carousel:
            return state.cycles > 0
        if self.receivers is not None:
            return state.complete >= self.receivers
        return self.effort or self.seconds is not None or not (state.pending or lost)


def all_receivers() -> Strategy:
    """Every receiver gets the object; one that dies or stands still is given up by name."""
    return Strategy()


def quorum(receivers: int) -> Strategy:
    """The object is done with when that many receivers have it. Raises ValueError below 1."""
    if receivers < 1:
        raise ValueError(f"a quorum of {receivers}: at least 1")
    return Strategy(receivers=receivers)


def deadline(seconds: float) -> Strategy:
    """The object is done with after that many seconds, or when all have it. Raises ValueError below 0."""
    if not seconds >= 0:
        raise ValueError(f"a deadline of {seconds:g} s: at least 0")
    return Strategy(seconds=seconds)


def best_effort() -> Strategy:
    """The object is done with when nobody asks for more."""
    return Strategy(effort=True)


def carousel(cycles: int | None = None, seconds: float | None = None) -> Strategy:
    """The object goes round and round, and nobody answers: receivers may come at any time, and may be mute.

    cycles   so often at most; None: until the call is cancelled, or Ctrl-C ends it
    seconds  for so long at most

    The promise is kept when all has been sent once. Raises ValueError below 1 round, and without a time.
    """
    if cycles is not None and cycles < 1:
        raise ValueError(f"a carousel of {cycles} rounds: at least 1")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"a carousel for {seconds:g} s: more than 0")
    return Strategy(carousel=True, cycles=cycles, seconds=seconds)


_WITHOUT_FIGURE = {"all": all_receivers, "best-effort": best_effort, "carousel": carousel}
"""What a strategy is called that has no figure."""
