"""Findings of `mcast doctor --backend udp`, and the hints to an endpoint that received nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcast import open_endpoint
from mcast.api import Level, TimedOut
from mcast.backends.udp.doctor import examine
from mcast.conformance.helpers import BOUND

from ..commands import MCAST
from ..own_network import needs_namespaces
from .conftest import Host

DOCTOR = f"{MCAST} doctor --backend udp --json {{}}; true"


@needs_namespaces
def test_an_interface_without_multicast_is_a_problem(hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    assert problems(host) == []
    host.run("ip", "link", "set", "eth0", "multicast", "off")
    (found,) = problems(host)
    assert (found["subject"], found["fix"].split(",")[0]) == ("eth0", "ip link set eth0 multicast on")


@needs_namespaces
def test_a_join_without_multicast_says_so(hosts: tuple[Host, Host]) -> None:
    hosts[0].run("ip", "link", "set", "eth0", "multicast", "off")
    program = (
        "import mcast\n"
        "try:\n"
        "    mcast.open_endpoint('udp', bind='10.0.0.1')\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    assert "eth0 has no multicast" in hosts[0].run(sys.executable, "-c", program)


@needs_namespaces
def test_a_firewall_is_a_problem(hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    host.run("nft", "add table ip t")
    host.run("nft", "add chain ip t in { type filter hook input priority 0; }")
    host.run("nft", "add rule ip t in udp dport 4791 drop")
    (found,) = problems(host)
    assert found["fix"] == "nft insert rule ip t in udp dport 4791 accept"
    host.run("sh", "-c", found["fix"])
    assert problems(host) == []


@needs_namespaces
def test_a_firewall_that_drops_igmp_is_a_warning(hosts: tuple[Host, Host]) -> None:
    """A switch's queries are not answered, although messages may pass."""
    host = hosts[0]
    host.run("nft", "add table inet t")
    host.run("nft", "add chain inet t in { type filter hook input priority 0; policy drop; }")
    host.run("nft", "add chain inet t out { type filter hook output priority 0; }")
    host.run("nft", "add rule inet t out ip protocol igmp drop")
    host.run("nft", "add rule inet t in udp dport 4791 accept")
    assert problems(host) == []
    found = [one for one in findings(host) if one["check"] == "firewall"]
    assert [(one["level"], one["fix"]) for one in found] == [
        ("warning", f"nft insert rule inet t {chain} ip protocol igmp accept") for chain in ("in", "out")
    ]
    for one in found:
        host.run("sh", "-c", one["fix"])
    assert [one["level"] for one in findings(host) if one["check"] == "firewall"] == ["ok"]


