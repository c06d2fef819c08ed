"""Closing objects: every step is tried, whatever fails."""

from __future__ import annotations

from collections.abc import Callable

from mcast.api import McastError, Refused


class ErrorCollector:
    """Collects errors of the steps; `done` raises the first one, with the others as notes.

    Of other exceptions the first ends the closing, which goes on when it is called again.
    """

    def __init__(self) -> None:
        self._failures: list[BaseException] = []

    def attempt(self, step: Callable[..., object], *arguments: object) -> bool:
        """Do one step; return whether it succeeded."""
        try:
            step(*arguments)
        except Refused as failure:
            self._failures.append(failure.error)
            return False
        except McastError as failure:
            self._failures.append(failure)
            return False
        return True

    def done(self) -> None:
        """Raise what went wrong, as code under a guard does."""
        if not self._failures:
            return
        first, *others = self._failures
        for other in others:
            first.add_note(f"besides, while closing: {type(other).__name__}: {other}")
        raise Refused(first)
