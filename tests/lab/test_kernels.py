"""Which kernel is chosen, what it loads, and how its image is unpacked; no guest is booted."""

import gzip
import lzma
import os
import shutil
import struct
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from rdma_lab import cache, kernels
from rdma_lab.errors import LabError, LabUnavailableError

DEPENDS = """\
kernel/fs/overlayfs/overlay.ko:
kernel/net/ipv4/udp_tunnel.ko.xz:
kernel/drivers/infiniband/core/ib_core.ko:
kernel/drivers/infiniband/core/ib_uverbs.ko: kernel/drivers/infiniband/core/ib_core.ko
kernel/sw/rdma-rxe.ko: kernel/drivers/infiniband/core/ib_uverbs.ko kernel/drivers/infiniband/core/ib_core.ko \
kernel/net/ipv4/udp_tunnel.ko.xz
kernel/drivers/infiniband/core/rdma_ucm.ko: kernel/drivers/infiniband/core/ib_core.ko
kernel/drivers/net/veth.ko:
"""


def unpacked(root: Path, version: str, depends: str = DEPENDS) -> Path:
    (root / "boot").mkdir(parents=True, exist_ok=True)
    (root / "boot" / f"vmlinuz-{version}").write_bytes(b"image")
    modules = root / "lib/modules" / version
    modules.mkdir(parents=True)
    (modules / "modules.dep").write_text(depends)
    (modules / "modules.builtin").write_text("kernel/net/bridge/bridge.ko\n")
    return root


def test_the_newest_kernel_is_taken(tmp_path: Path) -> None:
    for version in ("6.1.0-9-amd64", "6.12.9-amd64", "6.1.0-56-amd64"):
        unpacked(tmp_path, version)
    assert kernels.find(roots=[tmp_path]).version == "6.12.9-amd64"


def test_an_empty_kernel_is_refused() -> None:
    for choose in (kernels.find, kernels.newest):
        with pytest.raises(LabUnavailableError, match="version is empty: name one"):
            choose(" ")


def test_system_kernel_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of this system goes before a fetched one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for version in ("6.12.9-amd64", "6.12.10-amd64"):
        unpacked(kernels.fetched_dir() / version, version)
    system, *fetched = kernels.default_roots()
    assert system == Path("/")
    here = unpacked(tmp_path / "system", "6.1.0-56-amd64")
    assert kernels.find(roots=[here, *fetched]).version == "6.1.0-56-amd64"
    assert kernels.find("6.12", roots=[here, *fetched]).version == "6.12.10-amd64"


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has neither the variable nor a line in /etc/passwd."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**32 - 2)
    with pytest.raises(LabError, match="no home directory to keep files in: set HOME"):
        kernels.default_roots()


@pytest.mark.parametrize(
    ("wanted", "version"),
    [
        ("6.1", "6.1.0-56-amd64"),
        ("6.12", "6.12.9-amd64"),
        ("6.1.0-9", "6.1.0-9-amd64"),
        ("6.1.0-9-amd64", "6.1.0-9-amd64"),
    ],
)
def test_the_start_of_a_version_is_enough(tmp_path: Path, wanted: str, version: str) -> None:
    for here in ("6.1.0-9-amd64", "6.12.9-amd64", "6.1.0-56-amd64"):
        unpacked(tmp_path, here)
    assert kernels.find(wanted, roots=[tmp_path]).version == version


def test_a_directory_is_an_unpacked_package(tmp_path: Path) -> None:
    root = unpacked(tmp_path / "package", "6.12.9-amd64")
    kernel = kernels.find(str(root))
    assert (kernel.version, kernel.image) == ("6.12.9-amd64", root / "boot/vmlinuz-6.12.9-amd64")


def test_unknown_version_names_the_known_ones(tmp_path: Path) -> None:
    """An unknown version names what is here and how to fetch it."""
    unpacked(tmp_path, "6.1.0-56-amd64")
    with pytest.raises(
        LabUnavailableError, match=r"no kernel 6\.13 here, only 6\.1\.0-56-amd64.*lab kernel 6\.13"
    ):
        kernels.find("6.13", roots=[tmp_path])


def test_directory_without_a_slash_gets_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked(tmp_path, "6.1.0-56-amd64")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LabUnavailableError, match=r"no kernel mine here, .* write \./mine"):
        kernels.find("mine", roots=[tmp_path])


def test_no_kernel_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(LabUnavailableError, match="apt-get install linux-image-amd64"):
        kernels.find(roots=[tmp_path])


