"""Group of one root: that rank sends in it, and all others receive.

Each rank that is a root has such a group, as a session of `mcast.cast`: the root's end is a `RootSender`, the
ends of all other ranks are `RootReceiver`s. `broadcast` moves the bytes of one call as one object. Its
metadata has the job's token and the number of the object in this group, so that objects of other programs, or
of an earlier call, are refused. A receiver gets the buffer of the present call, and takes one object for each
`broadcast`. Nothing here agrees with other ranks: an end that fails leaves the group, which the others
notice, and `mcast.collective.agreement` then finds the common result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Protocol

from mcast.cast import Missed, Offered, Received, open_session, receive
from mcast.cast.io.driver import DEFAULT_MEMORY
from mcast.collective.job import JobTerms
from mcast.endpoint.blocking import Endpoint, Membership
from mcast.wire.addresses import McastAddress


class IncompleteError(RuntimeError):
    """The bytes did not arrive everywhere, for a reason that another rank knows better."""


class RootGroup(Protocol):
    """One rank's end of the group."""

    def broadcast(self, view: memoryview) -> None:
        """Send these bytes at the root, fill them elsewhere. Raises what keeps them from arriving whole."""

    def close(self) -> None:
        """Leave the group; the other ends are told. Idempotent."""


class RootSender:
    """The end that sends."""

    def __init__(self, stack: ExitStack, group: Membership, terms: JobTerms, receivers: int) -> None:
        self._stack, self._terms, self._receivers = stack, terms, receivers
        self._session = stack.enter_context(
            open_session(group, rate=terms.rate, peer_timeout=terms.peer_timeout, key=terms.key)
        )
        self._number = 0

    def broadcast(self, view: memoryview) -> None:
        if not self._number:
            self._session.wait_for_receivers(self._receivers, self._terms.peer_timeout)
        report = self._session.send(view, metadata=_ticket(self._terms, self._number))
        self._number += 1
        without = [one for one in report.receivers if not one.complete]
        if without or len(report.receivers) < self._receivers:
            said = "; ".join(f"{one.name} ({one.address}) {one.reason}" for one in without[:8])
            have = len(report.receivers) - len(without)
            raise IncompleteError(
                f"{have} of {self._receivers} ranks received the bytes of this rank: {said}"
            )

    def close(self) -> None:
        self._stack.close()


class RootReceiver:
    """A rank that receives the root's objects."""

    def __init__(self, stack: ExitStack, group: Membership, terms: JobTerms, room: int) -> None:
        self._stack, self._terms = stack, terms
        self._target = memoryview(b"")
        self._number = 0
        objects = receive(
            group,
            self._target_for,
            timeout=terms.peer_timeout,
            missed=self._missed,
            memory=room,
            peer_timeout=terms.peer_timeout,
            key=terms.key,
        )
        self._objects: Iterator[Received] = stack.enter_context(closing(objects))

    def broadcast(self, view: memoryview) -> None:
        self._target = view
        found = next(self._objects, None)
        if found is None:
            raise IncompleteError(
                f"the root sent nothing within {self._terms.peer_timeout:g} s, or this rank left the group"
            )
        self._number += 1
        if found.size != len(view):
            raise IncompleteError(f"the root sent {found.size} bytes, and this rank expects {len(view)}")

    def close(self) -> None:
        self._stack.close()

    def _target_for(self, offered: Offered) -> memoryview:
        if not self._expects(offered):
            raise OSError("this group belongs to the ranks of a job, which expects another object")
        return self._target if len(self._target) else memoryview(bytearray())

    def _missed(self, missed: Missed) -> None:
        if self._expects(missed.offered):
            raise IncompleteError(f"the bytes did not arrive completely: {missed.reason}")

    def _expects(self, offered: Offered) -> bool:
        return offered.metadata == _ticket(self._terms, self._number)


def _ticket(terms: JobTerms, number: int) -> bytes:
    """Return the metadata of an object: this job's token, and the object's number in this group."""
    return terms.token + number.to_bytes(8)


def _max_outstanding(endpoint: Endpoint, group: Membership) -> int:
    """Return the bytes that may be under way to this rank: three quarters of its receive queue."""
    return min(DEFAULT_MEMORY, endpoint.stats().receive_depth * group.max_message_size * 3 // 4)


def open_root_group(
    endpoint: Endpoint, group: McastAddress, terms: JobTerms, receivers: int | None
) -> RootGroup:
    """Join the group, to send to that many receivers, or to receive if `receivers` is None.

    Raises the McastError of a join that fails; nothing is left behind then.
    """
    with ExitStack() as undo:
        stack = undo.enter_context(ExitStack())
        member = stack.enter_context(endpoint.join(group, timeout=terms.peer_timeout))
        root_group: RootGroup = (
            RootReceiver(stack, member, terms, _max_outstanding(endpoint, member))
            if receivers is None
            else RootSender(stack, member, terms, receivers)
        )
        undo.pop_all()
        return root_group
