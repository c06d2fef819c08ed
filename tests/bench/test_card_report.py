"""A card report: what it measures, how it is judged, and that it names nobody."""

from __future__ import annotations

import getpass
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mcast.api import DeviceIdentity, Identity, Provider, Status, Testbed, override_provider
from mcast.backends.model.port import Port
from mcast.backends.rdma.identity import identify
from mcast.backends.sim import Fabric
from mcast.backends.sim.core.igmp import Igmp
from mcast.backends.sim.faults import Refuse, Requests
from mcast.backends.sim.testbed import sim_testbed
from mcast.bench import card_measure
from mcast.bench.card import make_card_report
from mcast.bench.card_privacy import Redactor, own_names
from mcast.bench.card_report import CardReport, spread
from mcast.conformance.clauses import CLAUSES
from mcast.conformance.facts import FACTS
from mcast.conformance.report import Outcome, SuiteReport, SuiteResult, build_report
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import SaMethod, SaStatus

ROOT = Path(__file__).parents[2]
P, F, D, N = Outcome.PASSED, Outcome.FAILED, Outcome.DEVIATION, Outcome.NOT_APPLICABLE
EVERYTHING = (*CLAUSES, *FACTS)

Bed = Callable[[], AbstractContextManager[Testbed]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_measure, "RUNS", 2)
    monkeypatch.setattr(card_measure, "RUN_SECONDS", 0.01)
    monkeypatch.setattr(card_measure, "JOINS", 5)


def suite(*others: SuiteResult, name: str = "acme") -> SuiteReport:
    """A run in which everything passed, and these besides."""
    return build_report([SuiteResult("t.py::all", name, EVERYTHING, P, ""), *others], [name], {})


def bad(outcome: Outcome, *proves: str, reason: str = "1 != 2") -> SuiteResult:
    return SuiteResult("t.py::bad", "acme", proves, outcome, reason)


def acme(testbed: Bed, identity: Identity = Identity()) -> AbstractContextManager[None]:  # noqa: B008
    """A provider `acme` with that test bed."""
    made = Provider(
        "acme",
        "a provider of somebody else",
        status=lambda: Status(True, "here"),
        open=lambda: pytest.fail("only its test bed is opened"),
        testbed=testbed,
        identify=lambda: identity,
    )
    return override_provider("acme", made)


def simulated(make: Callable[..., Fabric] = Fabric.roce, **options: Any) -> Bed:
    """The test bed of a fabric with these options."""
    return partial(sim_testbed, "acme", lambda ports: make(**{"ports": ports} | options))


def card(testbed: Bed, *results: SuiteResult, details: bool = False) -> CardReport:
    with acme(testbed):
        return make_card_report(suite(*results), "acme", 1.0, details)


@pytest.mark.parametrize("name", ["sim-roce", "sim-ib", "sim-shared"])
def test_everything_is_measured(name: str) -> None:
    """A file holds all of it, and is read back as it was written."""
    found = make_card_report(suite(name=name), name, 1.0)
    assert (found.verdict, found.why, found.provider) == ("pass", (), name)
    assert [found.loopback.outcome, found.join_leave.outcome] == ["measured", "measured"]
    assert [found.flooding.outcome, found.rate.outcome] == ["measured", "measured"]
    assert found.loopback.block == ("honoured" if name == "sim-ib" else "refused")
    assert (found.flooding.flooded, found.flooding.member) == (False, card_measure.MESSAGES)
    joins = found.join_leave
    assert joins.join is not None
    assert joins.leave is not None
    assert (joins.join.count, joins.leave.count, joins.refused) == (5, 5, 0)
    mtu = found.devices[0].ports[0].mtu
    assert [one.size for one in found.rate.sizes] == sorted({64, 1024, mtu})
    assert all(one.lost == 0 < one.messages_per_s.median for one in found.rate.sizes)
    assert [device.ports[0].used for device in found.devices] == [*range(found.bed.ports)]
    assert found.counts == {"clauses": {"passed": len(CLAUSES)}, "facts": {"passed": len(FACTS)}}
    assert CardReport.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("block", ["honoured", "ignored", "refused"])
