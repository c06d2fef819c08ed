"""A pytest plugin: the C core that MCAST_CORE names, made with a sanitizer, in place of the installed one.

Only tests that use the card are run.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location

import pytest

_NAME = "mcast.backends.rdma._native"


def _load(path: str) -> None:
    loader = ExtensionFileLoader(_NAME, path)
    spec = spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    sys.modules[_NAME] = module_from_spec(spec)
    loader.exec_module(sys.modules[_NAME])


_load(os.environ["MCAST_CORE"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item.nodeid.startswith("tests/card/") or "[card-" in item.nodeid]
