"""One protection domain a device context, shared by the QPs of a backend, freed with the last of them."""

from __future__ import annotations

import threading

from mcast.backends.rdma.native import Context, Id, Native, Pd


class ProtectionDomains:
    def __init__(self, native: Native) -> None:
        self._native = native
        self._lock = threading.Lock()
        self._used: dict[Context, tuple[Pd, int]] = {}

    def acquire(self, context: Context, id: Id) -> Pd:
        with self._lock:
            pd, users = self._used.get(context) or (self._native.alloc_pd(id), 0)
            self._used[context] = pd, users + 1
            return pd

    def release(self, context: Context) -> None:
        with self._lock:
            pd, users = self._used.pop(context)
            if users > 1:
                self._used[context] = pd, users - 1
            else:
                self._native.dealloc_pd(pd)
