"""Name, version and extras of the package for pip, and the system that it needs."""

from __future__ import annotations

import sys

DISTRIBUTION = "rdma-mcast"
"""The package's name for pip, because on PyPI the name mcast belongs to another project."""


VERSION = "0.1.0rc1"
"""The version, which stands nowhere else but in CITATION.cff."""

__version__ = VERSION


def line(extra: str) -> str:
    """The line to type for an optional part of the package, such as `pip install 'rdma-mcast[yaml]'`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


NEEDS_LINUX = (
    f"mcast needs Linux, and this is {sys.platform}: neither cards nor the simulator work here; run it "
    "on Linux, which may be a container, a virtual machine or WSL 2"
)
"""Next step on another system, where pip may install the package, and pytest then loads its plugin."""


def require_linux() -> None:
    """Raise ImportError on another system, before a call that only Linux has fails."""
    if sys.platform != "linux":
        raise ImportError(NEEDS_LINUX)
