"""How pip installs the package and its extras."""

from __future__ import annotations

DISTRIBUTION = "rdma-mcast"
"""The package's name for pip, because on PyPI the name mcast belongs to another project."""


def line(extra: str) -> str:
    """The line to type for an optional part of the package, such as `pip install 'rdma-mcast[yaml]'`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
