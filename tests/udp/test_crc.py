"""The library that makes CRCs: ISA-L if it is installed, else zlib, else the provider is unavailable."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import pytest

from mcast.backends.udp import _native

from ..card.build import ROOT
from ..sanitized import EXTENSION
from .test_sanitized import SOURCE_NAMES, SOURCES

WANTED = "MCAST_TEST_CRC_BY"
"""The library that a process of its own is to find."""


def test_the_library_is_the_best_that_is_there() -> None:
    """packages.txt brings ISA-L, so that both ways are tested."""
    assert os.environ.get(WANTED, "ISA-L") == _native.CRC_BY


@pytest.mark.parametrize("size", [0, 1, 15, 16, 63, 64, 65, 127, 128, 1000, 4111, 70_000])
def test_the_crc_is_that_of_zlib(size: int) -> None:
    data = os.urandom(size)
    assert _native.crc32(data) == zlib.crc32(data)


@pytest.mark.skipif(WANTED in os.environ, reason="this is the process without ISA-L")
def test_zlib_takes_the_place_of_isal(tmp_path: Path) -> None:
    """A file that is no library hides ISA-L; the rules, and a file between two processes, hold without it."""
    (tmp_path / "libisal.so.2").touch()
    here = "tests/udp/test_crc.py", "tests/udp/test_filter.py"
    there = "tests/udp/test_processes.py::test_answers_reach_the_process_that_asked"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *here, there]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    kept |= {"LD_LIBRARY_PATH": str(tmp_path), WANTED: "zlib"}
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_without_both_it_says_what_to_install(tmp_path: Path) -> None:
    """An extension that finds no library at all is there, but `udp` is not."""
    extension, no_library = tmp_path / "_native.so", tmp_path / "no_library.c"
    no_library.write_text("void *__wrap_dlopen(const char *name, int how) { return 0; }")
    flags = ["-std=gnu11", "-shared", "-fPIC", "-Wl,--wrap=dlopen", f"-I{sysconfig.get_path('include')}"]
    sources = [no_library, *(SOURCES / f"{name}.c" for name in SOURCE_NAMES)]
    subprocess.run(["gcc", *flags, "-o", extension, *sources], check=True, timeout=300)
    program = (
        "import importlib.machinery, importlib.util, sys\n"
        "from mcast.api import backend_status\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'mcast.backends.udp._native':\n"
        "            loader = importlib.machinery.ExtensionFileLoader(name, sys.argv[1])\n"
        "            return importlib.util.spec_from_file_location(name, sys.argv[1], loader=loader)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "found = backend_status('udp')\n"
        "print(found.available, found.reason.name, found.detail, found.fix)\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in (EXTENSION, "LD_PRELOAD")}
    command = [sys.executable, "-c", program, str(extension)]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("False NO_LIBRARY there is neither libisal.so.2 nor libz.so.1")
    assert "apt-get install libisal2" in done.stdout
