"""The more requests, the longer a comparison may take."""

from __future__ import annotations

from pathlib import Path

import pytest

SECONDS, REQUESTS_PER_SECOND = 400, 200
"""Time that a shrinking failure may need, and the rate of a very slow machine."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit = SECONDS + config.getoption("--oracle-requests") / REQUESTS_PER_SECOND
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(limit))
