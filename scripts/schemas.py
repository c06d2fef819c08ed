"""Writes the JSON schemas in `docs/schemas` from the types of outputs and files: `make schemas`."""

from __future__ import annotations

import ast
import inspect
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

from pydantic import TypeAdapter

import rdma_lab.cli
import rdma_lab.host
from mcast.backends.sim.scenario import model
from mcast.bench.card_report import CardReport
from mcast.cli import outputs

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"


class Described(NamedTuple):
    """What a schema describes.

    kind      type of the value
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
        f"mcast-{command.replace(' ', '-')}": Described(kind, (f"mcast {command}",))
        for command, kind in outputs.OUTPUTS.items()
    }
    return found | {
        "rdma-lab-check": Described(rdma_lab.cli.CheckOutput, ("rdma-lab check", "mcast lab check")),
        "error": Described(outputs.ErrorOutput, ("every mcast command",)),
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


def describe(one: dict[str, Any]) -> None:
    """Add the docstrings of the fields, which pydantic would read at each start, or not at all."""
    texts = _texts(one.get("title", ""))
    for name, field in one.get("properties", {}).items():
        if name in texts:
            field.setdefault("description", texts[name])


def _texts(name: str) -> dict[str, str]:
    """Field -> its docstring, of the class with that name and its bases."""
    found: dict[str, str] = {}
    for module in (outputs, model, rdma_lab.cli, rdma_lab.host):
        for node in _classes(module):
            if node.name == name:
                for base in node.bases:
                    found |= _texts(base.id) if isinstance(base, ast.Name) else {}
                for field, text in zip(node.body, node.body[1:], strict=False):
                    if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                        assert isinstance(field.target, ast.Name)
                        found[field.target.id] = ast.literal_eval(text.value)
    return found


@cache
def _classes(module: ModuleType) -> list[ast.ClassDef]:
    return [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.schema.json"):
        old.unlink()
    for name in described():
        (FOLDER / f"{name}.schema.json").write_text(schema(name), "utf-8")
