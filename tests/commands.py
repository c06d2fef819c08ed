"""Helpers of the tests of the command: running it, and a package of a third party."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
MCAST = Path(sys.executable).with_name("mcast")
QUOTED = shlex.quote(str(MCAST))
"""Quoted for a shell, wherever the clone is."""

PROVIDER = """
from contextlib import contextmanager
from mcast.backends.sim import ROCE

NAME, DEVIATIONS, LEAK = {name!r}, {deviations!r}, {leak!r}
LEAKS = [None] * 4  # in the first tests alone: a report of a hundred takes seconds to write

@contextmanager
def testbed():
    with ROCE.testbed() as bed:
        bed.deviations = DEVIATIONS
        if LEAK and LEAKS:
            LEAKS.pop()
            bed.observer.leftovers = lambda: (LEAK,)
        yield bed

PROVIDER = ROCE._replace(name=NAME, summary="a provider of somebody else", testbed=testbed)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a command in a directory of its own, without a terminal; more variables as `env`."""

    def call(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        return subprocess.run(
            [str(word) for word in command],
            cwd=tmp_path,
            env=kept | (env or {}),
            capture_output=True,
            text=True,
            timeout=500,
        )

    return call


@pytest.fixture
def mcast(run: Run) -> Run:
    """Run the command `mcast`."""
    return lambda *arguments, **options: run(MCAST, *arguments, **options)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command `mcast` in this process, which is quicker; `env` may name packages in PYTHONPATH."""

    def call(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        from mcast.cli import main

        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        for path in filter(None, (env or {}).get("PYTHONPATH", "").split(os.pathsep)):
            monkeypatch.syspath_prepend(path)
        monkeypatch.delitem(sys.modules, "acme_mcast", raising=False)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["mcast", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(sys.argv, code, out, err)

    return call


@pytest.fixture
def third_party(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Make a package with an entry point in `mcast.backends`; the answer is the environment that has it."""

    def install(
        name: str = "acme", deviations: dict[str, str] | None = None, leak: str = "", source: str = ""
    ) -> dict[str, str]:
        site = tmp_path / "site"
        info = site / "acme_mcast-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-mcast\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[mcast.backends]\n{name} = acme_mcast:PROVIDER\n")
        module = source or PROVIDER.format(name=name, deviations=deviations or {}, leak=leak)
        (site / "acme_mcast.py").write_text(module)
        return {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}

    return install


def written_to_terminal(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None = None,
    *,
    killed_at: str = "",
    status: int = 0,
) -> str:
    """Return the output of a command on the terminal that it is started on, and which ends with that status.

    killed_at  where it has written that, it gets a SIGTERM
    """
    leader, follower = pty.openpty()
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        written = b""
        try:
            while block := os.read(leader, 65536):
                written += block
                if killed_at and killed_at.encode() in written:
                    process.terminate()
                    killed_at = ""
        except OSError:  # the other end is closed: all is read
            pass
    os.close(leader)
    assert process.returncode == status, (process.returncode, written.decode())
    return written.decode()