@needs_namespaces
def test_a_strict_reverse_path_filter_is_a_note(hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    host.run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/conf/eth0/rp_filter")
    (found,) = (one for one in findings(host) if one["check"] == "rp_filter")
    assert (found["level"], found["subject"]) == ("note", "eth0")
    assert "rp_filter drops senders" in host.run("sh", "-c", RECV)
    host.run("sh", "-c", "echo 2 >/proc/sys/net/ipv4/conf/eth0/rp_filter")
    assert [one for one in findings(host) if one["check"] == "rp_filter"] == []
    assert "rp_filter" not in host.run("sh", "-c", RECV)


def test_without_the_extension_the_doctor_says_how_to_build_it() -> None:
    script = """
import sys
sys.modules["mcast.backends.udp._native"] = None
from mcast.backends.udp.doctor import examine
print(examine()[0].seen)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "_native is not built" in done.stdout, done.stderr


@needs_namespaces
def test_a_missing_querier_is_a_warning(hosts: tuple[Host, Host]) -> None:
    found = findings(hosts[0], "--listen 0.2")
    (querier,) = [one for one in found if one["check"] == "querier"]
    assert (querier["subject"], querier["level"]) == ("eth0", "warning")
    assert "without a querier" in querier["seen"]


@needs_namespaces
def test_a_bridge_of_the_host_that_nobody_asks_is_a_note(hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    host.run("ip", "link", "add", "br7", "type", "bridge", "mcast_snooping", "1")
    assert [one for one in findings(host) if one["subject"] == "br7"] == []  # it has no port
    host.run("ip", "link", "add", "guest0", "master", "br7", "type", "veth", "peer", "guest1")
    (found,) = (one for one in findings(host) if one["subject"] == "br7")
    assert (found["check"], found["level"]) == ("querier", "note")
    assert found["seen"].startswith("br7 snoops and nobody asks")
    host.run("ip", "addr", "add", "10.7.0.1/24", "dev", "br7")
    host.run("ip", "link", "set", "br7", "up")  # it is a port of this host
    assert [one["level"] for one in findings(host) if one["subject"] == "br7"] == ["warning"]
    host.run(*found["fix"].split())
    assert [one["level"] for one in findings(host) if one["subject"] == "br7"] == ["ok"]


def test_who_may_not_listen_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(names: list[str], seconds: float) -> None:
        raise PermissionError

    monkeypatch.setattr("mcast.backends.udp.doctor.hear_queriers", refuse)
    for one in examine(0.1):
        if one.check == "querier":
            assert (one.level, one.seen) == (Level.WARNING, "not listened: only root may")


DECIDING = (
    "check: nft list ruleset",
    "check: as root: mcast doctor --backend udp --listen 130",
    "check: run both ends with --network=host",
    "check: rdma link | grep 'netdev ",
)


@pytest.mark.parametrize("alone", [True, False])
def test_who_heard_nobody_is_told_of_suspicions(
    alone: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By `ready`, and once by a receive that has waited long; not where somebody was heard."""
    monkeypatch.setattr("mcast.endpoint.receiving.QUIET_TIME", 1e-9)
    monkeypatch.setattr("mcast.backends.udp.suspicions.LOOPBACK", "none")
    with open_endpoint("udp", bind="127.0.0.1") as one, open_endpoint("udp", bind="127.0.0.1") as other:
        group = one.join("239.1.1.1")
        if not alone:
            with other.sender("239.1.1.1") as sender:
                sender.send(b"x")
            assert group.recv(BOUND) is not None
        for _ in range(2):
            assert group.recv(0.01) is None
        said = [
            record.getMessage() for record in caplog.records if "no message arrived" in record.getMessage()
        ]
        with pytest.raises(TimedOut) as caught:
            one.join("239.1.1.3").ready(timeout=0.05)
    for found in (str(caught.value), *said):
        assert all(command in found for command in DECIDING)
    assert len(said) == alone


def test_loopback_has_no_firewall_between_hosts() -> None:
    with open_endpoint("udp", bind="127.0.0.1") as endpoint, pytest.raises(TimedOut) as caught:
        endpoint.join("239.1.1.1").ready(timeout=0.05)
    assert "firewall" not in str(caught.value)


def findings(host: Host, options: str = "") -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(host.run("sh", "-c", DOCTOR.format(options)))["providers"]["udp"]
    return found


@needs_namespaces
def test_a_ping_that_nobody_answers_names_suspicions(hosts: tuple[Host, Host]) -> None:
    asked = hosts[0].run("sh", "-c", f"{MCAST} ping 239.1.1.1 --backend udp -C 1 -W 0.1; true")
    assert [command for command in DECIDING if command not in asked] == []


RECV = f"{MCAST} recv 239.1.1.1 -o /dev/null --backend udp -b 10.0.0.1 --wait 0.1 2>&1; true"


@needs_namespaces
def test_recv_that_hears_nobody_names_suspicions(hosts: tuple[Host, Host]) -> None:
    """Of a port without a link that is all there is to say."""
    said = hosts[0].run("sh", "-c", RECV)
    assert [command for command in DECIDING if command not in said] == []
    hosts[0].run("ip", "link", "set", "eth0", "down")
    said = hosts[0].run("sh", "-c", RECV)
    assert "eth0 has no link -> ip link set eth0 up" in said
    assert "firewall" not in said


@needs_namespaces
def test_recv_names_suspicions_once(hosts: tuple[Host, Host]) -> None:
    """The endpoint logs them after ten seconds, and the command ends later."""
    said = hosts[0].run("sh", "-c", RECV.replace("--wait 0.1", "--wait 12"))
    assert "no transfer began" in said
    assert [said.count(command) for command in DECIDING] == [1] * len(DECIDING)


@needs_namespaces
def test_recv_that_heard_a_sender_suspects_no_network(hosts: tuple[Host, Host]) -> None:
    """The sender waits for a second receiver."""
    recv = RECV.replace("--wait 0.1", "--wait 8 --peer-timeout 1")
    send = f"nsenter -t {hosts[1].pid} -n {MCAST} send {MCAST} 239.1.1.1 --backend udp -n 2 --wait 4"
    said = hosts[0].run("sh", "-c", f"({recv}) & {send} >/dev/null 2>&1; wait")
    assert "but messages arrived" in said
    assert "firewall" not in said


def transfer_past(rule: str, hosts: tuple[Host, Host], file: Path, *options: str) -> str:
    """Return what both ends say of the file where the receiver's firewall has that rule."""
    words = " ".join(options)
    recv = RECV.replace("--wait 0.1", f"--wait 20 {words}")
    send = f"nsenter -t {hosts[1].pid} -n {MCAST} send {file} 239.1.1.1 --backend udp --rate 8M {words} 2>&1"
    chain = "add table ip t; add chain ip t in { type filter hook input priority 0; }"
    hosts[0].run("nft", f"{chain}; add rule ip t in udp dport 4791 {rule} drop")
    return hosts[0].run("sh", "-c", f"({recv}) & {send} & wait; true")


@needs_namespaces
def test_lost_network_is_suspected_at_both_ends(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Hint where the other end falls silent amid a transfer."""
    (tmp_path / "file").write_bytes(bytes(12_000_000))
    said = transfer_past("quota over 2 mbytes", hosts, tmp_path / "file", "--peer-timeout", "2")
    assert "the sender was silent for 2 s" in said
    assert "a receiver was silent for 2 s" in said
    assert said.count("check: as root, at both ends: mcast doctor --backend udp --listen 130") == 2


@needs_namespaces
def test_a_link_with_a_smaller_mtu_is_suspected(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    said = transfer_past("udp length > 700", hosts, tmp_path / "file")
    assert "requested too many repairs" in said
    assert said.count("a link on the way has a smaller MTU") == 2


@needs_namespaces
@pytest.mark.parametrize("mtu", [1000, 1500])
def test_an_mtu_below_that_of_objects_is_a_warning(hosts: tuple[Host, Host], mtu: int) -> None:
    hosts[0].run("ip", "link", "set", "eth0", "mtu", str(mtu))
    found = [(one["subject"], one["level"]) for one in findings(hosts[0]) if one["check"] == "MTU"]
    assert found == ([("eth0", "warning")] if mtu == 1000 else [])
    said = hosts[0].run("sh", "-c", RECV)
    assert ("objects need 1024: take a port with a larger MTU" in said) == (mtu == 1000)
    assert "Traceback" not in said


@needs_namespaces
@pytest.mark.parametrize("kind", ["docker", ""], ids=["inside", "outside"])
def test_a_container_is_a_warning(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel's own processes are not seen; its network may carry no multicast."""
    monkeypatch.setattr("mcast.backends.net.hostnet.container", lambda: kind)
    found = [one for one in examine() if one.check == "container"]
    assert [one.level for one in found] == [Level.WARNING] * bool(kind)
    for one in found:
        assert one.seen == "this is docker: its network may carry no multicast"
        assert "--network=host" in one.fix


@needs_namespaces
def test_answers_of_cards_that_are_lost_are_named(hosts: tuple[Host, Host]) -> None:
    """They come to port 4791, and are passed on over loopback, where the kernel drops them in silence."""
    host = hosts[0]
    host.run("ip", "link", "set", "lo", "down")
    assert problems(host) == []
    (found,) = (one for one in findings(host) if one["subject"] == "lo")
    assert (found["level"], found["fix"]) == ("note", "ip link set lo up")
    (hint,) = set(host.run(sys.executable, "-c", ANSWERED.replace("OTHER", str(hosts[1].pid))).splitlines())
    assert hint.startswith("loopback is down")
    assert hint.endswith("ip link set lo up {'not_forwarded': 1}")


ANSWERED = """
import logging, subprocess, sys, time, mcast
seen = []
handler = logging.Handler()
handler.emit = lambda record: seen.append(record.getMessage())
logging.getLogger("mcast").addHandler(handler)
with mcast.open_backend("udp") as backend, backend.event_channel() as channel, channel.create_id() as id_:
    id_.bind_addr("10.0.0.1")
    qp = id_.create_qp()
    message = bytes(4) + qp.qp_num.to_bytes(4) + bytes(32)
    sender = f"import socket; socket.socket(2, 2).sendto({message}, ('10.0.0.1', 4791))"
    there = "--net=/proc/OTHER/ns/net"
    subprocess.run(["nsenter", there, sys.executable, "-c", sender], check=True)
    end = time.monotonic() + 60
    while not (lost := backend.port_counters("eth0").get("not_forwarded", 0)) and time.monotonic() < end:
        time.sleep(0.01)
    print(*(one for one in seen if "loopback" in one), {"not_forwarded": lost})
"""


def problems(host: Host) -> list[dict[str, str]]:
    return [one for one in findings(host) if one["level"] == "problem"]
