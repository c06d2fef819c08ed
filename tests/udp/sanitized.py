"""A pytest plugin: an extension made with sanitizers, which MCAST_UDP_EXTENSION names, in place of the
installed one."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location

EXTENSION = "MCAST_UDP_EXTENSION"
_NAME = "mcast.backends.udp._native"


def _load(path: str) -> None:
    loader = ExtensionFileLoader(_NAME, path)
    spec = spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None
    sys.modules[_NAME] = module_from_spec(spec)
    loader.exec_module(sys.modules[_NAME])


if path := os.environ.get(EXTENSION):
    _load(path)
