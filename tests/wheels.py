"""The project's wheel, built once for all tests and workers of a run."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one worker after the other run the block."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, its links included, without what is built in it."""
    base = tmp_path_factory.getbasetemp()
    tree = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "mcast"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so")
    with locked(tree.with_suffix(".lock")):
        if not (tree / ".copied").exists():
            shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            (tree / ".copied").touch()
    return tree


def built(project: Path, **variables: str) -> Path:
    """The project's wheel, built from its source distribution."""
    for kind, made in (("sdist", "dist/*.tar.gz"), ("bdist_wheel", "dist/*.whl")):
        program = (
            ["setup.py"] if (project / "setup.py").exists() else ["-c", "import setuptools as s; s.setup()"]
        )
        command = [sys.executable, *program, "-q", kind]
        env = os.environ | variables
        subprocess.run(command, cwd=project, env=env, check=True, capture_output=True, timeout=500)
        (found,) = project.glob(made)
        if kind == "sdist":
            subprocess.run(["tar", "-xf", found, "-C", project / "dist"], check=True, timeout=500)
            (project,) = (one for one in (project / "dist").iterdir() if one.is_dir())
    return found


@pytest.fixture(scope="session")
def wheel(clone: Path, long: bool) -> Path:
    """The wheel with C."""
    note = clone / ".wheel"
    with locked(clone.with_suffix(".lock")):
        if not note.exists():
            # Only a long run runs the extension; without it, optimizing would take most of the build.
            note.write_text(str(built(clone, MCAST_RDMA="1", **({} if long else {"CFLAGS": "-O0"}))))
    return Path(note.read_text())
