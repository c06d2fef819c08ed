"""Waiting for a condition, and for a thread to sleep: bounded against hangs alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

BOUND = 30.0
"""Seconds; the longest that anything may take, never a delay."""


def until(condition: Callable[[], object]) -> None:
    end = monotonic() + BOUND
    while not condition():
        assert monotonic() < end
        threading.Event().wait(0.001)


def is_asleep(thread: threading.Thread) -> bool:
    """Whether it sleeps in poll(2), or whatever else the kernel lets it wait for; or has ended."""
    try:
        stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rsplit(")", 1)[1].split()[0] == "S"
