"""`mcast ping` on real devices: its own other end, and Debian's mckey as sender and as receiver."""

from __future__ import annotations

import subprocess
import threading
from ipaddress import IPv4Address
from time import monotonic, sleep
from typing import Any

import pytest

from mcast.api import Testbed
from mcast.bench.ping import answer_all, joined, ping_all
from mcast.endpoint.ports import choose
from mcast.wire.addresses import McastAddress
from mcast.wire.probe import PROBE_SIZE

from .conftest import mgid_of, source_of
from .test_mckey import mckey_sending

BOUND = 100.0
GROUP = McastAddress.of("239.77.3.1")


def ping_endpoint(bed: Testbed, port: int, qps: int = 1) -> Any:
    return joined(bed.backend, choose(bed.backend, bed.ports[port], None, 1), GROUP, qps)


@pytest.mark.parametrize("size", [PROBE_SIZE, 1024])
def test_another_device_answers(lab_bed: Testbed, size: int) -> None:
    with ping_endpoint(lab_bed, 0, qps=2) as pinging, ping_endpoint(lab_bed, 1) as answering:
        for port in (0, 1):
            wait_for_member(lab_bed, port)
        thread = threading.Thread(target=answer_all, args=(answering, 10))
        thread.start()
        outcome = ping_all(pinging, 5, size, 0.2, BOUND)
        thread.join(BOUND)
    (member,) = outcome.members
    assert member.address == source_of(lab_bed, lab_bed.ports[1])
    assert (member.answers, member.loss) == (10, 0)
    assert 0 < member.milliseconds.min <= member.milliseconds.max < 10_000


def test_what_mckey_sends_is_counted(lab_bed: Testbed) -> None:
    group = IPv4Address(str(GROUP))
    with ping_endpoint(lab_bed, 0) as answering, mckey_sending(lab_bed.ports[1], group=group, size=300):
        outcome = answer_all(answering, 20)
    for heard in outcome.heard:
        assert heard.address == source_of(lab_bed, lab_bed.ports[1])
        assert (heard.pings, heard.smallest, heard.largest) == (0, 300, 300)
    assert sum(heard.messages for heard in outcome.heard) == 20


def test_mckey_counts_our_pings_and_answers_none(lab_bed: Testbed) -> None:
    command = ["mckey", "-m", str(GROUP), "-b", str(lab_bed.ports[1]), "-C", "20", "-S", "100"]
    with (
        ping_endpoint(lab_bed, 0) as pinging,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mckey,
    ):
        wait_for_member(lab_bed, 1)
        # It attaches a moment after its IGMP report, and sleeps 3 s: offer more than it wants until it ends.
        end = monotonic() + BOUND
        while mckey.poll() is None and monotonic() < end:
            outcome = ping_all(pinging, 10, 100, 0.01, 0.1)
            assert (outcome.members, outcome.others) == ((), ())
        said = mckey.communicate(timeout=BOUND)[0]
    assert mckey.returncode == 0, said
    assert "data transfers complete" in said


def wait_for_member(bed: Testbed, port: int) -> None:
    """Until the bridge delivers the group to that port."""
    end = monotonic() + BOUND
    while bed.ports[port] not in bed.observer.group_ports(mgid_of(bed, GROUP)):
        assert monotonic() < end
        sleep(0.1)
