"""Counting the functions that a call enters, those of the garbage collector apart."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def profiled(note: Callable[[FrameType, str, Any], None], work: Callable[[], object]) -> None:
    """Do the work, and tell `note` of each call and return. No callback of a collection comes between."""
    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
