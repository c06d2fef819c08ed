"""The tables of the pages that are made from the code and the tests, written into the pages.

Below a line `<!-- table: NAME WORD -->`, up to `<!-- end of table -->`, a page holds what the function NAME
makes of the word; so a table has one source, and can be read where a page is not built.

usage: python -m scripts.tables    writes the tables of all pages
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"^(<!-- table: (\w+) ?(\w*) -->\n).*?^(<!-- end of table -->)$", re.M | re.S)


def facts(_: str) -> str:
    """Return the number of measured facts by topic, and of those that no test can show."""
    from mcast.conformance.facts import FACTS, TOPICS

    rows = []
    for topic in TOPICS:
        own = [fact for fact in FACTS.values() if fact.topic == topic]
        rows.append((topic, str(len(own)), str(sum(not fact.beyond for fact in own))))
    rows.append(("all", str(len(FACTS)), str(sum(not fact.beyond for fact in FACTS.values()))))
    return table(("topic", "facts", "shown by a test"), rows)


def drivers(_: str) -> str:
    """Which providers of libibverbs have multicast."""
    from mcast.backends.rdma.drivers import DRIVERS, RDMA_CORE

    rows = [
        (what, ", ".join(f"`{one.name}`" for one in DRIVERS.values() if one.attaches is attaches))
        for what, attaches in (("with multicast", True), ("without", False))
    ]
    return table((f"in rdma-core {RDMA_CORE}", "drivers (providers of libibverbs)"), rows)


def deviations(_: str) -> str:
    """Where the kernel differs from the suite's sentences in the lab."""
    from mcast.backends.rdma.infiniband_bed import ENOSYS_IS_EOPNOTSUPP
    from mcast.backends.rdma.roce_bed import OVER_LO

    declared = {"Soft-RoCE": OVER_LO, "InfiniBand": ENOSYS_IS_EOPNOTSUPP}
    rows = [(f"`{test}`", on, why) for on, tests in declared.items() for test, why in tests.items()]
    return table(("test that fails", "on", "why"), rows)


def mutations(_: str) -> str:
    """Each planted mistake, and the clause that notices it."""
    planted = module("tests/sim/test_mutations.py").MUTATIONS
    return table(
        ("mistake planted in the simulator", "the clause that fails"),
        [(what, ", ".join(dict.fromkeys(one.clause for one in found))) for what, found in planted.items()],
    )


def programs(_: str) -> str:
    """The RDMA programs that the tests run in the lab, with their commands on RoCE."""
    rows = []
    for one in module("tests/lab/programs.py").PROGRAMS:
        on = "roce" if "roce" in one.fabrics else "infiniband"
        fabrics = ", ".join({"roce": "RoCE", "infiniband": "InfiniBand"}[name] for name in one.fabrics)
        server, client = (" ".join(one.command(on, of_server=end)) for end in (True, False))
        client = client.replace(sys.executable, "python3")
        rows.append((one.name, f"`{one.package}`", fabrics, f"`{server}`" if server else "", f"`{client}`"))
    return table(("program", "package", "fabrics", "server", "client"), rows)


def action_inputs(_: str) -> str:
    """The inputs of the lab's GitHub action."""
    inputs = yaml.safe_load((ROOT / "lab" / "action.yml").read_text("utf-8"))["inputs"]
    rows = [
        (f"`{name}`", one["description"], f"`{one['default']}`" if one.get("default") else "")
        for name, one in inputs.items()
    ]
    return table(("input", "what it is", "default"), rows)


def scenario(_: str) -> str:
    """The tables of a scenario's file, from the models that read it."""
    from mcast.backends.sim.scenario import model

    parts = []
    for heading, kind in (
        ("At the top", model.Scenario),
        ("`[fabric]`", model.ScenarioTopology),
        ("`[[members]]`", model.Members),
        ("`[[traffic]]`", model.Traffic),
    ):
        parts += [f"### {heading}\n", f"{(kind.__doc__ or '').strip()}\n", _fields(kind)]
    return "\n".join(parts)


def statuses(_: str) -> str:
    """The exit statuses of all commands."""
    from mcast.cli.status import MEANINGS

    return table(("status", "when"), [(str(int(status)), words) for status, words in MEANINGS.items()])


def schemas(_: str) -> str:
    """Return the table of the JSON schemas: what each describes, and its file."""
    from scripts.schemas import described, purposes

    rows = [
        (
            ", ".join(f"`{one}`" for one in about.where),
            " Or: ".join(purposes(about)),
            f"[{name}](schemas/{name}.schema.json)",
        )
        for name, about in described().items()
    ]
    return table(("command or file", "what it is", "schema"), rows)


