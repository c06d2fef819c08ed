"""The lab: a small virtual machine with Soft-RoCE or InfiniBand devices, and a command run in it.

`LabMachine` says which machine, `LabMachine.run` boots it, runs one command there and returns its exit code,
`needs` says what this host lacks for it. Nothing on the host is changed: the guest writes to memory.
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
