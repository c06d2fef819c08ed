"""Validation of arguments, shared by all calls: types, numbers, times, buffers, file objects."""

from __future__ import annotations

TYPE_CHECKING = False  # as in `mcast`
if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer
else:
    Buffer = bytes | bytearray | memoryview
    """Stands for any object with memory, in annotations: typing_extensions takes long to load."""
