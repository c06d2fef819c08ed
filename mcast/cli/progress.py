"""Progress of long work: a bar on a terminal, and a line every so often elsewhere."""

from __future__ import annotations

import os
import sys
from math import inf
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from mcast.cli.terminal import console, say

if TYPE_CHECKING:
    from typing import Self

    from rich.progress import Progress


_FIRST, _LONGEST = 10.0, 300.0
"""Seconds until the first plain line, and the longest time between two of them.

The time between two doubles, so that the log of a command that runs for days stays short.
"""


class PlainLines:
    """Lines about progress on stderr, every so often, where no bar can be drawn."""

    def __init__(self, disable: bool) -> None:
        self._pause = _FIRST
        self._next = inf if disable else monotonic() + self._pause

    def show(self, text: str) -> None:
        """Print the text if a line is due."""
        if monotonic() >= self._next:
            self._pause = min(2 * self._pause, _LONGEST)
            self._next = monotonic() + self._pause
            say(text, err=True)


class Watch:
    """Progress of a transfer on stderr.

    On a terminal with a cursor a line, and a bar from the start of the transfer; elsewhere PlainLines.
    """

    def __init__(self, waiting: str) -> None:
        self._bar = _bar()
        self._lines = PlainLines(disable=self._bar is not None)
        self._task = self._bar.add_task(waiting, total=None) if self._bar else None
        self._started: float | None = None

    def __enter__(self) -> Self:
        if self._bar:
            try:
                self._bar.start()
            except BaseException:  # a signal's: the cursor may be hidden already
                self._bar.stop()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Seconds since the transfer began."""
        return perf_counter() - self._started if self._started is not None else 0.0

    def wait(self, description: str) -> None:
        """Show what the command is waiting for. A transfer that has begun stays on the line."""
        if self._started is None:
            self._update(description=description)

    def show(self, description: str, completed: int, total: int | None) -> None:
        """Show how many bytes are done. The first call marks the beginning of the transfer."""
        if self._started is None:
            self._started = perf_counter()
            self._update(description=description, total=total)
        self._update(completed=completed)
        of = "" if total is None else f" of {total:,}"
        self._lines.show(f"{description}: {completed:,}{of} bytes")

    def _update(self, **what: Any) -> None:
        if self._bar:
            assert self._task is not None
            self._bar.update(self._task, **what)


def _bar() -> Progress | None:
    """A progress bar on stderr, if that is a terminal with a cursor; it disappears when the work is done."""
    is_forced = os.environ.keys() & {"FORCE_COLOR", "TTY_COMPATIBLE"}
    if not is_forced and not (sys.stderr and sys.stderr.isatty()):  # rich would say the same, but loads long
        return None
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    err = console(stderr=True)
    if not err.is_interactive:
        return None
    text = TextColumn("{task.description}", markup=False)  # "[ff0e::1]:5000" is no style
    return Progress(
        text,
        BarColumn(None),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=err,
        transient=True,
    )
