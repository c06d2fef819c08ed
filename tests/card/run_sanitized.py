"""Runs the tests of the card, and those of endpoints on it, with the C core and the card under a sanitizer.

python -m tests.card.run_sanitized {1,thread} [PYTEST-OPTION...]      1: addresses and undefined behaviour
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence

from .build import ROOT, SANITIZE, build_core, build_exercise

LIBRARIES = {"1": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    # Python itself leaves memory behind, so leaks are not asked for; the card counts what it gave.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
ENOUGH = (
    "tests/card",
    "tests/endpoint/test_endpoint_threads.py",
    "tests/contract/test_buffers.py",
    "tests/contract/test_contract.py",
    "tests/contract/test_device_memory.py",
    "tests/contract/test_receive_memory.py",
    "tests/endpoint/test_port_events.py",
)
"""With these each line of C has run that any test of a card runs."""
TESTS = (*ENOUGH, "tests/endpoint/test_endpoint.py", "tests/endpoint/test_aio.py")


def command(sanitize: str, *options: str, tests: Sequence[str] = TESTS) -> tuple[list[str], dict[str, str]]:
    """Return the command to run, and its environment."""
    build_exercise(sanitize)
    found = [["gcc", f"-print-file-name={name}"] for name in LIBRARIES[sanitize]]
    preload = [
        subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() for ask in found
    ]
    environment = {
        **os.environ,
        **OPTIONS,
        SANITIZE: sanitize,
        "MCAST_CORE": str(build_core(sanitize)),
        "LD_PRELOAD": ":".join(preload),
        "PYTHONPATH": str(ROOT),
    }
    # ThreadSanitizer wants its own layout of the address space
    fixed = ["setarch", platform.machine(), "-R"] if sanitize == "thread" else []
    # a captured stderr (fd 2) would take the sanitizer's report with it
    pytest = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "tests.card.sanitized"]
    return [
        *fixed,
        sys.executable,
        *pytest,
        "--capture",
        "sys",
        "--timeout",
        "600",
        *options,
        *tests,
    ], environment


def main() -> int:
    run, environment = command(*sys.argv[1:])
    return subprocess.run(run, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
