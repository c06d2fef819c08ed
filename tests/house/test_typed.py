"""A type checker that sees the installed package knows the type of every public name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def completeness(package: Path, where: Path) -> dict[str, Any]:
    """Return pyright's report of a package that is installed as any other: not editable, and no link."""
    venv.create(where / "env", symlinks=True)
    (site,) = (where / "env").glob("lib/python*/site-packages")
    shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT / 'lab'}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", package.name, "--ignoreexternal", "--outputjson"],
        cwd=where,
        env=os.environ
        | {"PATH": f"{where}/env/bin:{os.environ['PATH']}", "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["typeCompleteness"]
    return found


def unknown(found: dict[str, Any]) -> list[str]:
    return [
        f"{symbol['name']}: {one['message']}"
        for symbol in found["symbols"]
        for one in symbol["diagnostics"]
        if one["severity"] == "error"
    ]


@pytest.mark.parametrize(
    ("package", "some"),
    [
        ("mcast", {"mcast.open_endpoint", "mcast.testing.plugin.McastEndpoints", "mcast.api.Backend"}),
        ("lab/rdma_lab", {"rdma_lab.machine.LabMachine.run", "rdma_lab.kernels.fetch"}),
    ],
)
def test_every_public_type_is_known(package: str, some: set[str], tmp_path: Path) -> None:
    found = completeness(ROOT / package, tmp_path)
    assert unknown(found) == []
    assert found["completenessScore"] == 1
    names = {symbol["name"] for symbol in found["symbols"]}
    assert some <= names


def test_installed_package_is_typed(tmp_path: Path) -> None:
    """A script that imports the installed package gets its types.

    Also where the install is editable, whose import hook no checker would read.
    """
    (tmp_path / "script.py").write_text("import mcast.api\n")
    words = ["--strict", "--follow-imports", "skip", "--cache-dir", os.devnull, "script.py"]
    env = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), done.stderr
