"""How pip installs the package and its extras, and which version this is."""

from __future__ import annotations

DISTRIBUTION = "rdma-mcast"
"""The package's name for pip, because on PyPI the name mcast belongs to another project."""


VERSION = "0.1.0.dev0"
"""The version, which stands nowhere else but in CITATION.cff."""


def line(extra: str) -> str:
    """The line to type for an optional part of the package, such as `pip install 'rdma-mcast[yaml]'`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
