"""What a sender does with slow receivers, as a value: when an object is done with, and whether it is kept."""

from __future__ import annotations

from typing import NamedTuple

from mcast.contract.seconds import seconds_in

_QUIET = 2


class Standing(NamedTuple):
    """How an object stands.

    whole    how many receivers have the object
    others   how many take part and do not have it yet
    seconds  since the object was begun
    quiet    how many times in a row nobody has answered the question what is missing; 0 until all is sent
    """

    whole: int
    others: int
    seconds: float
    quiet: int


class Strategy(NamedTuple):
    """What is waited for, of the receivers that are neither silent nor stand still.

    receivers  so many have the object; None: all that take part
    seconds    the object takes at most so long; None: as long as receivers make progress
    effort     True: the sender waits only for those that ask
    """

    receivers: int | None = None
    seconds: float | None = None
    effort: bool = False

    @classmethod
    def of(cls, text: str) -> Strategy:
        """What `all`, `quorum:K`, `deadline:SECONDS` (or 500ms) or `best-effort` says.

        Raises ValueError for others.
        """
        kind, _, figure = text.partition(":")
        try:
            if kind == "quorum":
                return quorum(int(figure))
            if kind == "deadline":
                timed = seconds_in(figure)
                return deadline(float(figure) if timed is None else timed)
            return {"all": all_of_them, "best-effort": best_effort}[text]()
        except (KeyError, ValueError):
            choices = "all, quorum:K, deadline:SECONDS and best-effort"
            raise ValueError(f"{text!r} is no strategy: there are {choices}") from None

    def done(self, standing: Standing) -> bool:
        """Whether the sender may turn to the next object."""
        if not standing.others or (self.receivers is not None and standing.whole >= self.receivers):
            return True
        if self.seconds is not None and standing.seconds >= self.seconds:
            return True
        return self.effort and standing.quiet >= _QUIET

    def kept(self, standing: Standing, lost: int) -> bool:
        """Whether the promise was kept; `lost` receivers were given up, or gave up."""
        if self.receivers is not None:
            return standing.whole >= self.receivers
        return self.effort or self.seconds is not None or not (standing.others or lost)


def all_of_them() -> Strategy:
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
        raise ValueError(f"a deadline of {seconds} s: at least 0")
    return Strategy(seconds=seconds)


def best_effort() -> Strategy:
    """The object is done with when nobody asks for more."""
    return Strategy(effort=True)
