"""The examples: each is run from the built wheel, with its own tests, and uses what users may use."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
from jinja2 import DictLoader, Environment

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(path.parent for path in EXAMPLES.glob("*/*") if path.name == "README.md")
NEEDS_TORCH = {"torch_weights"}
"""Folders that `make test-torch` runs."""
PUBLIC = {
    "mcast",
    "mcast.aio",
    "mcast.api",
    "mcast.cast",
    "mcast.collective",
    "mcast.testing.plugin",
    "mcast.backends.model",
    "mcast.backends.sim",
    "mcast.backends.sim.faults",
    "mcast.backends.sim.scenario.runner",
}
WHERE_FROM = """
import importlib.util as util, mcast
print(mcast.__file__, *filter(util.find_spec, ("tests", "benchmarks", "rdma_lab")))
"""
RUN = [folder for folder in FOLDERS if folder.name not in NEEDS_TORCH or find_spec("torch")]


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel, and with what is installed beside this one, but without the clone."""
    where = tmp_path_factory.mktemp("examples") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", where], check=True, timeout=500)
    (site,) = where.glob("lib/python*/site-packages")
    ZipFile(wheel).extractall(site)
    beside = [sysconfig.get_path("purelib")]
    if (torch := find_spec("torch")) and torch.origin:
        beside.append(str(Path(torch.origin).parents[1]))
    # A .pth file in a directory that a .pth file names has no effect: the clone's is one.
    (site / "beside.pth").write_text("\n".join(beside))
    return where / "bin" / "python"


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples, in which Python finds the wheel and nothing of the clone."""
    tree = tmp_path_factory.mktemp("copy") / "examples"
    shutil.copytree(EXAMPLES, tree, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    found = run(python, "-c", WHERE_FROM, cwd=tree).split()
    assert [Path(path).is_relative_to(python.parents[1]) for path in found] == [True], found
    return tree


@pytest.mark.parametrize("folder", RUN, ids=lambda path: path.name)
def test_an_example_passes_its_tests(folder: Path, python: Path, copy: Path, own_network: None) -> None:
    """In a network of its own, because two runs over UDP sockets would hear each other."""
    suite = copy / folder.name
    if (suite / "pyproject.toml").exists():
        options = ("-q", "--no-deps", "--no-index", "--no-build-isolation")
        run(sys.executable, "-m", "pip", "--python", python, "install", *options, ".", cwd=suite)
    output = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=suite)
    assert re.search(r"^\d+ passed in", output, re.M), output


def test_each_example_is_whole() -> None:
    """Each folder has a page and tests, and a row in the table."""
    folders = {
        path.parent for path in EXAMPLES.glob("*/*") if path.parent.name != "__pycache__" and path.is_file()
    }
    assert folders == set(FOLDERS)
    assert [folder.name for folder in FOLDERS if not list(folder.glob("test_*.py"))] == []
    row = r"^\| \[(\w+)\]\(\1/README\.md\) .* (\d+) \|$"
    table = dict(re.findall(row, (EXAMPLES / "README.md").read_text(), re.M))
    assert {name: int(lines) for name, lines in table.items()} == {one.name: length(one) for one in FOLDERS}


def length(folder: Path) -> int:
    """Lines of the programs of an example, without its tests."""
    return sum(
        len(source.splitlines()) for path, source in programs(folder) if not path.name.startswith("test_")
    )


def programs(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each program in a folder and its source, which of a notebook is that of its cells."""
    for path in sorted(folder.rglob("*.py")):
        yield path, path.read_text()
    for path in sorted(folder.rglob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        yield path, "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_page_of_the_notebook_is_dark_on_a_dark_system() -> None:
    """The template puts the dark theme of JupyterLab over the light one, for dark systems alone."""
    base = "{{ css('light') }}{% block html_head_css %}{% endblock %}"
    template = (EXAMPLES / "notebook/page.html.j2").read_text()
    shown = Environment(loader=DictLoader({"lab/index.html.j2": base, "page": template})).get_template("page")

    def css(name: str) -> str:
        return f'<style type="text/css">\n{name}\n</style>'  # as nbconvert writes it

    page = shown.render(css=css, resources={"include_css": css})
    styles = re.findall(r"<style ([^>]*)>\n(.*)\n</style>", page)
    assert styles == [
        ('type="text/css"', "light"),
        ('media="(prefers-color-scheme: dark)"', "static/theme-dark.css"),
    ]


@pytest.mark.parametrize(
    "source", [pytest.param(source, id=path.name) for path, source in programs(EXAMPLES)]
)
def test_an_example_uses_what_users_may_use(source: str) -> None:
    used = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used.add(str(node.module))
    assert {name for name in used if name.partition(".")[0] == "mcast"} <= PUBLIC
