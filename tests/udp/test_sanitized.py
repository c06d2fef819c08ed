"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mcast.backends.udp import _native

from ..card.build import ROOT
from ..card.run_sanitized import LIBRARIES, OPTIONS
from .sanitized import EXTENSION

SOURCES = ROOT / "mcast" / "backends" / "udp" / "csrc"
SOURCE_NAMES = "calls", "crc", "module", "ring"
FLAGS = [
    "-std=gnu11",
    "-O1",
    "-g",
    "-shared",
    "-fPIC",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover",
]
TESTS = (
    "tests/udp/test_sanitized.py",
    "tests/udp/test_filter.py",
    "tests/udp/test_calls.py",
    "tests/udp/test_offloads.py::test_batches_arrive_as_they_were_sent",
    "tests/udp/test_offloads.py::test_each_message_of_a_run_is_judged_alone",
    "tests/udp/test_offloads.py::test_a_run_past_the_last_receive_is_counted_by_message",
    "tests/udp/test_commands.py::test_a_series_of_rows_keeps_its_order",
    "tests/udp/test_commands.py::test_own_messages_come_back_unless_blocked",
    "tests/udp/test_processes.py::test_more_groups_than_a_socket_may_join",
    "tests/udp/test_processes.py::test_the_first_overflow_says_what_to_type",
)
"""They judge mutated datagrams, and send and receive by sockets, in their own process."""

if EXTENSION in os.environ:

    def test_the_extension_is_the_one_with_sanitizers() -> None:
        assert _native.__file__ == os.environ[EXTENSION]

else:

    @pytest.mark.timeout(3600)  # against hangs alone: each test in there has a limit of its own
    def test_no_datagram_breaks_a_rule_of_c(tmp_path: Path, long: bool) -> None:
        extension = tmp_path / "_native.so"
        include = sysconfig.get_path("include")
        sources = [SOURCES / f"{name}.c" for name in SOURCE_NAMES]
        subprocess.run(["gcc", *FLAGS, f"-I{include}", "-o", extension, *sources], check=True, timeout=500)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        # a captured stderr (fd 2) would take the sanitizer's report with it
        command += ["-p", "tests.udp.sanitized", "--capture", "sys", *(["--long"] if long else []), *TESTS]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        preload = [printed("gcc", f"-print-file-name={name}") for name in LIBRARIES["1"]]
        kept |= {
            **OPTIONS,
            EXTENSION: str(extension),
            "LD_PRELOAD": ":".join(preload),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


def printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