def test_kernel_without_rxe_is_refused(tmp_path: Path) -> None:
    """A kernel without rxe is refused by name and passed over otherwise."""
    plain = "".join(line for line in DEPENDS.splitlines(keepends=True) if "rxe" not in line)
    unpacked(tmp_path, "6.12.9-cloud-amd64", plain)
    with pytest.raises(LabUnavailableError, match=r"6\.12\.9-cloud-amd64 has no module rdma_rxe"):
        kernels.find("6.12", roots=[tmp_path])
    unpacked(tmp_path, "6.1.0-56-amd64")
    assert kernels.find(roots=[tmp_path]).version == "6.1.0-56-amd64"


@pytest.mark.parametrize("module", kernels.MODULES)
def test_a_missing_module_is_one_sentence(tmp_path: Path, module: str) -> None:
    root = unpacked(tmp_path, "6.12.9-amd64", "\n".join(f"kernel/{name}.ko:" for name in kernels.MODULES))
    for path in root.glob("lib/modules/*/modules.*"):
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line for line in lines if f"/{module}.ko" not in line))
    with pytest.raises(LabUnavailableError) as refused:
        kernels.find(roots=[root])
    assert str(refused.value) == (
        f"no usable kernel: 6.12.9-amd64 has no module {module}: apt-get install linux-image-amd64 has it all"
    )


def test_modules_are_loaded_after_what_they_depend_on(tmp_path: Path) -> None:
    unpacked(tmp_path, "6.12.9-amd64")
    order = [path.name for path in kernels.find(roots=[tmp_path]).load_order()]
    assert order == [
        *(
            "overlay.ko",
            "udp_tunnel.ko.xz",
            "ib_core.ko",
            "ib_uverbs.ko",
            "rdma-rxe.ko",
            "rdma_ucm.ko",
            "veth.ko",
        ),
    ]


def test_the_order_is_the_one_modprobe_takes() -> None:
    kernel = kernels.find()
    modprobe = shutil.which("modprobe", path="/usr/sbin:/sbin")
    assert modprobe is not None
    shown: dict[str, None] = {}
    for name in (*kernels.EXTRA_MODULES, *kernels.MODULES):
        command = [modprobe, "-C", os.devnull, "-S", kernel.version, "--show-depends", name]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        shown |= dict.fromkeys(Path(line.split()[1]).name for line in lines if line.startswith("insmod"))
    assert [path.name for path in kernel.load_order()] == list(shown)


def bzimage(payload: bytes) -> bytes:
    """The parts of the x86 boot protocol's header that tell where the payload is."""
    head = bytearray(3 * 512)
    head[0x1F1] = 2
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 16, len(payload))
    return bytes(head) + bytes(16) + payload + b"signature"


ELF = b"\x7fELF" + bytes(range(256)) * 64


@pytest.mark.parametrize("compress", [lzma.compress, gzip.compress])
def test_the_kernel_comes_out_of_its_image(compress: object) -> None:
    assert callable(compress)
    payload = compress(ELF) + struct.pack("<I", len(ELF))  # the build appends the size
    assert kernels.vmlinux(bzimage(payload)) == ELF


@pytest.mark.parametrize(
    "image", [b"not a kernel" * 100, bzimage(b"\x02\x21L\x18lz4"), bzimage(gzip.compress(b"no"))]
)
def test_an_image_in_no_known_form_is_booted_as_it_is(image: bytes) -> None:
    assert kernels.vmlinux(image) is None


def test_an_unpacked_image_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = kernels.find(str(unpacked(tmp_path / "root", "6.12.9-amd64")))
    assert kernels.boot_image(kernel) == kernel.image, "no PVH entry: as it is"
    (tmp_path / "root/boot/config-6.12.9-amd64").write_text("CONFIG_PVH=y\n")
    kernel.image.write_bytes(bzimage(gzip.compress(ELF)))
    image = kernels.boot_image(kernel)
    assert image.read_bytes()[: -cache.DIGEST] == ELF
    inode = image.stat().st_ino
    assert kernels.boot_image(kernel).stat().st_ino == inode
    kernel.image.write_bytes(bzimage(gzip.compress(ELF + b"upgraded")))
    image = kernels.boot_image(kernel)
    assert image.read_bytes()[: -cache.DIGEST] == ELF + b"upgraded"
    assert list(image.parent.iterdir()) == [image], "neither a partial file nor the old one stays"


