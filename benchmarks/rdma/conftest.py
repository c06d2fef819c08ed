"""Without RDMA ports, test_ours.py is collected only if it is asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcast.api import backend_status


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    if collection_path.name != "test_ours.py" or collection_path in asked:
        return None
    return None if backend_status("rdma").available else True
