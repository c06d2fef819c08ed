"""The tests hold whoever starts them: a user with habits, a hook of git, a service, a job of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/bench/test_bench.py::test_it_reads_well_in_80_columns",
    "tests/cli/test_cli.py::test_output_fits_80_columns_and_has_no_escapes",
    "tests/cli/test_cli.py::test_a_closed_stdout_is_one_sentence",
    "tests/cli/test_help.py",
    "tests/cli/test_send_recv.py::test_a_signal_leaves_nothing",
    "tests/house/test_release.py",
    "tests/testing/test_suite_plugin.py",
)
"""Some that tell one surrounding from another."""
OPTIONS = ("-p", "no:cacheprovider", "-p", "no:xdist")
VARIABLES = {
    "CI": "true",
    "GITHUB_ACTIONS": "true",
    "FORCE_COLOR": "1",
    "PY_COLORS": "1",
    "COLUMNS": "40",
    "TERM": "dumb",
    "PYTHONWARNINGS": "error",
    "PYTHONSAFEPATH": "1",
    "PYTEST_ADDOPTS": "-v --color=yes",
    "MCAST_SIM": "/nowhere",
    "MCAST_BACKEND": "nothing",
    "MCAST_BIND": "192.0.2.1",
    "SLURM_STEP_NUM_TASKS": "4",
    "GIT_DIR": "no/where",
}
if str(ROOT).isascii():  # else no Python starts there whose locale knows ASCII alone
    VARIABLES |= {"LC_ALL": "C", "PYTHONUTF8": "0"}
SIGNALS = "INT,TERM,HUP,CHLD"
UNKINDLY = f'umask 077; exec env --ignore-signal={SIGNALS} --block-signal={SIGNALS} "$@"'
"""Runs a command with what a parent may leave to it."""


def test_tests_hold_in_the_surroundings_of_another(tmp_path: Path) -> None:
    place = tmp_path / "a place"
    place.mkdir()
    done = subprocess.run(
        ["sh", "-c", UNKINDLY, "sh", sys.executable, "-m", "pytest", "-q", *OPTIONS, *TESTS],
        cwd=ROOT,
        env={**os.environ, **VARIABLES, "TMPDIR": str(place)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
