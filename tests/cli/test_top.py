"""`mcast top`: what it counts, and how it shows that to people, to programs and to a terminal."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable

import pytest

from mcast.api import Message
from mcast.cli.top import Meter
from mcast.contract.batch import CopiedBatch
from mcast.endpoint.sequence import HEADER_SIZE, SOURCES_MAX, pack
from mcast.wire.addresses import Gid

from ..commands import MCAST, Run
from .test_cli import on_a_terminal
from .test_groups_command import source

ONE, TWO = Gid("::ffff:239.1.1.1"), Gid("::ffff:239.1.1.2")
ALICE, BOB = Gid("::ffff:10.0.0.1"), Gid("::ffff:10.0.0.2")


def message(group: Gid, source: Gid, payload: bytes, qp_num: int = 17) -> Message:
    return Message(memoryview(payload), source, qp_num, group, None, False)


def numbered(group: Gid, source: Gid, numbers: list[int], stream: int = 1) -> list[Message]:
    return [message(group, source, pack(stream, number) + b"x") for number in numbers]


def meter() -> Meter:
    return Meter({ONE: "one", TWO: "two"})


def test_rates_are_of_the_interval_and_totals_of_all() -> None:
    counted = meter()
    counted.take(CopiedBatch([message(ONE, ALICE, bytes(100))] * 3 + [message(ONE, BOB, bytes(10))]))
    one, two = counted.look(2.0)
    assert (one["group"], one["messages"], one["bytes"]) == ("one", 4, 310)
    assert (one["messages_per_second"], one["bytes_per_second"]) == (2.0, 155.0)
    alice, bob = one["sources"]
    assert (alice["source"], alice["qp_num"], alice["messages_per_second"]) == ("10.0.0.1", 17, 1.5)
    assert (bob["source"], bob["messages"]) == ("10.0.0.2", 1)
    assert (two["messages"], two["sources"]) == (0, [])
    counted.take(CopiedBatch([message(ONE, BOB, b"")]))
    one, _ = counted.look(0.5)
    assert (one["messages"], one["messages_per_second"], one["bytes_per_second"]) == (5, 2.0, 0.0)
    assert one["sources"][0]["messages_per_second"] == 0


def test_gaps_are_counted_where_messages_are_numbered() -> None:
    counted = meter()
    counted.take(CopiedBatch(numbered(ONE, ALICE, [0, 1, 5, 5, 3]) + numbered(ONE, BOB, [7, 8])))
    counted.take(CopiedBatch([message(TWO, BOB, b"plain")]))
    one, two = counted.look(1.0)
    assert (one["gaps"], one["late"], one["duplicates"]) == (2, 1, 1)
    alice, bob = one["sources"]
    assert (alice["gaps"], alice["late"], alice["duplicates"]) == (2, 1, 1)
    assert (bob["gaps"], bob["messages"], bob["bytes"]) == (0, 2, 2 * (HEADER_SIZE + 1))
    assert two["gaps"] is None
    assert two["sources"][0]["gaps"] is None


def test_a_flood_of_sources_pushes_out_the_ones_that_are_silent() -> None:
    counted = meter()
    strangers = [message(ONE, BOB, b"x", qp_num=number) for number in range(SOURCES_MAX)]
    for stranger in strangers:
        counted.take(CopiedBatch([message(ONE, ALICE, b"y"), stranger]))
    one, _ = counted.look(1.0)
    assert (one["messages"], one["forgotten_sources"]) == (2 * SOURCES_MAX, 1)
    assert len(one["sources"]) == SOURCES_MAX
    (alice,) = [found for found in one["sources"] if found["source"] == "10.0.0.1"]
    assert alice["messages"] == SOURCES_MAX


def test_two_queue_pairs_of_one_port_are_two_sources() -> None:
    counted = meter()
    counted.take(CopiedBatch([message(ONE, ALICE, b"a", 17), message(ONE, ALICE, b"a", 18)]))
    assert [source["qp_num"] for source in counted.look(1.0)[0]["sources"]] == [17, 18]


def test_a_group_that_was_not_asked_for_is_not_counted() -> None:
    counted = meter()
    counted.take(CopiedBatch([message(Gid("::ffff:239.9.9.9"), ALICE, b"a")]))
    assert [group["messages"] for group in counted.look(1.0)] == [0, 0]


# --- the command -------------------------------------------------------------------------

DEMO = ("top", "239.1.1.1", "239.1.1.2", "--demo", "--interval", "0.2")

LOSSY = """
from mcast.backends.sim import ROCE, Fabric, open_fabric
from mcast.backends.sim.faults import Drop, Messages

kept = []

def open_lossy(**options):
    fabric = Fabric.roce(ports=2, clock="wall")
    kept.append(fabric.rules.when(Messages(group="239.1.1.1", nth=range(10, 100_000, 10)), Drop()))
    kept[0].__enter__()
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


@pytest.mark.parametrize("backend", ["sim-roce", "sim-ib"])
def test_a_program_gets_an_object_a_line(mcast: Run, backend: str) -> None:
    done = mcast(*DEMO, "--backend", backend, "--count", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(looks) == 3
    for look in looks:
        assert look["seconds"] >= 0.2
        assert [group["group"] for group in look["groups"]] == ["239.1.1.1", "239.1.1.2"]
        assert look["receive_queue"]["low_water"] <= look["receive_queue"]["depth"]
        assert (look["dropped"], look["events"]) == ({}, [])
    first, last = (look["groups"][0] for look in (looks[0], looks[-1]))
    assert last["messages"] > first["messages"] > 0
    assert last["gaps"] == 0
    assert len(last["sources"]) == 1


def test_without_a_group_it_shows_those_that_somebody_is_in(
    here: Run, third_party: Callable[..., dict[str, str]]
) -> None:
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
    done = run("sh", "-c", f"{MCAST} top 239.1.1.1 --demo --backend sim --interval 0.05 --json | head -n 1")
    assert json.loads(done.stdout)["groups"]
    assert done.stderr == ""


BAD_INPUT = {
    "unicast": (("10.0.0.1",), "10.0.0.1 is a unicast address"),
    "nobody to hear": (("239.1.1.1", "--backend", "sim"), "add --demo for made-up messages"),
    "nobody in a group": (("--backend", "sim", "--demo"), "nobody is seen in a group here: name a GROUP"),
    "no time": (("239.1.1.1", "--interval", "0"), "greater than or equal to 0.05"),
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
