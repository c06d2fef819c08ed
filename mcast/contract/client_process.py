"""Who takes part in a network that several processes share."""

from __future__ import annotations

from typing import NamedTuple


class ClientProcess(NamedTuple):
    """A process on a network that several processes share.

    pid      process id; 0 for a process of another PID namespace, as in another container
    program  name of the program
    hosts    number of the host that it is, or several; "all" for a process that looks on
    devices  names of its devices
    """

    pid: int
    program: str
    hosts: str
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        """The program and its process, for people."""
        return f"{self.program} ({self.pid})" if self.pid else "a process in another container"
