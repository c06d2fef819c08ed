"""The lab: a small virtual machine with Soft-RoCE or InfiniBand devices, and a command run in it.

`LabMachine` describes the machine, `LabMachine.run` boots it, runs one command in it and returns the
command's exit code, `needs` lists what this host lacks for that. The host is not changed: the guest writes to
memory.
"""

from mcast.lab.errors import (
    CommandNotFoundError,
    GuestPanicError,
    GuestStoppedError,
    LabError,
    LabTimeoutError,
    LabUnavailableError,
)
from mcast.lab.host import Need, apt_line, needs
from mcast.lab.machine import LabMachine, LabResult

__all__ = [
    "CommandNotFoundError",
    "GuestPanicError",
    "GuestStoppedError",
    "LabError",
    "LabMachine",
    "LabResult",
    "LabTimeoutError",
    "LabUnavailableError",
    "Need",
    "apt_line",
    "needs",
]
