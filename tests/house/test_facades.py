"""Names that applications import: checkers, Python and `help` know the same names."""

from __future__ import annotations

import ast
import pydoc
import re
from ast import literal_eval
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, get_type_hints

import griffe
import pytest

import mcast
import mcast.cast
from mcast.backends.sim import Fabric
from mcast.endpoint.settings import OpenArguments

ROOT = Path(__file__).parents[2]
SOURCE = Path(mcast.__file__ or "").read_text("utf-8")


UNNAMED = {"Backend", "__version__"}


def homes(facade: ModuleType) -> dict[str, str]:
    """Return the module of each public name."""
    return {name: f"mcast.{module}" for module, names in facade._NAMES.items() for name in names.split()}


def test_checkers_and_python_see_the_same_names() -> None:
    imports = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    modules = {name: f"mcast.{name}" for name in ("aio", "errors") if typed.pop(name) == "mcast"}
    assert typed | modules | {"__version__": "mcast.errors.install"} == homes(mcast)


@pytest.mark.parametrize("facade", [mcast, mcast.cast, mcast.errors], ids=lambda facade: facade.__name__)
def test_each_public_name_is_there(facade: ModuleType) -> None:
    assert {*homes(facade)} == {*dir(facade)}
    for name in dir(facade):
        assert getattr(facade, name) is not None


def test_help_fits_on_two_screens_and_names_everything() -> None:
    text = pydoc.plain(pydoc.render_doc(mcast))
    assert len(text.splitlines()) <= 100
    assert [name for name in homes(mcast) if name not in (mcast.__doc__ or "") and name not in UNNAMED] == []


def test_the_example_runs() -> None:
    (block,) = re.findall(r"^    with .*?\n\n", mcast.__doc__ or "", re.M | re.S)
    shown: dict[str, Any] = {"mcast": mcast}
    exec(dedent(block), shown)
    assert bytes(shown["message"].payload) == b"hello"


OPENERS = [mcast.open_endpoint, mcast.aio.open_endpoint]


@pytest.mark.parametrize("opener", OPENERS)
def test_openers_repeat_types_and_defaults(opener: Callable[..., Any]) -> None:
    """The signature is that of the options, and returns the endpoint."""
    shown, options = signature(opener), signature(OpenArguments)
    assert [*shown.parameters.values()] == [*options.parameters.values()]
    assert shown.return_annotation == "Endpoint"


def test_reference_shows_the_signature_of_help() -> None:
    """The page is made by griffe, which reads the source, as checkers do."""
    package = griffe.load("mcast", try_relative_path=False)
    for opener, module in zip(OPENERS, ("blocking", "awaiting"), strict=True):
        found = package[f"endpoint.{module}.open_endpoint"].parameters
        shown = signature(opener).parameters.values()
        assert [one.name for one in found] == [one.name for one in shown]
        for one, other in zip(found, shown, strict=True):
            assert str(one.annotation).replace("'", '"') == str(other.annotation).replace("'", '"')
            if other.default is not Parameter.empty and other.name != "rejoin":
                assert literal_eval(str(one.default)) == other.default


REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))

INTERNAL = {
    "mcast.backends.rdma.availability": "shows what a limit of the host leads to",
    "mcast.bench.card_report": "is described by its JSON schema",
}
"""Module that an example imports from, and that has no page -> reason."""


def public_names(module: str) -> set[str]:
    """Return the names of a module that applications import; none of a package whose modules have them."""
    found = import_module(module)
    return set(getattr(found, "__all__", None) or (dir(found) if hasattr(found, "_NAMES") else ()))


def documented(page: Path) -> dict[str, set[str]]:
    """Return each module of a page of the reference, and the names of it that the page documents or links to.

    A heading names the module. A name that another page documents is a link with the name as its text.
    """
    sections = re.split(r"^##? .*?`((?:mcast|rdma_lab)[\w.]*)`$", page.read_text("utf-8"), flags=re.M)
    found: dict[str, set[str]] = {module: set() for module in sections[1::2]}
    for module, text in zip(found, sections[2::2], strict=True):
        found[module] = set(re.findall(r"\[`(\w+)`\][\[(]", text))
        for shown in re.findall(r"^::: ([\w.]+)$", text, re.M):
            if shown not in found:
                assert shown.startswith(f"{module}."), (
                    f"{page.name}: {shown} is under the heading of {module}"
                )
                found[module].add(shown.removeprefix(f"{module}."))
    return found


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_reference_page_has_all_public_names(page: Path) -> None:
    """Each public name is on the page of its module, and each name of a page is public."""
    for module, shown in documented(page).items():
        public = public_names(module)
        where = page.relative_to(ROOT)
        lack = sorted(public - shown)
        assert lack == [], f"{where}: add `::: {module}.NAME` for {', '.join(lack)}"
        more = sorted(shown - public)
        assert more == [], f"{where}: {', '.join(more)}: not public, so add to {module}.__all__ or remove"


def test_open_endpoint_is_first_in_the_reference() -> None:
    found = [re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.M) for page in REFERENCE]
    firsts = {names[0] for names in found}
    assert "mcast.open_endpoint" in firsts
    aio = next(names for page, names in zip(REFERENCE, found, strict=True) if page.stem == "aio")
    assert aio[:2] == ["mcast.aio", "mcast.aio.open_endpoint"]


def test_examples_import_what_the_reference_has() -> None:
    """Modules that pages and examples import from are in the reference, and so is each page in its index."""
    pages = [ROOT / "README.md", ROOT / "lab/README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in [*pages, *(ROOT / "examples").rglob("*.py")])
    imported = set(re.findall(r"^ *(?:from|import) ((?:mcast|rdma_lab)\b[\w.]*)", text, re.M))
    shown = {module for page in REFERENCE for module in documented(page)}
    assert sorted(imported - shown - {*INTERNAL}) == []
    index = (ROOT / "docs/reference.md").read_text("utf-8")
    assert [page.name for page in REFERENCE if f"](reference/{page.name})" not in index] == []


@pytest.mark.parametrize("call", [*OPENERS, mcast.cast.send, mcast.cast.receive, mcast.cast.open_session])
def test_annotations_can_be_imported(call: Callable[..., Any]) -> None:
    assert get_type_hints(call)


def test_annotated_names_are_public() -> None:
    assert get_type_hints(mcast.cast.send)["data"] == mcast.cast.Sendable
    assert get_type_hints(mcast.cast.receive)["into"] == mcast.cast.ReceiveTarget
    assert mcast.errors.McastError is mcast.McastError


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (mcast.open_endpoint, "open_endpoint()"),
        (mcast.aio.open_endpoint, "open_endpoint()"),
        (Fabric.roce, "Fabric.roce()"),
        (Fabric.infiniband, "Fabric.infiniband()"),
    ],
)
def test_misspelt_option_names_the_call(call: Callable[..., Any], name: str) -> None:
    """No private class is named."""
    with pytest.raises(TypeError) as error:
        call(receive_dept=3, backend="sim") if "open" in name else call(receive_dept=3)
    # Python 3.13 adds what may have been meant.
    assert str(error.value).startswith(f"{name} got an unexpected keyword argument 'receive_dept'")
