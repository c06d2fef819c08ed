"""The kernel module that makes InfiniBand HCAs and switches: built once for a kernel, kept in the cache."""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path

from mcast.lab.errors import LabUnavailableError
from mcast.lab.kernels import Kernel, cache_dir, fetched_dir, headers_of

SOURCES = Path(str(files("mcast.lab") / "softib"))
SCRIPT = Path(str(files("mcast.lab") / "infiniband.sh"))
NEEDED = ("rdmavt", "ib_umad", "ib_ipoib", "rdma_ucm")
"""The kernel's own modules that an InfiniBand fabric is made of."""
MAX_HCAS, MAX_SWITCHES = 64, 16
"""As SOFTIB_HCAS and SOFTIB_SWITCHES in softib.h."""


def memory(ports: int) -> int:
    """The MiB of memory that a guest with so many HCAs needs at least, for a small command.

    Measured: 160 for one port, and 20 more for each further one, most of them in the rings of IPoIB.
    """
    return 256 + 22 * ports


def headers(kernel: Kernel) -> Path | None:
    """The headers that modules for `kernel` are built against; None without them.

    They are where the kernel was installed or unpacked, or where the modules' link `build` leads.
    """
    build = kernel.modules / "build"
    if (build / "Module.symvers").exists():
        return build
    found = (headers_of(kernel.version, root) for root in kernel.modules.parents)
    return next((path for path in found if path), None)


def headers_line(kernel: Kernel) -> str:
    """The line that brings the headers of `kernel`, and no other kernel.

    apt installs the image beside the headers, and the newest installed image is the lab's default: the line
    for a kernel that is not installed fetches its headers beside it.
    """
    if kernel.modules.is_relative_to(fetched_dir()):
        return f"mcast lab kernel {kernel.version}"
    return f"apt-get install linux-headers-{kernel.version}"


def module(kernel: Kernel) -> Path:
    """softib.ko for `kernel`, built if the cache has none of these sources and this kernel's symbols.

    Raises LabUnavailableError.
    """
    build = headers(kernel)
    if build is None:
        raise LabUnavailableError(
            f"InfiniBand wants the headers of Linux {kernel.version}: {headers_line(kernel)}"
        )
    made = cache_dir() / "softib" / f"{kernel.version}-{_digest(build)}" / "softib.ko"
    if not made.exists():
        _make(build, made)
    return made


def guest_script(kernel: Kernel, ports: int, switches: int) -> str:
    """The shell script that makes the fabric in a guest with that kernel. Raises LabUnavailableError."""
    if lacking := kernel.lacking(NEEDED):
        raise LabUnavailableError(
            f"Linux {kernel.version} makes no InfiniBand ports: it has no module {', '.join(lacking)}; "
            "linux-image-amd64 has it all"
        )
    settings = {"PORTS": ports, "SWITCHES": switches, "SOFTIB": shlex.quote(str(module(kernel)))}
    lines = [f"{name}={value}" for name, value in settings.items()]
    return "\n".join([*lines, f". {shlex.quote(str(SCRIPT))}", ""])


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".c", ".h"} or path.name == "Kbuild")


def _digest(build: Path) -> str:
    digest = hashlib.sha256()
    for path in (*_sources(), build / "Module.symvers"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _make(build: Path, made: Path) -> None:
    """Build in a folder of its own, and then put the module in its place at once, because two processes may
    build it together."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabUnavailableError(f"the InfiniBand module has no place: {error}") from error
    with tempfile.TemporaryDirectory(prefix="mcast-softib-") as folder:
        for path in _sources():
            shutil.copy(path, folder)
        command = ["make", "-C", str(build), f"M={folder}", f"-j{os.cpu_count() or 1}"]
        command += ["CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]  # type information wants pahole
        # GNU make of a caller speaks to its children by these
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env)
        except FileNotFoundError:
            raise LabUnavailableError(
                "the InfiniBand module cannot be built without make: apt-get install make"
            ) from None
        if done.returncode:
            said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[:5])
            raise LabUnavailableError(f"the InfiniBand module cannot be built against {build}: {said}")
        partial = made.with_name(f".{made.name}.{os.getpid()}")
        shutil.copy(Path(folder) / made.name, partial)
        partial.rename(made)
