"""The doctor's judgement: whatever can be wrong, planted into the facts of a healthy host, one by one."""

from __future__ import annotations

import errno as E
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest

from mcast.api import (
    DeviceInfo,
    Finding,
    Gid,
    Level,
    LinkLayer,
    PortInfo,
    PortState,
    UnavailableReason,
    UnusableDevice,
)
from mcast.backends.net.bridges import Bridge
from mcast.backends.net.firewall import IGMP, dropping_chains
from mcast.backends.rdma import availability, memlock
from mcast.backends.rdma.doctor.checks import QUIRKS, judge
from mcast.backends.rdma.doctor.host import HostFacts, PortFacts
from mcast.backends.rdma.memlock import shortage
from mcast.backends.rdma.net.ipoib import IpoibInterface
from mcast.errors.cause import Cause
from mcast.wire.mapping import ipoib_broadcast_mgid

ACTIVE, DOWN, INIT = PortState.ACTIVE, PortState.DOWN, PortState.INIT
IP = IPv4Address("10.0.0.1")
IB0 = IpoibInterface("ib0", None, 2048, up=True, carrier=True)
BRIDGE = Bridge("br0", snooping=True, querier=True)
PART = IB0._replace(name="ib0.8001", broadcast=Gid(ipoib_broadcast_mgid(0x8001)))


def port(name: str, layer: LinkLayer, state: PortState = ACTIVE, mtu: int = 1024, **facts: Any) -> PortFacts:
    addresses = facts.pop("addresses", (IP,))
    info = PortInfo(
        port_num=1,
        state=state,
        link_layer=layer,
        active_mtu=mtu,
        rate=100.0,
        lid=0 if layer is LinkLayer.ETHERNET else 7,
        gids={index: Gid(address) for index, address in enumerate(addresses)},
        addresses=addresses,
    )
    return PortFacts(device=name, info=info, **facts)


def roce(state: PortState = ACTIVE, mtu: int = 1024, **wrong: Any) -> PortFacts:
    right = {
        "gid_types": {0: "RoCE v2"},
        "netdev": "e1",
        "netdev_mtu": 1500,
        "software": True,
        "igmp_version": "V3",
        "accept_local": True,
        "subnets": ("10.0.0.0/24",),
        "bridge": BRIDGE,
    }
    return port("rxe1", LinkLayer.ETHERNET, state, mtu, **(right | wrong))


def infiniband(state: PortState = ACTIVE, mtu: int = 2048, **wrong: Any) -> PortFacts:
    right = {"sm_lid": 1, "capability_mask": 0x2651E848, "ipoib": (IB0,)}
    return port("mlx5_0", LinkLayer.INFINIBAND, state, mtu, **(right | wrong))


def host(*ports: PortFacts, groups: int = 8192, **facts: Any) -> HostFacts:
    """A host with these ports. Facts of `availability` are given as `available`."""
    devices = tuple(
        DeviceInfo(
            name=one.device,
            node_guid=1,
            max_mcast_grp=groups,
            max_mcast_qp_attach=56,
            max_qp_wr=64,
            ports=(one.info,),
        )
        for one in ports
    )
    found = availability.Facts(needed=1000, devices=devices)
    found = found._replace(**facts.pop("available", {}))
    return HostFacts(**({"available": found, "release": "6.1.0-56-amd64", "ports": ports} | facts))


def without(facts: HostFacts, name: str, why: str, driver: str = "") -> HostFacts:
    """The host, with a device whose driver has no multicast, or with "" one whose driver is tried."""
    changed = {"no_multicast": why, "driver": driver}
    devices = (one.model_copy(update=changed) if one.name == name else one for one in facts.devices)
    return facts._replace(available=facts.available._replace(devices=tuple(devices)))


def bad(facts: HostFacts) -> list[tuple[str, str, Level]]:
    levels = (Level.OK, Level.NOTE)
    return [(one.check, one.subject, one.level) for one in judge(facts) if one.level not in levels]


@pytest.mark.parametrize("ports", [(roce(),), (infiniband(),), (roce(), infiniband())])
def test_a_healthy_host_has_no_complaint(ports: tuple[PortFacts, ...]) -> None:
    findings = judge(host(*ports))
    assert bad(host(*ports)) == []
    assert all(one.seen and not one.fix for one in findings)


