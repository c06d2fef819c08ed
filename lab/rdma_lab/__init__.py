"""The lab: a small virtual machine with Soft-RoCE or InfiniBand devices, and a command run in it.

`LabMachine` describes the machine, `LabMachine.run` boots it, runs one command in it and returns the
command's exit code, `needs` lists what this host lacks for that. The host is not changed: the guest writes to
memory.
"""

from rdma_lab.errors import (
    CommandNotFoundError,
    GuestPanicError,
    GuestStoppedError,
    LabError,
    LabTimeoutError,
    LabUnavailableError,
)
from rdma_lab.host import Need, apt_line, needs
from rdma_lab.machine import LabMachine
from rdma_lab.result import LabResult

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