def test_loopback_blocking_is_what_it_is(block: str) -> None:
    found = card(simulated(block_loopback=block)).loopback
    assert (found.outcome, found.block) == ("measured", block)
    own = {"honoured": 0, "ignored": card_measure.MESSAGES, "refused": None}[block]
    assert (found.own, found.neighbour) == (own, None if own is None else card_measure.MESSAGES)


def test_a_fabric_that_floods_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switches that send every group to every port."""

    def everywhere(igmp: Igmp, source: Port, group: Gid, mlid: int) -> Sequence[Port]:
        return igmp._topology.ports

    monkeypatch.setattr(Igmp, "members", everywhere)
    found = card(simulated()).flooding
    assert (found.outcome, found.flooded) == ("measured", True)
    assert found.with_member is not None
    assert found.without_member is not None
    assert found.with_member.non_member == found.without_member.non_member == card_measure.MESSAGES


def test_a_deaf_port_says_nothing_of_flooding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the control fails, nothing is concluded, and the other measurements stand."""
    members = Igmp.members

    def not_the_second(igmp: Igmp, source: Port, group: Gid, mlid: int) -> Sequence[Port]:
        return [port for port in members(igmp, source, group, mlid) if port.index != 1]

    monkeypatch.setattr(Igmp, "members", not_the_second)
    monkeypatch.setattr("mcast.bench.end.BENCH_TIMEOUT", 0.1)
    found = card(simulated())
    assert (found.flooding.outcome, found.flooding.flooded, found.flooding.member) == ("failed", None, 0)
    assert "nothing follows" in found.flooding.reason
    assert found.rate.outcome == "failed"
    assert "<address 1> joined, but receives nothing from <address 2>" in found.rate.reason
    assert found.join_leave.outcome == found.loopback.outcome == "measured"


def test_one_port_cannot_show_flooding() -> None:
    found = card(simulated(lambda ports: Fabric.roce(ports=1)))
    assert (found.flooding.outcome, found.flooding.flooded) == ("not-applicable", None)
    assert found.flooding.reason == "there is one port, and this needs two"
    assert (found.rate.outcome, found.rate.receiver) == ("measured", "same port")
    assert "there is a second port" in found.bed.absent


def test_refused_joins_are_counted() -> None:
    """The SA refuses the second and third of five; the others are timed."""

    def make(ports: int) -> Fabric:
        fabric = Fabric.infiniband(ports=ports)
        fabric.rules.when(Requests(method=SaMethod.SET, nth=(3, 4)), Refuse(SaStatus.NO_RESOURCES))
        return fabric

    found = card(simulated(make)).join_leave
    assert found.refused == 2
    assert found.join is not None
    assert found.join.count == 3
    assert "EINVAL" in found.reason


@pytest.mark.parametrize(
    ("results", "verdict", "why"),
    [
        ([], "pass", ()),
        ([bad(N, "JEX-1", reason="not here: a switch")], "pass", ()),
        ([bad(F, "JEX-1")], "fail", ("JEX-1",)),
        ([bad(F)], "fail", ()),
        ([bad(Outcome.SKIPPED, "JEX-1")], "fail", ("JEX-1",)),
        ([bad(D, "JEX-1")], "differs", ("JEX-1",)),
        ([bad(F, "K-JOIN-1")], "differs", ("K-JOIN-1",)),
        ([bad(D, "K-JOIN-1"), bad(F, "JEX-2")], "fail", ("JEX-2", "K-JOIN-1")),
    ],
)
def test_the_verdict_follows_from_the_outcomes(
    results: list[SuiteResult], verdict: str, why: tuple[str, ...]
) -> None:
    found = card(simulated(), *results)
    assert (found.verdict, found.why) == (verdict, why)
    failed = [one for row in (*found.clauses, *found.facts) for one in row.failed] + [*found.loose]
    assert {one.reason for one in failed} == ({"1 != 2"} if verdict != "pass" else set())


def test_what_does_not_apply_is_counted() -> None:
    """Part of a clause that passed may be about what is not here."""
    found = card(simulated(), bad(N, "JEX-1", reason="not here: a switch"))
    row = found.clauses[0]
    assert (row.id, row.outcome, row.tests, row.not_applicable, row.failed) == ("JEX-1", "passed", 2, 1, ())


