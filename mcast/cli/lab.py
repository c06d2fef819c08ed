"""`mcast lab`: the command `rdma-lab`, where that package is installed. Nothing else imports it."""

from __future__ import annotations

from mcast.cli.status import ExitStatus
from mcast.cli.terminal import Failure
from mcast.errors import install

try:
    from rdma_lab import LabError, LabMachine
    from rdma_lab.cli import app
except ModuleNotFoundError as _error:
    if _error.name != "rdma_lab":
        raise
    raise Failure(
        f"the lab is a package of its own, rdma-lab, and not here: {install.line('lab')}", ExitStatus.LAB
    ) from None

__all__ = ["LabError", "LabMachine", "app"]
