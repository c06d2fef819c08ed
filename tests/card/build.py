"""Builds the card: one library that stands in for librdmacm and libibverbs."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.c"))
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Werror")
SANITIZERS = {
    "asan": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"),
    "tsan": ("-fsanitize=thread", "-fno-omit-frame-pointer"),
}


def build(sanitizer: str = "") -> Path:
    """The library, made anew only if a source has changed. `sanitizer` is "asan", "tsan" or nothing."""
    script = f"-Wl,--version-script={HERE / 'card.map'}"
    flags = ["-std=gnu11", "-shared", "-fPIC", "-O2", "-g", "-pthread", *WARNINGS, script]
    flags += SANITIZERS.get(sanitizer, ())
    inputs = [*SOURCES, HERE / "card.h", HERE / "card.map"]
    text = repr(flags).encode() + b"".join(path.read_bytes() for path in inputs)
    library = HERE.parents[1] / "build" / "card" / hashlib.sha256(text).hexdigest()[:16] / "card.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        half = library.with_suffix(f".{os.getpid()}")  # another process may build it, too
        subprocess.run(["cc", *flags, "-o", half, *SOURCES], check=True, timeout=120)
        half.replace(library)
    return library
