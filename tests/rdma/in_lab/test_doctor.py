"""Defects planted on a real host, one by one: the doctor names each, and what it says mends it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

import pytest

from mcast.api import Finding, Level, OutOfResources, Testbed
from mcast.backends.net.igmp_listener import hear_queriers
from mcast.backends.rdma import PROVIDER

from .conftest import sh

CONF = Path("/proc/sys/net/ipv4/conf")
SETTLE_TIMEOUT = 60.0
CLONE_NEWNET = 0x40000000
MCAST = f"{sys.executable} -m mcast doctor --backend rdma --json"


def wrong(findings: Sequence[Finding]) -> dict[tuple[str, str], Finding]:
    """Whatever is not ok, by check and subject."""
    return {(one.check, one.subject): one for one in findings if one.level is not Level.OK}


def wrong_once(condition: Callable[[dict[tuple[str, str], Finding]], bool]) -> dict[tuple[str, str], Finding]:
    """Return the findings as soon as the condition holds; after SETTLE_TIMEOUT seconds, in any case."""
    deadline = monotonic() + SETTLE_TIMEOUT
    while not condition(found := wrong(PROVIDER.checks(0))) and monotonic() < deadline:
        sleep(0.5)  # a look costs an emulated processor as much
    return found


def wrong_in_the_end() -> dict[tuple[str, str], Finding]:
    """Findings that stay: {} on a healthy host."""
    return wrong_once(lambda found: not found)


class Defect(NamedTuple):
    """A defect: shell commands that plant and undo it, and the findings; the fix removes it."""

    plant: str
    undo: str
    found: dict[tuple[str, str], Level]
    mends: bool = True


BRIDGE = "ip link set br0 type bridge"
NO_QUERIER = f"{BRIDGE} mcast_querier 0 mcast_query_response_interval 10"
QUERIER = f"{BRIDGE} mcast_querier 1; {BRIDGE} mcast_query_response_interval 1000"
"""For one response interval, in hundredths of a second, a new querier floods every group."""
JUMBO = "for i in $(ls /sys/class/net | grep '^[ep][0-9]'); do ip link set $i mtu 4200; done"
ALL = tuple(sorted(f"{path.name}/1" for path in Path("/sys/class/infiniband").glob("rxe*")))
DEFECTS = {
    "the link is down": Defect(
        "ip link set e2 down", "ip link set e2 up", {("link", "rxe2/1"): Level.PROBLEM}
    ),
    "no IPv4 address": Defect(
        "ip addr del 10.77.0.2/24 dev e2",
        "ip addr flush dev e2 scope global; ip addr add 10.77.0.2/24 dev e2;"
        "ip addr add fd77::2/64 dev e2 nodad",
        {("address", "rxe2/1"): Level.WARNING},
    ),
    "the MTU is small": Defect(
        "ip link set e2 mtu 400",
        "ip link set e2 mtu 1500; ip addr replace fd77::2/64 dev e2 nodad",
        {("MTU", "rxe2/1"): Level.WARNING},
    ),
    "the MTUs differ": Defect(
        "ip link set e1 mtu 4200; ip link set p1 mtu 4200",
        JUMBO.replace("4200", "1500"),
        {("MTU", name): Level.WARNING for name in ALL},
    ),
    "the switch's MTU is small": Defect(
        f"{JUMBO}; ip link set p2 mtu 1500",
        JUMBO.replace("4200", "1500"),
        {("MTU", name): Level.WARNING for name in ALL},
    ),
    "nobody asks for IGMP reports": Defect(
        NO_QUERIER,
        QUERIER,
        {("querier", name): Level.WARNING for name in ALL},
    ),
    "IGMPv1 is forced": Defect(
        f"echo 1 >{CONF}/e2/force_igmp_version",
        f"echo 0 >{CONF}/e2/force_igmp_version",
        {("IGMP", "rxe2/1"): Level.WARNING},
    ),
    "the reverse path is checked": Defect(
        f"for i in {CONF}/all {CONF}/e[0-9]*; do echo 1 >$i/rp_filter; done",
        f"for i in {CONF}/all {CONF}/e[0-9]*; do echo 0 >$i/rp_filter; done",
        {("rp_filter", name): Level.PROBLEM for name in ALL},
    ),
    "RoCE is filtered": Defect(
        "nft add table inet t; nft 'add chain inet t in { type filter hook input priority 0; }';"
        "nft add rule inet t in udp dport 4791 drop",
        "nft delete table inet t",
        {("firewall", ""): Level.PROBLEM},
    ),
    "the connection manager has no device file": Defect(
        "mv /dev/infiniband/rdma_cm /dev/infiniband/hidden",
        "mv /dev/infiniband/hidden /dev/infiniband/rdma_cm",
        {("modules", ""): Level.PROBLEM},
        mends=False,
    ),
}


@contextmanager
def planted(defect: Defect) -> Iterator[None]:
    sh(defect.plant)
    try:
        yield
    finally:
        sh(defect.undo)


def test_a_healthy_host_has_no_complaint() -> None:
    findings = PROVIDER.checks(0)
    assert wrong(findings) == {}
    seen = {(one.check, one.subject) for one in findings}
    for check in ("link", "address", "GIDs", "MTU", "IGMP", "querier", "rp_filter"):
        assert {(check, name) for name in ALL} <= seen


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_and_its_fix_mends_it(name: str) -> None:
    defect = DEFECTS[name]
    with planted(defect):
        found = wrong_once(lambda found: set(found) == set(defect.found))
        assert {key: one.level for key, one in found.items()} == defect.found
        if defect.mends:
            for fix in {one.fix for one in found.values()}:
                sh(fix)
            assert wrong_in_the_end() == {}


DEPRIVED = {
    "little memory may be locked": (
        f"ulimit -l 64; exec setpriv --bounding-set=-ipc_lock {MCAST}",
        {("memlock", ""): "problem"},
    ),
    "a device file may not be opened": (
        "file=/dev/infiniband/$(grep -lx rxe2 /sys/class/infiniband_verbs/*/ibdev | cut -d/ -f5); "
        f"chmod 000 $file; setpriv --bounding-set=-dac_override,-dac_read_search {MCAST}; "
        "status=$?; chmod 666 $file; exit $status",
        {("device", "rxe2"): "warning"},
    ),
}


@pytest.mark.long  # an emulated process needs seconds to import the command
@pytest.mark.parametrize("name", DEPRIVED)
def test_a_process_that_lacks_something_is_told(name: str) -> None:
    script, expected = DEPRIVED[name]
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=1000)
    problems = list(expected.values()).count("problem")
    assert (done.returncode, done.stderr) == (int(problems > 0), "")
    answer = json.loads(done.stdout)
    bad = {
        (one["check"], one["subject"]): one["level"]
        for one in answer["providers"]["rdma"]
        if one["level"] != "ok"
    }
    assert bad == expected
    assert answer["problems"] == problems


def test_netns_without_interfaces_is_reported() -> None:
    """A network namespace without the interfaces is told."""

    def findings_there() -> dict[tuple[str, str], Finding]:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0  # of this thread alone
        return wrong(PROVIDER.checks(0))

    with ThreadPoolExecutor(1) as elsewhere:
        found = elsewhere.submit(findings_there).result(timeout=60)
    assert set(found) == {("namespace", name) for name in ALL}


def test_a_querier_is_heard_where_there_is_one() -> None:
    with ThreadPoolExecutor(1) as beside:
        heard = beside.submit(hear_queriers, {"e1", "e2"}, SETTLE_TIMEOUT)
        while not heard.done():  # a bridge asks when it becomes querier
            sh(f"{NO_QUERIER}; {QUERIER}")
    assert set(heard.result()) == {"e1", "e2"}
    assert hear_queriers({"lo"}, 0.2) == {}


MEMLOCK, NOBODY = 6_144_000, 65534


def create_qps_until_memory_is_short() -> str:
    """Return the text of the error, for a user who may lock MEMLOCK bytes."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK, MEMLOCK))
    os.setuid(NOBODY)
    with PROVIDER.open() as backend, backend.event_channel() as channel:
        try:
            while True:
                cm_id = channel.create_id()
                cm_id.bind_addr("10.77.0.1")
                cm_id.create_qp()
        except OutOfResources as error:
            return str(error)


def test_an_error_for_want_of_locked_memory_tells_the_bytes() -> None:
    """In a process forked from this one, because an emulated one needs seconds to import the package."""
    with ProcessPoolExecutor(1, get_context("fork")) as apart:
        said = apart.submit(create_qps_until_memory_is_short).result(100)
    first, found, *_ = said.splitlines()
    assert first.startswith("create_qp(")
    assert ": ENOMEM: " in first
    assert re.match(
        r"  found: \d{6,} bytes must be locked in addition to \d{6,}, but the limit is 6144000 ", found
    )


def test_a_host_without_a_device_is_told(lab_bed: Testbed) -> None:
    for port in lab_bed.ports:
        lab_bed.remove_device(port)
    assert set(wrong(PROVIDER.checks(0))) == {("device", "")}


@pytest.mark.long
def test_on_a_healthy_host_the_command_succeeds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcast", "doctor", "--backend", "rdma"],
        capture_output=True,
        text=True,
        timeout=1000,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("no problems, no warnings, ")
    assert max(map(len, done.stdout.splitlines())) <= 80
