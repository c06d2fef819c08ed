"""ruff and mypy, as part of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mypy.main import process_options

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command", [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)], ids=" ".join
)
def test_clean(command: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
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