def test_a_run_of_nothing_fails() -> None:
    """All clauses not applicable: nothing was shown."""
    result = SuiteResult("t.py::all", "acme", EVERYTHING, N, "not here")
    with acme(simulated()):
        found = make_card_report(build_report([result], ["acme"], {}), "acme", 1.0)
    assert found.verdict == "fail"


def test_quartiles_and_extremes() -> None:
    found = spread([5.0, 1.0, 2.0, 3.0, 4.0], "us")
    assert (found.unit, found.count) == ("us", 5)
    assert (found.minimum, found.first_quartile, found.median) == (1, 2, 3)
    assert (found.third_quartile, found.maximum) == (4, 5)
    alone = spread([7.0], "us")
    assert {alone.minimum, alone.first_quartile, alone.median, alone.third_quartile, alone.maximum} == {7}


# --- nobody is named ---------------------------------------------------------------------------


HOST, USER = "secret-host.example.com", "alicia"


def macs() -> Iterator[str]:
    for path in Path("/sys/class/net").glob("*/address"):
        yield path.read_text().strip()


def values_of_this_host() -> set[str]:
    """Names of the machine, its user and the simulated devices, and their addresses."""
    names = {platform.node(), os.uname().nodename, getpass.getuser(), str(Path.home()), str(Path.cwd())}
    found = names | {str(ROOT), HOST, HOST.partition(".")[0], USER, *macs()}
    found |= {interface for _, interface in socket.if_nameindex()} - {"lo"}
    with sim_testbed("acme", Fabric.infiniband) as bed:
        for device in bed.backend.devices():
            found |= {device.name, f"{device.node_guid:#018x}", f"{device.node_guid:016x}"}
            for port in device.ports:
                found |= {*map(str, port.addresses), *map(str, port.gids.values())}
    return {value for value in found if value not in ("", "/", "root", "localhost", "00:00:00:00:00:00")}


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: HOST)
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, USER)


def test_no_value_of_this_host_is_in_the_file(somebody: None) -> None:
    """Each of them stands in the reason of a failure, as a word and inside a sentence."""
    values = sorted(values_of_this_host())
    reasons = [f"{value}: '{value}' is not ({value}), at {value}/x.py" for value in values]
    results = [bad(F, "JEX-1", reason=reason) for reason in reasons]
    text = card(simulated(Fabric.infiniband), *results).model_dump_json()
    words = "".join(one if one.isalnum() or one in "_-.:/" else " " for one in text).split()
    assert not {value for value in values if value in words or (len(value) > 6 and value in text)}
    named = card(simulated(Fabric.infiniband), *results, details=True).model_dump_json()
    assert all(value in named for value in values)


