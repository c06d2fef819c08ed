"""The kernel that the lab boots, where its modules are, and its image in the form that starts fastest."""

import fcntl
import lzma
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rdma_lab import cache, children
from rdma_lab.errors import LabError, LabUnavailableError

MODULES = ("overlay", "rdma_rxe", "rdma_ucm", "ib_uverbs", "veth", "bridge")
"""The modules that the guest loads, besides those of virtme-ng's initramfs for 9p and virtio."""
EXTRA_MODULES = ("crc32_generic",)
"""Loaded where the kernel has them as modules: rdma_rxe would have them looked up, which takes a second."""


@dataclass(frozen=True, slots=True)
class Kernel:
    version: str
    """The version, as `uname -r` prints it."""
    image: Path
    modules: Path
    """lib/modules/VERSION, with depmod's lists in it."""

    def load_order(self) -> tuple[Path, ...]:
        """The files of MODULES with all they depend on, in the order to insmod them; built-in ones left out.

        Raises KeyError with the name of a module that this kernel does not have.
        """
        depends = {
            _module_name(path): (path, needed.split())
            for path, _, needed in (line.partition(":") for line in _lines(self.modules / "modules.dep"))
        }
        built_in = {_module_name(path) for path in _lines(self.modules / "modules.builtin")}
        order: dict[str, None] = {}
        for name in (*(name for name in EXTRA_MODULES if name in depends), *MODULES):
            if name not in built_in:
                path, needed = depends[name]
                order |= dict.fromkeys([*reversed(needed), path])  # depmod lists the deepest need last
        return tuple(self.modules / path for path in order)

    def lacking(self, names: Sequence[str]) -> list[str]:
        """The modules of `names` that this kernel has neither as a file nor built in."""
        listed = (line.partition(":")[0] for line in _lines(self.modules / "modules.dep"))
        there = {_module_name(path) for path in (*listed, *_lines(self.modules / "modules.builtin"))}
        return [name for name in names if name not in there]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _module_name(path: str) -> str:
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:  # its specification wants a path that is not absolute to be ignored; in the guest it led elsewhere
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "rdma-lab"
    except RuntimeError:  # a container may run as a user that it does not know
        raise LabError("this user has no home directory to keep files in: set HOME") from None


def fetched_dir() -> Path:
    """Where `fetch` unpacks kernel packages, each in a folder of its own."""
    return cache_dir() / "kernels"


def default_roots() -> tuple[Path, ...]:
    """This system, then the fetched packages, newest first."""
    return (Path("/"), *sorted(fetched_dir().glob("[!.]*"), key=lambda path: _age(path.name), reverse=True))


def matches(version: str, wanted: str) -> bool:
    """Return True if `wanted` is this version or its beginning: 6.1 begins 6.1.0-56-amd64, and not 6.12."""
    return re.match(re.escape(wanted) + r"(?!\d)", version) is not None


