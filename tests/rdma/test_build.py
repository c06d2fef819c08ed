"""Builds by setup.py on a host with and without the headers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = {"CFLAGS": "-nostdinc"}
"""No header is found: the libraries' least of all."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with what an earlier build may have left in build/."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    rdma = Path("mcast/backends/rdma")
    shutil.copytree(ROOT / rdma, tree / rdma, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    arguments, udp, cast = (Path("mcast", name) for name in ("arguments", "backends/udp", "cast"))
    for other in (arguments, udp, cast):
        shutil.copytree(ROOT / other, tree / other, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tree / "mcast" / "__init__.py").touch()
    (tree / "mcast" / "errors").mkdir()
    shutil.copy(ROOT / "mcast" / "errors" / "install.py", tree / "mcast" / "errors")
    for build in ("lib", "lib.linux-x86_64-cpython-311"):
        for made in (
            rdma / "_native.abi3.so",
            arguments / "_rows.abi3.so",
            udp / "_native.abi3.so",
            cast / "_plane.abi3.so",
        ):
            stale = tree / "build" / build / made
            stale.parent.mkdir(parents=True, exist_ok=True)
            stale.write_bytes(b"from an earlier build")
    return tree


PLAIN = {"arguments/_rows.abi3.so", "cast/_plane.abi3.so", "udp/_native.abi3.so"}
"""Modules that need only a compiler and Python's headers."""


def build(tree: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", str(out)]
    env = {**os.environ, "CFLAGS": "-O0", **environment}  # none of it is run, and optimizing takes longest
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=500)


def extensions(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        return {"/".join(Path(name).parts[-2:]): archive.read(name) for name in names}


def wheel_in(out: Path) -> Path:
    (wheel,) = out.glob("*.whl")
    return wheel


def test_without_headers_the_wheel_is_pure(tree: Path, tmp_path: Path) -> None:
    done = build(tree, tmp_path, **HIDDEN)
    assert done.returncode == 0, done.stderr
    assert "mcast: without the rdma extension" in done.stderr
    assert wheel_in(tmp_path).name.endswith("-py3-none-any.whl")
    assert extensions(wheel_in(tmp_path)) == {}


WITHOUT_GIL = """
import runpy, sys, sysconfig
sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1
sys.hexversion = 0x030D0000
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
"""


def test_wheel_is_pure_for_old_free_threading(tree: Path, tmp_path: Path) -> None:
    """For an old python without a gil the wheel is pure."""
    command = [sys.executable, "-c", WITHOUT_GIL, "-q", "bdist_wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "without a GIL it takes CPython 3.14 or later" in done.stderr
    assert wheel_in(tmp_path).name.endswith("-py3-none-any.whl")


def test_wheel_without_the_rdma_extension(tree: Path, tmp_path: Path) -> None:
    """Switched off the wheel has what needs no libraries."""
    done = build(tree, tmp_path, MCAST_RDMA="0")
    assert done.returncode == 0, done.stderr
    assert "mcast: without the rdma extension" in done.stderr
    assert_serves_every_python(wheel_in(tmp_path), PLAIN)


def test_with_headers_one_wheel_serves_every_python(tree: Path, tmp_path: Path) -> None:
    done = build(tree, tmp_path, MCAST_RDMA="1")
    assert done.returncode == 0, done.stderr
    assert_serves_every_python(wheel_in(tmp_path), {*PLAIN, "rdma/_native.abi3.so"})


def assert_serves_every_python(wheel: Path, names: set[str]) -> None:
    assert "-cp311-abi3-linux_" in wheel.name
    found = extensions(wheel)
    assert found.keys() == names
    assert all(content.startswith(b"\x7fELF") for content in found.values())


def test_headers_that_are_too_old_count_as_missing(tree: Path, tmp_path: Path) -> None:
    for name in ("infiniband", "rdma"):
        shutil.copytree(f"/usr/include/{name}", tmp_path / "include" / name)
    verbs = tmp_path / "include" / "infiniband" / "verbs.h"
    verbs.write_text(verbs.read_text().replace("ibv_reg_dmabuf_mr", "ibv_reg_mr_of_old"))
    done = build(tree, tmp_path / "wheel", CFLAGS=f"-O0 '-I{tmp_path / 'include'}'")
    assert done.returncode == 0, done.stderr
    assert "mcast: without the rdma extension (infiniband/verbs.h has no ibv_reg_dmabuf_mr" in done.stderr
    assert_serves_every_python(wheel_in(tmp_path / "wheel"), PLAIN)


def test_required_headers_are_named(tree: Path, tmp_path: Path) -> None:
    """Required but without headers it stops and names the packages."""
    done = build(tree, tmp_path, MCAST_RDMA="1", **HIDDEN)
    assert done.returncode != 0
    assert "rdma/rdma_cma.h" in done.stderr
    assert "apt-get install gcc libc6-dev librdmacm-dev libibverbs-dev" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_is_said(tree: Path, tmp_path: Path) -> None:
    done = build(tree, tmp_path, MCAST_RDMA="1", CC="/nowhere/cc")
    assert done.returncode != 0
    assert "no C compiler" in done.stderr


def test_another_word_is_refused(tree: Path, tmp_path: Path) -> None:
    done = build(tree, tmp_path, MCAST_RDMA="yes")
    assert done.returncode != 0
    assert "it is auto, 1 or 0" in done.stderr
