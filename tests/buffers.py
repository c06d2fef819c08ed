"""Kinds of buffers, and of what is none: those that are payloads, and those that are refused."""

from __future__ import annotations

import ctypes as c
import mmap
import sys
from array import array
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import numpy as np

DATA = bytes(range(24))


class Plain(c.Structure):
    _fields_ = (("O", c.c_int32), ("rest", c.c_double))


class Packed(c.Structure):
    """Of the same format, "B", as one with objects: what it has inside only its type says."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("O", c.c_int8), ("rest", c.c_int64))


class Numbers(c.Union):
    _fields_ = (("few", c.c_int32), ("many", c.c_int64))


class WithObject(c.Structure):
    _fields_ = (("number", c.c_int32), ("thing", c.py_object))


class PackedObject(c.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("number", c.c_int8), ("thing", c.py_object))


class OrObject(c.Union):
    _fields_ = (("number", c.c_int64), ("thing", c.py_object))


class Around(c.Structure):
    _fields_ = (("number", c.c_int32), ("inner", OrObject * 2))


class OfSubclass(PackedObject):
    """Which has no field of its own."""


class Exporter:
    """A buffer by `__buffer__`, which Python knows from 3.12 on."""

    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(DATA)


class ObjectExporter:
    def __buffer__(self, flags: int) -> memoryview:
        return memoryview(_objects)


def released() -> memoryview:
    view = memoryview(b"bytes")
    view.release()
    return view


def closed() -> mmap.mmap:
    memory = mmap.mmap(-1, 64)
    memory.close()
    return memory


def mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, 64)
    memory[: len(DATA)] = DATA
    return memory


def fixed() -> Any:
    numbers = np.arange(3)
    numbers.setflags(write=False)
    return numbers


_objects: Any = np.array(["text", 2, None], dtype=object)
_records: Any = np.zeros(3, dtype=[("few", "i4"), ("any", "O"), ("more", "i4")])
"""Of which a selection of fields is a view of all: numpy copies nothing, and the format does not name the
others."""
_FEW: Any = np.dtype({"names": ["few"], "formats": ["i4"], "offsets": [0], "itemsize": _records.itemsize})
_numbers: Any = np.arange(6.0).reshape(2, 3)

PAYLOADS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: DATA,
    "empty bytes": lambda: b"",
    "bytearray": lambda: bytearray(DATA),
    "empty bytearray": bytearray,
    "memoryview of bytes": lambda: memoryview(DATA),
    "memoryview of a bytearray": lambda: memoryview(bytearray(DATA)),
    "read-only memoryview": lambda: memoryview(bytearray(DATA)).toreadonly(),
    "slice": lambda: memoryview(DATA)[3:11],
    "empty slice": lambda: memoryview(DATA)[5:5],
    "slice of one item with a step": lambda: memoryview(DATA)[::24],
    "memoryview of another format": lambda: memoryview(DATA).cast("d"),
    "memoryview of two dimensions": lambda: memoryview(bytearray(DATA)).cast("B", (4, 6)),
    "memoryview of no dimension": lambda: memoryview(DATA)[:8].cast("q", ()),
    "array.array": lambda: array("d", [1.5, 2.5]),
    "empty array.array": lambda: array("i"),
    "mmap": mapped,
    "PickleBuffer": lambda: PickleBuffer(DATA),
    "PickleBuffer of an array": lambda: PickleBuffer(_numbers),
    "int64": lambda: np.arange(3),
    "uint8": lambda: np.arange(3, dtype="u1"),
    "bool": lambda: np.array([True, False]),
    "float16": lambda: np.ones(3, dtype="f2"),
    "long double": lambda: np.zeros(2, dtype="g"),
    "complex": lambda: np.array([1j, 2]),
    "the other byte order": lambda: np.arange(3, dtype=np.dtype("i4").newbyteorder()),
    "text of fixed width": lambda: np.array(["text", "more"]),
    "bytes of fixed width": lambda: np.array([b"text", b"more"]),
    "void": lambda: np.zeros(2, dtype="V3"),
    "structured": lambda: np.zeros(2, dtype=[("O", "i4"), ("aO", "f8"), ("sub", "u1", (2, 3))]),
    "structured and aligned": lambda: np.zeros(2, dtype=np.dtype([("a", "u1"), ("b", "f8")], align=True)),
    "fields of records": lambda: np.zeros(2, dtype=[("a", "i4"), ("b", "f8"), ("c", "i4")])[["a", "c"]],
    "a record": lambda: np.ones(1, dtype=[("a", "i4"), ("b", "f8")])[0],
    "datetime64 as numbers": lambda: np.zeros(3, dtype="M8[s]").view("i8"),
    "one number": lambda: np.float64(2.5),
    "zero dimensions": lambda: np.array(7),
    "two dimensions": lambda: _numbers.copy(),
    "two dimensions, empty": lambda: np.zeros((0, 3)),
    "Fortran order": lambda: np.asfortranarray(_numbers),
    "memoryview in Fortran order": lambda: np.asfortranarray(_numbers).data,
    "read-only memoryview in Fortran order": lambda: np.asfortranarray(_numbers).data.toreadonly(),
    "transposed": lambda: np.arange(24).reshape(2, 3, 4).T,
    "read-only array": fixed,
    "ctypes number": lambda: c.c_int32(7),
    "ctypes array": lambda: (c.c_int32 * 3)(1, 2, 3),
    "ctypes array of arrays": lambda: ((c.c_int16 * 3) * 2)(),
    "empty ctypes array": lambda: (c.c_int32 * 0)(),
    "ctypes structure": lambda: Plain(1, 2.0),
    "packed ctypes structure": lambda: Packed(1, 2),
    "ctypes union": lambda: Numbers(1),
    "ctypes array of unions": lambda: (Numbers * 2)(),
}
"""Kinds of payloads -> one of the kind."""

REFUSED: dict[str, Callable[[], Any]] = {
    "str": lambda: "text",
    "int": lambda: 7,
    "None": lambda: None,
    "strided memoryview": lambda: memoryview(DATA)[::2],
    "reversed memoryview": lambda: memoryview(DATA)[::-1],
    "released memoryview": released,
    "closed mmap": closed,
    "strided": lambda: np.arange(6)[::2],
    "reversed": lambda: np.arange(6)[::-1],
    "a column": lambda: np.zeros((3, 3))[:, 1],
    "broadcast": lambda: np.broadcast_to(np.arange(1), (3,)),
    "axes in another order": lambda: np.zeros((2, 3, 4)).transpose(1, 0, 2),
    "objects": _objects.copy,
    "one object": lambda: np.array(None, dtype=object),
    "no objects": lambda: _objects[:0],
    "objects in two dimensions": lambda: np.zeros((2, 3), dtype=object),
    "memoryview of objects": lambda: memoryview(_objects),
    "PickleBuffer of objects": lambda: PickleBuffer(_objects),
    "structured with objects": lambda: np.zeros(2, dtype=[("few", "i4"), ("any", "O")]),
    "structured with objects inside": lambda: np.zeros(2, dtype=[("x", [("O", "u1"), ("y", "O")])]),
    "a record with an object": lambda: np.zeros(1, dtype=[("few", "i4"), ("any", "O")])[0],
    "fields between which there are objects": lambda: _records[["few", "more"]],
    "fields behind which there are objects": lambda: _records[["few"]],
    "a record of such fields": lambda: _records[["few"]][0],
    "such fields as a view": lambda: _records[["few"]].view(_FEW),
    "datetime64": lambda: np.zeros(3, dtype="M8[s]"),
    "timedelta64": lambda: np.zeros(3, dtype="m8[s]"),
    "structured with datetime64": lambda: np.zeros(3, dtype=[("when", "M8[s]")]),
    "py_object": lambda: c.py_object(DATA),
    "array of py_object": c.py_object * 2,
    "pointer to py_object": lambda: c.pointer(c.py_object(DATA)),
    "structure with py_object": WithObject,
    "packed structure with py_object": PackedObject,
    "union with py_object": OrObject,
    "array of unions with py_object": OrObject * 2,
    "structure of unions with py_object": Around,
    "structure that inherits py_object": OfSubclass,
    "memoryview of a union with py_object": lambda: memoryview(OrObject()),
}
"""Kinds of what is refused -> one of the kind."""

(PAYLOADS if sys.version_info >= (3, 12) else REFUSED)["__buffer__"] = Exporter
if hasattr(np.dtypes, "StringDType"):  # from numpy 2 on
    REFUSED["text of any width"] = lambda: np.array(["text", "more"], dtype=np.dtypes.StringDType())
REFUSED["__buffer__ of objects"] = ObjectExporter


def content(payload: Any) -> bytes:
    """The bytes of a payload in the order of memory, as numpy or Python has them."""
    if isinstance(payload, np.ndarray | memoryview):
        return payload.tobytes("A")
    return payload.raw().tobytes() if isinstance(payload, PickleBuffer) else bytes(payload)
