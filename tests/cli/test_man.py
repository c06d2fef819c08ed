"""The manual pages: they say what the help says, and groff finds nothing wrong in them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mcast.cli import SUMMARIES
from scripts.man import FOLDER, pages

PAGES = sorted(FOLDER.iterdir())


def rendered(page: Path) -> str:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-P-cbou", "-ww", "-rLL=80n", page],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_each_page_is_what_the_help_says() -> None:
    assert {page.name: page.read_text(encoding="utf-8") for page in PAGES} == pages(), "run `make generated`"
    assert len(PAGES) == 1 + len(SUMMARIES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_a_page_is_sane(page: Path) -> None:
    shown = rendered(page)
    lines = shown.splitlines()
    assert lines[0].startswith(f"{page.stem.upper()}(1)")
    heads = [line for line in lines if re.fullmatch("[A-Z ]+", line)]
    assert heads[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    assert heads[-3:] == ["EXIT STATUS", "ENVIRONMENT", "SEE ALSO"]
    assert max(map(len, lines)) <= 80
    assert "\\" not in shown
    assert re.findall(r"<(?:list|str|int|path|Mcast)", shown) == [], "Python's types"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_a_page_has_what_applies_to_its_command(page: Path) -> None:
    """Statuses of the lab where the lab is, and the options that the help has."""
    text = rendered(page)
    assert {*re.findall("^ {7}(.*--help)$", text, re.MULTILINE)} == {"-h, --help"}
    listed = re.findall("^ {7}([0-9]+) ", text.partition("EXIT STATUS")[2], re.MULTILINE)
    of_lab = ["124", "125", "127"] if page.stem in ("mcast", "mcast-lab") else []
    assert listed == ["0", "1", "2", *of_lab, "129", "130", "141", "143"]


def test_both_ends_of_a_transfer_refer_to_each_other() -> None:
    for one, other in (("send", "recv"), ("recv", "send")):
        assert f"mcast-{other}(1)" in rendered(FOLDER / f"mcast-{one}.1").partition("SEE ALSO")[2]


def test_a_page_shows_quotes_and_hyphens_to_paste() -> None:
    text = " ".join(rendered(FOLDER / "mcast-bench.1").split())
    assert "`mcast bench --client --receivers N`" in text
    assert "pip install 'rdma-mcast[mpi]'" in text
