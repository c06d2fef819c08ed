"""Requirements of the lab on this host, and the line to type if something is missing."""

import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rdma_lab import driver, kernels
from rdma_lab.errors import LabUnavailableError

SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
"""Where system tools are, for a user whose PATH has no sbin as well."""


@dataclass(frozen=True, slots=True)
class Need:
    """A program or a file that the lab needs."""

    name: str
    """Name of the program or the file."""
    found: str | None
    """Path or version that was found; None if it is missing."""
    package: str
    """Debian's package for it; "" for virtme-ng, which pip installs."""
    boots: bool
    """True: no guest starts without it. False: only commands in the guest miss it."""


def tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")


def commands(path: str) -> set[str]:
    """Return the names of the programs in the directories of that PATH."""
    found = set()
    for folder in path.split(":"):
        with suppress(OSError):
            found |= {entry.name for entry in os.scandir(folder or ".")}
    return found


def _tools(*names: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        paths = [tool(name) for name in names]
        return None if None in paths else ", ".join(path for path in paths if path)

    return probe


def virtme_run() -> list[str] | None:
    """The beginning of a virtme-run command line: this Python's own virtme-ng, or else one on the PATH."""
    if find_spec("virtme") is not None:
        return [sys.executable, "-c", "import sys; from virtme.commands.run import main; sys.exit(main())"]
    script = tool("virtme-run")
    return [script] if script else None


def _virtme_found() -> str | None:
    found = virtme_run()
    if found is None:
        return None
    return "in this Python" if found[0] == sys.executable else found[0]


def static_busybox() -> str | None:
    """A busybox that runs before any library is there: a 64-bit ELF file without a program interpreter."""
    candidates = (tool(name) for name in ("busybox", "busybox-static", "busybox.static"))
    return next((path for path in candidates if path and _is_static(Path(path))), None)


def _is_static(program: Path) -> bool:
    try:
        data = program.read_bytes()
        table, size, count = (*struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54))
        kinds = [struct.unpack_from("<I", data, table + size * i)[0] for i in range(count)]
    except (OSError, struct.error):  # a script, or damage
        return False
    pt_interp = 3
    return data.startswith(b"\x7fELF\x02") and pt_interp not in kinds


def _kernel() -> str | None:
    try:
        return kernels.find().version
    except LabUnavailableError:
        return None


def _headers() -> Need:
    """The headers of the kernel that the lab boots by default; apt is not asked for those of another."""
    name, package, found = "InfiniBand: kernel headers", "linux-headers-amd64", None
    try:
        kernel = kernels.find()
        package, found = f"linux-headers-{kernel.version}", driver.headers(kernel)
    except LabUnavailableError:  # there is no kernel yet: the newest image and its headers go together
        pass
    return Need(name, None if found is None else str(found), package, False)


def _library(pattern: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        roots = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/lib/x86_64-linux-gnu")
        return next((str(path) for root in roots for path in sorted(Path(root).glob(pattern))), None)

    return probe


def _header(name: str) -> Callable[[], str | None]:
    def probe() -> str | None:
        path = Path("/usr/include", name)
        return str(path) if path.exists() else None

    return probe


TABLE: tuple[tuple[str, str, bool, Callable[[], str | None]], ...] = (
    ("qemu-system-x86_64", "qemu-system-x86", True, _tools("qemu-system-x86_64")),
    ("a kernel with rdma_rxe", "linux-image-amd64", True, _kernel),
    ("virtme-ng", "", True, _virtme_found),
    ("a static busybox", "busybox-static", True, static_busybox),
    ("modprobe", "kmod", True, _tools("modprobe")),
    ("file", "file", True, _tools("file")),
    ("ip, bridge, rdma", "iproute2", True, _tools("ip", "bridge", "rdma")),
    ("librdmacm", "librdmacm1", False, _library("librdmacm.so.1")),
    ("libibverbs", "libibverbs1", False, _library("libibverbs.so.1")),
    ("Soft-RoCE's verbs provider", "ibverbs-providers", False, _library("libibverbs/librxe-rdmav*.so")),
    ("ibv_devinfo", "ibverbs-utils", False, _tools("ibv_devinfo")),
)


INFINIBAND: tuple[tuple[str, str, Callable[[], str | None]], ...] = (
    ("InfiniBand: make", "make", _tools("make")),
    ("InfiniBand: gcc", "gcc", _tools("gcc")),
    ("InfiniBand: libc's headers", "libc6-dev", _header("dlfcn.h")),
    ("InfiniBand: OpenSM", "opensm", _tools("opensm")),
)
"""Needs of an InfiniBand fabric besides the headers of its kernel."""


def needs(fabric: str | None = None) -> tuple[Need, ...]:
    """Return every need of that fabric, or of both, looked up now."""
    common = (Need(name, probe(), package, boots) for name, package, boots, probe in TABLE)
    return (*common, *(() if fabric == "roce" else (_headers(), *_infiniband())))


def _infiniband() -> tuple[Need, ...]:
    return tuple(Need(name, probe(), package, False) for name, package, probe in INFINIBAND)


def apt_line(missing: Iterable[Need]) -> str:
    """The one line that installs all of `missing`; "" if nothing is missing."""
    missing = tuple(missing)
    packages = sorted({need.package for need in missing if need.package})
    sudo = "" if os.geteuid() == 0 else "sudo "
    apt = [f"{sudo}apt-get install -y --no-install-recommends {' '.join(packages)}"] if packages else []
    pip = ["pip install virtme-ng"] if any(not need.package for need in missing) else []
    return " && ".join(apt + pip)


def require(fabric: str = "roce") -> None:
    """Raise LabUnavailableError, with the line to type, unless a guest with that fabric can boot here.

    The kernel's headers are left to the build of the module, which knows the kernel.
    """
    if (system := f"{platform.system()} {platform.machine()}") != "Linux x86_64":
        raise LabUnavailableError(
            f"the lab shares this machine's files with an x86-64 guest, and this is {system}"
        )
    wanted = [need for need in needs() if need.boots] + list(_infiniband() if fabric == "infiniband" else ())
    if missing := [need for need in wanted if need.found is None]:
        names = ", ".join(need.name for need in missing)
        raise LabUnavailableError(f"not on this machine: {names}: {apt_line(missing)}")


@cache
def kvm_problem() -> str:
    """Return why no kernel starts under KVM; "" if one does.

    Found out by starting one, because a VM that can be made may still not run.
    """
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
    except OSError as error:
        return f"/dev/kvm: {error.strerror}"
    qemu = tool("qemu-system-x86_64")
    if qemu is None:
        return "qemu-system-x86_64 is not on this machine"
    image = kernels.boot_image(kernels.find())
    command = [qemu, "-machine", "q35,accel=kvm", "-cpu", "host,topoext=on", "-m", "256", "-nodefaults"]
    command += ["-display", "none", "-no-reboot", "-serial", "stdio", "-kernel", str(image)]
    command += ["-append", "console=ttyS0 earlyprintk=serial,ttyS0,115200 panic=-1"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=5
        )
    except subprocess.TimeoutExpired:
        return "a kernel started under KVM hangs: it was stopped after 5 s"
    if "Kernel panic" in done.stdout:  # the kernel ran until it missed its root file system
        return ""
    said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
    return f"a kernel started under KVM ends early: {said or f'status {done.returncode}'}"
