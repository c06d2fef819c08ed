"""Fuzz one target without a guide: `python -m tests.fuzz.unguided TARGET SECONDS FOLDER`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from hashlib import sha1
from pathlib import Path

from hypothesis import HealthCheck, given, settings

from tests.fuzz.inputs import inputs
from tests.fuzz.targets import MAX_INPUT, TARGETS, seeds

_AT_ONCE = 100


def rounds(name: str, target: Callable[[bytes], None], until: float, folder: Path) -> int:
    """Try inputs until then; how many. One that fails is a file in the folder, and is raised."""
    tried, failed = 0, b""

    @settings(max_examples=_AT_ONCE, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(inputs(seeds(name), MAX_INPUT))
    def try_some(data: bytes) -> None:
        nonlocal tried, failed
        tried += 1
        try:
            target(data)
        except BaseException:
            failed = data
            raise

    try:
        while time.monotonic() < until:
            try_some()
    except BaseException:
        (folder / f"crash-{sha1(failed).hexdigest()}").write_bytes(failed)
        raise
    return tried


def main() -> None:
    """Run the command line."""
    name, seconds, folder = sys.argv[1:]
    tried = rounds(name, TARGETS[name], time.monotonic() + float(seconds), Path(folder))
    print(f"{tried} inputs, none failed")


if __name__ == "__main__":
    main()