def test_what_was_asked_for_is_named(somebody: None) -> None:
    found = card(simulated(), details=True)
    assert found.host is not None
    assert (found.host.name, found.host.user, found.redacted) == (HOST, USER, False)
    device = found.devices[0]
    assert (device.name, device.node_guid) == ("roce0", "0x0200000000000001")
    assert device.ports[0].addresses == ("10.0.0.1", "fd00::1")
    plain = card(simulated())
    assert (plain.host, plain.redacted, plain.devices[0].name) == (None, True, None)
    assert plain.devices[0].node_guid is None
    assert plain.devices[0].ports[0].addresses is None


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("10.0.0.1 sends, 10.0.0.2 hears 10.0.0.1", "<address 1> sends, <address 2> hears <address 1>"),
        ("239.1.1.1:5000 of 10.0.0.1", "<group 1>:5000 of <address 1>"),
        ("Gid('fe80::c80b:b0ff:fe68:7847')", "Gid('<address 1>')"),
        ("::ffff:10.0.0.1, not ::1", "<address 1>, not <address 2>"),
        ("fe80::1%eth0", "<address 1>%<interface 1>"),
        ("ff12:401b:ffff::1", "<group 1>"),
        ("gid:fe80::1, fe80::1: no. fe80::2.", "gid:<address 1>, <address 1>: no. <address 2>."),
        ("ca:0b:b0:68:78:47", "<address 1>"),
        ("ca-0b-b0-68-78-47", "<address 1>"),
        ("guid c80b:b0ff:fe68:7847, 0xc80bb0fffe687847", "guid <number 1>, <number 2>"),
        ("<Qp at 0x7f35d3a7c0d0>", "<Qp at <number 1>>"),
        ("cannot read /home/alicia/x/y.py: no", "cannot read <path 1>: no"),
        ("'/home/Bob Smith/x' is '~/x'", "'<path 1>' is '<path 2>'"),
        ("HOST7 of Alicia (host7.example.com)", "<host 1> of <user 1> (<host 2>)"),
        ("fe80::1%eth7", "<address 1>%<interface 1>"),
        ("no enx001122aabbcc, no rocex506b4b0300f4c8a2", "no enx<number 1>, no rocex<number 2>"),
        ("/sys/class/infiniband/rocex506b4b0300f4c8a2", "/sys/class/infiniband/rocex<number 1>"),
        ("file:///home/bob/x, at /home//bob/y.", "file:<path 1>, at <path 2>."),
        ("/srv/acme,inc/x /srv/acme:key/x /srv/acme#1", "<path 1> <path 2> <path 3>"),
        ("/proc/net/igmp,/home/bob/x /proc/../home/bob", "<path 1> <path 2>"),
        ("</home/bob> (/home/bob) ../../bob/x ./bob/x", "<<path 1>> (<path 1>) <path 2> <path 3>"),
        ("/dev/shm/bob /sys/fs/cgroup/bob.slice", "<path 1> <path 2>"),
        ("/dev/infiniband/uverbs0: no", None),
        ("mlx5_0/1 on eth0", "<device 1>/1 on <interface 1>"),
        ("/proc/net/igmp of eth0", "/proc/net/igmp of <interface 1>"),
        ("/sys/class/infiniband/mlx5_0/ports", "/sys/class/infiniband/<device 1>/ports"),
        ("test_join.py::test_a_join[1-2]: 1..49152, 0xC000, EINVAL", None),
        ("at 12:30:45, 3/4 and/or 1.5 s; 50%; a: b; ::", None),
        ("assert b'before' == b''; malicia's hosts7", None),
    ],
)
def test_what_names_somebody_is_replaced(text: str, redacted: str | None) -> None:
    names = {"host7": "host", "host7.example.com": "host", "alicia": "user", "eth0": "interface"}
    assert Redactor(names | {"mlx5_0": "device"}).text(text) == (text if redacted is None else redacted)


AROUND = st.text("gx_ :,.;()[]'\"=-/%\n", max_size=6)


@given(AROUND, st.ip_addresses(), AROUND, st.booleans())
@example("gid:", ip_address("fe80::1"), ".", False)
@example("x", ip_address("192.0.2.1"), "x", False)
def test_no_address_survives(before: str, address: Any, after: str, exploded: bool) -> None:
    """Whatever stands around it, in both ways to write it."""
    said = address.exploded if exploded else str(address)
    if said != "::":
        assert said not in Redactor({}).text(before + said + after)


def test_a_version_is_no_address() -> None:
    """A kernel may be named after the host that built it; its number stays."""
    assert Redactor({"alicia": "user"}).words("Linux 6.1.0.4-alicia+") == "Linux 6.1.0.4-<user 1>+"


def test_names_that_say_nothing_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "localhost")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "(none)", "6.1", "#1", "x86_64")))
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "root")
    monkeypatch.setenv("HOME", "/root")
    assert own_names() == {}


