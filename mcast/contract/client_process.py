"""Who takes part in a network that several processes share."""

from __future__ import annotations

from typing import NamedTuple


class ClientProcess(NamedTuple):
    """A process on a shared network: `pid` and the name of its `program`, and what is its own there.

    pid      0 for a process of another PID namespace, as in another container
    hosts    the numbers of the hosts that it is; "all" for one that looks on
    devices  the names of their devices
    """

    pid: int
    program: str
    hosts: str
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        """The program and its process, for people."""
        return f"{self.program} ({self.pid})" if self.pid else "a process in another container"
