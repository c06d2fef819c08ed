"""One protection domain for each device, shared by the queue pairs of a backend, and freed with the last of
them.

A queue pair cannot use the protection domain of another device (K-DATA-23).
"""

from __future__ import annotations

from mcast.backends.rdma.ending import Ending
from mcast.backends.rdma.native import Context, Native, NativeId, Pd
from mcast.interrupts import Lock


class ProtectionDomains:
    def __init__(self, native: Native) -> None:
        self._native = native
        self._lock = Lock()
        self._used: dict[Context, tuple[Pd, int]] = {}
        self._left: list[Pd] = []
        """Those that could not be freed."""

    def acquire(self, context: Context, id: NativeId) -> Pd:
        with self._lock:
            pd, users = self._used.get(context) or (self._native.alloc_pd(id), 0)
            self._used[context] = pd, users + 1
            return pd

    def release(self, context: Context) -> None:
        with self._lock:
            pd, users = self._used.pop(context)
            if users > 1:
                self._used[context] = pd, users - 1
                return
            self._left.append(pd)
            self.sweep()

    def sweep(self) -> None:
        """Free the protection domains that no queue pair uses."""
        with self._lock:
            ending = Ending()
            self._left = [pd for pd in self._left if not ending.attempt(self._native.dealloc_pd, pd)]
            ending.done()
