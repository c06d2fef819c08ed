"""The data plane under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest

from ..card.build import ROOT
from ..sanitized import EXTENSION, check

NAME = "mcast.cast._plane"
SEEDS = sorted(path.name for path in (ROOT / "tests/fuzz/corpus/segment_batches").iterdir())
TESTS = (
    "tests/cast/test_sanitized.py",
    "tests/cast/protocol/test_frame.py",
    "tests/cast/io/test_buffers.py",
    *(
        f"tests/fuzz/test_fuzz.py::test_a_target_holds_on_its_corpus[segment_batches-{seed}]"
        for seed in SEEDS
    ),
    "tests/fuzz/test_fuzz.py::test_a_target_holds_on_inputs_at_random[segment_batches]",
    "tests/cast/io/test_placing.py",
    "tests/cast/io/test_flow.py",
)
"""They frame random objects, with fields in their bounds and out of them, send objects, and place random
batches.

None takes real parity: liberasurecode does not find its parts beside a sanitizer.
"""

if EXTENSION in os.environ:

    def test_the_extension_is_the_one_with_sanitizers() -> None:
        assert f"{NAME}={import_module(NAME).__file__}" == os.environ[EXTENSION]

else:

    @pytest.mark.timeout(3600)  # against hangs alone: each test in there has a limit of its own
    def test_no_field_leads_out_of_memory(tmp_path: Path, long: bool) -> None:
        check(NAME, sorted((ROOT / "mcast/cast/csrc").glob("*.c")), TESTS, tmp_path, long)
