"""Where mcast does not work, it says so in one sentence: on other systems than Linux, and on trio."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import trio

from mcast import aio
from mcast.endpoint.awaiting import NO_LOOP

ELSEWHERE = """
import asyncio, os, pytest, random, sys, sysconfig  # these ask for the system, too
sysconfig.get_config_vars()
sys.platform = {platform!r}
for name in ("geteuid", "getuid", "eventfd", "memfd_create", "O_CLOEXEC"):
    delattr(os, name)
"""


def on_another_system(platform: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run the program where neither the name of the system nor the calls are those of Linux."""
    source = ELSEWHERE.format(platform=platform) + program
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
@pytest.mark.parametrize(
    "use",
    [
        "mcast.open_endpoint('sim')",
        "from mcast import Endpoint",
        "import mcast.api",
        "import mcast.aio",
        "from mcast.cast import send",
        "import mcast.backends.sim",
        "from mcast.testing.plugin import McastFabric",
    ],
)
def test_another_system_gets_one_sentence(platform: str, use: str) -> None:
    """Importing warns, for pytest loads the plugin in all suites; using a name is an ImportError."""
    done = on_another_system(platform, f"import mcast\n{use}")
    wanted = (
        f"mcast needs Linux, and this is {platform}: neither cards nor the simulator work here; run it on"
    )
    warned, *_, last = done.stderr.splitlines()
    assert f"RuntimeWarning: {wanted}" in warned
    assert last.startswith(f"ImportError: {wanted}")
    assert "AttributeError" not in done.stderr


def test_the_plugin_does_not_stop_pytest() -> None:
    """A suite that does not use mcast runs where mcast does not."""
    program = "import mcast.testing.plugin as plugin\nprint(plugin.LINK_LAYERS)"
    done = on_another_system("darwin", program)
    assert (done.returncode, done.stdout) == (0, "('roce', 'infiniband')\n")


def test_the_command_says_it_on_another_system() -> None:
    done = on_another_system("darwin", "from mcast.__main__ import main\nmain()")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("mcast needs Linux, and this is darwin: ")
    assert "Traceback" not in done.stderr


def test_on_linux_an_import_says_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import mcast, mcast.api"], capture_output=True, timeout=500
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def by_trio(call: Callable[[], object]) -> None:
    async def main() -> None:
        call()

    trio.run(main)


def by_nothing(call: Callable[[], object]) -> None:
    call()


@pytest.mark.parametrize("run", [by_trio, by_nothing])
def test_aio_needs_asyncio(run: Callable[[Callable[[], object]], None]) -> None:
    """On trio, and where nothing runs, the error says what would do."""
    with pytest.raises(RuntimeError) as refused:
        run(lambda: aio.open_endpoint("sim", "10.0.0.1"))
    assert str(refused.value) == NO_LOOP
    assert "trio.to_thread.run_sync" in NO_LOOP