def _age(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def installed(roots: Sequence[Path]) -> list[Kernel]:
    """Every kernel that has both an image and modules: root by root, the newest of each root first.

    The image is in /boot, or, as in Debian's packages from Linux 7 on, beside the modules.
    """

    def under(root: Path) -> Iterator[Kernel]:
        folders = {
            path.parent.name: path.parent
            for lib in ("usr/lib", "lib")  # of a version that is in both, the latter
            for path in (root / lib / "modules").glob("*/modules.dep")
        }
        for version, modules in folders.items():
            for image in (root / "boot" / f"vmlinuz-{version}", modules / "vmlinuz"):
                if image.exists():
                    yield Kernel(version, image.resolve(), modules.resolve())
                    break

    return [
        kernel
        for root in roots
        for kernel in sorted(under(root), key=lambda kernel: _age(kernel.version), reverse=True)
    ]


def _refuse_empty(wanted: str | None) -> None:
    if wanted is not None and not wanted.strip():
        raise LabUnavailableError("the kernel's version is empty: name one, such as 6.12")


def find(wanted: str | None = None, roots: Sequence[Path] | None = None) -> Kernel:
    """The first kernel, in the order of `installed`, that can make Soft-RoCE devices.

    `wanted` is a version (`6.12.117+deb12-amd64`), the start of one (`6.1` is not `6.12`), or the directory
    of an unpacked kernel package.
    Raises LabUnavailableError.
    """
    _refuse_empty(wanted)
    if wanted is not None and "/" in wanted:
        roots, wanted = (Path(wanted),), None
    roots = default_roots() if roots is None else roots
    kernels = installed(roots)
    if not kernels:
        raise LabUnavailableError(
            f"no kernel with its modules in {', '.join(str(root / 'boot') for root in roots)}: "
            "install one (apt-get install linux-image-amd64); an unpacked package also needs depmod -b"
        )
    names = ", ".join(kernel.version for kernel in kernels)
    if wanted is not None:
        kernels = [kernel for kernel in kernels if matches(kernel.version, wanted)]
        if not kernels:
            advice = f"fetch it with `rdma-lab kernel {wanted}`"
            if Path(wanted).is_dir():
                advice = f"for the directory, write ./{wanted}"
            raise LabUnavailableError(f"no kernel {wanted} here, only {names}: {advice}")
    lacking = []
    for kernel in kernels:
        try:
            kernel.load_order()
        except KeyError as missing:
            lacking.append(f"{kernel.version} has no module {missing.args[0]}")
            continue
        if not os.access(kernel.image, os.R_OK):
            lacking.append(f"{kernel.image} is not readable by you (chmod a+r it)")
            continue
        return kernel
    raise LabUnavailableError(
        f"no usable kernel: {'; '.join(lacking)}: apt-get install linux-image-amd64 has it all"
    )


def _inflate_zstd(data: bytes) -> bytes:
    return subprocess.run(
        ["zstd", "-dcq"], input=data, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout


INFLATE: dict[bytes, Callable[[bytes], bytes]] = {
    b"\xfd7zXZ\x00": lambda data: lzma.LZMADecompressor().decompress(data),
    b"\x1f\x8b": lambda data: zlib.decompressobj(31).decompress(data),
    b"\x28\xb5\x2f\xfd": _inflate_zstd,
}
"""First bytes of compressed data -> the function that decompresses it. Each ignores what follows the data."""


def inflate(data: bytes) -> bytes | None:
    """`data` decompressed; None if its format is not known, or its program is not installed."""
    decode = next((how for magic, how in INFLATE.items() if data.startswith(magic)), None)
    if decode is None or (decode is _inflate_zstd and shutil.which("zstd") is None):
        return None
    return decode(data)


def vmlinux(bzimage: bytes) -> bytes | None:
    """The ELF kernel inside a bzImage (Linux x86 boot protocol 2.08), None if it cannot be extracted."""
    if bzimage[0x202:0x206] != b"HdrS":
        return None
    start, length = struct.unpack_from("<II", bzimage, 0x248)
    start += (bzimage[0x1F1] + 1) * 512
    payload = bzimage[start : start + length]
    elf = inflate(payload)
    return elf if elf is not None and elf.startswith(b"\x7fELF") else None


def boot_image(kernel: Kernel) -> Path:
    """`kernel.image`, unpacked once into the cache, which takes an emulated guest 2.5 s at each boot."""
    configs = (kernel.image.with_name(f"config-{kernel.version}"), kernel.modules / "config")
    if not any(
        "CONFIG_PVH=y" in _lines(config) for config in configs
    ):  # QEMU starts an ELF kernel by its PVH entry only
        return kernel.image
    stat = kernel.image.stat()
    unpacked = cache_dir() / f"vmlinux-{kernel.version}-{stat.st_size}-{stat.st_mtime_ns}"
    try:
        if not cache.has(unpacked):
            elf = vmlinux(kernel.image.read_bytes())
            if elf is None:
                return kernel.image
            cache.store(unpacked, elf)  # QEMU does not mind the digest, which no header of the ELF file names
            for old in set(unpacked.parent.glob(f"vmlinux-{kernel.version}-*")) - {unpacked}:
                old.unlink(missing_ok=True)  # of a package that was upgraded
    except OSError:  # no cache (a read-only or missing home): slower, not wrong
        return kernel.image
    return unpacked


def newest(wanted: str) -> str:
    """Return the newest kernel version of the package sources that begins with `wanted`.

    Raises LabUnavailableError.
    """
    _refuse_empty(wanted)
    images = re.findall(r"^linux-image-(\d+\.\d+\.\d[^-]*(?:-\d+)?-amd64) ", _listed(), re.M)
    versions: list[str] = [version for version in images if matches(version, wanted)]
    if not versions:
        raise LabUnavailableError(
            f"the package sources have no kernel {wanted}: {_what_there_is(wanted, images)}"
        )
    return max(versions, key=_age)


def _what_there_is(wanted: str, images: list[str]) -> str:
    """Return the versions that the package sources have, and what to do for another one."""
    found = dict.fromkeys(".".join(version.split(".")[:2]) for version in sorted(images, key=_age))
    if not found:
        return "they have none at all: run apt-get update"
    there = f"they have {', '.join(found)}"
    if not re.match(r"\d", wanted) or _age(wanted) < _age(
        max(images, key=_age)
    ):  # no source adds an older one
        return f"{there}: name one of these"
    return f"{there}: run apt-get update, or add the security or the backports source of your release"


def fetch(wanted: str) -> Kernel:
    """Download Debian's newest kernel of version `wanted` from the configured sources, and unpack it.

    The headers for modules come along if the sources have them. Nothing is installed, and what was fetched
    before is not fetched again. Raises LabUnavailableError.
    """
    version = newest(wanted)
    target = fetched_dir() / version
    headers = _with_parts(f"linux-headers-{version}") if f"linux-headers-{version} " in _listed() else []
    with _fetching() as partial:
        if target.exists() and (not headers or headers_of(version, target)):
            return find(str(target))
        packages = dict.fromkeys([*_with_parts(f"linux-image-{version}"), *headers])
        _output(["apt-get", "download", *packages], cwd=partial)
        for deb in sorted(partial.glob("*.deb")):
            _output(["dpkg-deb", "--extract", str(deb), str(partial)])
            deb.unlink()
        if headers:
            makefile = partial / "usr/src" / f"linux-headers-{version}" / "Makefile"
            makefile.write_text(re.sub(r"(?<=[ =])/usr/src/", f"{target}/usr/src/", makefile.read_text()))
        if not (partial / "lib").exists():  # where depmod looks
            (partial / "lib").symlink_to("usr/lib")
        _output(
            [shutil.which("depmod", path="/usr/sbin:/sbin:/usr/bin") or "depmod", "-b", str(partial), version]
        )
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    return find(str(target))


@contextmanager
def _fetching() -> Iterator[Path]:
    """Yield an empty folder beside the fetched kernels, which one process has at a time.

    What a killed process has left in it is removed. Raises LabUnavailableError.
    """
    partial = fetched_dir() / ".partial"
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with (partial.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise LabUnavailableError(
            f"kernels cannot be kept in {partial.parent}: {error.strerror}: make room there, or set "
            "XDG_CACHE_HOME to a directory that you can write to"
        ) from None


def _listed() -> str:
    """Return a line for each package of a kernel, or of its headers, in the configured sources."""
    return _output(["apt-cache", "search", "--names-only", "^linux-(image|headers)-[0-9].*-amd64$"])


def headers_of(version: str, root: Path) -> Path | None:
    """Where linux-headers-VERSION is installed or unpacked under `root`; None without it."""
    path = root / "usr/src" / f"linux-headers-{version}"
    return path if (path / "Module.symvers").exists() else None


def _with_parts(package: str) -> list[str]:
    """The package and the packages of the same kernel that it is made of.

    Not all that it depends on: for headers, apt would install the image of the same version as well. From
    Linux 7 on, the image's binary and modules have packages of their own.
    """
    depends = _output(["apt-cache", "depends", package])
    return [package, *re.findall(r"Depends: (linux-(?:headers|kbuild|base|binary|modules)-\d\S*)", depends)]


def _output(command: list[str], cwd: Path | None = None) -> str:
    try:
        done = children.run(command, cwd=cwd)
    except FileNotFoundError as missing:
        raise LabUnavailableError(
            f"{command[0]} is not here: kernels are fetched on Debian only"
        ) from missing
    if done.returncode:
        raise LabUnavailableError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
