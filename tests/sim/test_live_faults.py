"""Faults of a served fabric: by `mcast sim ctl`, and those of a scenario on the wall clock."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from mcast import BackendUnavailable, Endpoint
from mcast.api import McastError
from mcast.backends.sim import Fabric
from mcast.backends.sim.scenario.fault_syntax import parse_fault
from mcast.backends.sim.scenario.faults import format_fault
from mcast.backends.sim.scenario.model import (
    FAULTS,
    BadScenario,
    OnMessages,
    OnRequests,
    ScenarioTopology,
    make_fault,
)
from mcast.backends.sim.served.attach import attach
from mcast.backends.sim.served.client import ServedBackend
from mcast.backends.sim.served.control import MAX_FAULTS
from mcast.backends.sim.served.server import FabricServer
from mcast.endpoint.policy import Lost, Rejoined

from ..commands import Run
from ..waiting import until

pytestmark = pytest.mark.usefixtures("named")

GROUP = "239.1.1.1"
PORTS = {"ib0": 0, "ib1": 1, "ib2": 2, "10.0.0.3": 2}
SHAPE = ScenarioTopology(link_layer="infiniband", ports=3, switches=3)


@pytest.fixture
def fabric() -> Fabric:
    return Fabric.infiniband(ports=3, switches=3, clock="wall")


# --- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("drop 1%", {"rate": 0.01}),
        ("delay 5ms", {"seconds": 0.005}),
        ("delay 0.5s 10% ib1", {"seconds": 0.5, "rate": 0.1, "target": 1}),
        ("drop nth=1,3 group=239.1.1.1 source=10.0.0.3", {"nth": (1, 3), "group": GROUP, "source": 2}),
        ("drop 239.1.1.1 until=10s", {"group": GROUP, "until": 10.0}),
        ("duplicate 2", {"copies": 2}),
        ("reorder 3", {"after": 3}),
        ("restart-sm 2s", {"outage": 2.0}),
        ("restart-sm", {}),
        ("link-down 10.0.0.3", {"port": 2}),
        ("link-down 1", {"port": 1}),
        ("cut-cable switch=1 at=1 until=2s", {"switch": 1, "at": 1.0, "until": 2.0}),
        ("cut-cable 2", {"switch": 2}),
        ("set-pkeys ib1 pkeys=0x7fff,0xffff", {"port": 1, "pkeys": (0x7FFF, 0xFFFF)}),
        ("remove-device port=ib2", {"port": 2}),
    ],
)
def test_a_fault_in_words_is_that_of_a_scenario(words: str, fields: dict[str, object]) -> None:
    fault = make_fault(parse_fault(words.split(), PORTS), SHAPE)
    assert fault.kind == words.split()[0]
    assert {name: getattr(fault, name) for name in fields} == fields
    assert make_fault(parse_fault(format_fault(fault).split(), PORTS), SHAPE) == fault


def test_a_status_goes_by_its_name() -> None:
    for words in ("sa-refuses NO_RESOURCES", "fail-qp ib1 LOC_QP_OP_ERR", "sa-silent SET"):
        fault = make_fault(parse_fault(words.split(), PORTS), SHAPE)
        status = getattr(fault, "status", None) or getattr(fault, "method", None)
        assert status is not None
        assert status.name == words.split()[-1]
        assert make_fault(parse_fault(format_fault(fault).split(), PORTS), SHAPE) == fault


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("drip 1%", "unknown fault 'drip': choose one of drop, delay, .*restart-sm, .*fail-qp$"),
        ("link-down ib7", "there is no port 'ib7': there are ib0 to ib2, or by address"),
        ("link-down 3", "there is no port '3': there are ib0 to ib2"),
        ("link-down ib1 ib2", "'ib2' sets port twice: give it once"),
        ("change-lid 5ms", "'5ms' is no argument of the fault 'change-lid': its fields are at, port"),
        (
            "drop colour=red",
            "'colour=red' is no argument of the fault 'drop': its fields are at, until, group",
        ),
    ],
)
def test_words_that_fit_nothing_are_one_sentence(words: str, sentence: str) -> None:
    with pytest.raises(BadScenario, match=sentence):
        parse_fault(words.split(), PORTS)


def test_fault_has_one_name_everywhere() -> None:
    """A fault of a port, a switch or the SM is a method of `Fabric` by that name.

    `set_link` and `starved` also end the fault; faults of messages and requests are rules.
    """
    incidents = [name for name, kind in FAULTS.items() if not issubclass(kind, OnMessages | OnRequests)]
    named = {"link-down": "set_link", "starve": "starved"}
    assert [name for name in incidents if not hasattr(Fabric, named.get(name, name.replace("-", "_")))] == []
    assert len(FAULTS) == len(set(FAULTS.values())) == 20


# --- on a served fabric -----------------------------------------------------------------------


def test_messages_are_lost_until_undo(onlooker: ServedBackend, pair: tuple[Endpoint, Endpoint]) -> None:
    """Messages are lost from the word to its mend."""
    one, other = pair
    with one.join(GROUP) as here, other.join(GROUP) as there:
        assert onlooker.control(["drop", "ib1"]) == ("drop target=1",)
        here.send(b"lost")
        assert onlooker.control(["list"]) == ("drop target=1",)
        assert onlooker.control(["undo", "ib1"]) == ("1 fault ended",)
        here.send(b"found")
        message = there.recv(10)
        assert message is not None
        assert bytes(message.payload) == b"found"
    assert onlooker.control(["list"]) == ("no fault lasts",)


def test_spent_rule_is_marked(onlooker: ServedBackend, pair: tuple[Endpoint, Endpoint]) -> None:
    """A rule for the second message stays in the list until `undo`, and the list says that it is spent."""
    one, other = pair
    with one.join(GROUP) as here, other.join(GROUP) as there:
        onlooker.control(["drop", "nth=2"])
        here.send(b"first")
        assert onlooker.control(["list"]) == ("drop nth=2",)
        here.send(b"second")
        assert onlooker.control(["list"]) == ("drop nth=2 (spent)",)
        here.send(b"third")
        received = [bytes(message.payload) for _ in range(2) if (message := there.recv(10))]
        assert received == [b"first", b"third"]
        assert onlooker.control(["undo", "drop"]) == ("1 fault ended",)


def test_undo_restores_a_cut_port(onlooker: ServedBackend, pair: tuple[Endpoint, Endpoint]) -> None:
    """A cut port's programs hear of it and the mend brings them back."""
    with pair[1].join(GROUP):
        onlooker.control(["link-down", "10.0.0.2"])
        until(lambda: isinstance(pair[1].next_event(10), Lost))
        assert onlooker.control(["undo"]) == ("1 fault ended",)
        until(lambda: isinstance(pair[1].next_event(20), Rejoined))


