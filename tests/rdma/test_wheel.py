"""One wheel serves machines with and without rdma-core: built once, installed in two clean environments."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from rdma_lab import LabMachine

from ..wheels import ROOT, built

LIBRARIES = re.compile(r"=> (\S*/lib(?:rdmacm|ibverbs)\.so\.1)$", re.MULTILINE)
HIDE = """
mkdir -p layer && mount -t tmpfs tmpfs layer && mkdir layer/upper layer/work &&
mount -t overlay overlay -o "lowerdir=$0,upperdir=$PWD/layer/upper,workdir=$PWD/layer/work" "$0" &&
rm "$0/librdmacm.so.1" "$0/libibverbs.so.1" && exec "$@"
"""
"""Runs a command that does not find the libraries of the directory $0; nobody else sees a difference."""
LEAVES_THE_GIL_OFF = """
import sys
import mcast
import mcast.arguments._rows
import mcast.cast._plane
from mcast.backends.rdma.backend import RdmaBackend
for name in ("sim-roce", "sim-ib"):
    mcast.open_backend(name).close()
assert not sys._is_gil_enabled()
"""
PART = "test_join_ex.py"
"""Part of the suite that is run from the wheel; tests/lab runs all of it from the sources."""
OPTIONS = (
    "-q -c /dev/null --rootdir / --import-mode=importlib -p no:cacheprovider -p mcast.conformance.plugin"
)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def lab_wheel(clone: Path) -> Path:
    """The wheel of rdma-lab."""
    found = built(clone / "lab")
    assert found.name.endswith("-py3-none-any.whl")
    return found


def install(wheel: Path, where: Path, python: str = sys.executable, extra: str = "[conformance]") -> Path:
    """A new environment of that Python with the wheel and what it needs; its Python."""
    subprocess.run([python, "-m", "venv", "--without-pip", where], check=True, timeout=500)
    pip = (python, "-m", "pip", "--python", where)  # a pip for each would take most of the time
    # Of what is installed little is imported: only that is compiled, when it is.
    done = run(*pip, "install", "-q", "--no-compile", f"{wheel}{extra}", cwd=where)
    assert done.returncode == 0, done.stderr
    return where / "bin" / "python"


def assert_demo_works(*command: str | Path, cwd: Path) -> None:
    demo = run(*command, "demo", "--size", "1M", cwd=cwd)
    assert demo.returncode == 0, demo.stderr
    assert demo.stdout.splitlines()[-1].startswith("demo: 3/3 receivers verified")


@pytest.mark.long
def test_what_goes_to_pypi_is_audited_and_works(tmp_path: Path) -> None:
    made = tmp_path / "made"
    done = run("make", "-s", "wheel", f"WHEELS={made}", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (with_c,) = made.glob("*-abi3-*x86_64.whl")
    (pure,) = made.glob("rdma_mcast-*-any.whl")
    for wheel in (with_c, pure):
        assert_demo_works(install(wheel, tmp_path / wheel.stem), "-m", "mcast", cwd=tmp_path)
    for number, given in enumerate(os.environ.get("FREE_THREADED", "").split()):
        abi = run(
            given, "-c", "import sys; print('cp%d%dt' % sys.version_info[:2])", cwd=tmp_path
        ).stdout.strip()
        (own,) = made.glob(f"*-{abi}-*.whl")
        python = install(own, tmp_path / str(number), given)
        done = run(python, "-W", "error", "-c", LEAVES_THE_GIL_OFF, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert_demo_works(python, "-W", "error::RuntimeWarning", "-m", "mcast", cwd=tmp_path)


def test_the_wheel_is_for_each_python(wheel: Path) -> None:
    assert "-cp311-abi3-linux" in wheel.name


def test_the_suite_is_in_the_wheel_and_no_link(wheel: Path) -> None:
    """`mcast/conformance` is a link to `tests/conformance`; the pages of facts in it are links to `docs`."""
    suite = ROOT / "tests" / "conformance"
    wanted = {one.name: one.read_bytes() for one in suite.iterdir() if one.suffix in {".py", ".md", ".html"}}
    with ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.startswith("mcast/conformance/")]
        assert {Path(name).name: packed.read(name) for name in names} == wanted
        assert not any(name.startswith("tests/") for name in packed.namelist())


def test_the_wheel_has_no_lab_and_no_kernel_code(wheel: Path) -> None:
    with ZipFile(wheel) as packed:
        names = packed.namelist()
    assert [
        name for name in names if "rdma_lab" in name or "softib" in name or name.endswith((".ko", "Kbuild"))
    ] == []
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"mcast", "rdma_mcast"}


def test_the_wheel_of_the_lab_is_whole(lab_wheel: Path) -> None:
    """All that is tracked, its licence, and nothing of mcast."""
    sources = {
        one for one in (ROOT / "lab" / "rdma_lab").rglob("*") if one.is_file() and one.suffix != ".pyc"
    }
    wanted = {str(one.relative_to(ROOT / "lab")): one.read_bytes() for one in sources}
    with ZipFile(lab_wheel) as packed:
        names = [name for name in packed.namelist() if ".dist-info/" not in name]
        assert {name: packed.read(name) for name in names} == wanted
        (licence,) = (name for name in packed.namelist() if name.endswith("/LICENSE"))
        assert packed.read(licence) == (ROOT / "LICENSE").read_bytes()
        (metadata,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
        assert not re.search("^Requires-Dist: (rdma-)?mcast", packed.read(metadata).decode(), re.M)
    assert {"rdma_lab/softib/Kbuild", "rdma_lab/opensm/no_send_only.c", "rdma_lab/py.typed"} <= wanted.keys()


def test_the_lab_is_installed_alone(lab_wheel: Path, tmp_path: Path) -> None:
    python = install(lab_wheel, tmp_path / "lab", extra="")
    done = run(python.with_name("rdma-lab"), "check", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"virtme-ng +in this Python", done.stdout)
    assert run(python, "-c", "import mcast", cwd=tmp_path).returncode == 1


def test_the_manual_pages_are_where_man_looks(wheel: Path) -> None:
    with ZipFile(wheel) as packed:
        found = {Path(name).name for name in packed.namelist() if "/data/share/man/man1/" in name}
    assert found == {page.name for page in (ROOT / "man").iterdir()}
    assert "mcast.1" in found


@pytest.mark.long
def test_suite_passes_on_real_devices(wheel: Path, tmp_path: Path) -> None:
    """With the libraries the suite passes on real devices."""
    python = install(wheel, tmp_path / "with")
    where = run(
        python, "-c", "import mcast.conformance as c; print(*c.__path__)", cwd=tmp_path
    ).stdout.strip()
    assert where.startswith(str(tmp_path))

    command = [str(python), "-m", "pytest", *OPTIONS.split(), "--require-backend", "rdma", f"{where}/{PART}"]
    output = tmp_path / "output"
    with output.open("wb") as out:
        result = LabMachine().run(command, cwd=tmp_path, output_timeout=300, stdout=out, stderr=out)
    assert result.exit_code == 0, output.read_text()
    assert re.search(r"\b\d+ passed", output.read_text()), output.read_text()

    assert_demo_works(python, "-m", "mcast", cwd=tmp_path)


def test_simulator_works_without_libraries(wheel: Path, tmp_path: Path) -> None:
    """Without the libraries info explains and the simulator works."""
    python = install(wheel, tmp_path / "without")
    libraries = [Path(found) for found in LIBRARIES.findall(run("/sbin/ldconfig", "-p", cwd=tmp_path).stdout)]
    assert libraries, "there is nothing to hide: apt-get install librdmacm1 libibverbs1"
    without = ["unshare", "-rm", "sh", "-c", HIDE, str(libraries[0].parent), str(python), "-m", "mcast"]

    info = run(*without, "info", "--json", cwd=tmp_path)
    assert info.returncode == 0, info.stderr
    rdma = json.loads(info.stdout)["providers"]["rdma"]
    assert (rdma["available"], rdma["reason"]) == (False, "library missing")
    said = r"lib(rdmacm|ibverbs)\.so\.1: cannot open shared object file: No such file or directory"
    assert re.search(said, rdma["detail"]), "the loader's own text"
    assert "apt-get install" in rdma["fix"]

    assert_demo_works(*without, cwd=tmp_path)
