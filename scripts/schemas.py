"""Writes the JSON schemas in `docs/schemas` from the types of outputs and files: `make generated`."""

from __future__ import annotations

import ast
import inspect
import json
import re
from enum import EnumType
from functools import cache, reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict, is_typeddict

import rdma_lab.cli
import rdma_lab.host
from mcast.backends.sim.scenario import model
from mcast.bench.card_report import CardReport
from mcast.cli import outputs

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"


class Described(NamedTuple):
    """What a schema describes.

    kind      type of the value in JSON
    where     commands that print it, or the file that holds it
    is_input  True for a file that is read, whose fields may be left out
    """

    kind: Any
    where: tuple[str, ...]
    is_input: bool = False


def commands() -> dict[str, str]:
    """Command with --json -> name of its schema."""
    return {f"mcast {command}": f"mcast-{command.replace(' ', '-')}" for command in outputs.OUTPUTS} | {
        "mcast lab check": "rdma-lab-check",
        "rdma-lab check": "rdma-lab-check",
    }


def described() -> dict[str, Described]:
    """Name of a schema -> what it describes."""
    found = {
        f"mcast-{command.replace(' ', '-')}": Described(json_type(kind), (f"mcast {command}",))
        for command, kind in outputs.OUTPUTS.items()
    }
    return found | {
        "rdma-lab-check": Described(rdma_lab.cli.CheckOutput, ("rdma-lab check", "mcast lab check")),
        "error": Described(outputs.ErrorOutput, ("every mcast command", "rdma-lab check")),
        "scenario": Described(model.Scenario, ("mcast sim run FILE",), is_input=True),
        "card-report-v1": Described(CardReport, ("mcast conformance --card-report FILE",), is_input=True),
    }


def purposes(about: Described) -> list[str]:
    """Return the first line about each shape of the value."""
    kinds = get_args(about.kind) or (about.kind,)
    return [(inspect.getdoc(kind) or "").partition("\n")[0] for kind in kinds]


def schema(name: str) -> str:
    """Return the text of the schema with that name."""
    about = described()[name]
    made = TypeAdapter(about.kind).json_schema(mode="validation" if about.is_input else "serialization")
    for one in (made, *made.get("$defs", {}).values()):
        describe(one)
    return json.dumps({"$schema": DRAFT, "$comment": ", ".join(about.where), **made}, indent=1) + "\n"


def json_type(kind: Any) -> Any:
    """Return the type of the JSON that stands for a value of this type."""
    if is_typeddict(kind) or hasattr(kind, "_fields"):
        return _object(kind)
    if isinstance(kind, EnumType):
        return Literal[tuple(one.value for one in kind)]
    origin, parts = get_origin(kind), get_args(kind)
    if not parts or origin is Literal:
        return kind
    if origin is tuple and parts[-1] is Ellipsis:
        origin, parts = list, parts[:1]
    made = tuple(map(json_type, parts))
    return reduce(or_, made) if origin in (Union, UnionType) else origin[made[0] if len(made) == 1 else made]


@cache
def _object(kind: Any) -> Any:
    """Return the typed dictionary that stands for a named tuple, or for one that has named tuples in it."""
    made: Any = TypedDict(kind.__name__, _fields(kind))  # type: ignore[misc]  # made from another class
    made.__doc__ = kind.__doc__.partition("\n")[0]
    return made


def _fields(kind: Any) -> dict[str, Any]:
    """Return each field of an object with the type and the description of its JSON."""
    found: dict[str, Any] = {}
    for extended in outputs.EXTENDED.get(kind, ()):
        found |= _fields(extended)
    texts = _docstrings(kind) if is_typeddict(kind) else _rows(kind)
    types = get_type_hints(kind, include_extras=True)
    if hasattr(kind, "as_dict"):
        types |= {name: get_type_hints(one.fget)["return"] for name, one in _properties(kind)}
    for name, of in types.items():
        if of in outputs.INLINE:
            found |= _fields(of)
        elif name in texts:
            found[name] = Annotated[json_type(of), Field(description=texts[name])]
        else:
            found[name] = json_type(of)
    return found


def _properties(kind: type) -> list[tuple[str, property]]:
    return [(name, one) for name, one in vars(kind).items() if isinstance(one, property)]


_ROW = re.compile(r"(\w+)  +(.+(?:\n {3,}.+)*)")


def _rows(kind: type) -> dict[str, str]:
    """Field of a named tuple -> its row of the table in the docstring; for a property, its own docstring."""
    rows = _ROW.findall(inspect.getdoc(kind) or "")
    rows += [(name, inspect.getdoc(one)) for name, one in _properties(kind) if one.__doc__]
    return {name: _sentence(" ".join(text.split())) for name, text in rows}


def _sentence(text: str) -> str:
    text = re.sub(r"\bNone\b", "null", text.removesuffix("."))
    return f"{text[0].upper()}{text[1:]}."


def _docstrings(kind: type) -> dict[str, str]:
    """Field -> the docstring after it, of a class and its bases."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        if one.__module__ in {module.__name__ for module in _MODULES}:
            (node,) = ast.parse(inspect.getsource(one)).body
            assert isinstance(node, ast.ClassDef)
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    assert isinstance(field.target, ast.Name)
                    found[field.target.id] = ast.literal_eval(text.value)
    return found


_MODULES = (outputs, model, rdma_lab.cli, rdma_lab.host)


def describe(one: dict[str, Any]) -> None:
    """Add the docstrings of a class's fields, which pydantic would read at each start, or not at all."""
    found = (getattr(module, one.get("title", ""), None) for module in _MODULES)
    texts = next((_docstrings(kind) for kind in found if kind is not None), {})
    for name, field in one.get("properties", {}).items():
        if name in texts:
            field.setdefault("description", texts[name])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.schema.json"):
        old.unlink()
    for name in described():
        (FOLDER / f"{name}.schema.json").write_text(schema(name), "utf-8")