@pytest.mark.parametrize("lack", [None, (UnavailableReason.NO_LIBRARY, "no librdmacm.so.1")])
def test_host_without_devices_has_no_problem(lack: Any) -> None:
    """A missing library is a problem if the kernel has a device."""
    (wrong,) = bad(host(has_device=False, available={"missing": lack}))
    assert wrong[2] is Level.INFO
    (wrong,) = bad(host(has_device=True, available={"missing": lack}))
    assert wrong[2] is Level.PROBLEM


W, P = Level.WARNING, Level.PROBLEM
DROP_ALL = ({"chain": {"family": "inet", "table": "t", "name": "in", "hook": "input", "policy": "drop"}},)
DROP = [
    {"chain": {"family": "inet", "table": "t", "name": "in", "hook": "input", "policy": "accept"}},
    {
        "rule": {
            "family": "inet",
            "table": "t",
            "chain": "in",
            "expr": [
                {
                    "match": {
                        "op": "==",
                        "left": {"payload": {"protocol": "udp", "field": "dport"}},
                        "right": 4791,
                    }
                },
                {"drop": None},
            ],
        }
    },
]
NO_LIBRARY = (UnavailableReason.NO_LIBRARY, "cannot open librdmacm.so.1")
PEER = roce(netdev="e2")._replace(device="rxe2")
LEFT_OUT = UnusableDevice(
    "rxe9", UnavailableReason.NO_PROVIDER, "no provider", "apt-get install ibverbs-providers", E.ENODEV
)
DEFECTS: dict[str, tuple[HostFacts, list[tuple[str, str, Level]], str]] = {
    "library": (host(available={"missing": NO_LIBRARY}), [("libraries", "", P)], "apt-get install rdma-core"),
    "no device": (host(), [("device", "", P)], "rdma link add"),
    "left out": (
        host(roce(), available={"unusable": (LEFT_OUT,)}),
        [("device", "rxe9", W)],
        "apt-get install ibverbs-providers",
    ),
    "all left out": (
        host(available={"unusable": (LEFT_OUT,)}),
        [("device", "rxe9", P)],
        "apt-get install ibverbs-providers",
    ),
    "no multicast beside another": (
        without(host(roce(), PEER), "rxe1", "its driver siw has none"),
        [("limits", "rxe1", W)],
        "another device",
    ),
    "a driver without multicast": (
        without(host(roce()), "rxe1", "its driver siw has none"),
        [("limits", "rxe1", P)],
        "another device",
    ),
    "no device file": (
        host(roce(), available={"absent": "/dev/infiniband/rdma_cm"}),
        [("modules", "", P)],
        "modprobe -a rdma_ucm",
    ),
    "barred": (
        host(roce(), available={"barred": "cannot open /dev/x"}),
        [("files", "", P)],
        "--device=/dev/infiniband",
    ),
    "memlock": (host(roce(), available={"memlock": 999}), [("memlock", "", P)], "ulimit -l unlimited"),
    "verbs": (host(roce(), available={"failed": "query_port(): EIO"}), [("verbs", "", P)], "ibv_devinfo"),
    "old kernel": (host(roce(), release="5.10.0-8"), [("kernel", "", W)], "Linux 5.15"),
    "old kernel, IB": (host(infiniband(), release="5.10.0-8"), [("kernel", "", W)], "Linux 5.12"),
    "exclusive": (
        host(netns_shared=False),
        [("device", "", P), ("namespace", "", P)],
        "rdma system set netns shared",
    ),
    "cgroup": (host(roce(), cgroup={"rxe1": {"hca_handle": 0}}), [("cgroup", "rxe1", P)], "hca_handle=max"),
    "firewall": (host(roce(), ruleset=tuple(DROP)), [("firewall", "", P)], "nft insert rule inet t in udp"),
    "firewall, IGMP": (
        host(roce(software=False), ruleset=DROP_ALL),
        [("firewall", "", W)],
        "nft insert rule inet t in ip protocol igmp accept",
    ),
    "firewall unknown": (host(roce(), ruleset=None), [("firewall", "", W)], "root"),
    "link down": (
        host(roce(DOWN, bridge=Bridge("br0", snooping=True, querier=False))),
        [("link", "rxe1/1", P)],
        "ip link set e1 up; then the cable",
    ),
    "interface down": (host(roce(DOWN, netdev_up=False)), [("link", "rxe1/1", P)], "ip link set e1 up"),
    "a used link down": (host(infiniband(), roce(DOWN)), [("link", "rxe1/1", P)], "ip link set e1 up"),
    "the only link down": (host(roce(DOWN, addresses=())), [("link", "rxe1/1", P)], "ip link set e1 up"),
    "unused link down": (host(infiniband(), roce(DOWN, addresses=())), [("link", "rxe1/1", W)], "ip link"),
    "IB cable": (host(infiniband(DOWN)), [("link", "mlx5_0/1", P)], "ibportstate"),
    "IB not set up": (
        host(infiniband(INIT, sm_lid=0)),
        [("link", "mlx5_0/1", P), ("SM", "mlx5_0/1", P)],
        "opensm",
    ),
    "another namespace": (
        host(roce(netdev_here=False, bridge=None, addresses=())),
        [("namespace", "rxe1/1", P)],
        "--network=host",
    ),
    "no address at all": (
        host(roce(addresses=())),
        [("address", "rxe1/1", P)],
        "ip addr add 10.0.0.1/24 dev e1",
    ),
    "only IPv6": (host(roce(addresses=(IPv6Address("fd77::1"),))), [("address", "rxe1/1", P)], "ip addr add"),
    "one without": (host(PEER, roce(addresses=(), subnets=())), [("address", "rxe1/1", W)], "ip addr add"),
    "RoCE v1": (host(roce(gid_types={0: "IB/RoCE v1"})), [("GIDs", "rxe1/1", P)], "cma_roce_mode -d rxe1"),
    "MTU": (host(roce(mtu=256, netdev_mtu=400)), [("MTU", "rxe1/1", W)], "ip link set e1 mtu 1500"),
    "mixed MTUs": (
        host(PEER._replace(info=roce(mtu=4096).info, netdev_mtu=9000), roce()),
        [("MTU", "rxe1/1", W)],
        "ip link set e1 mtu 9000",
    ),
    "another MTU, whose link is down": (
        host(PEER._replace(info=roce(DOWN, mtu=4096).info), roce()),
        [("link", "rxe2/1", P)],
        "ip link set e2 up",
    ),
    "a switch of a smaller MTU": (
        host(roce(mtu=4096, netdev_mtu=4200, bridge=BRIDGE._replace(mtus={"p1": 4200, "p2": 4147}))),
        [("MTU", "rxe1/1", W)],
        "ip link set p2 mtu 4200",
    ),
    "MTU, IB": (host(infiniband(mtu=512)), [("MTU", "mlx5_0/1", W)], "partitions.conf"),
    "no multicast": (host(roce(), groups=0), [("limits", "rxe1", P)], "another device"),
    "IGMPv1 forced": (
        host(roce(force_igmp_version=1)),
        [("IGMP", "rxe1/1", W)],
        "net.ipv4.conf.e1.force_igmp_version=0",
    ),
    "IGMPv1 heard": (host(roce(igmp_version="V1")), [("IGMP", "rxe1/1", W)], "querier"),
    "no querier": (
        host(roce(bridge=Bridge("br0", snooping=True, querier=False))),
        [("querier", "rxe1/1", W)],
        "ip link set br0 type bridge mcast_querier 1",
    ),
    "no querier heard": (host(roce(bridge=None, listened=130.0)), [("querier", "rxe1/1", W)], "IGMP querier"),
    "rp_filter": (
        host(roce(rp_filter=1), PEER),
        [("rp_filter", "rxe1/1", P)],
        "net.ipv4.conf.e1.rp_filter=2",
    ),
    "accept_local": (
        host(roce(accept_local=False), PEER),
        [("rp_filter", "rxe1/1", P)],
        "net.ipv4.conf.e1.accept_local=1",
    ),
    "no SM": (host(infiniband(sm_lid=0)), [("SM", "mlx5_0/1", P)], "systemctl start opensm"),
    "a dead SM": (host(infiniband(sm_silent=True)), [("SM", "mlx5_0/1", P)], "systemctl start opensm"),
    "no send-only": (host(infiniband(send_only=False)), [("SM", "mlx5_0/1", W)], "join as a full member"),
    "no IPoIB": (host(infiniband(ipoib=())), [("IPoIB", "mlx5_0/1", P)], "modprobe ib_ipoib"),
    "IPoIB down": (
        host(infiniband(ipoib=(IB0._replace(up=False, carrier=False),))),
        [("IPoIB", "mlx5_0/1", P)],
        "ip link set ib0 up",
    ),
    "no broadcast group": (
        host(infiniband(ipoib=(IB0._replace(carrier=False),))),
        [("IPoIB", "mlx5_0/1", P)],
        "saquery -g",
    ),
    "a group that refuses": (
        host(
            infiniband(ipoib=(IB0._replace(carrier=False),), refusals={"ib0": (Cause("why", "look", "act"),)})
        ),
        [("IPoIB", "mlx5_0/1", P)],
        "look; act",
    ),
    "a partition that the port is not in": (
        host(infiniband(ipoib=(IB0, PART._replace(carrier=False)), pkeys=(0xFFFF,))),
        [("P_Key", "mlx5_0/1", P)],
        "partitions.conf",
    ),
    "a limited member": (
        host(infiniband(ipoib=(IB0, PART), pkeys=(0xFFFF, 0x0001))),
        [("P_Key", "mlx5_0/1", W)],
        "=full",
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_named_alone_and_with_its_fix(name: str) -> None:
    facts, expected, fix = DEFECTS[name]
    assert bad(facts) == expected
    assert any(fix in one.fix for one in judge(facts))


HARMLESS = {
    "no snooping": host(roce(bridge=Bridge("br0", snooping=False, querier=False))),
    "another querier": host(
        roce(bridge=Bridge("br0", snooping=True, querier=False, other_querier="10.0.0.9"))
    ),
    "a querier that was heard": host(roce(bridge=None, listened=130.0, querier="10.0.0.9")),
    "another MTU in another subnet": host(
        PEER._replace(info=roce(mtu=4096).info, subnets=("10.9.0.0/24",)), roce()
    ),
    "a switch of the same MTU": host(
        roce(mtu=4096, netdev_mtu=4200, bridge=BRIDGE._replace(mtus={"p1": 4200, "p2": 4148}))
    ),
    "an unknown switch": host(roce(bridge=None)),
    "strict, but alone in its subnet": host(roce(rp_filter=1, accept_local=False)),
    "strict hardware": host(roce(rp_filter=1, software=False), PEER),
    "a filtered adapter": host(roce(software=False), ruleset=tuple(DROP)),
    "a limited cgroup": host(roce(), cgroup={"rxe1": {"hca_handle": 4}}),
    "an unreadable filter, no software device": host(infiniband(), ruleset=None),
    "a container": host(roce(), container="docker"),
    "a limit that is enough": host(roce(), available={"memlock": 1000}),
    "a full member of two partitions": host(infiniband(ipoib=(IB0, PART), pkeys=(0x8001, 0xFFFF))),
    "a kernel of the distant future": host(roce(), release="9.0-rc1"),
    "a kernel without a number": host(roce(), release="custom"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_odd_and_is_not_wrong_passes(name: str) -> None:
    assert bad(HARMLESS[name]) == []


HOST_CHECKS = ["libraries", "verbs", "device", "modules", "files", "memlock", "kernel"]


def test_each_link_layer_has_its_checks() -> None:
    def checks(facts: HostFacts) -> list[str]:
        return [one.check for one in judge(facts)]

    ethernet = ["link", "address", "GIDs", "MTU", "limits", "IGMP", "querier"]
    assert checks(host(roce())) == [*HOST_CHECKS, "firewall", "route", *ethernet]
    assert checks(host(infiniband())) == [*HOST_CHECKS, "link", "address", "MTU", "limits", "SM", "IPoIB"]
    assert checks(host(infiniband(ipoib=(PART,), pkeys=(0x8001,))))[-2:] == ["IPoIB", "P_Key"]
    assert "IGMP" not in checks(host(roce(igmp_version="")))
    assert "cgroup" in checks(host(roce(), cgroup={"rxe1": {"hca_handle": 4}}))
    assert "cgroup" not in checks(host(roce(), cgroup={"mlx5_9": {"hca_handle": 4}}))


@pytest.mark.parametrize(
    ("facts", "check", "seen"),
    [
        (host(roce(addresses=())), "address", "no IPv4 address (no address)"),
        (
            host(roce(addresses=(IPv6Address("fd77::1"),))),
            "address",
            "no IPv4 address (fd77::1); RoCEv2 joins IPv4 groups alone",
        ),
        (host(infiniband(addresses=(IPv6Address("fd77::1"),))), "address", "no IPv4 address (fd77::1)"),
        (
            host(roce(mtu=4096, netdev_mtu=9000)),
            "MTU",
            "a message carries up to 4096 bytes, if every receiver's port and every switch between takes "
            "that: `mcast ping -S 4096 GROUP` shows it, with `mcast ping --answer GROUP` at the receivers",
        ),
        (
            host(PEER._replace(info=roce(mtu=4096).info), roce()),
            "MTU",
            "a message carries up to 1024 bytes, and rxe2/1 of the same subnet sends up to 4096: larger "
            "messages are lost here in silence",
        ),
        (without(host(roce()), "rxe1", "its driver siw has none"), "limits", "no multicast: its driver siw"),
        (
            without(host(roce()), "rxe1", "", "siw"),
            "limits",
            "multicast may work with this newer rdma-core: its driver siw does not implement",
        ),
        (host(roce(), groups=0), "limits", "no multicast: it allows no groups (max_mcast_grp 0)"),
        (host(roce(), available={"unusable": (LEFT_OUT,)}), "device", "left out: no provider"),
        (host(roce(), route="e1"), "route", "groups go over e1; used only by resolve_addr without a source"),
        (host(roce()), "route", "none for groups; used only by resolve_addr without a source"),
        (host(roce()), "memlock", "no limit"),
        (host(roce()), "GIDs", "1 GID, RoCE v2"),
        (
            host(roce(addresses=(IP, IPv6Address("fd77::1")), gid_types={0: "RoCE v2", 1: "IB/RoCE v1"})),
            "GIDs",
            "2 GIDs, IB/RoCE v1, RoCE v2",
        ),
        (host(infiniband(send_only=True)), "SM", "LID 7, SM LID 1, capability mask 0x2651e848"),
        (host(roce(), available={"memlock": 2000}), "memlock", "2000 bytes, one QP needs 1000"),
        (host(roce(), release="5.14.1"), "kernel", "Linux 5.14.1: Soft-RoCE: a receive that is too small"),
        (host(infiniband(), release="6.1.0"), "kernel", "Linux 6.1.0"),
        (host(infiniband(), release="5.10.0"), "kernel", "Linux 5.10.0"),
    ],
)
def test_what_was_seen_is_said(facts: HostFacts, check: str, seen: str) -> None:
    assert any(one.seen.startswith(seen) for one in judge(facts) if one.check == check)


def test_link_that_is_down_by_choice_needs_no_cable() -> None:
    """A link that the host took down asks for no cable."""
    (finding,) = (one for one in judge(host(roce(DOWN, netdev_up=False))) if one.check == "link")
    assert finding.fix == "ip link set e1 up"


def test_what_cannot_be_known_is_said() -> None:
    (finding,) = (one for one in judge(host(roce(bridge=None))) if one.check == "querier")
    assert finding.level is Level.NOTE
    assert "cannot be seen" in finding.seen
    assert "--listen" in finding.fix


def test_no_library_hides_what_cannot_be_told() -> None:
    checks = {one.check for one in judge(host(available={"missing": NO_LIBRARY}))}
    assert checks <= {"libraries", "kernel"}


@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda quirk: quirk.says[:30])
def test_a_quirk_is_told_on_its_kernels_alone(quirk: Any) -> None:
    ports = infiniband() if quirk.link_layer is LinkLayer.INFINIBAND else roce()

    def findings_on(version: tuple[int, int]) -> list[Finding]:
        return [
            one
            for one in judge(host(ports, release=f"{version[0]}.{version[1]}.0"))
            if quirk.says in one.seen
        ]

    major, minor = quirk.before
    assert len(findings_on((major, minor - 1))) == (1 if minor else 0)
    assert findings_on(quirk.before) == []
    assert len(findings_on(quirk.since)) == 1


def test_a_shortage_of_locked_memory_is_counted() -> None:
    assert shortage(10, 5, None) == shortage(10, 5, 15) == ()
    (cause,) = shortage(10, 6, 15)
    assert cause.why == "10 bytes must be locked in addition to 6, but the limit is 15"
    assert "ulimit -l unlimited" in cause.next_step


def test_memlock_of_a_process_with_a_binary_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locked memory is known to a process whose name is no text."""
    (tmp_path / "status").write_bytes(b"Name:\t\xfc\nVmPin:\t       3 kB\n")
    monkeypatch.setattr(memlock, "_STATUS", tmp_path / "status")
    assert memlock.pinned() == 3 << 10


# --- the packet filter -------------------------------------------------------------------


def match(left: dict[str, Any], right: object, op: str = "==") -> dict[str, Any]:
    return {"match": {"op": op, "left": left, "right": right}}


DPORT = {"payload": {"protocol": "udp", "field": "dport"}}
UDP = match({"meta": {"key": "l4proto"}}, "udp")
ELSEWHERE = match({"meta": {"key": "iifname"}}, "eth9")


def rules(*lines: list[Any], policy: str = "accept", hook: str = "input") -> list[dict[str, Any]]:
    chain = {"family": "ip", "table": "filter", "name": "INPUT", "hook": hook, "policy": policy}
    return [
        {"chain": chain},
        *({"rule": {"family": "ip", "table": "filter", "chain": "INPUT", "expr": line}} for line in lines),
    ]


CALLED: list[Any] = [
    {"chain": {"family": "ip", "table": "filter", "name": "sub"}},
    {"rule": {"family": "ip", "table": "filter", "chain": "sub", "expr": [UDP, {"drop": None}]}},
]
FILTERS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "nothing": ([], False),
    "the port": (rules([match(DPORT, 4791), {"drop": None}]), True),
    "rejected": (rules([UDP, match(DPORT, 4791), {"counter": {}}, {"reject": {"type": "icmp"}}]), True),
    "another port": (rules([match(DPORT, 53), {"drop": None}]), False),
    "all but a port": (rules([match(DPORT, 53, "!="), {"drop": None}]), True),
    "all but this port": (rules([match(DPORT, 4791, "!="), {"drop": None}]), False),
    "a range": (rules([match(DPORT, {"range": [4000, 5000]}), {"drop": None}]), True),
    "a set": (rules([match(DPORT, {"set": [53, {"range": [4790, 4792]}]}), {"drop": None}]), True),
    "a port by its name": (rules([match(DPORT, "domain"), {"drop": None}]), False),
    "a named set": (rules([match(DPORT, "@ports"), {"drop": None}]), False),
    "accepted before": (rules([match(DPORT, 4791), {"accept": None}], [UDP, {"drop": None}]), False),
    "from elsewhere alone": (rules([ELSEWHERE, match(DPORT, 4791), {"drop": None}]), False),
    "everything": (rules([{"drop": None}]), True),
    "the policy": (rules(policy="drop"), True),
    "the policy, but let in": (rules([match(DPORT, 4791), {"accept": None}], policy="drop"), False),
    "in a chain that is called": ([*rules([{"jump": {"target": "sub"}}]), *CALLED], True),
    "a chain that nobody calls": ([*rules(), *CALLED], False),
    "a chain that calls itself": (rules([{"jump": {"target": "INPUT"}}]), False),
    "on the way elsewhere": (rules([match(DPORT, 4791), {"drop": None}], hook="forward"), False),
    "TCP": (rules([match({"meta": {"key": "l4proto"}}, "tcp"), {"drop": None}]), False),
    "a match of iptables that nft cannot show": (rules([{"xt": None}, {"drop": None}]), False),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_is_read_as_the_kernel_does(name: str) -> None:
    ruleset, drops = FILTERS[name]
    assert bool(dropping_chains(ruleset)) == drops


@pytest.mark.parametrize(
    ("ruleset", "drops"),
    [
        (rules([match(DPORT, 4791), {"drop": None}]), False),
        (rules([UDP, {"drop": None}]), False),
        (rules(policy="drop"), True),
        (rules([match({"payload": {"protocol": "ip", "field": "protocol"}}, "igmp"), {"drop": None}]), True),
        (
            rules([match({"meta": {"key": "l4proto"}}, "igmp"), {"accept": None}], policy="drop"),
            False,
        ),
    ],
    ids=["the port", "UDP", "the policy", "IGMP", "the policy, but let in"],
)
def test_a_filter_is_read_for_igmp(ruleset: list[dict[str, Any]], drops: bool) -> None:
    assert bool(dropping_chains(ruleset, IGMP)) == drops
