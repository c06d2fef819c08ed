"""Builds the card: one library that stands in for librdmacm and libibverbs; and the C core with sanitizers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from mcast.backends.rdma.csrc.build_native import SANITIZERS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = sorted(HERE.glob("*.c"))
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Werror")
SANITIZE = "MCAST_SANITIZE"
"""The variable that build_native.py reads: empty, or a key of SANITIZERS."""


def build(sanitize: str = os.environ.get(SANITIZE, "")) -> Path:
    """The library, made anew only if a source has changed."""
    script = f"-Wl,--version-script={HERE / 'card.map'}"
    flags = ["-std=gnu11", "-shared", "-fPIC", "-O2", "-g", "-pthread", *WARNINGS, script]
    flags += SANITIZERS.get(sanitize, [])
    inputs = [*SOURCES, HERE / "card.h", HERE / "card.map"]
    text = repr(flags).encode() + b"".join(path.read_bytes() for path in inputs)
    library = ROOT / "build" / "card" / hashlib.sha256(text).hexdigest()[:16] / "card.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        half = library.with_suffix(f".{os.getpid()}")  # another process may build it, too
        subprocess.run(["cc", *flags, "-o", half, *SOURCES], check=True, timeout=120)
        half.replace(library)
    return library


def build_core(sanitize: str) -> Path:
    """The extension `_native` with that sanitizer, beside the one that is installed."""
    home = ROOT / "build" / "sanitized" / sanitize
    command = [sys.executable, "setup.py", "-q", "build_ext", "-b", home, "-t", home / "objects"]
    subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, SANITIZE: sanitize, "MCAST_RDMA": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=300,
    )
    (core,) = (home / "mcast" / "backends" / "rdma").glob("_native*.so")
    return core
