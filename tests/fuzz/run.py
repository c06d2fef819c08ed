"""Fuzz the targets: `python -m tests.fuzz.run --seconds 600 [TARGET ...]`, or `--replay FILE TARGET`.

Coverage guides the inputs where atheris is installed, which has wheels for some versions of Python; else
hypothesis changes the seeds at random. An input on which a target fails stays in build/fuzz; its path is
printed, and the status is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz.targets import HERE, TARGETS

ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "fuzz"
GUIDED = find_spec("atheris") is not None

_LOGGED = 30
"""Lines of a target's output that are shown when it fails."""


def fuzz(target: str, seconds: float) -> bool:
    """Fuzz one target in a process of its own; whether it holds."""
    folder = BUILD / target
    corpus = folder / "corpus"  # what was found to reach more, kept for the next run
    corpus.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    driver = "tests.fuzz.guided" if GUIDED else "tests.fuzz.unguided"
    command = [sys.executable, "-m", driver, target, str(seconds), str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode == 0:
        print(f"{target}: {done.stdout.splitlines()[-1] if done.stdout else 'no output'}", flush=True)
        return True
    print("\n".join(done.stdout.splitlines()[-_LOGGED:]))
    found = sorted(path for path in folder.glob("*-*") if path.stat().st_mtime >= begun)
    for path in found:
        shown = path.relative_to(ROOT)
        again = f"{sys.executable} -m tests.fuzz.run {target} --replay {shown}"
        print(f"{target} fails on {shown}. To see it again: {again}", flush=True)
    if not found:
        print(f"{target} ended with status {done.returncode} and no input", flush=True)
    return False


def main() -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.run", description="Fuzz what reads strangers' bytes."
    )
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together (600)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="give the targets this input alone")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} (all)")
    options = parser.parse_args()
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"{', '.join(unknown)} is no target; there are {', '.join(TARGETS)}")
    targets = options.targets or [*TARGETS]
    if options.replay:
        data = options.replay.read_bytes()
        for target in targets:
            TARGETS[target](data)
        return 0
    print(
        "inputs are guided by coverage (atheris)" if GUIDED else "inputs are not guided: there is no atheris"
    )
    held = [fuzz(target, options.seconds / len(targets)) for target in targets]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
