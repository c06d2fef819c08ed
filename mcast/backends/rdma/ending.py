"""Closing objects: every step is tried, whatever fails."""

from __future__ import annotations

from collections.abc import Callable


class Ending:
    """Collects errors of the steps; `done` raises the first one, with the others as notes."""

    def __init__(self) -> None:
        self._failures: list[BaseException] = []

    def attempt(self, step: Callable[..., object], *arguments: object) -> bool:
        """Do one step; return whether it succeeded."""
        try:
            step(*arguments)
        except BaseException as failure:  # Ctrl-C too: it comes after the rest
            self._failures.append(failure)
            return False
        return True

    def done(self) -> None:
        """Raise what went wrong; an interrupt, such as Ctrl-C, goes before other errors."""
        if not self._failures:
            return
        first, *others = sorted(self._failures, key=lambda one: isinstance(one, Exception))
        for other in others:
            first.add_note(f"besides, while closing: {type(other).__name__}: {other}")
        raise first
