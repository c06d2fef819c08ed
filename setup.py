"""Decides which extensions are built; everything else stands in pyproject.toml.

`mcast.arguments._rows`, `mcast.cast._plane` and `mcast.backends.udp._native` are built where a C compiler and
Python's headers are. Elsewhere Python does the same as the first two, slower, and the provider `udp` is not
available. The rdma extension is built as MCAST_RDMA says:

MCAST_RDMA=auto  build it where a C compiler and the headers are, else leave it out (default)
MCAST_RDMA=1     build it, or stop and say what is missing
MCAST_RDMA=0     do not build it
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

HEADERS = ("rdma/rdma_cma.h", "infiniband/verbs.h")
NEWEST = "ibv_reg_dmabuf_mr"
"""What the rdma extension uses of rdma-core's headers and older ones have not: it came with version 34."""
PYTHON = ("Python.h",)
NO_GIL = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
"""Such a Python has no stable ABI: a wheel for it is for that version alone."""

IN_C = [
    Extension(
        "mcast.arguments._rows",
        ["mcast/arguments/csrc/rows.c"],
        extra_compile_args=["-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-g"],
        py_limited_api=not NO_GIL,
    ),
    Extension(
        "mcast.cast._plane",
        [f"mcast/cast/csrc/{name}.c" for name in ("frame", "module", "place")],
        depends=[f"mcast/cast/csrc/{name}.h" for name in ("frame", "place", "plane")],
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-g"],
        py_limited_api=not NO_GIL,
    ),
    Extension(
        "mcast.backends.udp._native",
        [f"mcast/backends/udp/csrc/{name}.c" for name in ("calls", "crc", "module", "ring")],
        depends=[f"mcast/backends/udp/csrc/{name}.h" for name in ("crc", "object", "ring")],
        libraries=["dl"],  # for dlopen before glibc 2.34
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-g"],
        py_limited_api=not NO_GIL,
    ),
]
FIX = "apt-get install gcc libc6-dev librdmacm-dev libibverbs-dev"


def missing(headers: tuple[str, ...], name: str = "") -> str:
    """What an extension that includes the headers, and uses that name of theirs, lacks to be built here; ''
    when nothing."""
    if NO_GIL and sys.hexversion < 0x030E0000:
        return "without a GIL it takes CPython 3.14 or later"
    if sys.platform != "linux":
        return f"{sys.platform} has no RDMA verbs (Linux only)"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    source = "".join(f"#include <{header}>\n" for header in headers)
    flags = [*shlex.split(os.environ.get("CFLAGS", "")), "-I", sysconfig.get_path("include")]
    try:
        probe = subprocess.run(
            [*compiler, *flags, "-E", "-x", "c", "-"],
            input=source,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"no C compiler: {error}"
    errors = (line for line in probe.stderr.splitlines() if "error" in line)
    if probe.returncode:
        return next(errors, "the compiler fails")
    return "" if name in probe.stdout else f"{headers[-1]} has no {name}, and is of an rdma-core before 34"


def wanted() -> bool:
    """Whether to build the rdma extension, as MCAST_RDMA says."""
    choice = os.environ.get("MCAST_RDMA", "auto")
    if choice not in ("auto", "1", "0"):
        raise SystemExit(f"MCAST_RDMA is {choice!r}: it is auto, 1 or 0")
    lack = "switched off by MCAST_RDMA=0" if choice == "0" else missing(HEADERS, NEWEST)
    if lack and choice == "1":
        raise SystemExit(f"MCAST_RDMA=1, but the rdma extension cannot be built: {lack}\nTry: {FIX}")
    if lack:
        print(f"mcast: without the rdma extension ({lack})", file=sys.stderr)
    return not lack


# An extension left in build/ by an earlier build would be packed unnoticed.
for made in ("arguments/_rows", "backends/rdma/_native", "backends/udp/_native", "cast/_plane"):
    for stale in Path("build").glob(f"*/mcast/{made}*"):
        stale.unlink()

with_rdma = wanted()
extensions = [] if missing(PYTHON) else IN_C
with_cffi = {"cffi_modules": ["mcast/backends/rdma/csrc/build_native.py:ffibuilder"]} if with_rdma else {}
has_c = bool(extensions) or with_rdma
abi3 = {"options": {"bdist_wheel": {"py_limited_api": "cp311"}}} if has_c and not NO_GIL else {}
setup(ext_modules=extensions, **with_cffi, **abi3)
