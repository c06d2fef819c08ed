"""`mcast mgid`: what it says of groups, MGIDs and MAC addresses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..commands import Run

BAD_INPUT = {
    "unicast": (("10.0.0.1",), "10.0.0.1 is a unicast address: groups are 224.0.0.0/4"),
    "unicast GID": (("::ffff:10.0.0.1",), "::ffff:10.0.0.1 is a unicast address"),
    "no address": (("hello",), "'hello' is not an address: give an IPv4 or IPv6 group, an MGID"),
    "interface": (("ff02::1%eth0",), "leave out '%eth0'"),
    "MAC of a port": (("02:11:22:33:44:55",), "not a multicast MAC address: those begin with 33:33"),
    "MAC outside IPv4": (("01:00:5e:80:00:01",), "01:00:5e and a byte below 80"),
    "invalid partition": (("239.1.1.1", "--pkey", "8000"), "'8000' is not a P_Key: give a hexadecimal"),
    "partition too large": (("239.1.1.1", "--pkey", "10001"), "'10001' is not a P_Key"),
    "no scope": (("239.1.1.1", "--scope", "wide"), "'wide' is not a scope: give one hexadecimal digit"),
    "scope too large": (("239.1.1.1", "--scope", "10"), "'10' is not a scope"),
    "nothing": ((), "Missing argument 'ADDRESS'"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(here: Run, case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = here("mgid", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("mcast mgid: ")
    assert says in done.stderr


def explained(here: Run, *arguments: str) -> dict[str, Any]:
    """The explanation of the one address, its sections by their titles."""
    done = here("mgid", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    (found,) = json.loads(done.stdout)["addresses"]
    return {**found, **{section["title"]: section for section in found["sections"]}}


def test_an_ipv4_group_on_every_link_layer(here: Run) -> None:
    found = explained(here, "239.1.1.1")
    cm, ipoib = found["InfiniBand, rdma_cm (PS_UDP)"], found["InfiniBand, IPoIB and rdma_cm (PS_IPOIB)"]
    assert cm["mgid"] == "ff12:4001:ffff::f01:101"
    assert ipoib["mgid"] == "ff12:401b:ffff::f01:101"
    assert (cm["flags"], cm["scope"], cm["signature"], cm["pkey"], cm["qkey"]) == (
        1,
        2,
        0x4001,
        0xFFFF,
        0x01234567,
    )
    assert ipoib["qkey"] is None
    assert found["RoCEv2"]["mgid"] == "::ffff:239.1.1.1"
    assert found["RoCEv2"]["mac"] == "01:00:5e:01:01:01"
    assert found["RoCEv1"] == {
        "title": "RoCEv1",
        "mgid": "ff0e::ffff:ef01:101",
        "mac": "33:33:ef:01:01:01",
    }
    shared = {each["where"]: each for each in found["shared"]}
    assert (shared["InfiniBand MGID"]["others"], shared["RoCEv1 MAC"]["others"]) == (0, 0)
    assert len(shared["RoCEv2 MAC"]["groups"]) == shared["RoCEv2 MAC"]["others"] == 31
    assert "224.129.1.1" in shared["RoCEv2 MAC"]["groups"]


def test_partition_and_scope_stand_in_the_mgid(here: Run) -> None:
    found = explained(here, "239.1.1.1", "--pkey", "0x0001", "--scope", "site")
    assert found["InfiniBand, rdma_cm (PS_UDP)"]["mgid"] == "ff15:4001:8001::f01:101"


def test_ipv6_group_on_each_link_layer(here: Run) -> None:
    """An IPv6 group is refused by RoCEv2 and folded by InfiniBand."""
    found = explained(here, "ff0e::1:2")
    assert found["InfiniBand, rdma_cm (PS_UDP)"]["mgid"] == "ff12:6001:ffff::1:2"
    assert found["RoCEv2"]["mgid"] is None
    assert "errno 524" in found["RoCEv2"]["refused"]
    folded = next(each for each in found["shared"] if each["where"] == "InfiniBand MGID")
    assert folded["others"] == 2**40 - 1
    assert "ff02::1:2" in folded["groups"]


@pytest.mark.parametrize(
    ("mgid", "stands_for"),
    [
        ("ff12:4001:ffff::f01:101", "the IPv4 group 239.1.1.1"),
        ("ff15:401b:8001::f01:101", "the IPv4 group 239.1.1.1"),
        ("ff12:401b:ffff::ffff:ffff", "255.255.255.255: the broadcast group of IPoIB"),
        ("ff12:601b:ffff::1:2", "each of 2^40 IPv6 groups, such as ff0e::1:2"),
        ("ff12:a01b:fe80::1", "the MGID itself, which the SA chose"),
        ("ff12:401b:ffff:1::1", "no group: an IPv4 group leaves bytes 6 to 11 zero"),
    ],
)
def test_an_mgid_of_infiniband_says_what_it_stands_for(here: Run, mgid: str, stands_for: str) -> None:
    found = explained(here, mgid)
    assert found["InfiniBand"]["mgid"] == mgid
    assert found["InfiniBand"]["stands_for"] == stands_for
    assert found["RoCE"]["mgid"] is None


def test_ipv6_group_like_a_signature(here: Run) -> None:
    """An IPv6 group that looks like a signature is an IPv6 group."""
    assert explained(here, "ff0e:4001::1")["kind"] == "IPv6 group"


def test_mgid_typed_as_ipv6_becomes_another(here: Run) -> None:
    """An MGID typed as an IPv6 group would become another."""
    assert (
        explained(here, "ff12:4001:ffff::f01:101")["InfiniBand"]["as_ipv6_group"] == "ff12:6001:ffff::f01:101"
    )
    assert "as_ipv6_group" not in explained(here, "ff12:a01b:fe80::1")["InfiniBand"]


@pytest.mark.parametrize(
    ("mgid", "version"), [("::ffff:239.1.1.1", "RoCEv2"), ("ff0e::ffff:ef01:101", "RoCEv1")]
)
def test_an_mgid_of_roce_is_explained_by_its_group(here: Run, mgid: str, version: str) -> None:
    found = explained(here, mgid)
    assert found["kind"] == f"MGID of {version} for the IPv4 group 239.1.1.1"
    assert found[version]["mgid"] == mgid


def test_a_mac_address_lists_its_groups(here: Run) -> None:
    assert len(explained(here, "01-00-5E-01-01-01")["RoCEv2"]["stands_for"]) == 32
    assert "IPv4 group 239.1.1.1" in explained(here, "33:33:ef:01:01:01")["kind"]


def test_collisions_of_several_addresses_are_named(here: Run) -> None:
    given = ("239.1.1.1", "224.129.1.1", "ff02::1:2", "ff0e::1:2", "238.0.0.1")
    found = json.loads(here("mgid", "--json", *given).stdout)["collisions"]
    assert found == [
        {"same": "RoCEv2 MAC", "name": "01:00:5e:01:01:01", "addresses": ["239.1.1.1", "224.129.1.1"]},
        {
            "same": "InfiniBand MGID",
            "name": "ff12:6001:ffff::1:2",
            "addresses": ["ff02::1:2", "ff0e::1:2"],
        },
        {
            "same": "InfiniBand MGID",
            "name": "ff12:601b:ffff::1:2",
            "addresses": ["ff02::1:2", "ff0e::1:2"],
        },
        {"same": "RoCEv1 MAC", "name": "33:33:00:01:00:02", "addresses": ["ff02::1:2", "ff0e::1:2"]},
    ]
    assert "collisions of these: none" in here("mgid", "239.1.1.1", "239.1.1.2").stdout


def test_the_text_fits_80_columns_and_says_the_same(here: Run) -> None:
    text = here("mgid", "239.1.1.1", "ff0e::1:2", "ff12:401b:ffff::ffff:ffff", "33:33:ef:01:01:01").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    for line in (
        "  MGID        ff12:4001:ffff::f01:101",
        "  scope       2 (link-local)",
        "  P_Key       0xffff (the default partition)",
        "  Q_Key       0x01234567",
        "  MAC         01:00:5e:01:01:01",
        "              the kernel refuses IPv6 groups (errno 524): use an IPv4 group",
    ):
        assert line in text.splitlines()
