"""Extensions made with AddressSanitizer and UndefinedBehaviorSanitizer, and a pytest plugin that loads one.

The plugin loads the extension that SANITIZED_EXTENSION names, as `module=path`, in place of the installed
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from .card.build import ROOT
from .card.run_sanitized import LIBRARIES, OPTIONS

EXTENSION = "SANITIZED_EXTENSION"
_FLAGS = [
    "-std=gnu11",
    "-O1",
    "-g",
    "-shared",
    "-fPIC",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover",
]


def _load(name: str, path: str) -> None:
    loader = ExtensionFileLoader(name, path)
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    sys.modules[name] = module_from_spec(spec)
    loader.exec_module(sys.modules[name])


if given := os.environ.get(EXTENSION):
    _load(*given.split("=", 1))


def check(name: str, sources: Sequence[Path], tests: Sequence[str], folder: Path, long: bool) -> None:
    """Build the extension of these sources in the folder, and run the tests with it in their own process."""
    extension, include = folder / "extension.so", sysconfig.get_path("include")
    subprocess.run(["gcc", *_FLAGS, f"-I{include}", "-o", extension, *sources], check=True, timeout=500)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    # a captured stderr (fd 2) would take the sanitizer's report with it
    command += ["-p", "tests.sanitized", "--capture", "sys", *(["--long"] if long else []), *tests]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    preload = [_printed("gcc", f"-print-file-name={library}") for library in LIBRARIES["1"]]
    kept |= {
        **OPTIONS,
        EXTENSION: f"{name}={extension}",
        "LD_PRELOAD": ":".join(preload),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
