"""The reason that is found for a refusal is the SA's reason: the modelled SA is asked as well."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcast.backends.sim.core.sa import DEFAULT_PREFIX, SaPort, SubnetAdmin
from mcast.errors.sa_refusal import PortView, refusal_causes
from mcast.wire.addresses import Gid
from mcast.wire.mad import SEND_ONLY_FULL_MEMBER
from mcast.wire.mcmember import JoinState, McMask, McMemberRecord, SaMethod, SaStatus
from mcast.wire.units import Selector

MGID = Gid("ff12:4001:ffff::f01:101")
CREATOR, ASKER = 1, 2
PKEYS = (0xFFFF, 0x8001, 0x0001)
OPTIONAL = (
    *(McMask.QKEY, McMask.PKEY, McMask.SL, McMask.FLOW_LABEL, McMask.TCLASS, McMask.HOP_LIMIT),
    *(McMask.MTU | McMask.MTU_SELECTOR, McMask.RATE | McMask.RATE_SELECTOR),
)
SOME_RATES = (2, 5, 3, 6, 7)


def record(guid: int, **fields: int) -> McMemberRecord:
    gid = Gid(DEFAULT_PREFIX + guid.to_bytes(8))
    plain = McMemberRecord(mgid=MGID, port_gid=gid, qkey=0x01234567, pkey=0xFFFF, join_state=JoinState.FULL)
    return plain._replace(**fields)  # type: ignore[arg-type]


def subnet(asker: SaPort, creator: SaPort, **group: int) -> SubnetAdmin:
    """An SA that has the group; its creator set the fields."""
    sa = SubnetAdmin()
    sa.add_port(creator)
    sa.add_port(asker)
    mask = McMask.CREATE | McMask.HOP_LIMIT
    reply = sa.handle(CREATOR, SaMethod.SET, mask, record(CREATOR, **group))
    assert reply is not None
    assert reply.status is SaStatus.OK
    return sa


@settings(max_examples=600)
@given(
    wanted=st.sets(st.sampled_from(OPTIONAL)),
    asked=st.fixed_dictionaries(
        {"mtu": st.integers(1, 5), "rate": st.sampled_from(SOME_RATES)},
        optional={
            "qkey": st.sampled_from((0x01234567, 1)),
            "pkey": st.sampled_from(PKEYS),
            "sl": st.sampled_from((0, 3)),
            "flow_label": st.sampled_from((0, 9)),
            "tclass": st.sampled_from((0, 7)),
            "hop_limit": st.sampled_from((0, 64)),
            "mtu_selector": st.sampled_from(Selector),
            "rate_selector": st.sampled_from(Selector),
        },
    ),
    group=st.fixed_dictionaries(
        {}, optional={"qkey": st.just(1), "sl": st.just(3), "pkey": st.sampled_from(PKEYS)}
    ),
    pkeys=st.sets(st.sampled_from(PKEYS), min_size=1),
    mtus=st.tuples(st.integers(2, 5), st.integers(2, 5)),
    rates=st.tuples(st.sampled_from(SOME_RATES), st.sampled_from(SOME_RATES)),
)
def test_a_cause_is_found_exactly_where_the_sa_refuses(
    wanted: set[McMask],
    asked: dict[str, int],
    group: dict[str, int],
    pkeys: set[int],
    mtus: tuple[int, int],
    rates: tuple[int, int],
) -> None:
    asker = SaPort(ASKER, pkeys=tuple(sorted(pkeys)), mtu=mtus[0], rate=rates[0])
    sa = subnet(asker, SaPort(CREATOR, pkeys=PKEYS, mtu=mtus[1], rate=rates[1]), **group)
    mask = int(McMask.JOIN)
    for bits in wanted:
        mask |= int(bits)
    request = record(ASKER, **asked)
    look_up = sa.handle(ASKER, SaMethod.GET, McMask.MGID, McMemberRecord(mgid=MGID))
    assert look_up is not None
    seen = look_up.records[0] if look_up.records else None
    found = refusal_causes(mask, request, seen, PortView(asker.pkeys, asker.mtu, asker.rate))
    reply = sa.handle(ASKER, SaMethod.SET, mask, request)
    assert reply is not None
    refused = reply.status is not SaStatus.OK
    if seen is not None:
        assert bool(found) == refused
    else:  # the group is of a partition that the port is not in, and so is not shown to it
        assert refused


@pytest.mark.parametrize("selector", Selector)
@pytest.mark.parametrize(
    ("field", "pair", "values"), [("mtu", OPTIONAL[6], (3, 4, 5)), ("rate", OPTIONAL[7], (2, 5, 3))]
)
@pytest.mark.parametrize("at", range(3))
def test_a_selector_is_read_as_the_sa_reads_it(
    selector: Selector, field: str, pair: McMask, values: tuple[int, ...], at: int
) -> None:
    """The group has the middle one of three values, by size; the request asks for each."""
    fast, plain = SaPort(ASKER, mtu=5, rate=7), SaPort(CREATOR, mtu=4, rate=5)
    sa = subnet(fast, plain)
    request = record(ASKER, **{field: values[at], f"{field}_selector": selector})
    mask = int(McMask.JOIN | pair)
    look_up = sa.handle(ASKER, SaMethod.GET, McMask.MGID, McMemberRecord(mgid=MGID))
    reply = sa.handle(ASKER, SaMethod.SET, mask, request)
    assert look_up is not None
    assert reply is not None
    found = refusal_causes(mask, request, look_up.records[0], PortView(fast.pkeys, fast.mtu, fast.rate))
    assert bool(found) == (reply.status is not SaStatus.OK)


def whys(mask: McMask, asked: McMemberRecord, group: McMemberRecord | None, **port: int) -> list[str]:
    view = PortView((0xFFFF,), port.get("mtu", 0), port.get("rate", 0))
    return [cause.why for cause in refusal_causes(int(mask), asked, group, view, port.get("capabilities"))]


@pytest.mark.parametrize(
    ("mask", "asked", "group", "why"),
    [
        (McMask.QKEY, {"qkey": 1}, {"qkey": 0x12345678}, "Q_Key is 0x1, the group's is 0x12345678"),
        (McMask.PKEY, {"pkey": 0x7FFF}, {"pkey": 0x7FFF}, "P_Key is 0x7fff, the group's is 0x7fff"),
        (McMask.SL, {"sl": 1}, {}, "SL is 1, the group's is 0"),
        (McMask.FLOW_LABEL, {}, {"flow_label": 0xABC}, "flow label is 0x0, the group's is 0xabc"),
        (McMask.TCLASS, {"tclass": 4}, {}, "traffic class is 4, the group's is 0"),
        (McMask.HOP_LIMIT, {"hop_limit": 64}, {}, "hop limit is 64, the group's is 0"),
        (
            McMask.MTU | McMask.MTU_SELECTOR,
            {"mtu": 4, "mtu_selector": Selector.GREATER},
            {"mtu": 4},
            "MTU is more than 2048 bytes, the group's is 2048 bytes",
        ),
        (
            McMask.RATE | McMask.RATE_SELECTOR,
            {"rate": 2, "rate_selector": Selector.LESS},
            {"rate": 3},
            "rate is less than 2.5 Gbit/s, the group's is 10 Gbit/s",
        ),
        (
            McMask.RATE | McMask.RATE_SELECTOR,
            {"rate": 60, "rate_selector": Selector.EXACTLY},
            {"rate": 3},
            "rate is code 60, the group's is 10 Gbit/s",
        ),
        (
            McMask.MTU | McMask.MTU_SELECTOR,
            {"mtu": 9, "mtu_selector": Selector.EXACTLY},
            {"mtu": 1},
            "MTU is code 9, the group's is 256 bytes",
        ),
    ],
)
def test_the_differing_field_is_named_with_both_values(
    mask: McMask, asked: dict[str, int], group: dict[str, int], why: str
) -> None:
    assert whys(mask, record(ASKER, **asked), record(CREATOR, **group)) == [why]
    assert whys(McMask(0), record(ASKER, **asked), record(CREATOR, **group)) == []


def test_slow_port_is_named() -> None:
    """A port that is too slow for the group is named."""
    group = record(CREATOR, mtu=5, rate=16)
    assert whys(McMask(0), record(ASKER), group, mtu=4, rate=7) == [
        "the port's MTU is 2048 bytes, the group's 4096 bytes",
        "the port's rate is 40 Gbit/s, the group's 100 Gbit/s",
    ]
    assert whys(McMask(0), record(ASKER), group, mtu=5, rate=16) == []
    assert whys(McMask(0), record(ASKER), group) == []


def test_missing_partition_of_a_hidden_group_is_named() -> None:
    """A partition that the port lacks is named though the group is hidden."""
    (why,) = whys(McMask.PKEY, record(ASKER, pkey=0x8001), None)
    assert why == "P_Key is 0x8001, the port's table has 0xffff"
    assert whys(McMask.PKEY, record(ASKER, pkey=0x7FFF), None) == []


def test_send_only_support_matters_to_send_only_joins() -> None:
    """Send only support is looked at for send only members alone."""
    send_only = record(ASKER, join_state=JoinState.SEND_ONLY_FULL)
    assert len(whys(McMask(0), send_only, None, capabilities=0)) == 1
    assert whys(McMask(0), send_only, None, capabilities=SEND_ONLY_FULL_MEMBER) == []
    assert whys(McMask(0), send_only, None) == []
    assert whys(McMask(0), record(ASKER), None, capabilities=0) == []
