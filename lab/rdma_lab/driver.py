"""The kernel module that makes InfiniBand HCAs and switches: built once for a kernel, kept in the cache.

So is what makes OpenSM an older one.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from rdma_lab import cache, children
from rdma_lab.errors import LabUnavailableError
from rdma_lab.kernels import Kernel, cache_dir, fetched_dir, headers_of

SOURCES = Path(str(files("rdma_lab") / "softib"))
NO_SEND_ONLY_SOURCE = Path(str(files("rdma_lab") / "opensm" / "no_send_only.c"))
SCRIPT = Path(str(files("rdma_lab") / "infiniband.sh"))
NEEDED = ("rdmavt", "ib_umad", "ib_ipoib", "rdma_ucm")
"""The kernel's own modules that an InfiniBand fabric is made of."""
MAX_HCAS, MAX_SWITCHES = 64, 16
"""SOFTIB_HCAS and SOFTIB_SWITCHES of softib.h."""

logger: logging.Logger = logging.getLogger("rdma_lab")


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
        return f"rdma-lab kernel {kernel.version}"
    return f"apt-get install linux-headers-{kernel.version}"


def module(kernel: Kernel) -> bytes:
    """The module softib for `kernel`, built if the cache has none of these sources and this kernel's symbols.

    Raises LabUnavailableError.
    """
    build = headers(kernel)
    if build is None:
        raise LabUnavailableError(
            f"InfiniBand needs the headers of Linux {kernel.version}: {headers_line(kernel)}"
        )
    made = cache_dir() / "softib" / f"{kernel.version}-{_digest(build)}" / "softib.ko"

    def command(folder: Path) -> list[str]:
        make = ["make", "-C", str(build), f"M={folder}", f"-j{os.cpu_count() or 1}"]
        return [*make, "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]  # type information wants pahole

    return _made(made, _sources(), command, f"the InfiniBand module cannot be built against {build}")


def no_send_only_library() -> bytes:
    """A library that makes OpenSM, started with this library preloaded, an SM without send-only members.

    Compiled if the cache has none of this source. Raises LabUnavailableError.
    """
    digest = hashlib.sha256(NO_SEND_ONLY_SOURCE.read_bytes()).hexdigest()[:16]
    made = cache_dir() / "opensm" / digest / "no_send_only.so"

    def command(folder: Path) -> list[str]:
        where = (str(folder / made.name), str(folder / NO_SEND_ONLY_SOURCE.name))
        return ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", *where]

    return _made(made, [NO_SEND_ONLY_SOURCE], command, f"{NO_SEND_ONLY_SOURCE} cannot be compiled")


def write_job(job: Path, kernel: Kernel, ports: int, switches: int) -> None:
    """Write what makes the fabric in a guest with that kernel to `job`, which the guest has as /run/rdma-lab.

    Raises LabUnavailableError, OSError.
    """
    if lacking := kernel.lacking(NEEDED):
        raise LabUnavailableError(
            f"Linux {kernel.version} makes no InfiniBand ports: it has no module {', '.join(lacking)}; "
            "linux-image-amd64 has it all"
        )
    for name, data in (("softib.ko", module(kernel)), ("no_send_only.so", no_send_only_library())):
        (job / name).write_bytes(data)
    settings = f"PORTS={ports}\nSWITCHES={switches}\n"
    (job / "fabric").write_text(settings + SCRIPT.read_text("utf-8"), "utf-8")


def _sources() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".c", ".h"} or path.name == "Kbuild")


def _digest(build: Path) -> str:
    digest = hashlib.sha256()
    for path in (*_sources(), build / "Module.symvers"):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _made(made: Path, sources: Sequence[Path], command: Callable[[Path], list[str]], failed: str) -> bytes:
    """The file `made`, built if the cache has it not, by a command for the folder with copies of the sources.

    The folder is the build's own, because two processes may build it together.
    """
    if cache.has(made):
        return made.read_bytes()[: -cache.DIGEST]
    with tempfile.TemporaryDirectory(prefix="rdma-lab-softib-") as name:
        folder = Path(name)
        for path in sources:
            shutil.copy(path, folder)
        words = command(folder)
        # GNU make of a caller speaks to its children by these
        env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        try:
            done = children.run(words, env=env | {"TMPDIR": name})  # where a compiler leaves files if killed
        except FileNotFoundError:
            raise LabUnavailableError(
                f"{made.name} cannot be built without {words[0]}: apt-get install {words[0]}"
            ) from None
        if done.returncode:
            said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[:5])
            raise LabUnavailableError(f"{failed}: {said}")
        data = (folder / made.name).read_bytes()
    try:
        cache.store(made, data)
    except OSError as error:
        logger.warning("%s could not be saved, so later runs build it again: %s", made, error.strerror)
    return data
