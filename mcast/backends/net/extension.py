"""Extensions of providers that are not built."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]
"""The directory that Python has imported mcast from: the clone, or site-packages."""


def how_to_build(fix: str) -> str:
    """Return what to do about an extension that is not built; `fix` builds it.

    Where the clone is the current directory, or that of the script, Python imports mcast from there, without
    extensions, even if mcast is installed. To install it again does not help then.
    """
    if not (ROOT / "setup.py").is_file():
        return fix
    return f"if mcast is installed, work outside of {ROOT}, which Python has imported it from; else {fix}"
