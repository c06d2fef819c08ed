"""Initramfs of the guest: its init, modules, and the tools that make its fabric.

virtme-ng's initramfs has busybox and the modules for 9p and virtio. A second archive is put behind it, as the
kernel allows (Documentation/driver-api/early-userspace/buffer-format.rst); its files replace files of the
first, or add to them.
"""

import re
import shlex
import subprocess
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from rdma_lab import host
from rdma_lab.errors import LabUnavailableError
from rdma_lab.kernels import Kernel, inflate

GUEST_INIT = Path(str(files("rdma_lab") / "guest.sh"))
TOOLS = ("ip", "rdma")
"""The tools that make the fabric; each comes with the libraries that it needs."""
_DIRECTORY, _PROGRAM = 0o040755, 0o100755


def add_ours(initramfs: Path, kernel: Kernel, ports: int) -> None:
    """Put the lab's own archive behind virtme-ng's in `initramfs`. Raises LabUnavailableError."""
    with initramfs.open("ab") as file:
        file.write(archive(_contents(kernel, ports)))


def archive(contents: Mapping[str, bytes]) -> bytes:
    """A cpio archive (newc) of files that may be run, by their paths from the root, and of their folders."""
    folders = {str(folder) for path in contents for folder in Path(path).parents} - {"."}
    entries = [(folder, _DIRECTORY, b"") for folder in sorted(folders)]  # a folder before what is in it
    entries += [(path, _PROGRAM, data) for path, data in contents.items()]
    parts = [_entry(number, *entry) for number, entry in enumerate(entries, 1)]
    return b"".join([*parts, _entry(0, "TRAILER!!!", 0, b"")])


def _entry(number: int, name: str, mode: int, data: bytes) -> bytes:
    words = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name.encode()) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % word for word in words) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def _contents(kernel: Kernel, ports: int) -> dict[str, bytes]:
    modules = {f"lab/modules/{path.name.partition('.ko')[0]}.ko": path for path in kernel.load_order()}
    order = " ".join(f"/{name}" for name in modules)
    settings = f"PORTS={ports}\nMODULES={shlex.quote(order)}\n"
    found = {"init": GUEST_INIT.read_bytes(), "lab/settings": settings.encode()}
    found |= {name: _inflated(path) for name, path in modules.items()}
    for name in TOOLS:
        program = host.tool(name)
        assert program is not None, "host.require has looked"
        found[f"lab/bin/{name}"] = Path(program).read_bytes()
        found |= _libraries(program)
    return found


def _inflated(module: Path) -> bytes:
    """The uncompressed bytes of `module`, because busybox loads no others."""
    data = module.read_bytes()
    if module.suffix == ".ko":
        return data
    inflated = inflate(data)
    if inflated is None:
        raise LabUnavailableError(f"{module} cannot be decompressed here: apt-get install zstd")
    return inflated


def _libraries(program: str) -> dict[str, bytes]:
    """Return the libraries of `program`, and its loader.

    The libraries belong into /lab/lib, the loader where the kernel looks for it.
    """
    ldd = host.tool("ldd")
    if ldd is None:
        raise LabUnavailableError("not on this machine: ldd: apt-get install libc-bin")
    listed = subprocess.run([ldd, program], capture_output=True, text=True).stdout
    found = {}
    for name, path in re.findall(r"^\s+(?:(\S+) => )?(/\S+) \(0x", listed, re.M):
        found[f"lab/lib/{name}" if name else path.lstrip("/")] = Path(path).read_bytes()
    return found
