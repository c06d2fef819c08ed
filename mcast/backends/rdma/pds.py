"""One protection domain for each device, shared by the queue pairs of a backend.

It is freed with the last of them.

A queue pair cannot use the protection domain of another device (K-DATA-23).
"""

from __future__ import annotations

import threading

from mcast.backends.rdma.error_collector import ErrorCollector
from mcast.backends.rdma.native import Context, HandleRef, Native, NativeId, Pd


class _ProtectionDomain:
    """A protection domain, once it is there, and those that use it."""

    def __init__(self, context: Context, ref: HandleRef) -> None:
        self.context: Context = context
        self.ref: HandleRef = ref
        self.owners: set[object] = set()


class ProtectionDomains:
    """The protection domains of a backend, with a lock for each call.

    No flag marks a change: an owner is noted before and forgotten after, so what was interrupted is freed
    with the owner, or by `sweep`.
    """

    def __init__(self, native: Native) -> None:
        self._native = native.guarded
        self._lock = threading.RLock()
        self._domains: list[_ProtectionDomain] = []

    def acquire(self, context: Context, id: NativeId, owner: object) -> Pd:
        """Return the protection domain of the id's device, for `owner` until its `release`."""
        with self._lock:
            domain = self._of(context)
            domain.owners.add(owner)
            if not self._native.is_made(domain.ref):
                self._native.alloc_pd(id, domain.ref)
            return self._native.pd(domain.ref)

    def _of(self, context: Context) -> _ProtectionDomain:
        for domain in self._domains:
            # One without owners could not be freed. A device that has come back may have the same context.
            if domain.context == context and domain.owners:
                return domain
        made = _ProtectionDomain(context, self._native.pd_ref())
        self._domains.append(made)
        return made

    def release(self, owner: object) -> None:
        """Let go of the owner's protection domain, if it has one."""
        with self._lock:
            for domain in self._domains:
                domain.owners.discard(owner)
            self.sweep()

    def sweep(self) -> None:
        """Free the protection domains that no queue pair uses."""
        with self._lock:
            errors = ErrorCollector()
            for domain in [one for one in self._domains if not one.owners]:
                if errors.attempt(self._native.dealloc_pd, domain.ref):
                    self._domains.remove(domain)
            errors.done()
