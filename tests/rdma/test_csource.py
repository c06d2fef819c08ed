"""The C core compiles without a warning, and cppcheck finds nothing in it."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import mcast.backends.rdma

FOLDERS = [
    Path(mcast.__file__).parent / "interrupts" / "csrc",
    Path(mcast.__file__).parent / "arguments" / "csrc",
    Path(mcast.backends.rdma.__file__).parent / "csrc",
]
SOURCES = sorted(source for folder in FOLDERS for source in folder.rglob("*.c"))
STRICTER = ("-Wshadow", "-Wstrict-prototypes")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def test_there_are_sources() -> None:
    assert {"rows.c", "cm.c", "dynload.c", "lease.c"} <= {source.name for source in SOURCES}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.parent.name}/{source.name}")
def test_a_source_compiles_without_a_warning(source: Path) -> None:
    """Here and not in the build's own flags: a newer compiler must not stop a user's installation."""
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", *STRICTER)
    done = run("gcc", *flags, f"-I{sysconfig.get_path('include')}", "-c", "-o", "/dev/null", source)
    assert done.returncode == 0, done.stderr


def test_cppcheck_finds_nothing() -> None:
    if shutil.which("cppcheck") is None:
        pytest.fail("cppcheck is missing: apt-get install cppcheck", pytrace=False)
    checks = "--enable=warning,performance,portability"
    macros = ("-DPy_BEGIN_ALLOW_THREADS={", "-DPy_END_ALLOW_THREADS=}", "-DPy_RETURN_NONE=return 0")
    template = "--template={severity}: {file}:{line}: {message} [{id}]"
    done = run("cppcheck", checks, *macros, "--std=c11", "--inline-suppr", "--quiet", template, *FOLDERS)
    assert done.returncode == 0, done.stdout + done.stderr
    # Versions since 2.11 advise on their own options, at the severity "information".
    assert [line for line in done.stderr.splitlines() if not line.startswith("information:")] == []
