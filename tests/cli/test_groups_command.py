"""`mcast groups`, on a fabric of somebody else where three ports are members."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from ..commands import Run

SOURCE = """
from mcast.api import JoinAttrEx
from mcast.backends.sim import {kind} as BASE, Fabric, open_fabric

def open_with_members(**options):
    fabric = Fabric.{make}(ports=3)
    backend = open_fabric(fabric)
    channel = backend.event_channel()
    for number, join in enumerate(({joins}), 1):
        cm_id = channel.create_id()
        cm_id.bind_addr(f"10.0.0.{{number}}")
        cm_id.join_multicast_ex(join("239.1.1.1"))
        channel.get_event(5).check()
    {then}
    return backend

PROVIDER = BASE._replace(name="acme", open=open_with_members)
"""
FULL, SEND_ONLY = "JoinAttrEx.full_member", "JoinAttrEx.send_only"
Installed = Callable[..., dict[str, str]]


def source(kind: str = "ROCE", joins: str = f"{FULL}, {FULL}, {SEND_ONLY}", then: str = "") -> str:
    make = {"ROCE": "roce", "INFINIBAND": "infiniband"}[kind]
    return SOURCE.format(kind=kind, make=make, joins=joins, then=then)


def test_members_and_what_is_not_seen_are_listed(here: Run, third_party: Installed) -> None:
    done = here("groups", "--backend", "acme", env=third_party(source=source()))
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "group      member   seen in",
        "239.1.1.1  roce0/1  the host's own list, the switch's snooping table",
        "           roce1/1  the host's own list, the switch's snooping table",
        "",
        "not seen",
        "  send-only members: they send no IGMP report, so no table has them",
    ]


def test_member_unknown_to_the_switch_is_marked(here: Run, third_party: Installed) -> None:
    """A member that the switch does not know is pointed out."""
    then = "next(iter(fabric.core.igmp.snooping.values())).pop(0)"
    done = here("groups", "--backend", "acme", env=third_party(source=source(then=then)))
    first, second = done.stdout.splitlines()[1:3]
    assert first.rstrip() == "239.1.1.1  roce0/1  the host's own list"
    assert second.strip() == "not in the switch's table: receives nothing"


def test_json_has_it_all(here: Run, third_party: Installed) -> None:
    env = third_party(source=source("INFINIBAND"))
    found = json.loads(here("groups", "239.1.1.1", "--backend", "acme", "--json", env=env).stdout)
    (group,) = found["groups"]
    assert (group["group"], group["mgid"]) == ("239.1.1.1", "ff12:4001:ffff::f01:101")
    assert group["mlid"] >= 0xC000
    assert group["members"] == [
        {"port": f"ib{number}/1", "seen_in": ["host", "sa"], "send_only": number == 2} for number in range(3)
    ]
    assert found["unseen"] == []


def test_infiniband_shows_mlids_and_ipoib_groups(here: Run, third_party: Installed) -> None:
    """On InfiniBand there are MLIDs and groups of IPoIB."""
    text = here("groups", "--backend", "acme", env=third_party(source=source("INFINIBAND"))).stdout
    assert text.splitlines()[0].split() == ["group", "MLID", "member", "seen", "in"]
    assert "ff12:401b:ffff::ffff:ffff  0xc000" in text
    assert "send-only" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_group_that_nobody_is_in_is_status_1(here: Run, third_party: Installed) -> None:
    env = third_party(source=source())
    done = here("groups", "239.1.1.1", "239.9.9.9", "--backend", "acme", env=env)
    assert (done.returncode, done.stderr) == (1, "mcast: no member is visible in 239.9.9.9\n")
    assert "239.1.1.1" in done.stdout


def test_no_group_at_all_is_said(here: Run, third_party: Installed) -> None:
    done = here("groups", "--backend", "acme", env=third_party(source=source(joins="")))
    assert done.stdout.startswith("no group is visible from this host\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--backend", "sim"),
            "'sim' is a fabric inside this process, on which no other program can be a member",
        ),
        (("10.0.0.1",), "10.0.0.1 is a unicast address"),
        (("--backend", "nope"), "'nope' is not a backend"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(here: Run, arguments: tuple[str, ...], says: str) -> None:
    done = here("groups", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
