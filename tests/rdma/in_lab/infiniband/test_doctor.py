"""Defects planted on an InfiniBand host, one by one: the doctor names each, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import pytest

from mcast.api import Finding, Level
from mcast.backends.rdma import PROVIDER

Levels = dict[tuple[str, str], Level]

SETTLE_TIMEOUT = 60.0
ALL = tuple(sorted(f"{path.name}/1" for path in Path("/sys/class/infiniband").glob("softib*")))
PARTITIONS = Path("/etc/opensm/partitions.conf")
PKEYS = "/sys/class/infiniband/softib2/ports/1/pkeys/*"
CHILD = "ip link add link ib2 name ib2.child type ipoib pkey {}; ip link set ib2.child up"
LINKS = "/sys/kernel/debug/softib/links"


def opensm(what: signal.Signals) -> None:
    os.kill(int(subprocess.check_output(["pidof", "opensm"])), what)


def sh(script: str) -> None:
    subprocess.run(["sh", "-ec", script], check=True, timeout=60)


def wrong() -> dict[tuple[str, str], Finding]:
    """Whatever is not ok, by check and subject."""
    return {(one.check, one.subject): one for one in PROVIDER.checks(0) if one.level is not Level.OK}


def levels(found: dict[tuple[str, str], Finding]) -> Levels:
    return {key: one.level for key, one in found.items()}


def until_wrong(expected: Levels) -> dict[tuple[str, str], Finding]:
    """Return the findings once they are these; after SETTLE_TIMEOUT seconds, in any case."""
    deadline = monotonic() + SETTLE_TIMEOUT
    while levels(found := wrong()) != expected and monotonic() < deadline:
        sleep(0.1)
    return found


def partitions(*lines: str) -> None:
    """Have OpenSM read these partitions; none: those that it makes by itself."""
    if lines:
        PARTITIONS.parent.mkdir(exist_ok=True)
        PARTITIONS.write_text("".join(f"{line};\n" for line in lines))
    else:
        PARTITIONS.unlink()
    opensm(signal.SIGHUP)


def plant_refusal() -> None:
    """A partition whose IPoIB broadcast group has a larger MTU than any port, and an interface in it."""
    partitions("Default=0x7fff,ipoib:ALL=full", "Large=0x2,ipoib,mtu=5:ALL=full")
    sh(f"until grep -q 0x8002 {PKEYS}; do sleep 0.1; done; {CHILD.format('0x8002')}")


def undo_refusal() -> None:
    sh("ip link del ib2.child")
    partitions()
    sh(f"while grep -q 0x8002 {PKEYS}; do sleep 0.1; done")


DEFECTS: dict[str, tuple[Callable[[], None], Callable[[], None], Levels]] = {
    "no subnet manager": (
        lambda: opensm(signal.SIGSTOP),
        lambda: opensm(signal.SIGCONT),
        {("SM", name): Level.PROBLEM for name in ALL},
    ),
    "IPoIB is down": (
        lambda: sh("ip link set ib2 down"),
        lambda: sh("ip link set ib2 up; ip addr replace fd77::2/64 dev ib2 nodad"),
        {("IPoIB", "softib2/1"): Level.PROBLEM},
    ),
    "the cable is out": (
        lambda: sh(f"echo softib2 out >{LINKS}"),
        lambda: sh(f"echo softib2 in >{LINKS}"),
        {("link", "softib2/1"): Level.PROBLEM},
    ),
    "a P_Key that the port has not": (
        lambda: sh(CHILD.format("0x8001")),
        lambda: sh("ip link del ib2.child"),
        {("P_Key", "softib2/1"): Level.PROBLEM},
    ),
    "a group that refuses": (
        plant_refusal,
        undo_refusal,
        {("IPoIB", "softib2/1"): Level.PROBLEM},
    ),
}
SAYS = {
    "a P_Key that the port has not": "ib2.child is of partition 0x8001, the port's table has 0xffff",
    "a group that refuses": "the port's MTU is 2048 bytes, the group's 4096 bytes",
}


@contextmanager
def planted(name: str) -> Iterator[Levels]:
    plant, undo, expected = DEFECTS[name]
    plant()
    try:
        yield expected
    finally:
        undo()


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str) -> None:
    assert until_wrong({}) == {}
    with planted(name) as expected:
        found = until_wrong(expected)
        assert levels(found) == expected
        assert all(one.fix for one in found.values())
        assert all(SAYS.get(name, "") in one.seen for one in found.values())
    assert until_wrong({}) == {}
