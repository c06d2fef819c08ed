"""Commands and the awaiting endpoints on `udp`, on loopback."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

import mcast.aio
from mcast import Endpoint, LoopbackPolicy, open_endpoint
from mcast.api import PortState, open_backend
from mcast.backends.net import hostnet
from mcast.conformance.helpers import BOUND

from ..commands import MCAST, Run
from ..own_network import needs_namespaces
from ..waiting import until
from .test_processes import GROUP, LO, UDP, echo


def test_demo_verifies_every_copy(mcast: Run) -> None:
    done = mcast("demo", *UDP, "--size", "200K")
    assert done.returncode == 0, done.stderr
    assert "3/3 receivers verified" in done.stdout


def test_bench_measures(mcast: Run) -> None:
    done = mcast("bench", *UDP, "--seconds", "0.1", "--receivers", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["messages"] > 0
    assert (found["receivers"], found["lost"]) == (2, 0)


@needs_namespaces
@pytest.mark.parametrize(
    "command", [("demo", "--size", "20K"), ("bench", "--seconds", "0.1")], ids=["demo", "bench"]
)
def test_two_networks_are_not_mixed(here: Run, command: tuple[str, ...]) -> None:
    """Both ends are on one interface, because no message goes from one network to the other."""
    for number in range(2):
        hostnet.run("ip", "link", "add", f"u{number}", "type", "veth", "peer", "name", f"p{number}")
        hostnet.run("ip", "addr", "add", f"10.0.{number}.1/24", "dev", f"u{number}")
        for end in "up":
            hostnet.run("ip", "link", "set", f"{end}{number}", "up")
    with open_backend("udp") as backend:
        until(lambda: {device.ports[0].state for device in backend.devices()} == {PortState.ACTIVE})
    done = here(*command, *UDP)
    assert done.returncode == 0, done.stderr


def test_ping_is_answered_by_another_process(mcast: Run) -> None:
    with echo("other") as other, open_endpoint("udp", bind="127.0.0.1") as endpoint:
        done = mcast("ping", GROUP, *UDP, *LO, "-c", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "127.0.0.1" in done.stdout
        with endpoint.sender(GROUP) as sender:
            sender.send(b"")
        assert other.wait(BOUND) == 0


@pytest.fixture
def quiet_is_suspicious(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait in vain names likely causes at once, and on loopback, too."""
    monkeypatch.setattr("mcast.endpoint.receiving.QUIET_TIME", 1e-9)
    monkeypatch.setattr("mcast.backends.udp.suspicions.LOOPBACK", "none")


@pytest.mark.usefixtures("quiet_is_suspicious")
@pytest.mark.parametrize("carousel", [True, False])
def test_carousel_expects_no_message(
    here: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, carousel: bool
) -> None:
    """Its receivers send nothing, so no firewall is suspected; other receivers would have joined."""
    (tmp_path / "file").write_bytes(bytes(100_000))
    how = ("--strategy", "carousel:3", "--rate", "100M") if carousel else ("--wait", "0.2")
    done = here("send", "file", GROUP, *how, *UDP, *LO)
    assert done.returncode == int(not carousel), done.stderr
    assert ("no message arrived" in caplog.text) is not carousel


@pytest.mark.usefixtures("quiet_is_suspicious")
@pytest.mark.parametrize("logged", [True, False], ids=["while it waits", "at the end"])
def test_idle_recv_names_first_that_nobody_sends(
    here: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, logged: bool
) -> None:
    """Once, be it while the command waits or when it ends."""
    if not logged:
        monkeypatch.setattr("mcast.endpoint.receiving.QUIET_TIME", 100.0)
    done = here("recv", GROUP, "-o", "copy", "--wait", "0.2", *UDP, *LO)
    assert done.returncode == 1
    named = [line.strip() for line in f"{caplog.text}{done.stderr}".splitlines() if "likely: " in line]
    assert named[0].startswith(f"likely: nobody sends to {GROUP} yet -> ")
    assert named[1].startswith("likely: a firewall")
    assert len({*named}) == len(named) > 3


def test_recv_that_was_only_pinged_says_what_it_may_be(mcast: Run) -> None:
    with subprocess.Popen(
        [MCAST, "recv", GROUP, "-o", "/dev/null", "--wait", "3", *UDP, *LO], stderr=PIPE
    ) as one:
        until(hostnet.igmp_memberships)
        assert mcast("ping", GROUP, *UDP, *LO, "-C", "1").returncode == 0
        assert b"but messages arrived: their sender only pings, " in one.communicate()[1]


def test_groups_lists_a_membership(mcast: Run) -> None:
    with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.join("239.1.1.77"):
        done = mcast("groups", *UDP)
    assert done.returncode == 0, done.stderr
    assert "239.1.1.77" in done.stdout


def test_awaiting_endpoints_hear_each_other() -> None:
    async def talk() -> list[bytes]:
        one = mcast.aio.open_endpoint("udp", bind="127.0.0.1")
        other = mcast.aio.open_endpoint("udp", bind="127.0.0.1")
        async with one as here, other as there, here.join(GROUP) as group, there.join(GROUP) as heard:
            for number in range(50):
                await group.send(b"%d" % number)
            found: list[bytes] = []
            while len(found) < 50:
                message = await heard.recv(BOUND)
                assert message is not None
                found.append(bytes(message.payload))
            return found

    assert asyncio.run(talk()) == [b"%d" % number for number in range(50)]


def test_a_series_of_rows_keeps_its_order() -> None:
    """Batches of every size, alike and not: with segmentation by the kernel, and without."""
    with open_endpoint("udp", bind="127.0.0.1") as endpoint, endpoint.join(GROUP) as group:
        for count, size in ((1, 10), (2, 1000), (63, 1024), (64, 1), (130, 4096), (65, 0)):
            sent = [bytes((number % 256,)) * size for number in range(count)]
            group.send_batch(sent)
            group.send_batch(sent[:1])
            assert take(endpoint, count + 1) == [*sent, sent[0]]


def take(endpoint: Endpoint, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        message = endpoint.recv(BOUND)
        assert message is not None
        found.append(bytes(message.payload))
    return found


@pytest.mark.parametrize("policy", ["on", "off"])
def test_own_messages_come_back_unless_blocked(policy: str) -> None:
    own = LoopbackPolicy(policy)
    with open_endpoint("udp", bind="127.0.0.1", loopback=own) as endpoint, endpoint.join(GROUP) as group:
        group.send(b"mine")
        found = group.recv(BOUND if policy == "on" else 0.1)
        assert (found is not None) is (policy == "on")
        if policy == "off":
            assert endpoint.backend.port_counters("lo")["own_blocked"] == 1
