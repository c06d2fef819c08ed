"""The help: every command on a line of its own, none cut short, all of it at 80 columns."""

from __future__ import annotations

import re

from ..commands import MCAST, Run

ORDER = ["info", "doctor", "demo", "send", "recv", "ping", "groups", "mgid", "top", "record", "replay"]
ORDER += ["bench", "conformance", "sim", "lab"]

ALL = """
import sys
from typer.main import get_command
from mcast.cli import app

def show(command, path):
    try:
        command.main([*path, "--help"], prog_name="mcast", standalone_mode=False)
    except SystemExit:
        pass

root = get_command(app)
for name, command in root.commands.items():
    show(root, [name])
    for inner in getattr(command, "commands", {}):
        show(root, [name, inner])
"""


def test_the_commands_are_in_order_of_use_and_none_is_cut_short(mcast: Run) -> None:
    text = mcast("--help").stdout
    _, _, commands = text.partition("Commands:\n")
    lines = commands.splitlines()
    assert [line.split()[0] for line in lines] == ORDER
    for line in lines:
        assert re.fullmatch(r"  [a-z]+ +\S.*[^.]\.", line), line


def test_all_help_fits_80_columns(run: Run) -> None:
    done = run(MCAST.with_name("python"), "-c", ALL, env={"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Usage: mcast ") >= len(ORDER) + 4
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
