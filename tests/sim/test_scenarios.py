"""Scenarios: what the ready-made ones show, how files are read, what the command prints."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from mcast.backends.sim.scenario import faults as scenario_faults
from mcast.backends.sim.scenario import model as scenario_model
from mcast.backends.sim.scenario.runner import (
    BadScenario,
    MemberResult,
    Scenario,
    ScenarioResult,
    load,
    ready_made,
    run,
)

GROUP = "239.1.1.1"


def simulated(name: str) -> tuple[ScenarioResult, dict[str, MemberResult]]:
    result = run(load(name))
    return result, {member.device: member for member in result.members}


def scenario(**changes: Any) -> Scenario:
    """Three members, one of which sends 100 messages in a second; with these changes."""
    return Scenario.model_validate(described(**changes))


def described(**changes: Any) -> dict[str, Any]:
    return {
        "name": "test",
        "seconds": 2,
        "fabric": {"link_layer": "infiniband", "ports": 4, "switches": 3},
        "members": [{"group": GROUP, "ports": [0, 1, 2], "rejoin": True}],
        "traffic": [{"group": GROUP, "port": 0, "start": 0.5, "stop": 1.5, "every": 0.01}],
        **changes,
    }


def faulty(link_layer: str = "infiniband", **fault: Any) -> tuple[ScenarioResult, MemberResult]:
    """The run with one fault, and its last member."""
    fabric = {"link_layer": link_layer, "ports": 4, "switches": 3}
    result = run(scenario(fabric=fabric, faults=[fault]))
    return result, result.members[-1]


# --- the ready-made ones ---------------------------------------------------------------------


def test_there_are_five() -> None:
    assert set(ready_made()) == {
        "sm-failover-under-load",
        "flapping-port",
        "late-join",
        "slow-receiver",
        "lossy-link",
    }


def test_sm_failover_under_load() -> None:
    """SA-SM-2: -ENETRESET for all; who rejoins goes on, who does not hears no more."""
    result, members = simulated("sm-failover-under-load")
    assert [members[f"ib{port}"].joins for port in range(6)] == [2, 2, 2, 2, 1, 1]
    assert all(members[f"ib{port}"].lost == 0 for port in range(4))
    ignores = members["ib4"]
    assert ignores.causes == {"the membership was lost": ignores.lost}
    assert ignores.received == 4 * 400  # until the new SM came, 4 s after the first message
    assert members["ib5"].joined == pytest.approx(7.1, abs=0.01)  # after -ETIMEDOUT
    lost = [seen for seen in result.seen if seen.errno == "ENETRESET"]
    assert [(seen.at, seen.device) for seen in lost] == [(5.0, f"ib{port}") for port in range(5)]
    assert [(seen.device, seen.errno) for seen in result.seen if seen.at == 7.0] == [("ib5", "ETIMEDOUT")]


def test_flapping_port() -> None:
    """SA-RESET-1: three times -ENETRESET, four joins, and nobody else is touched."""
    result, members = simulated("flapping-port")
    assert members["ib2"].joins == 4
    assert [seen.at for seen in result.seen if seen.errno == "ENETRESET"] == [2.0, 3.0, 5.0]
    assert 150 < members["ib2"].lost < 190  # down for 1.52 s at 100 messages/s, and up to 0.1 s to join again
    assert members["ib1"].lost == members["ib0"].lost == 0


def test_late_join() -> None:
    """docs/pitfalls.md, 3: the first messages after a join are lost while the switches are not programmed."""
    _, members = simulated("late-join")
    for late in (members["ib2"], members["ib3"]):
        assert late.causes["the fabric does not deliver the group to the port"] == 40  # 0.2 s, one each 5 ms
        assert late.lost == 41
    assert members["ib1"].lost == 0


def test_slow_receiver() -> None:
    """docs/pitfalls.md, 15: the receive queue runs dry in silence; sender and others see nothing of it."""
    result, members = simulated("slow-receiver")
    slow = members["roce3"]
    assert slow.causes == {"no receive is free": slow.counters.dropped_no_receive}
    assert slow.lost > 500
    assert slow.counters.recv_low_water == 0
    assert all(member.lost == 0 for device, member in members.items() if device != "roce3")
    assert {seen.what for seen in result.seen} == {"MULTICAST_JOIN"}


def test_lossy_link() -> None:
    _, members = simulated("lossy-link")
    lossy = members["roce3"]
    assert lossy.causes == {"a fault rule dropped it": lossy.lost}
    assert 15 < lossy.lost < 50  # 2 % of 1 500
    assert min(lossy.duplicates, lossy.out_of_order) > 5
    assert lossy.received + lossy.lost == lossy.expected == 2250
    assert all(member.lost == 0 for device, member in members.items() if device != "roce3")


def test_same_scenario_gives_the_same_trace() -> None:
    """Equal scenarios give equal results and traces."""
    first, second = (run(load("lossy-link")) for _ in range(2))
    assert first.as_json() == second.as_json()
    assert str(first.trace) == str(second.trace)
    other = run(load("lossy-link").model_copy(update={"seed": 8}))
    assert other.as_json()["members"] != first.as_json()["members"]


# --- every kind of fault, as a scenario has it -------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "causes"),
    [
        ({"kind": "drop", "nth": [2, 4]}, {"a fault rule dropped it": 2}),
        ({"kind": "drop", "target": 2, "at": 0.995, "until": 1.2}, {"a fault rule dropped it": 20}),
        ({"kind": "drop", "group": "239.9.9.9"}, {}),
        ({"kind": "delay", "seconds": 0.1}, {}),
        ({"kind": "delay", "seconds": 30}, {"still on its way": 100}),
        ({"kind": "duplicate", "copies": 2}, {}),
        ({"kind": "corrupt-qkey", "source": 0, "target": 2}, {"the Q_Key differs": 100}),
        ({"kind": "sa-slow", "port": 2, "seconds": 1}, {"the join was not complete": 50}),
        ({"kind": "sa-silent", "port": 2, "until": 0.5}, {"the join was not complete": 100}),
        ({"kind": "sa-refuses", "port": 2, "until": 0.75}, {"the join failed": 30}),
        ({"kind": "sa-refuses", "port": 1, "status": "NO_RESOURCES"}, {}),
        ({"kind": "cut-cable", "switch": 1, "at": 0.995, "until": 1.2}, {}),
        ({"kind": "link-down", "port": 2, "at": 0.995, "until": 1.2}, {"the join was refused": 29}),
        ({"kind": "change-lid", "port": 2, "at": 1.0}, {}),
        ({"kind": "set-pkeys", "port": 2, "at": 0.995}, {"the join was refused": 49}),
        ({"kind": "starve", "port": 2, "at": 0.995, "until": 1.2}, {"no receive is free": 20}),
        ({"kind": "overrun-cq", "port": 2, "at": 0.995}, {}),
        ({"kind": "fail-qp", "port": 2, "at": 0.995, "status": "LOC_PROT_ERR"}, {}),
        ({"kind": "remove-device", "port": 2, "at": 0.995}, {"the device is gone": 50}),
        ({"kind": "bond-failover", "port": 2, "at": 0.995}, {}),
        ({"kind": "restart-sm", "at": 0.995}, {}),
        (
            {"kind": "program-late", "seconds": 0.7},
            {"the fabric does not deliver the group to the port": 20},
        ),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if "kind" in value else "",
)
def test_a_fault_in_a_scenario(fault: dict[str, Any], causes: dict[str, int]) -> None:
    _, member = faulty(**fault)
    assert {why: member.causes.get(why, 0) for why in causes} == pytest.approx(causes, abs=2)
    assert bool(member.lost) >= bool(causes)
    assert member.expected == 100


def test_faults_show_in_the_counters() -> None:
    """Faults show in the counters and in what is seen."""
    assert faulty(kind="duplicate", copies=2)[1].duplicates == 200
    assert faulty(kind="corrupt-qkey", target=2)[1].counters.dropped_qkey == 100
    for kind, status in (("overrun-cq", "WR_FLUSH_ERR"), ("fail-qp", "LOC_QP_OP_ERR")):
        seen = faulty(kind=kind, port=2, at=1.0)[0].seen[-1]
        assert (seen.device, seen.what, seen.errno, seen.detail) == ("ib2", "QP in ERR, reset", "EIO", status)
    for kind in ("bond-failover", "remove-device"):
        assert faulty(kind=kind, port=2, at=1.0)[0].seen[-1].what in ("ADDR_CHANGE", "DEVICE_REMOVAL")


def test_without_a_querier_a_long_run_falls_silent() -> None:
    """RFC 3376, 8.4: 260 s."""
    long = {"seconds": 400, "traffic": [{"group": GROUP, "port": 0, "every": 1}]}
    result = run(scenario(fabric={"ports": 4}, faults=[{"kind": "stop-querier"}], **long))
    assert result.members[-1].causes == {"the fabric does not deliver the group to the port": 140}


def test_a_member_that_leaves_expects_no_more() -> None:
    members = [{"group": GROUP, "ports": [0]}, {"group": GROUP, "ports": [1], "leave": 1.0}]
    stays, leaves = run(scenario(members=members)).members
    assert (stays.expected, leaves.expected, leaves.received, leaves.lost) == (100, 50, 50, 0)


# --- reading ---------------------------------------------------------------------------------


TOML = """
name = "mine"
seconds = 1
[[members]]
group = "239.1.1.1"
ports = [0, 1]
"""


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text(TOML)
    yaml.write_text("{name: mine, seconds: 1, members: [{group: 239.1.1.1, ports: [0, 1]}]}")
    assert load(toml) == load(str(yaml))
    assert load(toml).members[0].ports == (0, 1)


def test_an_exponent_is_a_number_in_yaml_too(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "{name: mine, seconds: 2e-1, seed: 12, members: [{group: 239.1.1.1, ports: [0, 1]}]}"
    )
    assert load(tmp_path / "a.yaml").seconds == 0.2


def test_yaml_without_pyyaml_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yml").write_text("name: x")
    with pytest.raises(BadScenario, match=r"PyYAML: pip install 'rdma-mcast\[yaml\]', or write TOML"):
        load(tmp_path / "a.yml")


def test_wrong_scenario_name_lists_the_known() -> None:
    """A ready made name is a scenario and a wrong one names them."""
    with pytest.raises(
        BadScenario, match=r"sm-failover is neither a file nor a ready-made scenario: choose one of .*lossy"
    ):
        load("sm-failover")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": 0}, "seconds is 0: give more than 0"),
        ({"members": []}, "members has too few entries: give 1 or more"),
        ({"speed": 3}, "unknown field speed"),
        ({"members": [{"group": "10.0.0.1", "ports": [0]}]}, "10.0.0.1"),
        ({"members": [{"group": GROUP, "ports": [0, 9]}]}, "port 9: this fabric has ports 0..3"),
        ({"members": [{"group": GROUP, "ports": [0, 0]}]}, "port 0 is a member of 239.1.1.1 twice"),
        ({"traffic": [{"group": GROUP, "port": 3}]}, "port 3 sends to 239.1.1.1 but is no member of it"),
        (
            {"traffic": [{"group": GROUP, "port": 0, "size": 2000}]},
            "size 2000 is larger than the MTU, 1024 bytes",
        ),
        (
            {"faults": [{"kind": "gremlins"}]},
            "entry 1 of faults: unknown kind 'gremlins': choose one of 'drop', ",
        ),
        ({"faults": [{"kind": "link-down", "port": 7}]}, "port 7: this fabric has ports 0..3"),
        ({"faults": [{"kind": "drop", "at": 2, "until": 1}]}, "until = 1 is not after at = 2"),
        (
            {"members": [{"group": GROUP, "ports": [0], "join": 0.5, "leave": 0.2}]},
            "entry 1 of members: leave = 0.2 is not after join = 0.5",
        ),
        (
            {"traffic": [{"group": GROUP, "port": 0, "start": 0.5, "stop": 0.5}]},
            "entry 1 of traffic: stop = 0.5 is not after start = 0.5",
        ),
        ({"seconds": True}, "seconds is True: give a number"),
        ({"seconds": "1"}, "seconds is '1': give a number"),
        ({"seed": 1.0}, "seed is 1.0: give a whole number"),
        (
            {"faults": [{"kind": "drop", "at": True}]},
            "at of drop of entry 1 of faults is True: give",
        ),
        (
            {"faults": [{"kind": "drop", "nth": True}]},
            "nth of drop of entry 1 of faults is True",
        ),
        (
            {"members": [{"group": GROUP, "ports": [0], "rejoin": 1}]},
            "rejoin of entry 1 of members is 1: give true or false",
        ),
        ({"name": ""}, "name is '': give text of 1 or more characters"),
        ({"name": "x" * 201}, "name is longer than 200 characters"),
        ({"fabric": 3}, "fabric is 3: give a table with its fields"),
        ({"faults": [3]}, "entry 1 of faults is 3: give a table with its fields"),
        ({"members": [{"group": GROUP, "ports": 0}]}, "ports of entry 1 of members is 0: give a list"),
        ({"faults": [{"kind": "drop", "rate": 2}]}, "rate of drop of entry 1 of faults is 2: give 1 or less"),
        (
            {"faults": [{"kind": "drop", "nth": [2, 0]}]},
            "entry 2 of nth of drop of entry 1 of faults is 0: give 1",
        ),
        ({"faults": [{"kind": "cut-cable", "switch": 3}]}, "switch 3: the leaves are 1..2"),
        ({"faults": [{"kind": "stop-querier"}]}, "'stop-querier' needs IGMP: the fabric must be \"roce\""),
        ({"faults": [{"kind": "sa-refuses", "status": "NO"}]}, "'NO' is not one of OK, UNSUP_METHOD_ATTR,"),
        ({"fabric": {}, "faults": [{"kind": "restart-sm"}]}, "'restart-sm' needs an SM: the fabric must be"),
    ],
)
def test_a_bad_scenario_is_refused_in_one_sentence(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(json.dumps(described(**change)))
    with pytest.raises(BadScenario) as raised:
        load(path)
    assert says in str(raised.value)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.toml", b"name = ", "is not TOML"),
        ("a.yaml", b"{name: [", "is not YAML"),
        ("a.toml", b"\xff\xfe\x00", "is not text"),
        ("a.toml", None, "cannot read"),
        ("a.yaml", b"just words", "that is a table of name, seconds, members and more"),
    ],
)
def test_a_file_that_is_no_scenario(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadScenario, match=says):
        load(tmp_path / name)


HEAD = 'name = "x"\nseconds = 1\n[[members]]\ngroup = "239.1.1.1"\nports = [0]\n'
MERGES = "\n".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}" for i in range(1, 25))
HOSTILE = {
    "a.toml": {
        "deep": (b"a = " + b"[" * 10_000, "nested too deeply"),
        "deep tables": (b"a = " + b"{a = " * 10_000, "nested too deeply"),
        "long key": (b"a." * 20_000 + b"a = 1", "more than 1,000 dots"),
        "long number": (f"seed = {'9' * 5_000}\n{HEAD}".encode(), "is not TOML"),
        "long hex number": (f"seed = 0x{'f' * 5_000}\n{HEAD}".encode(), "seed"),
        "huge number": (f"{HEAD}join = {'9' * 400}\n".encode(), "join of entry 1 of members"),
        "date": (HEAD.replace("= 1", "= 2001-01-01").encode(), "seconds"),
        "no number": (HEAD.replace("= 1", "= nan").encode(), "seconds"),
        "infinite": (HEAD.replace("= 1", "= 1e400").encode(), "seconds"),
        "large": (b"#" * 100_000, "larger than"),
        "long name": (HEAD.replace("x", "x" * 300).encode(), "name"),
    },
    "a.yaml": {
        "no date": (b"seconds: 2001-99-99", "is not YAML"),
        "no time": (b"seconds: 2001-01-01 99:99:99", "is not YAML"),
        "tag int": (b"seconds: !!int ''", "line 1 has the tag"),
        "tag bool": (b"seconds: !!bool x", "line 1 has the tag"),
        "tag timestamp": (b"seconds: !!timestamp x", "line 1 has the tag"),
        "tag python": (b"!!python/object:os.system {}", "line 1 has the tag"),
        "deep": (b"[" * 60_000, "nested more than 16 deep"),
        "deep tables": (b"{a: " * 15_000, "nested more than 16 deep"),
        "deep dashes": (b"- " * 30_000, "nested more than 16 deep"),
        "long number": (b"seed: " + b"9" * 5_000, "is not YAML"),
        "base 60": (b"seconds: 1" + b":59" * 15_000 + b".0", "is not YAML"),
        "merges": (f"m0: &m0 {{a: 1}}\n{MERGES}".encode(), "line 2 has the alias [*]m0"),
        "laughs": (b"a: &a [1, 1]\nb: &b [*a, *a]", "line 2 has the alias [*]a"),
        "itself": (b"&a [*a]", "line 1 has the alias [*]a"),
        "two documents": (b"a: 1\n---\nb: 2", "is not YAML"),
        "nothing": (b"", "is no scenario"),
        "unhashable key": (b"{[]: 1}", "is not YAML"),
        "control": (b"name: \x1b[31m", "is not YAML"),
    },
}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        pytest.param(file, *case, id=f"{file} {kind}")
        for file, cases in HOSTILE.items()
        for kind, case in cases.items()
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadScenario, match=says) as raised:
        load(tmp_path / name)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1_500


@pytest.mark.parametrize("name", ["a\0.toml", "x" * 300 + ".toml", "x" * 300, "", "/dev/zero", "a\0"])
def test_a_name_that_no_file_has_is_refused(name: str) -> None:
    with pytest.raises(BadScenario):
        load(name)
    if name == "/dev/zero":
        with pytest.raises(BadScenario, match="larger than"):
            load(Path(name))


FIELDS: list[tuple[str, dict[str, Any], type[BaseModel]]] = [
    ("", {}, Scenario),
    ("fabric", {}, scenario_model.ScenarioTopology),
    ("members", {"group": GROUP, "ports": [0]}, scenario_model.Members),
    ("traffic", {"group": GROUP, "port": 0}, scenario_model.Traffic),
    *(
        ("faults", {"kind": kind.model_fields["kind"].annotation.__args__[0]}, kind)
        for kind in get_args(get_args(scenario_model.ScenarioFault)[0])
    ),
]


def refused(where: str, fields: dict[str, Any], name: str, value: object) -> bool:
    """Return True if that field is refused with that value."""
    made = {**fields, name: value}
    asked = made if not where else {where: made if where == "fabric" else [made]}
    with pytest.raises(ValidationError) as raised:
        Scenario.model_validate(described(**asked))
    return any(name in error["loc"] for error in raised.value.errors(include_url=False))


@pytest.mark.parametrize(
    ("where", "name", "fields"),
    [
        ("traffic", "every", {"group": GROUP, "port": 0}),
        ("members", "read_every", {"group": GROUP, "ports": [0]}),
    ],
)
def test_what_repeats_has_a_least_interval(where: str, name: str, fields: dict[str, Any]) -> None:
    assert refused(where, fields, name, 0.9e-6)


@pytest.mark.parametrize("value", [1e300, -1e300, 1 << 80, -(1 << 80), "x" * 20_000, {"x": {}}], ids=type)
def test_every_field_is_bounded(value: object) -> None:
    for where, fields, model in FIELDS:
        unbounded = [name for name in model.model_fields if not refused(where, fields, name, value)]
        assert set(unbounded) <= {"kind"}, model


def test_every_list_is_bounded() -> None:
    lists = 0
    for where, fields, model in FIELDS:
        for name, field in model.model_fields.items():
            if "tuple" in str(field.annotation):
                lists += 1
                assert refused(where, fields, name, [1] * 70_000), (model, name)
    assert lists > len(FIELDS) / 2


MANY = [{"group": GROUP, "ports": [*range(500)], "rejoin": True}]
BIG: dict[str, Any] = {"ports": 500, "link_layer": "infiniband"}


@pytest.mark.parametrize(
    "much",
    [
        {"traffic": [{"group": GROUP, "port": 0, "every": 1e-6}]},
        {"traffic": [{"group": GROUP, "port": 0, "every": 0.001, "burst": 10_000}]},
        {"seconds": 1e6, "traffic": [{"group": GROUP, "port": 0}]},
        {"members": [{"group": GROUP, "ports": [0], "read_every": 1e-6}], "traffic": [], "seconds": 100},
        {"fabric": BIG, "members": MANY, "seconds": 1e6, "traffic": []},
        {"fabric": BIG | {"ports": 65_000}, "faults": [{"kind": "restart-sm"}] * 1_000},
        {
            "faults": [{"kind": "duplicate", "copies": 1_000}],
            "traffic": [{"group": GROUP, "port": 0, "every": 0.001}],
        },
    ],
)
def test_a_run_without_end_is_refused(much: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"a run would take some [0-9,]+ steps, but at most 1,000,000 are allowed"
    ):
        scenario(**much)


def test_the_shortest_intervals_get_somewhere() -> None:
    traffic = [{"group": GROUP, "port": 0, "every": 1e-6, "stop": 1e-4}]
    members = [{"group": GROUP, "ports": [0, 1], "read_every": 1e-6}]
    shortest = scenario(seconds=1e-3, members=members, traffic=traffic, fabric={"ports": 2})
    first = run(shortest).members[0]
    assert first.sent + first.held_back == 100


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([GROUP, "drop"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FITTING = st.integers(-1, 5) | st.floats(-1, 3)
FITTING |= st.sampled_from([GROUP, "SET", "LOC_QP_OP_ERR", 0x8001, [1, 2], [0xFFFF]])


@st.composite
def mangled(draw: st.DrawFn) -> dict[str, Any]:
    """A scenario with faults, some of whose fields have values that may or may not be allowed."""
    link_layer = draw(st.sampled_from(["roce", "infiniband"]))
    faults: list[object] = []
    made = described(seconds=1, fabric={"link_layer": link_layer, "ports": 4, "switches": 3}, faults=faults)
    tables = {
        "fabric": made["fabric"],
        "members": made["members"][0],
        "traffic": made["traffic"][0],
        "": made,
    }
    for where, fields, model in draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        if where == "faults":
            table = {**fields}
            faults.append(table)
        else:
            table = tables[where]
        names = st.sampled_from([name for name in model.model_fields if name != "kind"])
        table |= draw(st.dictionaries(names, FITTING | VALUES if where else VALUES, max_size=3))
    return made


@settings(max_examples=200, deadline=None)
@given(mangled())
def test_any_scenario_is_refused_or_simulated(made: dict[str, Any]) -> None:
    """Whatever a scenario says it is refused or played."""
    with suppress(BadScenario):
        simulated = scenario_model._parse("x", json.dumps(made), yaml=True)
        if scenario_model.steps_of(simulated) < 10_000:
            run(simulated)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200) | VALUES.map(str), st.sampled_from(["toml", "yaml"]))
def test_whatever_a_file_holds_it_is_refused_or_read(text: str, syntax: str) -> None:
    with suppress(BadScenario):
        scenario_model._parse("x", text, syntax == "yaml")


def test_every_kind_of_fault_can_begin() -> None:
    assert set(scenario_faults._BEGIN) == set(get_args(get_args(scenario_model.ScenarioFault)[0]))


# --- the command -----------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", "from mcast.cli import main; main()", "sim", *arguments]
    environment = {"COLUMNS": "80", "PATH": "", "NO_COLOR": "1"}
    return subprocess.run(line, capture_output=True, text=True, timeout=500, env=environment)


def test_report_fits_80_columns() -> None:
    """The command fits 80 columns and says who lost what and why."""
    done = command("run", "sm-failover-under-load")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "ib4        1,996  the membership was lost" in done.stdout
    assert "MULTICAST_ERROR ENETRESET" in done.stdout
    assert done.stdout.endswith("sim: 3,596 messages sent, 3,236 of 20,376 expected copies lost\n")


def test_the_command_prints_json() -> None:
    found = json.loads(command("run", "slow-receiver", "--json").stdout)
    assert found == json.loads(json.dumps(run(load("slow-receiver")).as_json()))
    assert found["members"][3]["causes"] == {"no receive is free": found["members"][3]["lost"]}


def test_the_command_lists_what_there_is() -> None:
    listed = command("list").stdout.splitlines()
    assert [line for line in listed if not line.startswith(" ")] == list(ready_made())
    assert max(map(len, listed)) <= 80


def test_bad_input_ends_with_one_sentence_and_status_2(tmp_path: Path) -> None:
    for argument in ("nonsense", str(tmp_path / "none.toml"), str(tmp_path)):
        done = command("run", argument)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1, done.stderr
