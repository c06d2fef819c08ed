"""What applications import: checkers, Python and `help` know the same names."""

from __future__ import annotations

import ast
import pydoc
import re
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

import mcast
import mcast.cast

SOURCE = Path(mcast.__file__ or "").read_text("utf-8")


def test_checkers_and_python_see_the_same_names() -> None:
    imports = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    assert typed.pop("aio") == "mcast"
    assert typed == {name: f"mcast.{module}" for name, module in mcast._HOME.items()}


@pytest.mark.parametrize("facade", [mcast, mcast.cast], ids=lambda facade: facade.__name__)
def test_each_public_name_is_there(facade: ModuleType) -> None:
    assert {*facade._HOME} <= {*dir(facade)}
    for name in dir(facade):
        assert getattr(facade, name) is not None


def test_help_fits_on_two_screens_and_names_everything() -> None:
    text = pydoc.plain(pydoc.render_doc(mcast))
    assert len(text.splitlines()) <= 100
    assert [name for name in mcast._HOME if name not in (mcast.__doc__ or "") and name != "Backend"] == []


def test_the_example_runs() -> None:
    (block,) = re.findall(r"^    with .*?\n\n", mcast.__doc__ or "", re.M | re.S)
    shown: dict[str, Any] = {"mcast": mcast}
    exec(dedent(block), shown)
    assert bytes(shown["message"].payload) == b"hello"
