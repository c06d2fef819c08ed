"""The C core: warnings are errors, libc alone is linked, and Python's view of it is exact."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import numpy

import mcast.backends.rdma
from mcast.api import RECORD_DTYPE
from mcast.backends.rdma import _native  # type: ignore[attr-defined]
from mcast.backends.rdma.native import Lib, QpPlan

HOME = Path(mcast.backends.rdma.__file__).parent


def test_only_libc_is_linked() -> None:
    said = subprocess.run(
        ["readelf", "-d", _native.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", said)) <= {"libc.so.6", "libdl.so.2", "ld-linux-x86-64.so.2"}


def test_the_protocol_names_what_the_header_declares() -> None:
    text = re.sub(r"/\*.*?\*/", "", (HOME / "csrc" / "cdefs.h").read_text(), flags=re.S)
    declared = {
        name: 0 if arguments.strip() == "void" else arguments.count(",") + 1
        for name, arguments in re.findall(r"\b(mcast_\w+)\(((?:[^()]|\(\*\w+\)(?:\[\d+\])?)*)\);", text)
    }
    protocol = {
        name: len(inspect.signature(member).parameters) - 1
        for name, member in vars(Lib).items()
        if name.startswith("mcast_")
    }
    assert protocol == declared


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
