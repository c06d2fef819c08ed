"""Waiting for a condition, for threads and for a thread to sleep: bounded against hangs alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from mcast.api import McastError

BOUND = 300.0
"""Seconds; the longest that anything may take, never a delay."""


def until(condition: Callable[[], object]) -> None:
    end = monotonic() + BOUND
    while not condition():
        assert monotonic() < end
        threading.Event().wait(0.001)


def descriptors() -> set[tuple[str, str]]:
    """Return the number and the file of each descriptor of this process.

    A test for leaks asks by `<=` whether the set has grown, not by `==` whether it is the same: what an
    earlier test left to a thread may close meanwhile.
    """
    gc.collect()
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed by now, as the listing's own
            found.add((one.name, str(one.readlink())))
    return found


def is_asleep(thread: threading.Thread) -> bool:
    """Return True if it sleeps in poll(2), or whatever else the kernel lets it wait for; or has ended."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rsplit(")", 1)[1].split()[0] == "S"


class Running:
    """Calls in threads of their own, and what became of them."""

    def __init__(self, *calls: Callable[[], Any]) -> None:
        self.found: list[Any] = [None] * len(calls)
        self.threads = [
            threading.Thread(target=self._run, args=(place, call), daemon=True)
            for place, call in enumerate(calls)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, place: int, call: Callable[[], Any]) -> None:
        try:
            self.found[place] = call()
        except McastError as error:
            self.found[place] = error

    def results(self) -> list[Any]:
        """Of all, once they are done."""
        end = monotonic() + BOUND
        for thread in self.threads:
            thread.join(max(0.0, end - monotonic()))
        assert not any(thread.is_alive() for thread in self.threads)
        return self.found
