"""A MkDocs hook: what pages take from the code and the tests, put in when the site is built.

A line `<!-- include: NAME WORDS -->` becomes what the function NAME makes of the words; so a table has one
source, and a page cannot lag behind it.
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
INCLUDE = re.compile(r"^<!-- include: (\w+) ?(.*?) -->$", re.M)


def file(path: str) -> str:
    """A file as it is."""
    return (ROOT / path).read_text("utf-8").rstrip()


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


def help_of(words: str) -> str:
    """Return the help of a command, at 80 columns."""
    from typer.testing import CliRunner

    from mcast.cli import app

    arguments = [*words.split(), "--help"]
    done = CliRunner().invoke(app, arguments, prog_name="mcast", env={"COLUMNS": "80"})
    if done.exit_code:
        raise ValueError(f"mcast {' '.join(arguments)}: status {done.exit_code}")
    return f"```text\n{done.output.strip()}\n```"


def action_inputs(_: str) -> str:
    """The inputs of the lab's GitHub action."""
    inputs = yaml.safe_load((ROOT / "lab" / "action.yml").read_text("utf-8"))["inputs"]
    rows = [
        (f"`{name}`", one["description"], f"`{one['default']}`" if one.get("default") else "")
        for name, one in inputs.items()
    ]
    return table(("input", "what it is", "default"), rows)


def picture(words: str) -> str:
    """A picture of `scripts/pictures.py`: the function's name, and its argument."""
    name, _, argument = words.partition(" ")
    drawn: str = getattr(module("scripts/pictures.py"), name)(argument)
    return drawn


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


_PLACES = {
    "JOINING": (60, 24),
    "JOINED": (270, 24),
    "LOST": (270, 150),
    "FAILED": (60, 150),
    "LEFT": (165, 214),
}
"""Where the picture of a membership's life has the middle of each state's box."""
_ACROSS, _DOWN = 50, 17
"""Half of a box, so small that the picture fits a page of 400 pixels."""

_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>'
)


def life(_: str) -> str:
    """A membership's states and changes: a picture, and a table of all rows."""
    from mcast.endpoint.membership import TRANSITIONS, Change

    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, change), step in TRANSITIONS.items():
        if state is not step.state and change is not Change.LEAVE:
            arrows.setdefault((state.name, step.state.name), []).append(change.name.lower().replace("_", " "))
    parts = [_label(*_PLACES["LEFT"], 35, "middle", "by leave, from any state")]
    for name, (x, y) in _PLACES.items():
        parts.append(
            f'<rect x="{x - _ACROSS}" y="{y - _DOWN}" width="{2 * _ACROSS}" height="{2 * _DOWN}" rx="6" '
            'fill="none" stroke="currentColor"/>'
        )
        parts.append(_label(x, y, 5, "middle", name.lower()))
    for (one, other), words in arrows.items():
        parts.append(_arrow(_PLACES[one], _PLACES[other], words))
    rows = [
        (
            state.name.lower(),
            f"{change.name.lower().replace('_', ' ')}: {change.value}",
            step.state.name.lower(),
            "; ".join(action.value for action in step.actions) or "-",
        )
        for (state, change), step in TRANSITIONS.items()
    ]
    head = (
        '<svg viewBox="0 0 360 256" style="min-width: 0; max-width: 26rem" role="img" '
        'aria-label="The life of a membership">'
    )
    picture = "".join(['<div class="picture">', head, _TIP, *parts, "</svg></div>"])
    return f"{picture}\n\n" + table(("state", "change", "next", "what is done"), rows)


def _label(x: float, y: float, down: float, anchor: str, words: str) -> str:
    place = f'x="{x}" y="{y + down}" text-anchor="{anchor}"'
    return f'<text {place} fill="currentColor" font-size="13">{words}</text>'


def _arrow(start: tuple[int, int], end: tuple[int, int], words: list[str]) -> str:
    """From box to box, along or down, with its words above or beside; two that are opposite stand apart."""
    right, down = (end[0] > start[0]) - (end[0] < start[0]), (end[1] > start[1]) - (end[1] < start[1])
    x, y = start[0] + _ACROSS * right + 15 * down, start[1] + _DOWN * down
    to_x, to_y = end[0] - _ACROSS * right + 15 * down, end[1] - _DOWN * down
    line = f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="currentColor" marker-end="url(#tip)"/>'
    if right:
        texts = [
            _label((x + to_x) / 2, y, -6 - 15 * above, "middle", word)
            for above, word in enumerate(reversed(words))
        ]
    else:
        side, aside = ("start", 8) if down > 0 else ("end", -8)
        texts = [
            _label(x + aside, (y + to_y) / 2, 15 * below - 5, side, word) for below, word in enumerate(words)
        ]
    return line + "".join(texts)


INCLUDES: dict[str, Callable[[str], str]] = {
    function.__name__: function
    for function in (
        file,
        facts,
        drivers,
        deviations,
        mutations,
        help_of,
        statuses,
        schemas,
        variables,
        picture,
        action_inputs,
        scenario,
        faults,
        errors,
        atlas,
        life,
        programs,
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


def pages_of_ids() -> dict[str, str]:
    """Id of a clause or a fact -> the page, built, with its row."""
    from mcast.conformance.markdown_table import lines

    pages = (ROOT / "docs" / "facts").glob("*.md")
    return {line.id: f"facts/{page.stem}.html" for page in pages for line in lines(page.read_text("utf-8"))}


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """MkDocs' event: a page as HTML. What is made from code cites ids, and gets links to their rows."""
    if not page.file.src_uri.startswith(("errors.md", "reference/")):
        return html
    up = "../" * page.file.src_uri.count("/")
    found = pages_of_ids()
    html = re.sub(r"docs/pitfalls\.md, (?=\d)", f'<a href="{up}pitfalls.html">pitfall</a> ', html)
    return re.sub(
        r"(?<![\w#-])[A-Z]+(-[A-Z]+)?-\d+\b(?![^<]*>|</a>)",
        lambda id_: f'<a href="{up}{found[id_[0]]}#{id_[0]}">{id_[0]}</a>' if id_[0] in found else id_[0],
        html,
    )


_FOR_TESTS = re.compile(r"^(```\w+) title=\"(?:not run by the tests|run by make test-all|prints).*\"$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs' event: a page's text, before it is rendered, without what blocks' titles tell the tests."""
    included = INCLUDE.sub(lambda found: INCLUDES[found[1]](found[2]), markdown)
    return _FOR_TESTS.sub(r"\1", included)
