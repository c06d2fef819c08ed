"""Builds `mcast.backends.rdma._native` (cffi, API mode, stable ABI with a GIL). It links libc alone.

MCAST_SANITIZE=1 builds it with AddressSanitizer and UndefinedBehaviorSanitizer, MCAST_SANITIZE=thread with
ThreadSanitizer.
"""

import os
import sysconfig
from pathlib import Path

from cffi import FFI  # type: ignore[import-untyped]

HERE = Path(__file__).parent
SOURCES = sorted(HERE.rglob("*.c"))
FRAMES = ["-fno-omit-frame-pointer"]
SANITIZERS = {
    "1": ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", *FRAMES],
    "thread": ["-fsanitize=thread", *FRAMES],
}
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-g"]
HIDDEN = ["-fvisibility=hidden"]
"""Keeps other libraries' functions of the same names from replacing the extension's own."""
EXTRA = SANITIZERS.get(os.environ.get("MCAST_SANITIZE", ""), [])

ffibuilder: FFI = FFI()
ffibuilder.cdef((HERE / "cdefs.h").read_text())
ffibuilder.set_source(
    "mcast.backends.rdma._native",
    '#include "native.h"\n',
    # relative to setup.py: setuptools refuses absolute paths
    sources=[os.path.relpath(path) for path in SOURCES],
    depends=[os.path.relpath(path) for path in sorted(HERE.rglob("*.h"))],
    include_dirs=[os.path.relpath(HERE)],
    extra_compile_args=[*FLAGS, *HIDDEN, *EXTRA],
    extra_link_args=["-ldl", *EXTRA],
    py_limited_api=not sysconfig.get_config_var("Py_GIL_DISABLED"),
)
