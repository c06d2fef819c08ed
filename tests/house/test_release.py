"""Consistency of a release: one version, its notes, and what it breaks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from trove_classifiers import classifiers as known_classifiers

import mcast

ROOT = Path(__file__).parents[2]
FILES = (
    "CHANGELOG.md",
    "CITATION.cff",
    "lab/pyproject.toml",
    "mcast/errors/install.py",
    "pyproject.toml",
)
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
    """Both distributions and the citation have the version of the package."""
    assert mcast.__version__ == metadata("rdma-mcast")["Version"] == metadata("rdma-lab")["Version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))["version"] == mcast.__version__


def test_no_built_file_is_tracked() -> None:
    """A library or wheel in the repository would be packed in place of what its sources give."""
    command = ["git", "ls-files", "*.so", "*.o", "*.ko", "*.pyc", "*.whl", "*.tar.gz"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.parametrize("name", ["rdma-mcast", "rdma-lab"])
def test_metadata_is_complete(name: str) -> None:
    """An index page shows who wrote it, its licence, README, Pythons and words to find it by."""
    found = metadata(name)
    for field in ("Summary", "Author", "Keywords", "License-File", "Requires-Python"):
        assert found[field], field
    assert found["License-Expression"] == "BSD-2-Clause"
    assert found["Description-Content-Type"] == "text/markdown"
    assert "\n## " in str(found.json["description"])
    classifiers = set(found.get_all("Classifier") or ())
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= classifiers
    assert "Typing :: Typed" in classifiers
    assert classifiers <= known_classifiers


def test_no_release_before_all_is_in_order(release: Callable[[list[str], Path], str], tree: Path) -> None:
    """Each thing that a release lacks has a sentence; without any, the notes are printed."""
    install, changelog = tree / "mcast" / "errors" / "install.py", tree / "CHANGELOG.md"
    projects = [tree / "pyproject.toml", tree / "lab" / "pyproject.toml"]
    notes = "### Added\n\n- A name."
    changelog.write_text(f"# Changelog\n\n## [Unreleased]\n\n{notes}\n")
    change(install, mcast.__version__, "7.0.0.dev0")
    assert [line.split(" ")[0] for line in refusal(release, tree)] == [
        "VERSION",
        "CHANGELOG.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "pyproject.toml",
        "lab/pyproject.toml",
        "lab/pyproject.toml",
    ]

    change(install, "7.0.0.dev0", "7.0.0rc1")
    change(projects[1], mcast.__version__, "7.0.0rc1")
    cited = yaml.safe_load((tree / "CITATION.cff").read_text("utf-8"))
    change(tree / "CITATION.cff", cited["version"], "7.0.0rc1")
    change(tree / "CITATION.cff", str(cited["date-released"]), "2027-01-01")
    change(changelog, "## [Unreleased]", "## [Unreleased]\n\n## [7.0.0rc1] - 2027-01-01")
    assert release([], tree) == notes

    for file in (install, changelog, projects[1], tree / "CITATION.cff"):
        change(file, "7.0.0rc1", "7.0.0")
    assert [line.split(":")[0] for line in refusal(release, tree)] == [
        "pyproject.toml has no [project.urls]",
        "lab/pyproject.toml has no [project.urls]",
    ]

    for file in projects:
        change(file, "[project.scripts]", '[project.urls]\nSource = "file:///"\n\n[project.scripts]')
    assert release([], tree) == notes

    change(tree / "CITATION.cff", "2027-01-01", "2027-01-02")
    assert refusal(release, tree) == [
        "CITATION.cff has another date than 2027-01-01, that of [7.0.0] in CHANGELOG.md"
    ]


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
