"""The notebook, cell by cell, as Jupyter runs it: the value of a cell's last line is its result."""

from __future__ import annotations

import ast
import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).with_name("scenario.ipynb")


def execute(path: Path) -> list[Any]:
    """Run the cells in one namespace; return the value of each, or None."""
    names: dict[str, Any] = {}
    values = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            *body, last = ast.parse("".join(cell["source"])).body
            if not isinstance(last, ast.Expr):
                body.append(last)
            exec(compile(ast.Module(body, []), str(path), "exec"), names)
            values.append(
                eval(compile(ast.Expression(last.value), str(path), "eval"), names)
                if isinstance(last, ast.Expr)
                else None
            )
    return values


def test_the_cells_run_and_show_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    result, *_ = execute(NOTEBOOK)
    html = result._repr_html_()
    assert html.startswith("<iframe ")
    page = unescape(html.partition('srcdoc="')[2].rpartition('"')[0])
    assert page == result.page()
    assert "the membership was lost" in page
    assert capsys.readouterr().out.splitlines() == [
        "ib0 249 of 249 {}",
        "ib1 249 of 249 {}",
        "ib2 100 of 249 {'the membership was lost': 149}",
        "0.1 11",
        "0.2 21",
        "0.5 51",
        "1.0 101",
    ]


def test_the_notebook_is_saved_without_output() -> None:
    """Else each run would change the file, and what it shows could be of another version."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[], [], []]
