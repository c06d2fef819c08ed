"""Codes of MTU and rate, their order, and what a selector takes."""

from __future__ import annotations

import pytest

from mcast.wire.units import MTU, PACKET_LIFE, RATE, Selector, is_selected

OLD_RATES = {2: 2.5, 5: 5, 3: 10, 6: 20, 4: 30, 7: 40, 8: 60, 9: 80, 10: 120}
"""SDR to QDR: 10 bits on the wire carry 8."""


def test_the_codes_are_those_of_the_headers() -> None:
    """ib_mtu and ib_rate in include/rdma/ib_verbs.h of Linux."""
    assert [MTU.code[size] for size in (256, 512, 1024, 2048, 4096)] == [1, 2, 3, 4, 5]
    speeds = {25: 15, 50: 20, 100: 16, 200: 17, 400: 21, 800: 23}
    assert {gbps: RATE.code[gbps] for gbps in speeds} == speeds
    assert {gbps: RATE.code[gbps] for gbps in OLD_RATES.values()} == {r: c for c, r in OLD_RATES.items()}
    assert set(RATE.value) == set(range(2, 25))


def test_rates_are_in_order_of_data_rate() -> None:
    """Rates are in the order of what is left for data."""
    left = {c: gbps * 8 / 10 if c in OLD_RATES else gbps * 64 / 66 for c, gbps in RATE.value.items()}
    assert list(left.values()) == sorted(left.values())
    assert sorted(RATE.value, key=RATE.rank.__getitem__) == list(RATE.value)
    assert {RATE.rank[code] for code in range(64) if code not in RATE.value} == {0}


def test_codes_that_ascend_are_their_own_rank() -> None:
    assert MTU.rank == PACKET_LIFE.rank == tuple(range(64))
    assert PACKET_LIFE.value[18] == pytest.approx(1.07e6, rel=0.01)  # OpenSM's, about a second


def test_links_have_the_code_of_their_rate() -> None:
    """Links have the code of the rate they are named after."""
    speeds = {2.5: 2, 10: 3, 40: 7, 56.25: 12, 103.125: 16, 212.5: 17, 425.0: 21, 850.0: 23}
    assert {gbps: RATE.nearest(gbps) for gbps in speeds} == speeds


def test_a_code_is_said_with_its_unit() -> None:
    assert (MTU.describe(4), RATE.describe(2), RATE.describe(60)) == ("2048 bytes", "2.5 Gbit/s", "code 60")


@pytest.mark.parametrize(
    ("selector", "takes"),
    [
        (Selector.GREATER, {6, 7}),
        (Selector.LESS, {3, 4}),
        (Selector.EXACTLY, {5}),
        (Selector.LARGEST, {3, 4, 5, 6, 7}),
    ],
)
def test_what_a_selector_takes_for_five(selector: Selector, takes: set[int]) -> None:
    assert {has for has in range(3, 8) if is_selected(selector, has, 5)} == takes
