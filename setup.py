"""Decides whether the rdma extension is built; everything else stands in pyproject.toml.

MCAST_RDMA=auto  build it where a C compiler and the headers are, else make an honest pure wheel (default)
MCAST_RDMA=1     build it, or stop and say what is missing
MCAST_RDMA=0     do not build it
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

HEADERS = ("rdma/rdma_cma.h", "infiniband/verbs.h")
FIX = "apt-get install gcc libc6-dev librdmacm-dev libibverbs-dev"


def missing() -> str:
    """What the extension lacks to be built here; '' when nothing."""
    if sys.platform != "linux":
        return f"{sys.platform} has no RDMA verbs (Linux only)"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    source = "".join(f"#include <{header}>\n" for header in HEADERS)
    flags = shlex.split(os.environ.get("CFLAGS", ""))
    try:
        probe = subprocess.run(
            [*compiler, *flags, "-E", "-x", "c", "-o", os.devnull, "-"],
            input=source,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        return f"no C compiler: {error}"
    errors = (line for line in probe.stderr.splitlines() if "error" in line)
    return next(errors, "the compiler fails") if probe.returncode else ""


def wanted() -> bool:
    """Whether to build the extension, as MCAST_RDMA says."""
    choice = os.environ.get("MCAST_RDMA", "auto")
    if choice not in ("auto", "1", "0"):
        raise SystemExit(f"MCAST_RDMA is {choice!r}: it is auto, 1 or 0")
    lack = "switched off by MCAST_RDMA=0" if choice == "0" else missing()
    if lack and choice == "1":
        raise SystemExit(f"MCAST_RDMA=1, but the rdma extension cannot be built: {lack}\nTry: {FIX}")
    if lack:
        print(f"mcast: without the rdma extension ({lack})", file=sys.stderr)
    return not lack


# An extension left in build/ by an earlier build would be packed unnoticed.
for stale in Path("build").glob("*/mcast/backends/rdma/_native*"):
    stale.unlink()

if wanted():
    setup(
        cffi_modules=["mcast/backends/rdma/csrc/build_native.py:ffibuilder"],
        options={"bdist_wheel": {"py_limited_api": "cp311"}},
    )
else:
    setup()
