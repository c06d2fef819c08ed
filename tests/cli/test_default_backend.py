"""The backend of a command that nobody named one for."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from mcast.api import Finding, Level, Status, UnavailableReason, UnusableDevice, override_provider
from mcast.backends.sim import ROCE

from ..commands import Run

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = "239.1.1.1"
NO_DEVICE = Status(False, "the kernel has no RDMA device", UnavailableReason.NO_DEVICE, "load a driver")
LACKS = Finding("device", "", Level.INFO, NO_DEVICE.detail, NO_DEVICE.fix)
COMMANDS = [
    f"ping {GROUP}",
    f"listen {GROUP} --demo",
    f"record {GROUP} -o x --demo",
    f"top {GROUP} --demo",
    f"send {os.devnull} {GROUP}",
    f"recv {GROUP} -o x",
    "groups",
    "bench",
    "bench --server",
    "conformance",
]


@pytest.fixture(autouse=True)
def nobody_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MCAST_BACKEND", raising=False)


@pytest.fixture
def no_device() -> Iterator[None]:
    stand_in = ROCE._replace(summary="cards", status=lambda: NO_DEVICE, checks=lambda listen: (LACKS,))
    with override_provider("rdma", stand_in):
        yield


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_device_is_a_sentence_with_choices(here: Run, command: str) -> None:
    done = here(*command.split())
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    for words in ("the kernel has no RDMA device", "--backend sim", "mcast demo", "mcast doctor"):
        assert words in done.stderr


ALONE = " --backend sim-roce"
"""A fabric inside one process, on which no other program can be."""


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize(
    "command",
    [*COMMANDS, f"ping {GROUP}{ALONE}", f"listen {GROUP}{ALONE}", f"recv {GROUP} -o x{ALONE}"],
)
def test_sockets_are_named_where_they_can_be_used(here: Run, command: str, usable: bool) -> None:
    status = Status(True, "sockets on lo") if usable else NO_DEVICE
    with override_provider("udp", ROCE._replace(status=lambda: status)):
        done = here(*command.split())
    assert done.returncode == 2
    assert ("--backend udp" in done.stderr) is usable
    assert ALONE in command or ("sockets on lo" in done.stderr) is usable


@pytest.mark.parametrize("command", ["bench --seconds 0.01 --receivers 1", f"listen {GROUP} --demo -C 1"])
def test_usable_device_is_the_default(here: Run, command: str) -> None:
    """The stand-in for cards is a simulated fabric of four ports."""
    opened: list[str] = []

    def opens(**options: object) -> object:
        opened.append("rdma")
        return ROCE.open(**options | {"ports": 4, "clock": "wall"})

    with override_provider("rdma", ROCE._replace(open=opens)):  # type: ignore[arg-type]
        assert here(*command.split()).returncode == 0
    assert opened == ["rdma"]


@pytest.mark.usefixtures("no_device")
def test_variable_names_the_backend(here: Run) -> None:
    done = here("bench", "--seconds", "0.01", env={"MCAST_BACKEND": "sim-ib"})
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "sim-ib")


@pytest.mark.usefixtures("no_device")
def test_demo_is_simulated_and_says_so(here: Run) -> None:
    done = here("demo", "--size", "1K")
    assert done.returncode == 0
    assert "on sim (simulated)" in done.stdout
    assert "sim is a simulated fabric" in " ".join(here("demo", "--help").stdout.split())


@pytest.mark.usefixtures("no_device")
class TestDoctor:
    """A host without cards has nothing wrong with it unless somebody wants one."""

    def test_card_that_nobody_wants_is_no_problem(self, here: Run) -> None:
        done = here("doctor", "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, found["problems"]) == (0, 0)
        assert found["providers"]["rdma"][0]["level"] == "info"
        assert "mcast doctor --backend rdma" in here("doctor").stdout

    @pytest.mark.parametrize(
        ("words", "env"),
        [(["--backend", "rdma"], {}), ([], {"MCAST_BACKEND": "rdma"})],
        ids=["option", "variable"],
    )
    def test_wanted_card_is_a_problem(self, here: Run, words: list[str], env: dict[str, str]) -> None:
        done = here("doctor", "--json", *words, env=env)
        found = json.loads(done.stdout)
        assert (done.returncode, found["problems"], list(found["providers"])) == (1, 1, ["rdma"])

    def test_variable_is_no_part_of_an_explanation(self, here: Run) -> None:
        assert here("doctor", "EINVAL", env={"MCAST_BACKEND": "rdma"}).returncode == 0

    @pytest.mark.parametrize("left_out", [False, True])
    def test_provider_without_checks(self, here: Run, left_out: bool) -> None:
        """A device that is left out is one that somebody has put there."""
        device = UnusableDevice("x0", UnavailableReason.NO_PERMISSION, "closed", "open it", 13)
        status = NO_DEVICE._replace(unusable=(device,) if left_out else ())
        with ExitStack() as stack:
            other = ROCE._replace(summary="other", status=lambda: status, checks=lambda listen: ())
            stack.enter_context(override_provider("other", other))
            assert here("doctor").returncode == int(left_out)
            assert here("doctor", "--backend", "other").returncode == 1