def test_the_domain_and_who_called_sudo_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may be named after another host of the domain; paths are of the user who called sudo."""
    monkeypatch.setattr(platform, "node", lambda: "db1.corp.example.com")
    monkeypatch.setenv("USER", "root")
    monkeypatch.setenv("LOGNAME", "root")
    monkeypatch.setenv("SUDO_USER", USER)
    redactor = Redactor(own_names())
    assert redactor.words("6.1-db2.corp.example.com") == "6.1-db2.<domain 1>"
    assert redactor.words(f"6.1-{USER}+") == "6.1-<user 1>+"


def test_a_device_that_was_left_out_is_not_named() -> None:
    """A backend leaves out a device that it may not open; sysfs has it, and an error names it."""
    identity = Identity({}, {"acme_hca7": DeviceIdentity()})
    with acme(simulated(), identity):
        found = make_card_report(suite(bad(F, "JEX-1", reason="acme_hca7: no permission")), "acme", 1.0)
    text = found.model_dump_json()
    assert "no permission" in text
    assert "acme_hca7" not in text


def test_a_long_text_takes_no_time() -> None:
    """Digits, colons and dots of which no part is an address, as in a dump."""
    start = time.thread_time()
    Redactor({}).text("12.3:" * 800)
    assert time.thread_time() - start < 4


# --- what a device is --------------------------------------------------------------------------


def plant(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def test_a_card_is_read_from_sysfs(tmp_path: Path) -> None:
    """node_desc, which names the host, is not reported; nor is where the card is plugged in."""
    ids = {"vendor": "0x15b3", "device": "0x101d", "revision": "0x00"}
    plant(tmp_path / "pci/0000:c1:00.0", **ids)
    plant(tmp_path / "drivers/mlx5_core")
    (tmp_path / "pci/0000:c1:00.0/driver").symlink_to(tmp_path / "drivers/mlx5_core")
    about = {"fw_ver": "22.39.1002", "board_id": "MT_0000000359", "node_desc": f"{HOST} mlx5_0"}
    plant(tmp_path / "ib/mlx5_0", **about)
    (tmp_path / "ib/mlx5_0/device").symlink_to(tmp_path / "pci/0000:c1:00.0")
    plant(tmp_path / "ib/rxe0", node_desc="rxe", fw_ver="")
    plant(tmp_path / "ib/other0", node_desc=HOST)
    plant(tmp_path / "modules/mlx5_core", version="24.10-0.7.0")
    lines = (
        "7f r-xp 0 00:1f 1 /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0",
        "7f r-xp 0 00:1f 1 /usr/lib/x86_64-linux-gnu/librdmacm.so.1.3.44.0",
        "7f r-xp 0 00:1f 1 /usr/lib/x86_64-linux-gnu/libmlx5.so.1.24.44.0",
        f"7f r-xp 0 00:1f 1 /home/{USER}/lib/libother.so.1.2.3",
    )
    (tmp_path / "maps").write_text("\n".join(lines))
    found = identify(tmp_path / "ib", tmp_path / "modules", tmp_path / "maps")
    hardware = {"board_id": "MT_0000000359", **{f"pci_{name}": value for name, value in ids.items()}}
    assert found == Identity(
        {"libibverbs": "1.14.44.0", "libmlx5": "1.24.44.0", "librdmacm": "1.3.44.0", "rdma-core": "44.0"},
        {
            "mlx5_0": DeviceIdentity("mlx5_core", "24.10-0.7.0", "22.39.1002", hardware),
            "other0": DeviceIdentity(),
            "rxe0": DeviceIdentity("rdma_rxe"),
        },
    )


def test_the_report_says_what_the_device_is(somebody: None) -> None:
    """Identify the device in the provider's words, without names that somebody has built into a version."""
    ours = DeviceIdentity("mlx5_core", "", "22.39.1002", {"board_id": f"{USER}-1"})
    identity = Identity({"rdma-core": "44.0"}, {"roce0": ours})
    with acme(simulated(), identity):
        found = make_card_report(suite(), "acme", 1.0)
    assert found.versions.libraries == {"rdma-core": "44.0"}
    assert found.devices[0].hardware == {"board_id": "<user 1>-1"}
    assert [(one.driver, one.firmware) for one in found.devices[:2]] == [
        ("mlx5_core", "22.39.1002"),
        ("", ""),
    ]


def test_a_bed_s_port_may_be_any_port() -> None:
    """The report says which ports were used, also where the bed leaves out the first."""

    class Later:
        def __enter__(self) -> Testbed:
            self._bed = sim_testbed("acme", Fabric.roce)
            bed = self._bed.__enter__()
            bed.ports = (IPv4Address("10.0.0.3"), IPv4Address("10.0.0.2"))
            return bed

        def __exit__(self, *error: Any) -> None:
            self._bed.__exit__(*error)

    found = card(Later)
    assert [device.ports[0].used for device in found.devices] == [None, 1, 0, None]
    assert found.rate.outcome == found.flooding.outcome == "measured"
