"""Consistency of a release: one version, its notes, and what it breaks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml

import mcast

ROOT = Path(__file__).parents[2]
FILES = ("CHANGELOG.md", "CITATION.cff", "pyproject.toml", "mcast/errors/install.py")
OLD = "def join(group: str, port: int = 0) -> None: ...\ndef leave(group: str) -> None: ...\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def release() -> Callable[[list[str], Path], str]:
    spec = spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[[list[str], Path], str] = module.main
    return main


def refusal(release: Callable[[list[str], Path], str], tree: Path, *arguments: str) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        release([*arguments], tree)
    return str(caught.value).splitlines()


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")


def test_the_version_is_one() -> None:
    from importlib.metadata import version

    assert mcast.__version__ == version("rdma-mcast")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == mcast.__version__


def test_no_release_before_all_is_in_order(release: Callable[[list[str], Path], str], tree: Path) -> None:
    said = refusal(release, tree)
    assert [line.split(" ")[0] for line in said] == [
        "VERSION",
        "CHANGELOG.md",
        "CHANGELOG.md",
        "pyproject.toml",
    ]

    for name in ("mcast/errors/install.py", "CITATION.cff"):
        change(tree / name, mcast.__version__, "0.1.0")
    change(tree / "CHANGELOG.md", "## [Unreleased]", "## [Unreleased]\n\n## [0.1.0] - 2027-01-01")
    change(
        tree / "pyproject.toml",
        "[project.scripts]",
        '[project.urls]\nSource = "file:///"\n\n[project.scripts]',
    )
    notes = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("## [Unreleased]")[2].strip()
    assert release([], tree) == notes

    change(tree / "CITATION.cff", "0.1.0", "0.0.9")
    assert refusal(release, tree) == ["CITATION.cff cites 0.0.9, and the version is 0.1.0"]


def test_what_a_release_breaks_must_be_told(release: Callable[[list[str], Path], str], tree: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tree, check=True, capture_output=True)

    (tree / "mcast" / "__init__.py").write_text(OLD)
    (tree / "CHANGELOG.md").write_text("## [Unreleased]\n\n### Added\n- `join` and `leave`.\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    assert release(["breaks"], tree).startswith("There is no release yet")

    git("tag", "v0.0.1")
    (tree / "mcast" / "__init__.py").write_text(OLD + "def listen() -> None: ...\n")
    assert release(["breaks"], tree).startswith("Programs for v0.0.1 find all")

    (tree / "mcast" / "__init__.py").write_text(OLD.replace(", port: int = 0", "").replace("leave", "left"))
    port, gone, _ = refusal(release, tree, "breaks")
    assert "`join(port)`: *Parameter was removed*" in port
    assert "`leave`: *Public object was removed*" in gone

    change(
        tree / "CHANGELOG.md",
        "### Added",
        "### Changed\n- `join` lost `port`.\n\n### Removed\n- `leave`.\n\n### Added",
    )
    assert release(["breaks"], tree).startswith("Programs for v0.0.1 find all")
