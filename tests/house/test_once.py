"""A rule lives in one place: no table and no function of the package stands in it twice.

A table is the constants of a literal, of an enumeration or of a mask, with pairs either way round. Functions
are alike if they differ in names and constants alone. So are constants with a value that is no chance: a
sentence, a path, a number that is not round, a union of flags.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import mcast

ROOT = Path(mcast.__file__).parent
FILES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] != "conformance"
}
ENTRIES, STATEMENTS = 4, 5
"""So many in common make a second place."""

NAMING = {"TypeVar", "ParamSpec", "getLogger", "logging.getLogger", "ContextVar"}
"""Calls whose text is only a name."""
NO_RULES = {"__slots__", "__all__", "__match_args__"}


def entry(*parts: ast.expr | None) -> tuple[str, ...]:
    """The constants of an entry, in any order; () if it has another part than these."""
    try:
        return tuple(sorted(repr(ast.literal_eval(part)) for part in parts if part is not None))
    except ValueError:
        return ()


def tables(tree: ast.Module) -> Iterator[tuple[int, frozenset[tuple[str, ...]]]]:
    """Line and entries of each literal, each class with constants, and each union of flags."""
    names = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in NO_RULES
    ]
    sums = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp)]
    inner = {one for node in sums for one in ast.walk(node) if one is not node}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found = [entry(*pair) for pair in zip(node.keys, node.values, strict=True)]
        elif isinstance(node, ast.Set | ast.Tuple | ast.List) and node not in names:
            found = [entry(one) for one in node.elts]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and node not in inner:
            found = [(ast.unparse(one),) for one in ast.walk(node) if isinstance(one, ast.Attribute)]
            found = [(name,) for (name,) in found if name[0].isupper()]
        elif isinstance(node, ast.ClassDef):
            found = [
                (ast.unparse(one.targets[0]), *entry(one.value))
                for one in node.body
                if isinstance(one, ast.Assign) and entry(one.value)
            ]
        else:
            continue
        if len(entries := frozenset(filter(None, found))) >= ENTRIES:
            yield node.lineno, entries


class Shape(ast.NodeTransformer):
    """What is left of a function without its names and constants."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("_", node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Attribute(self.visit(node.value), "_", node.ctx)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("_")

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return ast.keyword("_", self.visit(node.value))


def functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and shape of each function's body, without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if sum(isinstance(one, ast.stmt) for part in body for one in ast.walk(part)) >= STATEMENTS:
                yield node.lineno, "".join(ast.dump(Shape().visit(part)) for part in body)


def is_telling(value: ast.expr) -> bool:
    """Whether two constants with this value are one by more than chance."""
    try:
        found = ast.literal_eval(value)
    except ValueError:
        flags = [one for one in ast.walk(value) if isinstance(one, ast.Attribute) and one.attr.isupper()]
        texts = [one for one in ast.walk(value) if isinstance(one, ast.Constant) and type(one.value) is str]
        return len(flags) > 1 or (bool(texts) and ast.unparse(value).partition("(")[0] not in NAMING)
    if type(found) is int:  # neither a power of ten or two, nor near one
        return found > 1000 and found % 1000 > 0 and min(found.bit_count(), (found + 1).bit_count()) > 2
    return type(found) is str and len(found) > 20


def constants(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and value of each telling constant of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and (value := node.value) is not None:
            for one in value.elts if isinstance(value, ast.Tuple) else [value]:
                if is_telling(one):
                    yield node.lineno, ast.unparse(one)


def twice(files: dict[str, str]) -> list[str]:
    """Each two places that say the same."""
    trees = {name: ast.parse(text) for name, text in files.items()}
    known = [(f"{name}:{line}", rows) for name, tree in trees.items() for line, rows in tables(tree)]
    often = Counter(row for _, rows in known for row in rows)
    several = [(place, {row for row in rows if often[row] > 1}) for place, rows in known]
    found = [
        f"{one} and {other} have {sorted(rows & others)}"
        for (one, rows), (other, others) in combinations([it for it in several if len(it[1]) >= ENTRIES], 2)
        if len(rows & others) >= ENTRIES
    ]
    bodies: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for line, body in [*functions(tree), *constants(tree)]:
            bodies.setdefault(body, []).append(f"{name}:{line}")
    return found + [" and ".join(places) + " are alike" for places in bodies.values() if len(places) > 1]


def test_no_rule_stands_in_two_places() -> None:
    assert twice(FILES) == []


def test_a_second_place_is_found() -> None:
    rule = (
        "def one(a, b):\n    for c in a:\n        if c > b:\n            return c\n    b += 1\n    return b\n"
    )
    copy = rule.replace("one(a, b)", "other(x, y)").replace("in a", "in x").replace("1", "2")
    files = {
        "dict.py": "RATES = {2: 2.5, 5: 5, 3: 10, 6: 20}",
        "inverse.py": "CODES = {2.5: 2, 5: 5, 10: 3, 20: 6, 40: 7}",
        "mask.py": "A = McMask.QKEY | McMask.SL | McMask.PKEY | McMask.TCLASS",
        "union.py": "B = 1 | int(McMask.SL | McMask.QKEY | McMask.TCLASS | McMask.PKEY)",
        "enum.py": "class Mtu(IntEnum):\n    A = 1\n    B = 2\n    C = 3\n    D = 4\n",
        "kind.py": "class Kind(Enum):\n    D = 4\n    C = 3\n    B = 2\n    A = 1\n    E = 5\n",
        "rule.py": rule,
        "copy.py": copy,
        "number.py": "PORT = 4791",
        "again.py": "A, B = 1, 4791",
        "path.py": "NET = Path('/sys/class/net')",
        "same.py": "_NET = Path('/sys/class/net')",
        "flags.py": "BOTH = int(Mask.A | Mask.B)\nLOG = getLogger('a')\nN = 4096\nM = 65535",
        "both.py": "_BOTH = int(Mask.A | Mask.B)\nlog = getLogger('a')\nn = 4096\nm = 65535",
        "said.py": "WHY = 'no such device in this host'",
        "told.py": "WHAT = 'no such device in this host'",
        "slots.py": "__slots__ = ('a', 'b', 'c', 'd')\ndef short(): return short()",
        "other.py": "__slots__ = ('a', 'b', 'c', 'd')\ndef brief(): return brief()\nA = (1, 2, 3)",
    }
    found = [line.partition(" have ")[0].partition(" are ")[0] for line in twice(files)]
    pairs = {("dict", "inverse"), ("mask", "union"), ("enum", "kind"), ("rule", "copy")}
    pairs |= {("number", "again"), ("path", "same"), ("flags", "both"), ("said", "told")}
    assert set(found) == {f"{one}.py:1 and {other}.py:1" for one, other in pairs}
