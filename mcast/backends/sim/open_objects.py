"""The objects that a program has opened on a fabric and not closed, with where it opened them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple
from weakref import ref

from mcast.api import Batch
from mcast.backends.sim.backend import SimBackend, SimCmId, SimEventChannel, SimQueuePair
from mcast.backends.sim.fabric import Fabric

_OURS = frozenset({"mcast", "asyncio", "contextlib", "threading", "concurrent"})
"""Packages that open things on behalf of the program."""

OpenedAt = tuple[tuple[str, int, str], ...]
"""File, line and function of frames of the program, the innermost first."""


class Leftover(NamedTuple):
    """Objects that one line of the program opened and did not close, in words."""

    place: OpenedAt
    what: str


class OpenObjects:
    """Notes all that is opened on the fabric from now on, and where: `depth` frames of the program."""

    def __init__(self, fabric: Fabric, depth: int = 1) -> None:
        self._depth = depth
        self._opened: dict[SimBackend | SimEventChannel | SimCmId | SimQueuePair, OpenedAt] = {}
        # By weak reference, because a batch that the program drops is released, and must not stay alive here.
        # No Python code runs then, as it does in a WeakKeyDictionary: an exception there would be dropped.
        self._batches: dict[ref[Batch], tuple[SimQueuePair, OpenedAt]] = {}
        fabric.watch = self._note

    def _note(self, thing: object, qp: object = None) -> None:
        place = opened_at(self._depth)
        if isinstance(thing, Batch) and isinstance(qp, SimQueuePair):
            self._batches[ref(thing, self._batches.pop)] = (qp, place)
        elif isinstance(thing, SimBackend | SimEventChannel | SimCmId | SimQueuePair):
            self._opened[thing] = place

    def leases(self) -> tuple[Leftover, ...]:
        """Batches that are held and not released."""
        return _by_place(
            (place, f"a batch of {_count(len(batch), 'message')} of QP {qp.qp_num}")
            for known, (qp, place) in list(self._batches.items())
            if (batch := known()) is not None and len(batch) and not batch.released
        )

    def leftovers(self) -> tuple[Leftover, ...]:
        """Everything that is not closed."""
        return _by_place((place, _words(thing)) for thing, place in self._opened.items() if not thing.closed)

    def close(self) -> None:
        """Close every backend and all its objects; calls that wait on them end."""
        for thing in list(self._opened):
            if isinstance(thing, SimBackend):
                thing.close()


def opened_at(depth: int) -> OpenedAt:
    """The innermost `depth` frames of the program that is calling."""
    return tuple(_frames(sys._getframe(1), depth))


def _words(thing: SimBackend | SimEventChannel | SimCmId | SimQueuePair) -> str:
    match thing:
        case SimBackend():
            return f"backend {thing.name}"
        case SimEventChannel():
            unread = thing.unread
            return f"event channel ({_count(unread, 'unread event')})" if unread else "event channel"
        case SimCmId():
            groups = ", ".join(map(str, thing.core.groups))
            return f"id {thing.core.number} on {thing.device}" + (f" (member of {groups})" if groups else "")
        case SimQueuePair():
            groups = ", ".join(map(str, thing.attachments))
            where = f"QP {thing.qp_num} on {thing.core.port.name}"
            return where + (f" (attached to {groups})" if groups else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _by_place(found: Iterator[tuple[OpenedAt, str]]) -> tuple[Leftover, ...]:
    places: dict[OpenedAt, list[str]] = {}
    for place, words in found:
        places.setdefault(place, []).append(words)
    return tuple(Leftover(place, ", ".join(words)) for place, words in places.items())


def _frames(frame: FrameType | None, depth: int) -> Iterator[tuple[str, int, str]]:
    """The program's innermost frames, without those of the files in `_OURS`."""
    for found, line in traceback.walk_stack(frame):
        if not depth:
            return
        if str(found.f_globals.get("__name__")).partition(".")[0] not in _OURS:
            depth -= 1
            yield found.f_code.co_filename, line, found.f_code.co_qualname
