"""The C core and the card under AddressSanitizer and UndefinedBehaviorSanitizer, in their own process."""

from __future__ import annotations

import os
import subprocess

import pytest

from mcast.backends.rdma import _native

from .build import ROOT, SANITIZE
from .run_sanitized import ENOUGH, TESTS, command

if SANITIZE in os.environ:

    def test_the_core_is_the_one_with_a_sanitizer() -> None:
        assert _native.__file__ == os.environ["MCAST_CORE"]

else:

    @pytest.mark.timeout(3600)  # against hangs alone: each test in there has a limit of its own
    def test_nothing_is_used_that_is_gone(long: bool) -> None:
        run, environment = command("1", tests=TESTS if long else ENOUGH)
        kept = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(run, cwd=ROOT, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
