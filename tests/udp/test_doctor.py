"""`mcast doctor --backend udp`: each defect is named, with the line to type."""

from __future__ import annotations

import json
import sys

from ..commands import MCAST
from ..own_network import needs_namespaces
from .conftest import Host

DOCTOR = f"{MCAST} doctor --backend udp --json; true"


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


def problems(host: Host) -> list[dict[str, str]]:
    found = json.loads(host.run("sh", "-c", DOCTOR))
    return [one for one in found["providers"]["udp"] if one["level"] == "problem"]
