"""The C core: warnings are errors, libc alone is linked, and Python's view of it is exact."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy

import mcast.backends.rdma
from mcast.api import RECORD_DTYPE
from mcast.backends.rdma import _native
from mcast.backends.rdma.native import QpPlan
from scripts.native_stub import STUB, stub

HOME = Path(mcast.backends.rdma.__file__).parent


def test_only_libc_is_linked() -> None:
    said = subprocess.run(
        ["readelf", "-d", _native.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", said)) <= {"libc.so.6", "libdl.so.2", "ld-linux-x86-64.so.2"}


def test_the_types_are_those_of_the_header() -> None:
    """`python -m scripts.native_stub` makes them again."""
    assert STUB.read_text() == stub()


def test_the_types_have_every_function() -> None:
    declared = {name for name in dir(_native.lib) if name.startswith("mcast_")}
    assert set(re.findall(r"def (mcast_\w+)", STUB.read_text())) == declared


def test_the_records_have_one_layout() -> None:
    ffi = _native.ffi
    one = ffi.new(
        "struct mcast_message *",
        {
            "offset": 1,
            "length": 2,
            "src_qp": 3,
            "imm": 4,
            "slot": 5,
            "has_imm": 6,
            "own_qp_num": 7,
            "src_lid": 8,
            "generation": 11,
            "source": bytes([9] * 16),
            "group": bytes([10] * 16),
            "timestamp": 12,
        },
    )
    (row,) = numpy.frombuffer(ffi.buffer(one), RECORD_DTYPE)
    assert row.nbytes == ffi.sizeof("struct mcast_message")
    *numbers, source, group, timestamp = row
    assert [*numbers, timestamp] == [1, 2, 3, 4, 6, 8, 12]
    assert (bytes(source), bytes(group)) == (bytes([9] * 16), bytes([10] * 16))


def test_the_plan_fills_the_struct() -> None:
    fields = {name for name, _ in _native.ffi.typeof("struct mcast_qp_init").fields}
    assert fields - {"slab", "slab_bytes"} == set(QpPlan._fields)