def test_a_restart_of_the_sm_resets_the_memberships(
    onlooker: ServedBackend, pair: tuple[Endpoint, Endpoint]
) -> None:
    with pair[0].join(GROUP):
        assert onlooker.control(["restart-sm"]) == ("restart-sm",)
        until(lambda: isinstance(pair[0].next_event(10), Lost))
        until(lambda: isinstance(pair[0].next_event(20), Rejoined))


def test_a_removed_device_comes_back_by_its_mend(onlooker: ServedBackend) -> None:
    onlooker.control(["remove-device", "ib1"])
    assert [device.name for device in onlooker.devices()] == ["ib0", "ib2"]
    assert onlooker.control(["undo", "remove-device"]) == ("1 fault ended",)
    assert len(onlooker.devices()) == 3


def test_a_fault_ends_by_itself_at_until(onlooker: ServedBackend, server: FabricServer) -> None:
    onlooker.control(["program-late", "1s", "until=10ms"])
    until(lambda: onlooker.control(["list"]) == ("no fault lasts",))
    assert server.control.faults.count == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give a command: `list`, `undo`, or a fault: drop, "),
        (["undo", "ib1"], "no active fault matches 'ib1'; active faults: none"),
        (["undo", "ib1", "ib2"], '"undo" takes one argument'),
        (["stop-querier"], "needs IGMP: the fabric must be"),
        (["cut-cable", "switch=3"], "the leaves are 1..2"),
        (["cut-cable"], "the fields of 'cut-cable' are at, until, switch"),
        (["delay"], "seconds of delay is needed"),
        (["drop", "rate=\x1b[2J"], "rate is '"),
        (["drop", "nth=2,0"], "entry 2 of nth of drop is 0: give 1 or more"),
    ],
)
def test_other_words_are_refused_and_change_nothing(
    onlooker: ServedBackend, server: FabricServer, words: list[str], sentence: str
) -> None:
    with pytest.raises(McastError, match=sentence):
        onlooker.control(words)
    assert server.control.faults.count == 0
    assert len(onlooker.devices()) == 3


def test_the_faults_that_last_or_wait_are_bounded(onlooker: ServedBackend, server: FabricServer) -> None:
    for words in (["drop", "at=1000"], ["drop", "nth=1"]):
        for _ in range(MAX_FAULTS // 2):
            onlooker.control(words)
    with pytest.raises(McastError, match=f"{MAX_FAULTS} faults are active or scheduled"):
        onlooker.control(["drop"])
    assert onlooker.control(["undo"]) == (f"{MAX_FAULTS // 2} faults ended",)
    assert len(server.fabric.rules.deliveries) == 0


def test_the_command_says_what_it_did_or_why_not(server: FabricServer, here: Run, tmp_path: Path) -> None:
    done = here("sim", "ctl", "drop", "1%")
    assert (done.returncode, done.stdout) == (0, "drop rate=0.01\n")
    done = here("sim", "ctl", "link-down", "ib9", "--socket", server.path)
    assert (done.returncode, done.stderr) == (
        2,
        "mcast: there is no port 'ib9': there are ib0 to ib2, or by address\n",
    )
    done = here("sim", "ctl", "list", "--socket", tmp_path / "nothing")
    assert done.returncode == 2
    assert "no fabric is served at" in done.stderr


def test_serve_injects_scenario_faults_in_real_time(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve plays the faults of a scenario on the wall clock."""
    (tmp_path / "late.toml").write_text(
        'name = "late"\nseconds = 60\nseed = 5\nfabric = {ports = 2}\n'
        f'members = [{{group = "{GROUP}", ports = [0]}}]\n'
        '[[faults]]\nkind = "drop"\nrate = 0.5\n'
        '[[faults]]\nkind = "link-down"\nport = 1\nat = 0.01\n'
    )
    path = tmp_path / "fabric.sock"
    simulated: list[str] = []

    def is_served() -> bool:
        try:
            attach("sim", socket=path, host="all").close()
        except BackendUnavailable:
            return False
        return True

    def end_it() -> None:
        try:
            until(is_served)
            with attach("sim", socket=path, host="all") as backend:
                until(lambda: len(backend.control(["list"])) == 2)
                simulated.extend(backend.control(["list"]))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end_it)
    thread.start()
    done = here("sim", "serve", "--scenario", "late.toml", "--socket", path)
    thread.join()
    assert done.returncode == 0, done.stderr
    assert simulated == ["drop rate=0.5", "link-down at=0.01 port=1"]
    said = [line for line in done.stdout.splitlines() if line.startswith(("fault", "ended"))]
    assert said == [
        *(f"fault: {one}" for one in simulated),
        *(f"ended: {one}" for one in reversed(simulated)),
    ]
    assert not path.exists()