def variables(name: str) -> str:
    """Return a table of environment variables, by its name in `scripts/variables.py`."""
    rows = [
        (
            ", ".join(f"`{each}`" for each in one.name.split(", ")),
            one.what,
            one.values,
            one.default,
            one.reader,
        )
        for one in getattr(module("scripts/variables.py"), name)
    ]
    return table(("variable", "what it does", "values", "default", "who reads it"), rows)


def faults(_: str) -> str:
    """Each kind of fault with its fields, from the models."""
    from mcast.backends.sim.scenario import model

    parts = []
    for name, kind in model.FAULTS.items():
        parts += [f"### {name}\n", f"{(kind.__doc__ or '').strip()}\n", _fields(kind)]
    return "\n".join(parts)


def _fields(kind: Any) -> str:
    """The fields of a model: name, meaning, what is allowed, default. One without a docstring is an error."""
    from scripts.schemas import describe

    schema = kind.model_json_schema()
    describe(schema)
    rows = []
    for name, field in schema["properties"].items():
        if name == "kind":
            continue
        needed = name in schema.get("required", ())
        default = "needed" if needed else _shown(field.get("default"))
        rows.append((f"`{name}`", field["description"], _allowed(field, schema.get("$defs", {})), default))
    return table(("field", "what", "allowed", "default"), rows)


def _shown(value: object) -> str:
    return "" if value is None or value in ([], "") or isinstance(value, dict) else f"`{json.dumps(value)}`"


def _allowed(field: dict[str, Any], defs: dict[str, Any]) -> str:
    """In words, what a JSON schema lets a field be."""
    if "$ref" in field:
        return _allowed(defs[field["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in field:
        return "; or ".join(_allowed(one, defs) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = field.get("type")
    if kind == "object" or "oneOf" in field:
        return "table"
    if kind == "array":
        items = _allowed(field["items"], defs) if "items" in field else ""
        return "tables" if items in ("table", "") else f"list: {items}"
    least, over = field.get("minimum", field.get("exclusiveMinimum")), "exclusiveMinimum" in field
    most, under = field.get("maximum", field.get("exclusiveMaximum")), "exclusiveMaximum" in field
    words = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "text"}[
        kind
    ]
    if least is not None:
        words += f" {'above' if over else 'from'} {_plain(least)}"
    if most is not None and most < 1 << 60:
        words += f" {'below' if under else 'to'} {_plain(most)}"
    return words


def _plain(number: float) -> str:
    return f"{int(number):,}" if number == int(number) else f"{number:f}".rstrip("0")


def errors(_: str) -> str:
    """The tree of exceptions, as the module's docstring draws it."""
    from mcast.errors import tree as errors

    assert errors.__doc__ is not None
    return "```text\n" + errors.__doc__.split("```")[1].strip("\n") + "\n```"


def atlas(_: str) -> str:
    """Return the meaning of each errno in each phase."""
    from mcast.errors import causes

    return causes.atlas()


def life(_: str) -> str:
    """Each change of a membership's state."""
    from mcast.endpoint.membership import TRANSITIONS

    rows = [
        (
            state.name.lower(),
            f"{change.name.lower().replace('_', ' ')}: {change.value}",
            step.state.name.lower(),
            "; ".join(action.value for action in step.actions) or "-",
        )
        for (state, change), step in TRANSITIONS.items()
    ]
    return table(("state", "change", "next", "what is done"), rows)


TABLES: dict[str, Callable[[str], str]] = {
    function.__name__: function
    for function in (
        facts,
        drivers,
        deviations,
        mutations,
        programs,
        action_inputs,
        scenario,
        statuses,
        schemas,
        variables,
        faults,
        errors,
        atlas,
        life,
    )
}


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table. A pipe between backticks ends no cell, and a backslash there would be shown."""
    lines = [head, tuple("---" for _ in head), *rows]
    cells = (
        [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or "\\|", cell) for cell in line] for line in lines
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def module(path: str) -> ModuleType:
    """A module of the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, found)  # where dataclasses look for the names in their annotations
    spec.loader.exec_module(found)
    return found


def pages() -> list[Path]:
    """The pages that may hold a table."""
    return sorted((ROOT / "docs").rglob("*.md"))


def renewed(page: str) -> str:
    """Return the text of a page with its tables as they are now."""
    return TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]](found[3]).strip()}\n\n{found[4]}", page)


def main() -> None:
    """Write them."""
    for page in pages():
        page.write_text(renewed(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
