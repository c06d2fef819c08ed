"""The rooms of the house: a file's folder says what it may import; CONTRIBUTING.md has the map of all files.

The folders stand on floors; a folder knows those on the floors below its own, and nobody beside it.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from textwrap import wrap

import pytest

import mcast

ROOT = Path(mcast.__file__).parent
PACKAGE = ROOT.name

PROVIDERS = frozenset(f"backends/{one.parent.name}" for one in ROOT.glob("backends/*/__init__.py"))
FLOORS = (
    frozenset({"wire", "interrupts"}),
    frozenset({"errors"}),
    frozenset({"contract"}),
    frozenset({"pcapng"}),
    frozenset({"endpoint", "conformance"}) | PROVIDERS,
    frozenset({""}),
    frozenset({"bench", "capture", "cast", "lab", "testing"}),
    frozenset({"cli", "collective"}),
)
"""From the ground up. "" is the facade `mcast`, whose names lead to the endpoints and the contract."""

FRONT = {"__init__": "", "aio": "", "api": "contract", "__main__": "cli", "backends/__init__": "wire"}
"""The files that lie in no room, and the room that each belongs to."""

MAY_NAME = dict.fromkeys(("cli/sim", "cli/served", "testing/plugin", "testing/shared"), "backends/sim")
"""Above the contract a provider is known by its name alone, but where it is the very subject of a file."""

FOLDERS = sorted(
    {path.parent for kind in ("py", "c") for path in ROOT.rglob(f"*.{kind}")} | {ROOT / "conformance"}
)
FILES = sorted(
    str(path.relative_to(ROOT).with_suffix(""))
    for folder in FOLDERS
    for path in folder.glob("*.py")
    if folder.name != "csrc" and not path.name.startswith("test_")
)


def room(file: str) -> str:
    """The room that a file lies in: `endpoint/core` in `endpoint`, `backends/sim/qp` in `backends/sim`."""
    parts = file.split("/")
    return FRONT[file] if file in FRONT else "/".join(parts[: 2 if parts[0] == "backends" else 1])


def imports(text: str, file: str, files: Collection[str]) -> Iterator[str]:
    """The files that a text imports, at its top or not: `api` for `mcast.api`; `file` is where it stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = [PACKAGE, *file.split("/")[:-1]]
            base = here[: len(here) + 1 - node.level] if node.level else []
            base += (node.module or "").split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for top, *rest in names:
            # `from package import module` names the module; `from module import value` does not.
            paths = (
                "/".join(rest),
                "/".join(rest[:-1]),
                "/".join([*rest, "__init__"]),
                "/".join([*rest[:-1], "__init__"]),
            )
            if top == PACKAGE:
                yield next((path for path in paths if path in files), "/".join(rest))


@cache
def knows() -> dict[str, set[str]]:
    """What each file imports. Only the tests read all files, not each worker as it finds the tests."""
    files = frozenset(FILES)
    return {file: set(imports((ROOT / f"{file}.py").read_text(), file, files)) for file in FILES}


def offences(file: str, known: set[str]) -> list[str]:
    """What a file imports and may not."""
    ours = room(file)
    floor = next(number for number, rooms in enumerate(FLOORS) if ours in rooms)
    below = {one for rooms in FLOORS[:floor] for one in rooms - PROVIDERS}
    allowed = below | {ours, MAY_NAME.get(file, ours)}
    return sorted(one for one in known if not one.startswith("_") and room(one) not in allowed)


@pytest.mark.parametrize("file", FILES)
def test_a_file_knows_its_room_and_the_floors_below(file: str) -> None:
    assert offences(file, knows()[file]) == []


def test_no_files_go_in_circles() -> None:
    """The types in signatures (`if TYPE_CHECKING`) are known, too, and so is what a function imports late."""
    try:
        TopologicalSorter({file: known - {file} for file, known in knows().items()}).prepare()
    except CycleError as error:
        pytest.fail(" knows ".join(reversed(error.args[1])))


def test_no_file_lies_flat() -> None:
    assert {file for file in FILES if "/" not in file} <= set(FRONT)


def drawn() -> str:
    """The map: each folder, what its docstring says it is, and the files in it."""
    out = []
    for folder in FOLDERS:
        sources = [one for one in folder.iterdir() if one.suffix in {".py", ".c", ".h"}]
        names = [one.name.removesuffix(".py") for one in sources if one.name != "__init__.py"]
        init = folder / "__init__.py"
        said = (ast.get_docstring(ast.parse(init.read_text())) or "").splitlines() if init.exists() else []
        title = f"{folder.relative_to(ROOT.parent)}/"
        text = f"{title:28} {said[0].rstrip('.') if said else 'C'}"
        out += wrap(text, 96, subsequent_indent=29 * " ")
        files = " ".join(sorted(one for one in names if not one.startswith("test_")))
        out += wrap(files, 96, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(out)


def test_the_map_is_the_tree() -> None:
    map_ = (ROOT.parent / "CONTRIBUTING.md").read_text("utf-8").partition('title="the rooms"\n')[2]
    assert map_.partition("\n```")[0] == drawn(), "CONTRIBUTING.md, the rooms"


TWINS = {"endpoint/awaiting", "endpoint/blocking"}
"""The two that have the same classes on purpose: one awaits what the other blocks for."""


def test_a_name_of_a_type_has_one_meaning() -> None:
    homes: dict[str, set[str]] = {}
    for file in FILES:
        for node in ast.parse((ROOT / f"{file}.py").read_text()).body:
            names = [node] if isinstance(node, ast.ClassDef) else getattr(node, "targets", [])
            for name in (getattr(one, "name", getattr(one, "id", "_")) for one in names):
                if name[0].isupper() and not name.isupper():
                    homes.setdefault(name, set()).add(file)
    assert {name: files for name, files in homes.items() if len(files) > 1 and files != TWINS} == {}


def test_the_reader_of_imports_sees_them_all() -> None:
    text = """
import mcast.backends.sim
def late():
    from mcast.backends import rdma
    from ..backends.sim.core import qp
    from mcast.api import Backend
    import json
"""
    seen = list(imports(text, "cli/some", FILES))
    assert seen == ["backends/sim/__init__", "backends/rdma/__init__", "backends/sim/core/qp", "api"]
    assert offences("cli/some", set(seen)) == [
        "backends/rdma/__init__",
        "backends/sim/__init__",
        "backends/sim/core/qp",
    ]
    assert offences("wire/mapping", {"api"}) == ["api"]
