"""The lines to type that install the package install this one, with extras that exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from mcast.errors.install import DISTRIBUTION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
_ANOTHERS = re.compile(r"(?:install [^\n`]*|[\"'`])(?<![\w-])mcast(?:\[|(?= *[=<>~]=?\d))")
"""mcast as pip's name for a package: with extras, or with a version."""


@pytest.mark.parametrize(
    "line", ["pip install 'mcast[lab]'", "pip install -q mcast==1.3", 'docs = ["mcast[conformance]"]']
)
def test_the_name_of_the_other_project_is_found(line: str) -> None:
    assert _ANOTHERS.search(line)


def test_no_line_installs_another_project() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone: which files are the project's own is not known")
    listing = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]  # another user's clone, too
    tracked = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
    files = [ROOT / name for name in tracked.stdout.split("\0") if name and ROOT / name != Path(__file__)]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.is_file()
        for match in _ANOTHERS.finditer(path.read_text("utf-8", "ignore"))
    ]
    assert not found


def test_each_extra_that_a_message_names_exists() -> None:
    named = {
        extra
        for path in (ROOT / "mcast").rglob("*.py")
        for extra in re.findall(r"install\.line\([\"'](\w+)", path.read_text("utf-8"))
    }
    assert named
    assert named <= set(PROJECT["optional-dependencies"])
