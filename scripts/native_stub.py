"""Makes the types of the C core: mcast/backends/rdma/_native.pyi, from csrc/cdefs.h.

python -m scripts.native_stub
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parents[1] / "mcast" / "backends" / "rdma"
STUB = HOME / "_native.pyi"
HEAD = '''"""The C core, as cffi makes it. By scripts/native_stub.py, from csrc/cdefs.h."""

from typing import Any

from mcast.backends.rdma.native import {handles}, Pointer

ffi: Any
lib: Lib

class Lib:
'''
WHOLE = {"int", "int64_t", "size_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t"}
BYTES = {"const char *", "const uint8_t *"}
"""Arguments, for which cffi takes `bytes`."""


def handle_of(struct: str) -> str:
    """Name in Python of a struct that is declared and not defined: NativeQp of mcast_qp, Pd of ibv_pd."""
    owner, _, name = struct.partition("_")
    return ("Native" if owner == "mcast" else "") + name.capitalize()


def type_of(c: str, handles: dict[str, str], is_result: bool = False) -> str:
    """Type of a value of C; anything for a pointer that is no handle."""
    if c in WHOLE:
        return "int"
    if c == "void":
        return "None"
    if c in BYTES and not is_result:
        return "bytes"
    return handles.get(c.removeprefix("const "), "Pointer")


def arguments_of(text: str, handles: dict[str, str]) -> Iterator[str]:
    """The arguments of a function, with their types."""
    text = re.sub(r"\(\*(\w+)\)\[\d+\]", r"* \1", text)  # a pointer to arrays
    for c, name in re.findall(r"([^,]*?)(\w+)(?:,|$)", "" if text == "void" else text):
        yield f"{name}: {type_of(c.strip(), handles)}"


def stub() -> str:
    """The text of the stub."""
    header = re.sub(r"/\*.*?\*/", "", (HOME / "csrc" / "cdefs.h").read_text(), flags=re.S)
    functions = re.findall(r"^([\w ]+?[ *]+)(mcast_\w+)\(((?:[^();]|\(\*\w+\))*)\);", header, re.M)
    opaque = re.findall(r"^struct (\w+);", header, re.M)
    used = [one for one in opaque if re.search(rf"struct {one} \*\w", header)]
    handles = {f"struct {one} *": handle_of(one) for one in used}
    enums = "".join(re.findall(r"^enum \{.*?\};", header, re.M | re.S))
    lines = [f"    {name}: int" for name in re.findall(r"[A-Z_]{2,}", enums)]
    for result, name, arguments in functions:
        given = ["self", *arguments_of(" ".join(arguments.split()), handles), "/"]
        returned = type_of(result.strip(), handles, is_result=True)
        lines.append(f"    def {name}({', '.join(given)}) -> {returned}: ...")
    text = HEAD.format(handles=", ".join(sorted(handles.values()))) + "\n".join(lines)
    format_it = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(STUB), "-"]
    done = subprocess.run(format_it, input=text, capture_output=True, text=True, check=True)
    return str(done.stdout)


if __name__ == "__main__":
    STUB.write_text(stub())
