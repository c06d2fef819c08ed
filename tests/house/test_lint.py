"""ruff and mypy, as part of the tests; mypy reads the pages' blocks of Python, too."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from mypy.main import process_options

from tests.house.test_docs import PAGES, Fence, fences, is_file_name

ROOT = Path(__file__).parents[2]
UNTYPED = {"contract", "files-and-captures", "performance", "pitfalls", "recipes"}
"""Pages that speak of other things than None, which a call returns when its time is up."""


@pytest.mark.parametrize("command", [("ruff", "check"), ("ruff", "format", "--check")], ids=" ".join)
def test_clean(command: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def module_of(fence: Fence) -> str:
    return fence.title if is_file_name(fence.title) else f"{fence.page.stem.lower()}_{fence.line}.py"


def test_types(tmp_path: Path) -> None:
    """One run for the project and for what its pages show, because each run would read the project."""
    pages = [page for page in PAGES if page.stem not in UNTYPED]
    folders = [tmp_path / str(number) for number in range(len(pages))]
    for page, folder in zip(pages, folders, strict=True):
        folder.mkdir()
        for fence in fences(page):
            if fence.language == "python":
                (folder / module_of(fence)).write_text(fence.text)
    shown = [str(path) for path in tmp_path.rglob("*.py")]
    assert {"first.py", "test_collector.py"} <= {Path(path).name for path in shown}
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *own, *shown],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_linted_once_and_typed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mcast/conformance` is a link to `tests/conformance`: a file has two paths there."""
    monkeypatch.chdir(ROOT)
    once = Counter(
        Path(folder, name).resolve()
        for top in ("mcast", "tests", "benchmarks", "examples")
        for folder, _, names in os.walk(top)
        for name in names
        if name.endswith((".py", ".pyi"))
    )
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files"], capture_output=True, text=True, check=True
    )
    linted = Counter(Path(line).resolve() for line in shown.stdout.splitlines())
    typed = Counter(Path(source.path or "").resolve() for source in process_options([])[0])
    assert typed == once
    assert {path: linted[path] for path in once} == once
