"""Debian's mckey, a program of others, as sender to our receiver and as receiver of our sender."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import IPv4Address
from time import monotonic, sleep

import pytest

from mcast.api import Backend, CmId, Destination, EventChannel, Gid, JoinAttrEx, JoinFlag, QueuePair, Testbed

COUNT, SIZE, BOUND = 100, 512, 100.0
GROUP = IPv4Address("239.77.1.1")


@contextmanager
def mckey(address: IPv4Address, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = ["mckey", "-m", str(GROUP), "-b", str(address), "-C", str(COUNT), "-S", str(SIZE), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def mckey_sending(
    address: IPv4Address, *options: str, group: IPv4Address = GROUP, size: int = SIZE
) -> Iterator[None]:
    """Run mckey as a sender, again and again.

    It ends right after its last post, and Linux 6.12 drops what Soft-RoCE has not sent by then: of a hundred
    messages none may come.
    """
    command = ["mckey", "-s", "-m", str(group), "-b", str(address), "-C", "4000", "-S", str(size), *options]
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=BOUND)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield
        finally:
            is_over.set()
        running.result(BOUND)


def joined(
    backend: Backend, address: IPv4Address, flag: JoinFlag
) -> tuple[EventChannel, CmId, QueuePair, Destination]:
    channel = backend.event_channel()
    cm_id = channel.create_id()
    cm_id.bind_addr(address)
    qp = cm_id.create_qp()
    cm_id.join_multicast_ex(JoinAttrEx(join_flags=flag, addr=GROUP))  # type: ignore[arg-type]
    event = channel.get_event(BOUND)
    assert event is not None
    ud = event.check().ud
    assert ud is not None
    return channel, cm_id, qp, ud.destination


def wait_for_member(bed: Testbed, address: IPv4Address) -> None:
    """Until the bridge delivers the group to that port."""
    end = monotonic() + BOUND
    while address not in bed.observer.group_ports(Gid(GROUP)):
        assert monotonic() < end, f"{address} does not join"
        sleep(0.1)


FULL_MEMBER = pytest.param((), id="full member", marks=pytest.mark.long)  # as in test_ping.py
SEND_ONLY = pytest.param(("-o",), id="send-only")
OUR_FLAGS = [
    pytest.param(flag, id=flag.name, marks=[pytest.mark.long] if flag is JoinFlag.FULLMEMBER else [])
    for flag in JoinFlag
]
"""The flags of our joins; as full members we send to mckey in test_ping.py, too."""


@pytest.mark.parametrize("options", [FULL_MEMBER, SEND_ONLY])
def test_mckey_sends_to_us(lab_bed: Testbed, options: tuple[str, ...]) -> None:
    ours, theirs, *_ = lab_bed.ports
    _, _, qp, _ = joined(lab_bed.backend, ours, JoinFlag.FULLMEMBER)
    wait_for_member(lab_bed, ours)
    got = 0
    with mckey_sending(theirs, *options):
        while got < COUNT:
            with qp.recv(COUNT, BOUND) as batch:
                assert len(batch), "no message came"
                assert set(batch.lengths) == {SIZE}
                assert {message.source for message in batch} == {Gid(theirs)}
                got += len(batch)


@pytest.mark.parametrize("flag", OUR_FLAGS)
def test_mckey_receives_from_us(lab_bed: Testbed, flag: JoinFlag) -> None:
    ours, theirs, *_ = lab_bed.ports
    _, _, qp, group = joined(lab_bed.backend, ours, flag)
    with mckey(theirs) as process:
        wait_for_member(lab_bed, theirs)
        # it attaches a moment after its IGMP report: offer more than it wants until it has enough
        end = monotonic() + BOUND
        while process.poll() is None and monotonic() < end:
            qp.send(group, [bytes(SIZE)] * 10)
            sleep(0.05)
        said = process.communicate(timeout=BOUND)[0]
    assert process.returncode == 0, said
    assert "data transfers complete" in said
