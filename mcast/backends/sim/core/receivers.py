"""Who gets a copy of the messages of each group, as far as it has been worked out."""

from __future__ import annotations

from collections.abc import Sequence

from mcast.backends.sim.core.qp import Qp
from mcast.wire.addresses import Gid

Route = int | Gid
"""What switches know a group by: on InfiniBand its MLID, on RoCE the group itself."""


class Receivers:
    """Remembers who receives; whatever changes that says so here.

    known    route -> (index of the sending port, group) -> the QPs that get a copy
    version  how often something has changed: what was worked out with the same number still holds
    """

    __slots__ = ("known", "version")

    def __init__(self) -> None:
        self.known: dict[Route, dict[tuple[int, Gid], Sequence[Qp]]] = {}
        self.version = 0

    def forget(self, route: Route) -> None:
        """Something has changed in one group."""
        self.known.pop(route, None)
        self.version += 1

    def forget_all(self) -> None:
        """Something has changed for all groups."""
        self.known.clear()
        self.version += 1
