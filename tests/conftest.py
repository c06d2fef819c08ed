"""Options of the whole test suite."""

from __future__ import annotations

import pytest
from hypothesis import settings


def pytest_addoption(parser: pytest.Parser) -> None:
    oracle = parser.getgroup("oracle", "comparison with OpenSM (tests/oracle)")
    oracle.addoption(
        "--oracle-requests", type=int, default=20_000, metavar="N", help="compare at least N requests"
    )
    oracle.addoption("--oracle-seed", type=int, default=0, metavar="SEED", help="draw from this seed on")


# For a guest without hardware virtualisation, where each step takes long (`--hypothesis-profile lab`).
settings.register_profile("lab", max_examples=8, deadline=None)
