"""The InfiniBand module's source: warnings, sparse, checkpatch, and the order of its files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from rdma_lab import driver, kernels

IGNORED = "MACRO_ARG_REUSE"
"""sizeof and offsetof evaluate nothing."""
MAX_LINE = 120

pytestmark = pytest.mark.long


class Build(NamedTuple):
    folder: Path
    output: str
    """Of make and the compilers."""


def headers() -> Path:
    found = driver.headers(kernels.find())
    if found is None:
        pytest.fail("these tests compile a kernel module: apt-get install linux-headers-amd64", pytrace=False)
    return found


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The module, compiled with more warnings (W=1) and checked by sparse (C=2)."""
    if not shutil.which("sparse"):
        pytest.fail("these tests check the module with sparse: apt-get install sparse", pytrace=False)
    folder = tmp_path_factory.mktemp("softib") / "softib"
    shutil.copytree(driver.SOURCES, folder)
    command = ["make", "-C", str(headers()), f"M={folder}", f"-j{os.cpu_count() or 1}", "W=1", "C=2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        [*command, "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return Build(folder, done.stdout + done.stderr)


def test_compilers_and_sparse_are_silent(build: Build) -> None:
    """But for what they say of the kernel's own headers."""
    said = re.findall(rf"^{build.folder}/\S+:\d+:\d+: (?:warning|error).*", build.output, re.MULTILINE)
    assert said == []
    assert build.output.count("  CHECK ") >= len(list(driver.SOURCES.glob("*.c")))


def symbols(objects: Path, kinds: str) -> set[str]:
    done = subprocess.run(["nm", str(objects)], capture_output=True, text=True, check=True)
    return set(re.findall(rf"[{kinds}] (softib_\w+)$", done.stdout, re.MULTILINE))


def test_files_call_only_those_before_them(build: Build) -> None:
    """In the order of Kbuild, which softib.h explains; so there is no circle."""
    names = re.findall(
        r"(\w+)\.o", " ".join(re.findall(r"^softib-y.*", (build.folder / "Kbuild").read_text(), re.M))
    )
    assert sorted(names) == sorted(
        path.stem for path in build.folder.glob("*.c") if not path.stem.endswith(".mod")
    )
    defined: set[str] = set()
    for name in names:
        objects = build.folder / f"{name}.o"
        defined |= symbols(objects, "TRD")
        assert symbols(objects, "U") <= defined, f"{name}.c calls a file that comes later in Kbuild"


def test_checkpatch_is_silent() -> None:
    """$CHECKPATCH, or the kernel's in its headers: Ubuntu's have it, Debian's do not."""
    script = Path(os.environ.get("CHECKPATCH") or headers() / "scripts/checkpatch.pl")
    if not script.exists():
        pytest.skip("the installed headers have no checkpatch.pl: set CHECKPATCH to its path")
    options = ["--no-tree", "--strict", "--file", "--terse", "--no-summary", f"--max-line-length={MAX_LINE}"]
    files = sorted(str(path) for path in driver.SOURCES.glob("*.[ch]"))
    command = ["perl", str(script), *options, f"--ignore={IGNORED}", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert re.findall(r"^.*: (?:ERROR|WARNING|CHECK):.*", done.stdout, re.MULTILINE) == []
    assert done.returncode == 0, done.stderr
