"""`mcast top`: how it shows what is heard to people, to programs and to a terminal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable

import pytest

from mcast.endpoint.watching import MAX_GAPS

from ..commands import MCAST, QUOTED, Run
from .test_cli import on_a_terminal
from .test_groups_command import source

DEMO = ("top", "239.1.1.1", "239.1.1.2", "--demo", "--interval", "0.2")

LOSSY = """
from mcast.backends.sim import ROCE, Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Messages

def open_lossy(**options):
    fabric = Fabric.roce(ports=2, clock="wall")
    fabric.rules.when(Messages(group="239.1.1.1", nth=range(10, 100_000, 10)), Drop())
    return open_fabric(fabric)

PROVIDER = ROCE._replace(name="acme", open=open_lossy)
"""


def test_lost_messages_are_gaps_of_their_group_alone(
    mcast: Run, third_party: Callable[..., dict[str, str]]
) -> None:
    arguments = (*DEMO, "--backend", "acme", "--device", "roce0", "--count", "1", "--json")
    lossy, whole = json.loads(mcast(*arguments, env=third_party(source=LOSSY)).stdout)["groups"]
    assert lossy["gaps"] == lossy["sources"][0]["gaps"] == (lossy["messages"] - 1) // 9 > 0
    assert whole["gaps"] == 0


def test_gaps_are_losses(mcast: Run, third_party: Callable[..., dict[str, str]]) -> None:
    """The line of losses counts the gaps of the same look, and each gap is named."""
    arguments = (*DEMO, "--backend", "acme", "--device", "roce0", "--count", "1")
    lossy, whole, lost, *events = mcast(*arguments, env=third_party(source=LOSSY)).stdout.splitlines()
    gaps = int(lossy.split()[-2])
    assert lossy.endswith(f", {gaps} gaps")
    assert gaps > 0
    assert whole.endswith(", 0 gaps")
    assert lost.endswith(f"; lost {gaps} in gaps")
    assert re.search(r" 239.1.1.1: message \d+9 of 10.0.0.2 is missing$", events[-1])
    assert len(events) == min(gaps, MAX_GAPS)


@pytest.mark.parametrize("backend", ["sim-roce", "sim-ib"])
def test_a_program_gets_an_object_a_line(mcast: Run, backend: str) -> None:
    done = mcast(*DEMO, "--backend", backend, "--count", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    samples = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(samples) == 3
    for sample in samples:
        assert sample["seconds"] >= 0.2
        assert [group["group"] for group in sample["groups"]] == ["239.1.1.1", "239.1.1.2"]
        assert sample["receive_queue"]["low_water"] <= sample["receive_queue"]["depth"]
        assert (sample["dropped"], sample["events"]) == ({}, [])
    first, last = (sample["groups"][0] for sample in (samples[0], samples[-1]))
    assert last["messages"] > first["messages"] > 0
    assert last["gaps"] == 0
    assert len(last["sources"]) == 1


def test_the_queue_is_as_deep_as_was_asked(here: Run) -> None:
    done = here(*DEMO, "--backend", "sim", "--count", "1", "--receive-depth", "64", "--json")
    assert json.loads(done.stdout)["receive_queue"]["depth"] == 64


def test_top_shows_groups_with_members_by_default(
    here: Run, third_party: Callable[..., dict[str, str]]
) -> None:
    """Without a group it shows those that somebody is in."""
    env = third_party(source=source())
    done = here("top", "--backend", "acme", "--device", "roce2", "--count", "1", "--json", env=env)
    assert [group["group"] for group in json.loads(done.stdout)["groups"]] == ["239.1.1.1"]


def test_without_a_terminal_there_are_plain_lines(mcast: Run) -> None:
    done = mcast(*DEMO, "--backend", "sim", "--count", "2")
    lines = done.stdout.splitlines()
    assert (done.returncode, len(lines)) == (0, 6)
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    assert " 239.1.1.1: " in lines[0]
    assert lines[0].endswith(" from 1 source, 0 gaps")
    assert lines[2].endswith("lost nothing")


def test_on_a_terminal_the_table_is_drawn_again() -> None:
    written = on_a_terminal(*DEMO, "--backend", "sim", "--count", "2")
    assert written.count("group, source") >= 2
    assert "  10.0.0.2 QP " in written
    assert "\x1b[1A" in written, "the cursor goes back"


def test_ctrl_c_is_the_usual_end() -> None:
    command = [str(MCAST), "top", "239.1.1.1", "--demo", "--backend", "sim", "--interval", "0.05", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=500)
    assert (process.returncode, said) == (0, "")


def test_a_reader_that_leaves_ends_it(run: Run) -> None:
    done = run("sh", "-c", f"{QUOTED} top 239.1.1.1 --demo --backend sim --interval 0.05 --json | head -n 1")
    assert json.loads(done.stdout)["groups"]
    assert done.stderr == ""


BAD_INPUT = {
    "unicast": (("10.0.0.1",), "10.0.0.1 is a unicast address"),
    "nobody to hear": (("239.1.1.1", "--backend", "sim"), "add --demo for made-up messages"),
    "nobody in a group": (
        ("--backend", "sim", "--demo"),
        "no group with a member is seen here: name a GROUP",
    ),
    "a deep queue": (
        ("239.1.1.1", "--demo", "--backend", "sim", "--receive-depth", "9999999"),
        "--receive-depth is 9999999: allowed are 1..",
    ),
    "no time": (("239.1.1.1", "--interval", "0"), "0 is out of range: give 0.05 to 604,800 s"),
    "where twice": (
        ("239.1.1.1", "--demo", "--backend", "sim", "--bind", "10.0.0.1", "--device", "roce0"),
        "give one of them",
    ),
    "no such place": (
        ("239.1.1.1", "--demo", "--backend", "sim", "--bind", "10.9.9.9"),
        "no port has the address 10.9.9.9",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(here: Run, case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = here("top", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
