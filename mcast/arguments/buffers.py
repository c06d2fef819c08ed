"""Payload buffers: contiguous memory without Python objects in it.

Only this file decides what a payload buffer is. Providers, `QueuePair.register`, `mcast.cast` and
`mcast.collective` ask it. The fast calls in C take what is plainly one (`is_plain` in
mcast/backends/rdma/csrc/calls/send.c) and leave all else to the contract. So a buffer has one verdict
everywhere.

The bytes of an array of Python objects are addresses of this process. Sent, they mean nothing; received, they
let the sender choose which memory the interpreter follows. The format of a buffer says what its items are
(PEP 3118). A buffer that cannot tell its format, as an array of datetime64, is therefore refused.
"""

from __future__ import annotations

import re
import sys
from pickle import PickleBuffer
from typing import Any

from typing_extensions import Buffer

FREE_THREADED: bool = not getattr(sys, "_is_gil_enabled", lambda: True)()
"""True if threads run at once, because Python has no GIL.

Then Python's memoryviews are not safe to share: where one thread releases a view, no other thread may release
it, or make or end a slice of it, at that moment.
"""

_FIELD_NAME = re.compile(":[^:]*:")
"""The name of a field in a format: the O in `T{i:O:}` is a name, and no object."""


def flat_bytes(buffer: Buffer, index: int | None = None) -> memoryview:
    """Return a payload buffer as a flat view of bytes, in the order of memory.

    Raises TypeError if it is none. `index` is its place in a batch, which the error then names.
    """
    try:
        # A view of a view counts in the first one, where threads may send the same: see FREE_THREADED
        view = memoryview(PickleBuffer(buffer) if FREE_THREADED else buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise _refusal(buffer, index, _why_no_view(buffer, error)) from None
    if (view.format != "B" or view.itemsize != 1) and _has_objects(view):
        why = "has Python objects as items, which exist in this process alone: give numbers, or pickle.dumps"
        raise _refusal(buffer, index, why)
    if not view.contiguous:
        raise _refusal(buffer, index, "has items that lie apart in memory: give a contiguous copy")
    if not view.nbytes:  # `cast` refuses a shape such as (0, 3)
        return memoryview(b"" if view.readonly else bytearray())
    if view.c_contiguous:
        return view.cast("B")
    # Fortran order, which `cast` refuses. Before 3.13 Python crashes when the garbage collector frees a
    # memoryview that something else has a buffer of; so this is of the object whose memory the view shows.
    is_view = sys.version_info < (3, 13) and isinstance(buffer, memoryview | PickleBuffer)
    raw = PickleBuffer(_owner(view) if is_view else buffer).raw()
    return raw.toreadonly() if view.readonly else raw  # the view may be read-only, and its owner not


def writable_bytes(buffer: Buffer) -> memoryview:
    """Return a payload buffer as `flat_bytes` does, to write into. Raises TypeError if it is read-only."""
    view = flat_bytes(buffer)
    if view.readonly:
        raise _refusal(buffer, None, "is read-only: give a bytearray or an array that can be written")
    return view


def is_buffer(thing: object) -> bool:
    """Return True for an object with the buffer protocol, even if `flat_bytes` refuses it."""
    try:
        memoryview(thing)  # type: ignore[arg-type]
    except TypeError:
        return False
    except (ValueError, BufferError):
        pass
    return True


def _refusal(buffer: object, index: int | None, why: str) -> TypeError:
    subject = "this" if index is None else f"message {index}: this"
    return TypeError(f"{subject} {type(buffer).__name__} {why}")


def _why_no_view(buffer: object, error: Exception) -> str:
    if isinstance(buffer, str):
        return "has no bytes: give those of text.encode()"
    if isinstance(error, TypeError):
        return f"is no buffer: give bytes or an array ({error})"
    instead = "; give a view of numbers, as array.view('i8')" if hasattr(buffer, "dtype") else ""
    return f"does not show its memory: {error}{instead}"


def _has_objects(view: memoryview) -> bool:
    if "O" in view.format and "O" in _FIELD_NAME.sub("", view.format):
        return True
    if "T" in view.format and _is_part_of_objects(_owner(view)):
        return True
    # In a format of ctypes, B may also be a union or a packed structure, whatever their fields are
    ctypes: Any = sys.modules.get("ctypes") if "B" in view.format else None
    return ctypes is not None and _is_of_objects(type(_owner(view)), ctypes)


def _is_part_of_objects(array: Any) -> bool:
    """Return True for an array of numpy that shows some fields of records which have objects in others.

    The memory of such an array has all fields, and its format names those that it shows alone.
    """
    while array is not None:
        if getattr(getattr(array, "dtype", None), "hasobject", False):
            return True
        array = getattr(array, "base", None)
    return False


def _owner(view: memoryview) -> Any:
    """Return the object whose memory a view shows, or a view of a view."""
    found: Any = view.obj
    while isinstance(found, memoryview):
        found = found.obj
    return found


def _is_of_objects(kind: Any, ctypes: Any) -> bool:
    """Return True for a type of ctypes that has `py_object` somewhere inside, False for every other type."""
    if issubclass(kind, ctypes.Array):
        return _is_of_objects(kind._type_, ctypes)
    if issubclass(kind, ctypes.Structure | ctypes.Union):
        fields = [field for base in kind.__mro__ for field in vars(base).get("_fields_", ())]
        return any(_is_of_objects(field[1], ctypes) for field in fields)
    return issubclass(kind, ctypes.py_object)
