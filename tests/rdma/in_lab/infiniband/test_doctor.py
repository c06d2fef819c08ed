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

SETTLE = 60.0
ALL = tuple(sorted(f"{path.name}/1" for path in Path("/sys/class/infiniband").glob("softib*")))
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
    """What is wrong once it is this; after SETTLE seconds, in any case."""
    deadline = monotonic() + SETTLE
    while levels(found := wrong()) != expected and monotonic() < deadline:
        sleep(0.1)
    return found


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
    assert until_wrong({}) == {}
