"""Which queue pairs get a copy of the messages of each group, as far as it was worked out."""

from __future__ import annotations

from collections.abc import Sequence

from mcast.backends.model.qp import Qp
from mcast.wire.addresses import Gid

Route = int | Gid
"""Key of a group in the switches: its MLID on InfiniBand, the group itself on RoCE."""


class Receivers:
    """Remembers the receivers of groups. Code that changes them must say so here.

    known    route -> (index of the sending port, group) -> the queue pairs that get a copy
    version  how often something has changed; whatever was worked out at the same version is still true
    """

    __slots__ = ("known", "version")

    def __init__(self) -> None:
        self.known: dict[Route, dict[tuple[int, Gid], Sequence[Qp]]] = {}
        self.version: int = 0

    def forget(self, route: Route) -> None:
        """Forget the receivers of one group, because something has changed there."""
        self.known.pop(route, None)
        self.version += 1

    def forget_all(self) -> None:
        """Something has changed for all groups."""
        self.known.clear()
        self.changed()

    def changed(self) -> None:
        """Something has changed that no group's receivers depend on, but what was worked out from them."""
        self.version += 1
