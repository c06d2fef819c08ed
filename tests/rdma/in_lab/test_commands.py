"""`mcast groups`, `top`, `record` and `replay` on real devices, each as a process of its own."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from time import monotonic, sleep

import pytest

from mcast.api import Capability, Testbed
from mcast.backends.net.groups import UNTRUSTED
from mcast.capture.recorder import make_recorder
from mcast.capture.replay import RecordedMessage, read_messages
from mcast.endpoint.blocking import open_endpoint
from mcast.wire.addresses import McastAddress

from .conftest import mgid_of, source_of

BOUND, COUNT = 900.0, 50
MCAST = [sys.executable, "-m", "mcast"]
PAYLOADS = [bytes([number]) * number * 7 for number in range(COUNT)]

pytestmark = pytest.mark.long  # an emulated process needs seconds to import the command


@contextmanager
def started(*command: object) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended with the block."""
    words = [str(word) for word in command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def mcast(*arguments: object) -> str:
    done = subprocess.run([*MCAST, *map(str, arguments)], capture_output=True, text=True, timeout=BOUND)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def until(what: str, bed: Testbed, group: IPv4Address, wanted: set[IPv4Address]) -> None:
    """Wait until the bridge delivers the group to these ports."""
    end = monotonic() + BOUND
    while bed.observer.group_ports(mgid_of(bed, McastAddress.of(group))) != wanted:
        assert monotonic() < end, what
        sleep(0.1)


@contextmanager
def recording(bed: Testbed, group: IPv4Address, file: Path) -> Iterator[None]:
    """`mcast record` on the first port, from when it hears to when it has COUNT messages."""
    where = ("--bind", bed.ports[0], "-o", file, "--count", COUNT, "--seconds", BOUND, "--json")
    with started(*MCAST, "record", group, *where) as process:
        until("record does not join", bed, group, {bed.ports[0]})
        yield
        out, said = process.communicate(timeout=BOUND)
    assert (process.returncode, said) == (0, "")
    assert json.loads(out)["messages"] == COUNT


def send(bed: Testbed, group: IPv4Address) -> int:
    """Send the payloads from the second port once the member there answers; the QP number."""
    with open_endpoint(bed.backend, bed.ports[1], loopback="off") as endpoint:
        sender = endpoint.join(group)  # a full member: a unicast answer would get lost in one namespace
        sender.ready(timeout=BOUND)
        for number, payload in enumerate(PAYLOADS):
            sender.send(payload, imm=number)
        return endpoint.qp_num


def read(file: Path) -> list[RecordedMessage]:
    with file.open("rb") as source:
        return list(read_messages(source))


def test_record_replay_record_is_the_same(lab_bed: Testbed, tmp_path: Path) -> None:
    group, file, again = IPv4Address("239.79.1.1"), tmp_path / "recorded.pcapng", io.BytesIO()
    with recording(lab_bed, group, file):
        send(lab_bed, group)
    found = read(file)
    assert [(message.payload, message.imm) for message in found] == list(
        zip(PAYLOADS, range(COUNT), strict=True)
    )
    assert {message.group for message in found} == {mgid_of(lab_bed, McastAddress.of(group))}
    assert [message.t for message in found] == sorted(message.t for message in found)
    until("record does not leave", lab_bed, group, set())
    with open_endpoint(lab_bed.backend, lab_bed.ports[0], loopback="off") as member:
        member.join(group)
        recorder = make_recorder(member, again)
        with started(*MCAST, "replay", file, "--bind", lab_bed.ports[1], "--members", 1) as process:
            while recorder.messages < COUNT:
                with member.recv_batch(COUNT, BOUND) as batch:
                    assert len(batch), process.communicate(timeout=BOUND)
                    recorder.take(batch, 0)
            _, said = process.communicate(timeout=BOUND)
    assert (process.returncode, said) == (0, "")
    replayed = read_messages(io.BytesIO(again.getvalue()))
    assert [message[1:] for message in replayed] == [message[1:] for message in found]


def test_what_dumpcap_captures_is_read(lab_bed: Testbed, tmp_path: Path) -> None:
    dumpcap = shutil.which("dumpcap")
    if dumpcap is None:
        pytest.fail("packets are captured with dumpcap: apt-get install tshark", pytrace=False)
    group, file = IPv4Address("239.79.1.2"), tmp_path / "captured.pcapng"
    wanted = f"udp port 4791 and dst host {group}"
    with open_endpoint(lab_bed.backend, lab_bed.ports[0], loopback="off") as member:
        member.join(group)
        until("the member does not join", lab_bed, group, {lab_bed.ports[0]})
        with started(dumpcap, "-q", "-i", "e1", "-f", wanted, "-w", file, "-c", COUNT) as process:
            assert process.stderr is not None
            while "File:" not in (line := process.stderr.readline()):
                assert line, "dumpcap does not start"
            with open_endpoint(lab_bed.backend, lab_bed.ports[1]) as endpoint:
                sender = endpoint.sender(group)
                for payload in PAYLOADS:
                    sender.send(payload)
                sent_by = endpoint.qp_num
            process.communicate(timeout=BOUND)
    found = read(file)
    assert [message.payload for message in found] == PAYLOADS
    assert {message.group for message in found} == {mgid_of(lab_bed, McastAddress.of(group))}
    assert sent_by > 1


def test_top_and_groups_show_real_traffic(lab_bed: Testbed) -> None:
    group, bound = IPv4Address("239.79.1.3"), lab_bed.ports[0]
    shown = mcast(
        "top", group, "--demo", "--bind", bound, "--count", 2, "--interval", 0.5, "--json"
    ).splitlines()
    found = json.loads(shown[-1])["groups"][0]
    assert found["messages"] > 0
    assert found["gaps"] is not None
    # the next one of the kernel's list, where a device that was removed is the last
    (source,) = (one["source"] for one in found["sources"])
    assert source in {source_of(lab_bed, port) for port in lab_bed.ports[1:]}
    with open_endpoint(lab_bed.backend, bound) as member:
        member.join(group)
        table = json.loads(mcast("groups", group, "--json"))
        (info,) = table["groups"]
        port = f"{member.device.name}/{member.port.port_num}"
    assert info["mgid"] == str(mgid_of(lab_bed, McastAddress.of(group)))
    named = Capability.GROUP_TABLE in lab_bed.backend.capabilities
    assert [one["port"] for one in info["members"]] == ([port] if named else [])
    assert (UNTRUSTED in table["unseen"]) is not named
