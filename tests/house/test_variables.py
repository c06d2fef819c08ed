"""The table of environment variables: it has every variable that the code reads, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.variables import BUILD, SYSTEM, USE

ROOT = Path(__file__).parents[2]
OWN = re.compile(r"(?:MCAST|RDMA_LAB)(?:_[A-Z]+)*")
SHIPPED = [ROOT / "setup.py", *(ROOT / "mcast").rglob("*.py"), *(ROOT / "lab/rdma_lab").rglob("*.py")]
OTHERS = [one for name in ("tests", "benchmarks", "scripts") for one in (ROOT / name).rglob("*.py")]
OURS = [one for one in (*SHIPPED, *OTHERS) if one != ROOT / "scripts/variables.py"]
C = [one for name in ("mcast", "lab/rdma_lab", "tests") for one in (ROOT / name).rglob("*.c")]

NOT_READ = {
    "MCAST": "a constant of the tests with the command's path",
    "RDMA_LAB_": "a prefix",
    "MCAST_X": "any variable, which the lab's guest inherits",
}
"""Text that looks like a variable -> what it is."""

WRITTEN_FOR_OTHERS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD"}


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file; nothing of one that cannot have a variable, because that takes a while for all files."""
    text = path.read_text("utf-8")
    return ast.parse(text if re.search(r"environ|getenv|MCAST_|RDMA_LAB", text) else "")


def reads(path: Path) -> Iterator[str]:
    """Names of the variables that a file reads: those in a call or an index of `os.environ`."""
    tree = parse(path)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        found: ast.expr | None = None
        if isinstance(node, ast.Call) and re.search(r"environ\.(get|pop)$|getenv$", ast.unparse(node.func)):
            found = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            found = node.slice if isinstance(node.ctx, ast.Load) else None
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            found = node.left
        if isinstance(found, ast.Constant):
            yield str(found.value)
        elif isinstance(found, ast.Name) and found.id in constants:
            yield str(constants[found.id])


def named(path: Path) -> set[str]:
    """Return the texts of a file that are names of our variables, wherever they stand."""
    texts = [node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and OWN.fullmatch(text)}


def rows(*tables: tuple[tuple[str, ...], ...]) -> list[str]:
    return [name for table in tables for row in table for name in row[0].split(", ")]


def test_own_variables_are_in_the_table() -> None:
    """Each of ours that Python or C reads has a row, and each row is read."""
    found = {name for path in OURS for name in (*reads(path), *named(path)) if OWN.fullmatch(name)}
    found |= {
        name for path in C for name in re.findall(r'getenv\("(\w+)"\)', path.read_text()) if OWN.match(name)
    }
    text = (ROOT / "lab/rdma_lab/machine.py").read_text("utf-8")
    found |= set(re.findall(r"export (RDMA_LAB\w*)=", text))
    table = {*rows(USE, BUILD)}
    assert sorted(found - {*NOT_READ} - table) == [], "give each of these a row in scripts/variables.py"
    assert sorted(table - found) == [], "nothing reads these, which have a row in scripts/variables.py"


def test_other_variables_are_in_the_table() -> None:
    """Each variable of the system that the packages read has a row, and each row is named in them."""
    table = rows(SYSTEM)
    found = {name for path in SHIPPED for name in reads(path) if not OWN.fullmatch(name)}
    assert sorted(found - {*table} - WRITTEN_FOR_OTHERS) == []
    code = "".join(path.read_text("utf-8") for path in SHIPPED)
    assert [name for name in table if not re.search(rf"\b{name}\b", code)] == []


def test_pages_link_to_the_table() -> None:
    """The table is on one page, and no other page has a table row for a variable."""
    pages = {ROOT / "README.md", ROOT / "lab/README.md", *(ROOT / "docs").rglob("*.md")}
    other = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages - {ROOT / "docs/environment.md"}
        for line in page.read_text("utf-8").splitlines()
        if re.match(r"\| *`?(MCAST|RDMA_LAB)_?[A-Z]*`? *\|", line)
    ]
    assert other == [], "docs/environment.md has the table of variables: link to it"
