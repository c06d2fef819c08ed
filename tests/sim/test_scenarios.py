"""Scenarios: what the ready-made ones show, how files are read, what the command prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcast.backends.sim import scenario_faults, scenario_model
from mcast.backends.sim.scenario import (
    BadScenario,
    MemberResult,
    Scenario,
    ScenarioResult,
    load,
    ready_made,
    run,
)

GROUP = "239.1.1.1"


def played(name: str) -> tuple[ScenarioResult, dict[str, MemberResult]]:
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
    """Facts: SA, SM restart: -ENETRESET for all; who rejoins goes on, who does not hears no more."""
    result, members = played("sm-failover-under-load")
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
    """Facts: SA, PORT_ERR: three times -ENETRESET, four joins, and nobody else is touched."""
    result, members = played("flapping-port")
    assert members["ib2"].joins == 4
    assert [seen.at for seen in result.seen if seen.errno == "ENETRESET"] == [2.0, 3.0, 5.0]
    assert 150 < members["ib2"].lost < 190  # down for 1.52 s at 100 messages/s, and up to 0.1 s to join again
    assert members["ib1"].lost == members["ib0"].lost == 0


def test_late_join() -> None:
    """Facts: users, 3: the first messages after a join are lost while the switches are not programmed."""
    _, members = played("late-join")
    for late in (members["ib2"], members["ib3"]):
        assert late.causes["the fabric does not deliver the group to the port"] == 40  # 0.2 s, one each 5 ms
        assert late.lost == 41
    assert members["ib1"].lost == 0


def test_slow_receiver() -> None:
    """Facts: users, 15: the receive queue runs dry in silence; sender and others see nothing of it."""
    result, members = played("slow-receiver")
    slow = members["roce3"]
    assert slow.causes == {"no receive is free": slow.counters.dropped_no_receive}
    assert slow.lost > 500
    assert slow.counters.recv_low_water == 0
    assert all(member.lost == 0 for device, member in members.items() if device != "roce3")
    assert {seen.what for seen in result.seen} == {"MULTICAST_JOIN"}


def test_lossy_link() -> None:
    _, members = played("lossy-link")
    lossy = members["roce3"]
    assert lossy.causes == {"a fault rule dropped it": lossy.lost}
    assert 15 < lossy.lost < 50  # 2 % of 1 500
    assert min(lossy.duplicates, lossy.out_of_order) > 5
    assert lossy.received + lossy.lost == lossy.expected == 2250
    assert all(member.lost == 0 for device, member in members.items() if device != "roce3")


def test_the_same_scenario_gives_the_same_result_and_trace() -> None:
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
        ({"kind": "cut", "switch": 1, "at": 0.995, "until": 1.2}, {}),
        ({"kind": "link-down", "port": 2, "at": 0.995, "until": 1.2}, {"the join was refused": 29}),
        ({"kind": "lid-change", "port": 2, "at": 1.0}, {}),
        ({"kind": "pkey-change", "port": 2, "at": 0.995}, {"the join was refused": 49}),
        ({"kind": "starve", "port": 2, "at": 0.995, "until": 1.2}, {"no receive is free": 20}),
        ({"kind": "cq-overrun", "port": 2, "at": 0.995}, {}),
        ({"kind": "qp-error", "port": 2, "at": 0.995, "status": "LOC_PROT_ERR"}, {}),
        ({"kind": "device-removal", "port": 2, "at": 0.995}, {"the device is gone": 50}),
        ({"kind": "bond-failover", "port": 2, "at": 0.995}, {}),
        ({"kind": "sm-restart", "at": 0.995}, {}),
        (
            {"kind": "late-switches", "seconds": 0.7},
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


def test_faults_show_in_the_counters_and_in_what_is_seen() -> None:
    assert faulty(kind="duplicate", copies=2)[1].duplicates == 200
    assert faulty(kind="corrupt-qkey", target=2)[1].counters.dropped_qkey == 100
    for kind, status in (("cq-overrun", "WR_FLUSH_ERR"), ("qp-error", "LOC_QP_OP_ERR")):
        seen = faulty(kind=kind, port=2, at=1.0)[0].seen[-1]
        assert (seen.device, seen.what, seen.errno, seen.detail) == ("ib2", "QP in ERR, reset", "EIO", status)
    for kind in ("bond-failover", "device-removal"):
        assert faulty(kind=kind, port=2, at=1.0)[0].seen[-1].what in ("ADDR_CHANGE", "DEVICE_REMOVAL")


def test_without_a_querier_a_long_run_falls_silent() -> None:
    """RFC 3376, 8.4: 260 s."""
    long = {"seconds": 400, "traffic": [{"group": GROUP, "port": 0, "every": 1}]}
    result = run(scenario(fabric={"ports": 4}, faults=[{"kind": "no-querier"}], **long))
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


def test_yaml_without_pyyaml_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yml").write_text("name: x")
    with pytest.raises(BadScenario, match=r"YAML needs PyYAML: pip install 'mcast\[yaml\]', or write TOML"):
        load(tmp_path / "a.yml")


def test_a_ready_made_name_is_a_scenario_and_a_wrong_one_names_them() -> None:
    with pytest.raises(
        BadScenario, match=r"sm-failover is no file and no ready-made scenario: there are .*lossy"
    ):
        load("sm-failover")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seconds": 0}, "seconds: Input should be greater than 0"),
        ({"members": []}, "members: Tuple should have at least 1 item"),
        ({"speed": 3}, "speed: Extra inputs are not permitted"),
        ({"members": [{"group": "10.0.0.1", "ports": [0]}]}, "10.0.0.1"),
        ({"members": [{"group": GROUP, "ports": [0, 9]}]}, "port 9: this fabric has ports 0..3"),
        ({"members": [{"group": GROUP, "ports": [0, 0]}]}, "port 0 is a member of 239.1.1.1 twice"),
        ({"traffic": [{"group": GROUP, "port": 3}]}, "port 3 sends to 239.1.1.1 but is no member of it"),
        (
            {"traffic": [{"group": GROUP, "port": 0, "size": 2000}]},
            "size 2000 is larger than the MTU, 1024 bytes",
        ),
        ({"faults": [{"kind": "gremlins"}]}, "faults.0: Input tag 'gremlins' found using 'kind'"),
        ({"faults": [{"kind": "link-down", "port": 7}]}, "port 7: this fabric has ports 0..3"),
        ({"faults": [{"kind": "drop", "at": 2, "until": 1}]}, "until = 1 is not after at = 2"),
        ({"faults": [{"kind": "drop", "rate": 2}]}, "rate: Input should be less than or equal to 1"),
        ({"faults": [{"kind": "cut", "switch": 3}]}, "switch 3: the leaves are 1..2"),
        ({"faults": [{"kind": "no-querier"}]}, "'no-querier' needs IGMP: the fabric must be \"roce\""),
        ({"faults": [{"kind": "sa-refuses", "status": "NO"}]}, "'NO' is none of OK, UNSUP_METHOD_ATTR,"),
        ({"fabric": {}, "faults": [{"kind": "sm-restart"}]}, "'sm-restart' needs an SM: the fabric must be"),
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
        ("a.yaml", b"just words", "should be a valid dictionary"),
    ],
)
def test_a_file_that_is_no_scenario(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadScenario, match=says):
        load(tmp_path / name)


def test_every_kind_of_fault_can_begin() -> None:
    from typing import get_args

    assert set(scenario_faults._BEGIN) == set(get_args(get_args(scenario_model.Fault)[0]))


# --- the command -----------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", "from mcast.cli import main; main()", "sim", *arguments]
    environment = {"COLUMNS": "80", "PATH": "", "NO_COLOR": "1"}
    return subprocess.run(line, capture_output=True, text=True, timeout=500, env=environment)


def test_the_command_fits_80_columns_and_says_who_lost_what_and_why() -> None:
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
