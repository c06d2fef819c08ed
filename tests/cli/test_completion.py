"""Shell completion: what the shell is given to source, and what it then offers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcast import backend_names

from ..commands import MCAST, Run

ASK = """
source <(mcast --show-completion)
complete_with=$(complete -p mcast | sed 's/.*-F \\([^ ]*\\).*/\\1/')
while IFS= read -r line; do
    eval "COMP_WORDS=($line)"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    $complete_with mcast
    printf '%s\\n' "${COMPREPLY[*]}" | tr '\\n' ' '
    echo
done <lines
"""
SHELL = {"PATH": f"{MCAST.parent}{os.pathsep}{os.environ['PATH']}", "SHELL": "/bin/bash"}
"""The shell is looked for among the parents, which bash is one of."""

OFFERED: dict[str, tuple[set[str], set[str]]] = {
    "mcast ''": ({"info", "top", "record", "lab", "sim"}, {"--help"}),
    "mcast re": ({"recv", "record", "replay"}, {"top"}),
    "mcast top --in": ({"--interval"}, {"--demo"}),
    "mcast doctor EADDR": ({"EADDRINUSE", "EADDRNOTAVAIL"}, {"EINVAL"}),
    "mcast sim run sm-": ({"sm-failover-under-load"}, {"list"}),
    "mcast top --backend sim --bind 10.0.0.": ({"10.0.0.1", "10.0.0.4"}, {"10.0.0.5"}),
    "mcast record 239.1.1.1 --backend sim-ib --device ''": ({"ib0/1", "ib3/1"}, {"roce0/1"}),
    "mcast top --backend acme --bind ''": (set(), {"10.0.0.1"}),
    "mcast demo --backend sim-": ({"sim-roce", "sim-ib", "sim-shared", "sim-shared-ib"}, {"rdma"}),
    **{
        f"mcast {command} --backend ''": ({*backend_names(), "acme"}, set())
        for command in ("doctor", "conformance", "groups")
    },
}
"""Line -> what is offered among others for its last word, and what is not."""


def test_bash_is_offered_what_there_is(
    run: Run, tmp_path: Path, third_party: Callable[..., dict[str, str]]
) -> None:
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in OFFERED))
    env = SHELL | third_party(source="raise RuntimeError('out of order')")
    done = run("bash", "--norc", "-c", ASK, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    for (line, (some, none)), found in zip(OFFERED.items(), done.stdout.splitlines(), strict=True):
        assert some <= set(found.split()), line
        assert not none & set(found.split()), line


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_theirs(run: Run, shell: str) -> None:
    done = run(MCAST, env={"_MCAST_COMPLETE": f"source_{shell}"})
    assert done.returncode == 0
    assert f"_MCAST_COMPLETE=complete_{shell}" in done.stdout


def test_installing_changes_the_shells_own_file_alone(run: Run, tmp_path: Path) -> None:
    env = SHELL | {"HOME": str(tmp_path)}
    done = run("bash", "--norc", "-c", "mcast --install-completion; true", env=env)
    assert "bash completion installed" in done.stdout
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {".bashrc", ".bash_completions/mcast.sh"}
