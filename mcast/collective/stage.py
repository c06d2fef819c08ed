"""The group in which one rank sends: the rank speaks in it, and the others hear."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Protocol

from mcast.cast import Missed, Offered, Received, open_session, receive
from mcast.cast.objects.calls import MEMORY
from mcast.collective.place import JobTerms
from mcast.endpoint.blocking import Endpoint, Membership
from mcast.wire.addresses import McastAddress


class NotWhole(RuntimeError):
    """The bytes did not arrive everywhere, for a reason that another rank knows better."""


class Stage(Protocol):
    """One end of a stage."""

    def carry(self, view: memoryview) -> None:
        """Send these bytes, or fill them. Raises what keeps them from arriving whole."""

    def close(self) -> None:
        """Leave the group; the other ends are told. Idempotent."""


class Speaking:
    """The end that sends."""

    def __init__(self, stack: ExitStack, group: Membership, terms: JobTerms, listeners: int) -> None:
        self._stack, self._terms, self._listeners = stack, terms, listeners
        self._session = stack.enter_context(
            open_session(group, rate=terms.rate, silence=terms.patience, key=terms.key)
        )
        self._number = 0

    def carry(self, view: memoryview) -> None:
        if not self._number:
            self._session.gather(self._listeners, self._terms.patience)
        report = self._session.send(view, metadata=_ticket(self._terms, self._number))
        self._number += 1
        without = [one for one in report.receivers if not one.whole]
        if without or len(report.receivers) < self._listeners:
            said = "; ".join(f"{one.name} ({one.address}) {one.why}" for one in without[:8])
            have = len(report.receivers) - len(without)
            raise NotWhole(f"{have} of {self._listeners} ranks have the bytes of this one: {said}")

    def close(self) -> None:
        self._stack.close()


class Hearing:
    """An end that receives."""

    def __init__(self, stack: ExitStack, group: Membership, terms: JobTerms, room: int) -> None:
        self._stack, self._terms = stack, terms
        self._target = memoryview(b"")
        self._number = 0
        objects = receive(
            group,
            self._place,
            timeout=terms.patience,
            missed=self._missed,
            memory=room,
            silence=terms.patience,
            key=terms.key,
        )
        self._objects: Iterator[Received] = stack.enter_context(closing(objects))

    def carry(self, view: memoryview) -> None:
        self._target = view
        found = next(self._objects, None)
        if found is None:
            raise NotWhole(f"nothing came within {self._terms.patience:g} s, or this rank has left the group")
        self._number += 1
        if found.size != len(view):
            raise NotWhole(f"{found.size} bytes came from the root, not {len(view)}")

    def close(self) -> None:
        self._stack.close()

    def _place(self, offered: Offered) -> memoryview:
        if not self._expects(offered):
            raise OSError("this group belongs to an MPI job, which expects another object")
        return self._target if len(self._target) else memoryview(bytearray())

    def _missed(self, missed: Missed) -> None:
        if self._expects(missed.offered):
            raise NotWhole(f"the bytes did not arrive whole: {missed.why}")

    def _expects(self, offered: Offered) -> bool:
        return offered.metadata == _ticket(self._terms, self._number)


def _ticket(terms: JobTerms, number: int) -> bytes:
    """What goes with an object: it says that the object is this job's, and which one of this stage."""
    return terms.token + number.to_bytes(8)


def _room(endpoint: Endpoint, group: Membership) -> int:
    """How many bytes may be under way to this rank: three quarters of what its receive queue holds."""
    return min(MEMORY, endpoint.stats().receive_depth * group.max_message_size * 3 // 4)


def open_stage(endpoint: Endpoint, group: McastAddress, terms: JobTerms, listeners: int | None) -> Stage:
    """Join the group, to speak to so many listeners, or to hear where `listeners` is None.

    Raises the McastError of a join that fails; nothing is left behind then.
    """
    with ExitStack() as undo:
        stack = undo.enter_context(ExitStack())
        member = stack.enter_context(endpoint.join(group, timeout=terms.patience))
        stage: Stage = (
            Hearing(stack, member, terms, _room(endpoint, member))
            if listeners is None
            else Speaking(stack, member, terms, listeners)
        )
        undo.pop_all()
        return stage
