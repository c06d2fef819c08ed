"""The name under which a CI system stores the lab's cache, `kernels.cache_dir`, from one run to the next."""

import re
import subprocess
from importlib.metadata import version

from rdma_lab import host, kernels
from rdma_lab.errors import LabUnavailableError
from rdma_lab.machine import LabMachine


def cache_key(machine: LabMachine) -> str:
    """Return a name that changes when a run of `machine` would find nothing of use in the cache.

    The cache holds fetched kernels, what was built for InfiniBand, and kept guests: these depend on this
    package, the kernel, QEMU, and on what the guest has when it is kept. That is its Soft-RoCE devices, and
    no InfiniBand fabric, which is made later. For a kernel named by the start of its version, that of the
    package sources counts, because `kernels.fetch` takes it. Raises LabUnavailableError.
    """
    named = machine.kernel if machine.kernel and "/" not in machine.kernel else None
    kernel = kernels.newest(named) if named else kernels.find(machine.kernel).version
    devices = f"-{machine.ports}" if machine.fabric == "roce" else ""
    guest = f"{machine.fabric}{devices}-{machine.memory}M-{len(machine.share)}-shared"
    return f"rdma-lab-{version('rdma-lab')}-linux-{kernel}-qemu-{_qemu_version()}-{guest}"


def _qemu_version() -> str:
    """Return QEMU's version and its package's, such as 7.2.22-Debian-1-7.2+dfsg-7+deb12u18."""
    qemu = host.tool("qemu-system-x86_64")
    if qemu is None:
        raise LabUnavailableError("not on this machine: qemu-system-x86_64: apt-get install qemu-system-x86")
    first = subprocess.run([qemu, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    return re.sub(r"[^\w.+]+", "-", first.partition(" version ")[2]).strip("-")
