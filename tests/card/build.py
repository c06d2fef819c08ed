"""Builds the card, which stands in for librdmacm and libibverbs, and the C core with sanitizers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CSRC = HERE / "csrc"
SOURCES = sorted(CSRC.glob("*.c"))
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Werror")
SANITIZE = "MCAST_SANITIZE"
"""The variable that build_native.py reads: empty, or a key of its SANITIZERS."""


def build(sanitize: str = os.environ.get(SANITIZE, ""), without: Sequence[str] = ()) -> Path:
    """The library; `without` functions that old ones do not have."""
    script = f"-Wl,--version-script={CSRC / 'card.map'}"
    hidden = [f"-D{name}=hidden_{name}" for name in without]
    return _made("card.so", SOURCES, sanitize, "-shared", "-fPIC", script, *hidden)


def build_exercise(sanitize: str = os.environ.get(SANITIZE, "")) -> Path:
    """The program that asks the card in C."""
    card = build(sanitize)
    here = f"-Wl,-rpath,{card.parent}"
    return _made("exercise", [HERE / "exercise.c", card], sanitize, f"-I{CSRC}", here)


def _made(name: str, sources: list[Path], sanitize: str, *options: str) -> Path:
    """Made anew only if a source, or an option, has changed."""
    from mcast.backends.rdma.csrc.build_native import SANITIZERS  # takes a while

    flags = ["-std=gnu11", "-O2", "-g", "-pthread", *WARNINGS, *options, *SANITIZERS.get(sanitize, [])]
    inputs = [*sources, *sorted(CSRC.glob("*.h")), CSRC / "card.map"]
    text = repr(flags).encode() + b"".join(path.read_bytes() for path in inputs)
    found = ROOT / "build" / "card" / hashlib.sha256(text).hexdigest()[:16] / name
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        half = found.with_suffix(f".{os.getpid()}")  # another process may build it, too
        command: list[str | Path] = ["cc", *flags, "-o", half, *sources]
        subprocess.run(command, check=True, timeout=500)
        half.replace(found)
    return found


def build_core(sanitize: str) -> Path:
    """The extension `_native` with that sanitizer, beside the one that is installed."""
    home = ROOT / "build" / "sanitized" / sanitize
    command: list[str | Path] = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["-b", home, "-t", home / "objects"]
    subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, SANITIZE: sanitize, "MCAST_RDMA": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=500,
    )
    (core,) = (home / "mcast" / "backends" / "rdma").glob("_native*.so")
    return core
