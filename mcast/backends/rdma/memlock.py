"""Locked memory: the limit for a queue pair's buffers and registered memory."""

from __future__ import annotations

import errno as E
import resource
from pathlib import Path

from mcast.api import Cause, McastError, Refused

FIX = "raise the limit: ulimit -l unlimited (docker: --ulimit memlock=-1)"

_CAP_IPC_LOCK = 14
_STATUS = Path("/proc/self/status")


def limit() -> int | None:
    """Return the number of bytes this process may lock; None for no limit (root, CAP_IPC_LOCK)."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = soft == resource.RLIM_INFINITY or int(_status("CapEff"), 16) >> _CAP_IPC_LOCK & 1
    return None if unlimited else soft


def pinned() -> int:
    """Bytes that are locked for devices now."""
    return int(_status("VmPin").split()[0]) * 1024


def _status(name: str) -> str:
    lines = (line.partition(":") for line in _STATUS.read_text(errors="replace").splitlines())
    return next((value.strip() for key, _, value in lines if key == name), "0")


def with_memlock_cause(refused: Refused, needed: int) -> Refused:
    """Return the refusal of a call that was to lock `needed` bytes.

    For ENOMEM it states whether the limit on locked memory was the reason.
    """
    error = refused.error
    if isinstance(error, McastError) and error.errno == E.ENOMEM:
        error.found = shortage(needed, pinned(), limit())
    return refused


def shortage(needed: int, locked: int, most: int | None) -> tuple[Cause, ...]:
    """The cause, if `needed` bytes more than the `locked` ones are too many."""
    if most is None or locked + needed <= most:
        return ()
    why = f"{needed} bytes must be locked in addition to {locked}, but the limit is {most}"
    return (Cause(why, "ulimit -l", f"{FIX}, or ask for fewer, smaller receives"),)