def test_parallel_unpacks_keep_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who unpacks the same image at once never removes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = kernels.find(str(unpacked(tmp_path / "root", "6.12.9-amd64")))
    (tmp_path / "root/boot/config-6.12.9-amd64").write_text("CONFIG_PVH=y\n")
    kernel.image.write_bytes(bzimage(gzip.compress(ELF)))
    image, removed = kernels.boot_image(kernel), set[Path]()
    has, unlink = cache.has, Path.unlink

    def seen(path: Path, missing_ok: bool = False) -> None:
        removed.add(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(cache, "has", lambda path: path != image and has(path))  # not yet, when it looked
    monkeypatch.setattr(Path, "unlink", seen)
    assert kernels.boot_image(kernel) == image
    assert image not in removed, "the other is about to boot it"


@pytest.mark.parametrize("damage", ["empty", "cut short", "a byte"])
def test_a_damaged_image_is_unpacked_again(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = kernels.find(str(unpacked(tmp_path / "root", "6.12.9-amd64")))
    (tmp_path / "root/boot/config-6.12.9-amd64").write_text("CONFIG_PVH=y\n")
    kernel.image.write_bytes(bzimage(gzip.compress(ELF)))
    image = kernels.boot_image(kernel)
    whole = image.read_bytes()
    damaged = bytes([*whole[:99], whole[99] ^ 1, *whole[100:]])
    image.write_bytes({"empty": b"", "cut short": whole[:-100], "a byte": damaged}[damage])
    assert kernels.boot_image(kernel) == image
    assert image.read_bytes() == whole


def test_failed_unpack_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that cannot be written whole leaves nothing."""

    def full(_: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = kernels.find(str(unpacked(tmp_path / "root", "6.12.9-amd64")))
    (tmp_path / "root/boot/config-6.12.9-amd64").write_text("CONFIG_PVH=y\n")
    kernel.image.write_bytes(bzimage(gzip.compress(ELF)))
    monkeypatch.setattr(Path, "replace", full)
    assert kernels.boot_image(kernel) == kernel.image
    assert list(kernels.cache_dir().iterdir()) == []


def test_read_only_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be written only costs time."""
    (tmp_path / "cache").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = kernels.find(str(unpacked(tmp_path / "root", "6.12.9-amd64")))
    (tmp_path / "root/boot/config-6.12.9-amd64").write_text("CONFIG_PVH=y\n")
    kernel.image.write_bytes(bzimage(gzip.compress(ELF)))
    assert kernels.boot_image(kernel) == kernel.image


class Sources:
    """Debian's package sources, with a kernel 6.12.9 and, if so wanted, its headers; `got` was downloaded.

    If `split`, the image and its modules are in packages of their own, without /boot and /lib.
    """

    def __init__(self, headers: bool, split: bool = False) -> None:
        self.headers = headers
        self.split = split
        self.got: list[list[str]] = []

    def output(self, command: list[str], cwd: Path | None = None) -> str:
        version = "6.12.9-amd64"
        match command:
            case ["apt-cache", "search", *_]:
                listed = f"linux-image-{version} - Linux\n"
                return listed + (f"linux-headers-{version} - Headers\n" if self.headers else "")
            case ["apt-cache", "depends", package] if package.startswith("linux-image"):
                parts = [f"linux-{name}-{version}" for name in ("base", "binary", "modules")]
                return "".join(f"  Depends: {name}\n" for name in ("linux-base", *(parts * self.split)))
            case ["apt-cache", "depends", *_]:
                needed = ("linux-base", f"linux-image-{version}", "linux-headers-6.12.9-common")
                return "".join(f"  Depends: {name}\n" for name in (*needed, "linux-kbuild-6.12.9", "gcc-12"))
            case ["apt-get", "download", *packages]:
                assert cwd is not None
                self.got.append(packages)
                for name in packages:
                    (cwd / f"{name}.deb").touch()
            case ["dpkg-deb", "--extract", deb, into]:
                root, name = Path(into), Path(deb).stem
                if name.startswith("linux-image") and not self.split:
                    unpacked(root, version)
                elif name.startswith(("linux-binary", "linux-modules")):
                    modules = root / "usr/lib/modules" / version
                    modules.mkdir(parents=True, exist_ok=True)
                    (modules / ("vmlinuz" if name.startswith("linux-binary") else "some.ko")).touch()
                elif name == f"linux-headers-{version}":
                    headers = root / "usr/src" / name
                    headers.mkdir(parents=True)
                    (headers / "Module.symvers").touch()
                    (headers / "Makefile").write_text(
                        f"KBUILD_OUTPUT=/usr/src/{name}\n"  # from Linux 7 on
                        "include /usr/src/linux-headers-6.12.9-common/Makefile\n"
                    )
            case [depmod, "-b", root, _] if depmod.endswith("depmod"):
                where = Path(root) / "lib/modules" / version
                assert where.is_dir(), "depmod looks there alone"
                (where / "modules.dep").write_text(DEPENDS)
                (where / "modules.builtin").write_text("kernel/net/bridge/bridge.ko\n")
        return ""


@pytest.mark.parametrize("headers", [True, False], ids=["with-headers", "without-headers"])
def test_kernel_is_fetched_once_with_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: bool
) -> None:
    """A kernel is fetched once and its headers with it.

    Not the image that apt would have beside them: it is the one that was asked for.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = Sources(headers)
    monkeypatch.setattr(kernels, "_output", sources.output)
    kernel = kernels.fetch("6.12")
    assert kernels.fetch("6.12.9") == kernel
    extra = ["linux-headers-6.12.9-amd64", "linux-headers-6.12.9-common", "linux-kbuild-6.12.9"]
    assert sources.got == [["linux-image-6.12.9-amd64", *(extra if headers else ())]]
    root = kernels.fetched_dir() / "6.12.9-amd64"
    found = kernels.headers_of("6.12.9-amd64", root)
    assert (found is not None) == headers
    if found:
        common = root / "usr/src/linux-headers-6.12.9-common/Makefile"
        assert (found / "Makefile").read_text() == f"KBUILD_OUTPUT={found}\ninclude {common}\n"
    assert not list(root.glob("*.deb"))


def test_a_fetch_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rest = kernels.fetched_dir() / ".partial/usr/lib"
    rest.mkdir(parents=True)
    monkeypatch.setattr(kernels, "_output", Sources(headers=False).output)
    kernels.fetch("6.12")
    assert {path.name for path in kernels.fetched_dir().iterdir()} == {".lock", "6.12.9-amd64"}


def test_two_fetches_download_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits, and finds what the first has fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources, both, overtaken = Sources(headers=True), threading.Barrier(2), threading.Event()

    def output(command: list[str], cwd: Path | None = None) -> str:
        if command[:2] == ["apt-cache", "depends"] and "headers" in command[2]:
            with suppress(threading.BrokenBarrierError):
                both.wait(30)
        if command[:2] == ["apt-get", "download"]:
            overtaken.wait(0.5 if not sources.got else 0)
            overtaken.set()
        return sources.output(command, cwd)

    monkeypatch.setattr(kernels, "_output", output)
    with ThreadPoolExecutor(2) as threads:
        one, other = (threads.submit(kernels.fetch, "6.12") for _ in range(2))
        assert one.result() == other.result()
    assert len(sources.got) == 1


def test_a_fetch_without_a_place_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_output", Sources(headers=False).output)
    with pytest.raises(LabUnavailableError, match=r"kernels: Not a directory: make room there, or set XDG"):
        kernels.fetch("6.12")


def test_a_cache_of_a_relative_path_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The XDG specification says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert kernels.cache_dir() == Path.home() / ".cache/rdma-lab"


def test_missing_headers_are_fetched_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was fetched without headers gets them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unpacked(kernels.fetched_dir() / "6.12.9-amd64", "6.12.9-amd64")
    monkeypatch.setattr(kernels, "_output", Sources(headers=True).output)
    kernels.fetch("6.12")
    assert kernels.headers_of("6.12.9-amd64", kernels.fetched_dir() / "6.12.9-amd64")


def test_a_split_kernel_is_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Linux 7 on, Debian's image package is empty, and depends on those with binary and modules."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = Sources(headers=False, split=True)
    monkeypatch.setattr(kernels, "_output", sources.output)
    kernel = kernels.fetch("6.12")
    parts = [f"linux-{name}-6.12.9-amd64" for name in ("image", "base", "binary", "modules")]
    assert sources.got == [parts]
    assert kernel.image == kernels.fetched_dir() / "6.12.9-amd64/usr/lib/modules/6.12.9-amd64/vmlinuz"
    assert kernel.modules == kernel.image.parent


def test_a_config_beside_the_modules_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel = kernels.find(str(unpacked(tmp_path / "root", "6.12.9-amd64")))
    (kernel.modules / "config").write_text("CONFIG_PVH=y\n")
    kernel.image.write_bytes(bzimage(gzip.compress(ELF)))
    assert kernels.boot_image(kernel) != kernel.image
