"""The SA against every row of docs/facts/sa.md that was seen on OpenSM, and against its own invariants."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcast.backends.sim.core.sa import (
    DEFAULT_PREFIX,
    IPOIB_QKEY,
    Notice,
    Quirks,
    SaPort,
    SaReply,
    SubnetAdmin,
    WellKnownGroup,
)
from mcast.wire.addresses import ZERO_GID
from mcast.wire.mapping import ipoib_broadcast_mgid
from mcast.wire.mcmember import MLID_FIRST, JoinState, McMask, McMemberRecord, SaMethod, SaStatus
from mcast.wire.units import RATE, Selector

OK, REQ_INVALID, INSUF_COMPS = SaStatus.OK, SaStatus.REQ_INVALID, SaStatus.INSUF_COMPS
SPEC, OPENSM = Quirks(), Quirks.OPENSM_3_3
BOTH = pytest.mark.parametrize("quirks", [SPEC, OPENSM], ids=["spec", "opensm"])
GT, LT, EQ, LARGEST = Selector
A, B, C = 0xA1, 0xB1, 0xC1
MGID = bytes.fromhex("ff12 4001 ffff 0000 0000 0000 0000 0001")
OTHER = bytes.fromhex("ff12 4001 ffff 0000 0000 0000 0000 0002")
JOIN, CREATE = McMask.JOIN, McMask.CREATE
ALL_BITS = McMask((1 << 18) - 1)
MTU_BOTH, RATE_BOTH = McMask.MTU | McMask.MTU_SELECTOR, McMask.RATE | McMask.RATE_SELECTOR


def gid(guid: int, prefix: bytes = DEFAULT_PREFIX) -> bytes:
    return prefix + guid.to_bytes(8)


def record(guid: int = A, mgid: bytes = MGID, state: int = 1, **fields: Any) -> McMemberRecord:
    given = {"qkey": 0x1234567, "pkey": 0xFFFF, **fields}
    return McMemberRecord(mgid=mgid, port_gid=gid(guid), join_state=state, **given)


class Sa(SubnetAdmin):
    """The SA with ports A, B, C in the default partition, and requests in short."""

    def __init__(self, quirks: Quirks = SPEC, **options: Any) -> None:
        super().__init__(quirks=quirks, **options)
        for guid in (A, B, C):
            self.add_port(SaPort(guid))

    def ask(self, method: int, rec: McMemberRecord, mask: int, by: int, sm_key: int = 0) -> SaReply:
        reply = self.handle(by, method, mask, rec, sm_key)
        assert reply is not None
        return reply

    def create(self, guid: int = A, mask: int = CREATE, by: int | None = None, **fields: Any) -> SaReply:
        return self.ask(SaMethod.SET, record(guid, **fields), mask, guid if by is None else by)

    def join(
        self, guid: int, state: int = 1, mask: int = JOIN, by: int | None = None, **fields: Any
    ) -> SaReply:
        rec = record(guid, state=state, **fields)
        return self.ask(SaMethod.SET, rec, mask, guid if by is None else by)

    def leave(
        self, guid: int, state: int = 1, mask: int = JOIN, by: int | None = None, **fields: Any
    ) -> SaReply:
        rec = record(guid, state=state, **fields)
        return self.ask(SaMethod.DELETE, rec, mask, guid if by is None else by)

    def table(self, by: int = A, mask: int = 0, sm_key: int = 1, **fields: Any) -> tuple[McMemberRecord, ...]:
        return self.ask(SaMethod.GET_TABLE, McMemberRecord(**fields), mask, by, sm_key).records

    def states(self, mgid: bytes = MGID) -> dict[int, int] | None:
        group = self.group(mgid)
        return None if group is None else {m.guid: int(m.join_state) for m in group.members}


def status_and_state(reply: SaReply) -> tuple[SaStatus, int]:
    return reply.status, int(reply.records[0].join_state)


# -- the wire


def test_mask_bits_are_in_the_order_of_the_record() -> None:
    bits = [bit for bit in McMask if int(bit).bit_count() == 1]
    assert [str(bit.name).lower() for bit in bits] == list(McMemberRecord._fields)
    assert [int(bit) for bit in bits] == [1 << at for at in range(18)]


def test_the_record_on_the_wire() -> None:
    rec = McMemberRecord(
        MGID, gid(A), 0x11223344, 0xC0FE, 2, 4, 0x55, 0xFFFF, 1, 3, 2, 18, 9, 0xABCDE, 64, 0xE, 5, True
    )
    assert rec.pack().hex(" ", 4) == (
        "ff124001 ffff0000 00000000 00000001 fe800000 00000000 00000000 000000a1 "
        "11223344 c0fe8455 ffff4392 9abcde40 e5800000"
    )


UINT = st.integers
RECORDS = st.builds(
    McMemberRecord,
    *(st.binary(min_size=16, max_size=16),) * 2,
    UINT(0, 2**32 - 1),
    UINT(0, 2**16 - 1),
    UINT(0, 3),
    UINT(0, 63),
    UINT(0, 255),
    UINT(0, 2**16 - 1),
    UINT(0, 3),
    UINT(0, 63),
    UINT(0, 3),
    UINT(0, 63),
    UINT(0, 15),
    UINT(0, 2**20 - 1),
    UINT(0, 255),
    UINT(0, 15),
    UINT(0, 15),
    st.booleans(),
)


@given(RECORDS)
def test_pack_and_unpack_are_inverse(rec: McMemberRecord) -> None:
    assert len(rec.pack()) == 52
    assert McMemberRecord.unpack(rec.pack()) == rec


@given(st.binary(min_size=52, max_size=52))
def test_any_52_bytes_come_back_but_for_reserved_bits(wire: bytes) -> None:
    again = McMemberRecord.unpack(wire).pack()
    assert again == wire[:49] + bytes((wire[49] & 0x80, 0, 0))


@pytest.mark.parametrize("field", [{"flow_label": 1 << 20}, {"mtu": 64}, {"qkey": -1}, {"mgid": b"short"}])
def test_a_field_that_does_not_fit_is_named(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        McMemberRecord(**field).pack()


def test_a_record_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="52 bytes, not 51"):
        McMemberRecord.unpack(bytes(51))


# -- masks


@BOTH
@pytest.mark.parametrize("missing", [McMask.MGID, McMask.PORT_GID, McMask.JOIN_STATE])
@pytest.mark.parametrize("method", [SaMethod.SET, SaMethod.DELETE])
def test_set_and_delete_need_the_join_mask(quirks: Quirks, method: SaMethod, missing: McMask) -> None:
    sa = Sa(quirks)
    sa.create()
    assert sa.ask(method, record(), ALL_BITS & ~missing, A).status == INSUF_COMPS


@BOTH
@pytest.mark.parametrize("missing", [McMask.QKEY, McMask.PKEY, McMask.SL, McMask.FLOW_LABEL, McMask.TCLASS])
def test_create_needs_the_create_mask(quirks: Quirks, missing: McMask) -> None:
    assert Sa(quirks).create(mask=CREATE & ~missing).status == INSUF_COMPS


@BOTH
def test_a_join_mask_alone_does_not_create(quirks: Quirks) -> None:
    assert Sa(quirks).join(A).status == INSUF_COMPS


@BOTH
def test_create_with_exactly_the_create_mask(quirks: Quirks) -> None:
    """The port gives MTU and rate; lifetime and hop limit are 0, selectors EXACTLY."""
    sa = Sa(quirks, well_known=())
    sa.add_port(SaPort(A, mtu=3, rate=6))
    reply = sa.create(sl=3, flow_label=0x12345, tclass=7, scope=2)
    assert reply.records == (
        McMemberRecord(
            MGID, gid(A), 0x1234567, 0xC000, EQ, 3, 7, 0xFFFF, EQ, 6, EQ, 0, 3, 0x12345, 0, 2, 1, False
        ),
    )


@BOTH
def test_join_returns_the_groups_values(quirks: Quirks) -> None:
    sa = Sa(quirks)
    made = sa.create(sl=3, flow_label=5, tclass=7, scope=2).records[0]
    assert sa.join(B, 2, qkey=99, mlid=1, sl=0).records == (
        made._replace(port_gid=gid(B), join_state=JoinState.NON),
    )


# -- join states


@BOTH
@pytest.mark.parametrize("state", range(16))
def test_create_needs_a_full_bit(quirks: Quirks, state: int) -> None:
    sa = Sa(quirks)
    reply = sa.create(state=state)
    if state & 9:
        assert status_and_state(reply) == (OK, state)
        assert sa.states() == {A: state}
    else:
        assert reply.status == REQ_INVALID
        assert sa.group(MGID) is None


@BOTH
@pytest.mark.parametrize("state", range(16))
def test_join_takes_any_state_but_0(quirks: Quirks, state: int) -> None:
    sa = Sa(quirks)
    sa.create()
    reply = sa.join(B, state)
    assert status_and_state(reply) == (OK, state) if state else reply.status == REQ_INVALID


@BOTH
def test_rejoin_is_idempotent_and_other_bits_add_up(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create()
    assert sa.join(A) == sa.join(A)
    assert [status_and_state(sa.join(A, state)) for state in (4, 2, 8)] == [(OK, 5), (OK, 7), (OK, 15)]


@BOTH
def test_leave_returns_the_bits_that_remain(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create(state=15)
    assert [status_and_state(sa.leave(A, state))[1] for state in (4, 2, 8, 1)] == [11, 9, 1, 0]
    assert sa.group(MGID) is None


@BOTH
def test_leave_echoes_the_request(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create(scope=2)
    sa.join(A, 2)
    sa.join(B)
    asked = record(qkey=9, mlid=8, mtu=1, tclass=7, pkey=6, rate=5, packet_life=4, sl=3, hop_limit=2)
    assert sa.ask(SaMethod.DELETE, asked, JOIN, A).records == (
        asked._replace(mtu_selector=2, rate_selector=2, life_selector=2, scope=2, join_state=JoinState.NON),
    )


LEAVES_REFUSED = {
    "bits not all held": (A, 3, MGID),
    "no bits": (A, 0, MGID),
    "not a member": (C, 1, MGID),
    "unknown group": (A, 1, OTHER),
}


@BOTH
@pytest.mark.parametrize(("guid", "state", "mgid"), LEAVES_REFUSED.values(), ids=LEAVES_REFUSED)
def test_leave_refused(quirks: Quirks, guid: int, state: int, mgid: bytes) -> None:
    sa = Sa(quirks)
    sa.create()
    sa.join(B, 2)
    assert sa.leave(guid, state, mgid=mgid).status == REQ_INVALID
    assert sa.states() == {A: 1, B: 2}


@BOTH
def test_leave_twice(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create()
    sa.join(B)
    assert [sa.leave(B).status for _ in range(2)] == [OK, REQ_INVALID]


@BOTH
def test_leave_ignores_a_wrong_qkey(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create()
    assert sa.leave(A, mask=JOIN | McMask.QKEY, qkey=666).status == OK


@BOTH
@pytest.mark.parametrize("state", [2, 4, 6])
def test_the_last_full_member_takes_the_others_along(quirks: Quirks, state: int) -> None:
    sa = Sa(quirks)
    sa.create()
    sa.join(B, state)
    sa.leave(A)
    assert sa.group(MGID) is None
    assert sa.leave(B, state).status == REQ_INVALID


@BOTH
def test_a_send_only_full_member_keeps_the_group(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create()
    sa.join(B, 8)
    sa.leave(A)
    assert sa.states() == {B: 8}
    sa.leave(B, 8)
    assert sa.group(MGID) is None


# held by A, left, another full member?, quirks -> bits in the answer, the group after
PARTIAL_LEAVES = {
    "1+4 alone leaves 1": (5, 1, False, BOTH, 0, None),
    "1+4 with another leaves 1": (5, 1, True, BOTH, 4, {A: 4, B: 1}),
    "8+4 alone leaves 8": (12, 8, False, SPEC, 0, None),
    "8+4 alone leaves 8, opensm": (12, 8, False, OPENSM, 4, None),
    "1+8 alone leaves 1": (9, 1, False, SPEC, 8, {A: 8}),
    "1+8 alone leaves 1, opensm": (9, 1, False, OPENSM, 0, {}),
    "1+8 with another leaves 1": (9, 1, True, BOTH, 8, {A: 8, B: 1}),
}


@pytest.mark.parametrize(
    ("held", "left", "another", "who", "answer", "after"), PARTIAL_LEAVES.values(), ids=PARTIAL_LEAVES
)
def test_leave_some_bits(
    held: int, left: int, another: bool, who: Any, answer: int, after: dict[int, int] | None
) -> None:
    for quirks in (SPEC, OPENSM) if who is BOTH else (who,):
        sa = Sa(quirks)
        sa.create(state=held)
        if another:
            sa.join(B)
        assert status_and_state(sa.leave(A, left)) == (OK, answer)
        assert sa.states() == after


def test_opensm_never_deletes_the_emptied_group() -> None:
    sa = Sa(OPENSM)
    sa.create(state=9)
    sa.leave(A, 1)
    sa.join(B)
    sa.leave(B)
    assert sa.states() == {}
    sa.restart()
    assert sa.group(MGID) is None


def test_without_the_capability_send_only_full_is_refused() -> None:
    assert Sa().capability_mask2 >> 12 & 1
    sa = Sa(send_only_full_member=False)
    assert not sa.capability_mask2
    assert sa.create(state=9).status == REQ_INVALID
    sa.create()
    assert [sa.join(B, state).status for state in (8, 12, 4, 2)] == [REQ_INVALID, REQ_INVALID, OK, OK]


# -- MGIDs


def mgid_of(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", "")).ljust(16, b"\1")


MGIDS = {
    "unicast": ("fe80", REQ_INVALID),
    "first byte not ff": ("7f12:4001", REQ_INVALID),
    "flag bit 4": ("ff22:4001", REQ_INVALID),
    "flag bit 5": ("ff42:4001", REQ_INVALID),
    "flag bit 6": ("ff92:4001", REQ_INVALID),
    "T 0": ("ff02:4001", OK),
    "T 1": ("ff12:4001", OK),
    "a01b link-local": ("ff12:a01b", REQ_INVALID),
    "a01b site-local": ("ff15:a01b", OK),
    "a01b scope a": ("ff1a:a01b", OK),
    "4001": ("ff12:4001", OK),
    "6001": ("ff12:6001", OK),
}


@BOTH
@pytest.mark.parametrize(("text", "status"), MGIDS.values(), ids=MGIDS)
def test_mgid(quirks: Quirks, text: str, status: SaStatus) -> None:
    assert Sa(quirks).create(mgid=mgid_of(text)).status == status


@BOTH
@pytest.mark.parametrize("scope", range(16))
def test_every_scope(quirks: Quirks, scope: int) -> None:
    reply = Sa(quirks).create(mgid=bytes((0xFF, 0x10 | scope)) + MGID[2:])
    assert reply.status == OK
    assert reply.records[0].scope == (0 if quirks is OPENSM else scope)  # as sent, or the MGID's


IPOIB_FIELDS = {"qkey": IPOIB_QKEY, "pkey": 0xFFFF}
IPOIB = {
    "equal values": ("ff12:401b:ffff", {}, 0, OK),
    "ipv6": ("ff12:601b:ffff", {}, 0, OK),
    "other scope": ("ff15:401b:ffff", {}, 0, REQ_INVALID),
    "other partition": ("ff12:401b:8001", {}, 0, REQ_INVALID),
    "qkey": ("ff12:401b:ffff", {"qkey": 1}, 0, REQ_INVALID),
    "pkey": ("ff12:401b:ffff", {"pkey": 0x8001}, 0, REQ_INVALID),
    "tclass": ("ff12:401b:ffff", {"tclass": 1}, 0, REQ_INVALID),
    "sl": ("ff12:401b:ffff", {"sl": 1}, 0, REQ_INVALID),
    "flow": ("ff12:401b:ffff", {"flow_label": 1}, 0, REQ_INVALID),
    "hop, masked": ("ff12:401b:ffff", {"hop_limit": 1}, McMask.HOP_LIMIT, REQ_INVALID),
    "hop, not masked": ("ff12:401b:ffff", {"hop_limit": 1}, 0, OK),
}


@BOTH
@pytest.mark.parametrize(("text", "fields", "mask", "status"), IPOIB.values(), ids=IPOIB)
def test_ipoib_groups_follow_their_broadcast_group(
    quirks: Quirks, text: str, fields: dict[str, int], mask: int, status: SaStatus
) -> None:
    sa = Sa(quirks)
    sa.add_port(SaPort(A, pkeys=(0xFFFF, 0x8001)))
    assert sa.create(mgid=mgid_of(text), mask=CREATE | mask, **{**IPOIB_FIELDS, **fields}).status == status


def test_ipoib_groups_need_their_broadcast_group() -> None:
    sa = Sa(well_known=())
    assert sa.create(mgid=mgid_of("ff12:401b:ffff")).status == REQ_INVALID
    assert sa.create(mgid=ipoib_broadcast_mgid()).status == OK
    assert sa.create(mgid=mgid_of("ff12:401b:ffff")).status == OK


@pytest.mark.parametrize(("quirks", "status"), [(SPEC, REQ_INVALID), (OPENSM, OK)], ids=["spec", "opensm"])
def test_reserved_flags_of_an_ipoib_mgid(quirks: Quirks, status: SaStatus) -> None:
    assert Sa(quirks).create(mgid=mgid_of("fff2:401b:ffff"), **IPOIB_FIELDS).status == status


ASSIGNED = {
    "spec": (SPEC, ["ff12a01bfe80000000000000 00000000", "ff12a01bfe80000000000000 00000001"]),
    "opensm": (OPENSM, ["ff12a01bfe8000000000 00000000 0000", "ff12a01bfe8000000000 01000000 0000"]),
}


@pytest.mark.parametrize(("quirks", "mgids"), ASSIGNED.values(), ids=ASSIGNED)
def test_the_sa_assigns_mgids(quirks: Quirks, mgids: list[str]) -> None:
    sa = Sa(quirks)
    got = [sa.create(mgid=ZERO_GID, scope=5).records[0].mgid for _ in mgids]
    assert got == [bytes.fromhex(mgid) for mgid in mgids]
    scoped = sa.create(mgid=ZERO_GID, scope=5, mask=CREATE | McMask.SCOPE).records[0]
    assert (scoped.mgid[1], scoped.scope) == (0x15, 5)


@pytest.mark.parametrize(("quirks", "number"), [(SPEC, 0), (OPENSM, 1)], ids=["spec", "opensm"])
def test_a_failed_create_and_the_mgid_counter(quirks: Quirks, number: int) -> None:
    sa = Sa(quirks)
    assert sa.create(mgid=ZERO_GID, pkey=0x8001).status == REQ_INVALID
    mgid = sa.create(mgid=ZERO_GID).records[0].mgid
    assert int.from_bytes(mgid[10:14] if quirks is OPENSM else mgid[12:], "little") == number


# -- MLIDs


@BOTH
def test_mlids_are_the_lowest_free(quirks: Quirks) -> None:
    sa = Sa(quirks)
    mgids = [bytes(OTHER[:15]) + bytes((n,)) for n in range(4)]
    assert [sa.create(mgid=mgid).records[0].mlid for mgid in mgids] == [0xC001, 0xC002, 0xC003, 0xC004]
    sa.leave(A, mgid=mgids[2])
    sa.leave(A, mgid=mgids[0])
    again = [sa.create(mgid=mgid).records[0].mlid for mgid in (mgids[2], mgids[0])]
    assert again == [0xC001, 0xC003]


WANTED = {
    "free": (0xC010, 0xC010),
    "taken": (0xC000, 0xC001),
    "unicast": (0xBFFF, 0xC001),
    "beyond the switches": (0xC020, 0xC001),
}


@BOTH
@pytest.mark.parametrize(("wanted", "mlid"), WANTED.values(), ids=WANTED)
def test_a_wanted_mlid(quirks: Quirks, wanted: int, mlid: int) -> None:
    sa = Sa(quirks, max_mlid=0xC01F)
    assert sa.create(mlid=wanted, mask=CREATE | McMask.MLID).records[0].mlid == mlid


@pytest.mark.parametrize(("quirks", "mlid"), [(SPEC, 0xC001), (OPENSM, 0xC010)], ids=["spec", "opensm"])
def test_a_wanted_mlid_without_its_mask_bit(quirks: Quirks, mlid: int) -> None:
    assert Sa(quirks).create(mlid=0xC010).records[0].mlid == mlid


@BOTH
def test_out_of_mlids(quirks: Quirks) -> None:
    """31 groups beside the broadcast group on switches with 32 entries; joins still work."""
    sa = Sa(quirks, max_mlid=0xC01F)
    mgids = [OTHER[:14] + n.to_bytes(2) for n in range(32)]
    statuses = [sa.create(mgid=mgid).status for mgid in mgids]
    assert statuses == [OK] * 31 + [SaStatus.NO_RESOURCES]
    assert sa.join(B, mgid=mgids[0]).status == OK
    sa.leave(A, mgid=mgids[5])
    assert sa.create(mgid=mgids[31]).records[0].mlid == 0xC006


def test_mlids_end_at_fffe() -> None:
    sa = Sa(well_known=())
    for n in range(0xFFFE - MLID_FIRST + 1):
        mlid = sa.create(mgid=OTHER[:14] + n.to_bytes(2)).records[0].mlid
    assert mlid == 0xFFFE
    assert sa.create(mgid=mgid_of("ff15:4001")).status == SaStatus.NO_RESOURCES


# -- joining with more than the join mask

MISMATCHES = {
    "qkey": (McMask.QKEY, {"qkey": 1}, BOTH),
    "pkey": (McMask.PKEY, {"pkey": 0x8001}, BOTH),
    "sl": (McMask.SL, {"sl": 1}, BOTH),
    "flow": (McMask.FLOW_LABEL, {"flow_label": 1}, BOTH),
    "tclass": (McMask.TCLASS, {"tclass": 1}, BOTH),
    "hop": (McMask.HOP_LIMIT, {"hop_limit": 1}, BOTH),
    "scope": (McMask.SCOPE, {"scope": 1}, SPEC),
    "life": (McMask.PACKET_LIFE | McMask.LIFE_SELECTOR, {"packet_life": 1, "life_selector": 2}, SPEC),
    "mlid": (McMask.MLID, {"mlid": 0xC123}, SPEC),
    "proxy": (McMask.PROXY_JOIN, {"proxy_join": True}, None),
}


@pytest.mark.parametrize(("mask", "fields", "who"), MISMATCHES.values(), ids=MISMATCHES)
@BOTH
def test_join_mismatch(quirks: Quirks, mask: McMask, fields: dict[str, Any], who: Any) -> None:
    """A field that only the specification compares is not refused by OpenSM."""
    sa = Sa(quirks)
    sa.add_port(SaPort(B, pkeys=(0xFFFF, 0x8001)))
    sa.create()
    assert sa.join(B, **fields).status == OK, "without the mask bit the value does not matter"
    assert sa.join(B, mask=JOIN | mask, **fields).status == (REQ_INVALID if who in (BOTH, quirks) else OK)


@pytest.mark.parametrize(
    ("selector", "mtu", "status"),
    [
        (GT, 3, OK),
        (LT, 5, OK),
        (EQ, 4, OK),
        (LARGEST, 1, OK),
        (GT, 4, REQ_INVALID),
        (GT, 5, REQ_INVALID),
        (LT, 3, REQ_INVALID),
        (LT, 4, REQ_INVALID),
        (EQ, 3, REQ_INVALID),
        (EQ, 5, REQ_INVALID),
        (EQ, 0, REQ_INVALID),
        (LARGEST, 6, REQ_INVALID),
    ],
)
@BOTH
def test_join_with_an_mtu(quirks: Quirks, selector: Selector, mtu: int, status: SaStatus) -> None:
    """The group has MTU 4; 0 and 6 are no MTUs at all."""
    sa = Sa(quirks)
    sa.create()
    assert sa.join(B, mask=JOIN | MTU_BOTH, mtu=mtu, mtu_selector=selector).status == status


@pytest.mark.parametrize(
    ("selector", "rate", "status"),
    [
        (GT, 2, OK),
        (GT, 5, OK),
        (LT, 6, OK),
        (EQ, 3, OK),
        (LARGEST, 2, OK),
        (GT, 3, REQ_INVALID),
        (GT, 11, REQ_INVALID),
        (LT, 5, REQ_INVALID),
        (LT, 3, REQ_INVALID),
        (EQ, 2, REQ_INVALID),
        (EQ, 1, REQ_INVALID),
        (LARGEST, 63, REQ_INVALID),
    ],
)
@BOTH
def test_join_with_a_rate(quirks: Quirks, selector: Selector, rate: int, status: SaStatus) -> None:
    """The group has 10 Gb/s (3): faster than 5 Gb/s (5), slower than 14 Gb/s (11); 1 and 63 are no rates."""
    sa = Sa(quirks)
    sa.create()
    assert sa.join(B, mask=JOIN | RATE_BOTH, rate=rate, rate_selector=selector).status == status


@pytest.mark.parametrize(("quirks", "status"), [(SPEC, OK), (OPENSM, REQ_INVALID)], ids=["spec", "opensm"])
def test_the_fastest_rates(quirks: Quirks, status: SaStatus) -> None:
    sa = Sa(quirks)
    sa.create()
    assert sa.join(B, mask=JOIN | RATE_BOTH, rate=24, rate_selector=LT).status == status
    assert sa.join(B, mask=JOIN | RATE_BOTH, rate=22, rate_selector=LT).status == OK


@pytest.mark.parametrize(("rate", "status"), [(22, REQ_INVALID), (23, OK), (63, OK)])
def test_a_code_that_is_no_rate_ranks_below_all(rate: int, status: SaStatus) -> None:
    """Only a lone selector lets one through the check of codes."""
    reply = Sa(OPENSM).create(mask=CREATE | McMask.RATE_SELECTOR, rate=rate, rate_selector=GT)
    assert reply.status == status


@BOTH
@pytest.mark.parametrize("mask", [McMask.MTU, McMask.RATE])
def test_a_value_without_its_selector_is_ignored(quirks: Quirks, mask: McMask) -> None:
    sa = Sa(quirks)
    sa.create()
    assert sa.join(B, mask=JOIN | mask, mtu=0, rate=0).status == OK


@pytest.mark.parametrize("mask", [McMask.MTU_SELECTOR, McMask.RATE_SELECTOR])
@pytest.mark.parametrize(("quirks", "status"), [(SPEC, OK), (OPENSM, REQ_INVALID)], ids=["spec", "opensm"])
def test_a_selector_without_its_value(quirks: Quirks, status: SaStatus, mask: McMask) -> None:
    sa = Sa(quirks)
    sa.create()
    assert sa.join(B, mask=JOIN | mask, mtu_selector=EQ, rate_selector=EQ).status == status


@BOTH
@pytest.mark.parametrize("slow", [SaPort(B, mtu=3), SaPort(B, rate=5)], ids=["mtu", "rate"])
def test_a_port_slower_than_the_group(quirks: Quirks, slow: SaPort) -> None:
    sa = Sa(quirks)
    sa.create()
    sa.add_port(slow)
    assert sa.join(B).status == REQ_INVALID


# -- what a create makes of MTU and rate, on a port of MTU 4 and rate 3

CREATED_MTU = {
    "EQ below": (EQ, 3, 3),
    "EQ port": (EQ, 4, 4),
    "EQ above": (EQ, 5, None),
    "GT below": (GT, 2, 4),
    "GT port": (GT, 4, None),
    "GT above": (GT, 5, None),
    "LT port": (LT, 4, 3),
    "LT below": (LT, 2, 1),
    "LT above": (LT, 5, 4),
    "LT 1": (LT, 1, None),
    "LARGEST": (LARGEST, 1, 4),
    "no such MTU": (EQ, 0, None),
}


@BOTH
@pytest.mark.parametrize(("selector", "mtu", "made"), CREATED_MTU.values(), ids=CREATED_MTU)
def test_create_with_an_mtu(quirks: Quirks, selector: Selector, mtu: int, made: int | None) -> None:
    sa = Sa(quirks)
    reply = sa.create(mask=CREATE | MTU_BOTH, mtu=mtu, mtu_selector=selector)
    if made is None:
        assert reply.status == REQ_INVALID
        assert sa.group(MGID) is None
    else:
        assert (reply.records[0].mtu_selector, reply.records[0].mtu) == (EQ, made)


CREATED_RATE = {
    "EQ below": (EQ, 5, 3, 5),
    "EQ above": (EQ, 11, 3, None),
    "GT below": (GT, 5, 3, 3),
    "GT port": (GT, 3, 3, None),
    "LT port": (LT, 3, 3, 5),
    "LT above": (LT, 6, 3, 3),
    "LT 25 Gb/s": (LT, 15, 7, 4),
    "LT slowest": (LT, 2, 3, None),
    "LARGEST": (LARGEST, 2, 7, 7),
}


@BOTH
@pytest.mark.parametrize(("selector", "rate", "port", "made"), CREATED_RATE.values(), ids=CREATED_RATE)
def test_create_with_a_rate(
    quirks: Quirks, selector: Selector, rate: int, port: int, made: int | None
) -> None:
    sa = Sa(quirks)
    sa.add_port(SaPort(A, rate=port))
    reply = sa.create(mask=CREATE | RATE_BOTH, rate=rate, rate_selector=selector)
    assert (reply.records[0].rate if reply.records else None) == made
    assert reply.status == (OK if made else REQ_INVALID)


CREATED_LIFE = {
    "EQ": (EQ, 9, 9),
    "GT": (GT, 9, 10),
    "LT": (LT, 9, 8),
    "LT 0": (LT, 0, None),
    "any": (3, 9, 0),
}


@pytest.mark.parametrize(("selector", "life", "made"), CREATED_LIFE.values(), ids=CREATED_LIFE)
def test_create_with_a_packet_lifetime(selector: Selector, life: int, made: int | None) -> None:
    mask = CREATE | McMask.PACKET_LIFE | McMask.LIFE_SELECTOR
    for quirks, wanted in ((SPEC, made), (OPENSM, life)):
        reply = Sa(quirks).create(mask=mask, packet_life=life, life_selector=selector)
        assert (reply.records[0].packet_life if reply.records else None) == wanted
        assert reply.status == (REQ_INVALID if wanted is None else OK)


@pytest.mark.parametrize(("quirks", "taken"), [(SPEC, False), (OPENSM, True)], ids=["spec", "opensm"])
def test_create_and_unmasked_fields(quirks: Quirks, taken: bool) -> None:
    made = Sa(quirks).create(hop_limit=9, packet_life=8, scope=7).records[0]
    assert (made.hop_limit, made.packet_life, made.scope) == ((9, 8, 7) if taken else (0, 0, 2))


@pytest.mark.parametrize(("quirks", "status"), [(SPEC, REQ_INVALID), (OPENSM, OK)], ids=["spec", "opensm"])
def test_create_with_a_scope_that_is_not_the_mgids(quirks: Quirks, status: SaStatus) -> None:
    assert Sa(quirks).create(mask=CREATE | McMask.SCOPE, scope=7).status == status


# -- P_Keys

PKEYS = {
    "foreign": (0x8002, REQ_INVALID),
    "0": (0, REQ_INVALID),
    "0x8000": (0x8000, REQ_INVALID),
    "full": (0xFFFF, OK),
    "limited member": (0x8001, OK),
    "limited group": (0x0001, OK),
}


@BOTH
@pytest.mark.parametrize(("pkey", "status"), PKEYS.values(), ids=PKEYS)
def test_create_in_a_partition(quirks: Quirks, pkey: int, status: SaStatus) -> None:
    sa = Sa(quirks)
    sa.add_port(SaPort(A, pkeys=(0xFFFF, 0x0001)))
    assert sa.create(pkey=pkey).status == status


@BOTH
def test_join_from_another_partition(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.add_port(SaPort(A, pkeys=(0xFFFF, 0x8001)))
    sa.create(pkey=0x8001)
    assert sa.join(B).status == REQ_INVALID
    sa.add_port(SaPort(B, pkeys=(0xFFFF, 0x0001)))
    assert sa.join(B).status == OK


@BOTH
@pytest.mark.parametrize(
    ("group", "masked", "status"),
    [
        (0x8001, 0x8001, OK),
        (0x8001, 0x0001, OK),
        (0x0001, 0x0001, REQ_INVALID),
        (0x0001, 0x8001, OK),
        (0x0001, None, OK),
    ],
)
def test_join_with_a_pkey(quirks: Quirks, group: int, masked: int | None, status: SaStatus) -> None:
    sa = Sa(quirks)
    for guid in (A, B):
        sa.add_port(SaPort(guid, pkeys=(0xFFFF, 0x8001)))
    sa.create(pkey=group)
    mask = JOIN if masked is None else JOIN | McMask.PKEY
    assert sa.join(B, mask=mask, pkey=masked or 0).status == status


# -- PortGID and proxies

PORT_GIDS = {
    "unknown GUID": (gid(0x77), REQ_INVALID),
    "wrong prefix": (gid(A, bytes.fromhex("fe80000000000001")), SaStatus.INVALID_GID),
    "zero": (ZERO_GID, SaStatus.INVALID_GID),
    "multicast": (MGID, SaStatus.INVALID_GID),
}


@BOTH
@pytest.mark.parametrize(("port_gid", "status"), PORT_GIDS.values(), ids=PORT_GIDS)
@pytest.mark.parametrize("method", [SaMethod.SET, SaMethod.DELETE])
def test_port_gid(quirks: Quirks, method: SaMethod, port_gid: bytes, status: SaStatus) -> None:
    sa = Sa(quirks)
    sa.create()
    assert sa.ask(method, record()._replace(port_gid=port_gid), CREATE, A).status == status


def test_the_default_prefix_stands_for_the_subnets() -> None:
    prefix = bytes.fromhex("fec0000000000007")
    sa = Sa(subnet_prefix=prefix)
    assert sa.create().records[0].port_gid == gid(A)
    assert sa.ask(SaMethod.SET, record(B)._replace(port_gid=gid(B, prefix)), JOIN, B).status == OK
    assert [rec.port_gid for rec in sa.table()] == [gid(A, prefix), gid(B, prefix)]
    assert Sa(OPENSM, subnet_prefix=prefix).create().status == SaStatus.INVALID_GID


@BOTH
def test_a_proxy_joins_and_any_port_of_the_partition_undoes_it(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create()
    assert sa.join(B, by=A).status == OK
    assert [m.proxy_join for m in sa.group(MGID).members] == [False, True]  # type: ignore[union-attr]
    assert sa.join(B, 2, by=C).status == OK
    assert sa.leave(B, 3, by=C).status == OK


@BOTH
def test_a_proxy_needs_a_common_partition(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create()
    sa.add_port(SaPort(B, pkeys=(0x7FFF,)))
    assert sa.join(B, by=A).status == OK, "full and limited"
    sa.add_port(SaPort(A, pkeys=(0x7FFF, 0x8001)))
    sa.add_port(SaPort(C, pkeys=(0x7FFF, 0x8002)))
    assert sa.join(C, by=B).status == REQ_INVALID, "two limited"


@BOTH
def test_a_self_joined_record_is_its_ports_own(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create()
    sa.join(B)
    assert sa.join(B, 2, by=A).status == REQ_INVALID
    assert sa.leave(B, by=A).status == REQ_INVALID
    assert sa.states() == {A: 1, B: 1}


@BOTH
def test_proxied_record_is_closed_to_other_pkeys(quirks: Quirks) -> None:
    """A proxied record is closed to other partitions."""
    sa = Sa(quirks)
    for guid in (A, B):
        sa.add_port(SaPort(guid, pkeys=(0xFFFF, 0x8001)))
    sa.create(pkey=0x8001)
    sa.join(B, by=A)
    assert sa.leave(B, by=C).status == REQ_INVALID


@pytest.mark.parametrize(("quirks", "echoes"), [(SPEC, False), (OPENSM, True)], ids=["spec", "opensm"])
def test_proxy_join_in_the_answer(quirks: Quirks, echoes: bool) -> None:
    sa = Sa(quirks)
    sa.create()
    assert sa.join(B, by=A).records[0].proxy_join is not echoes
    assert sa.join(C, proxy_join=True).records[0].proxy_join is echoes


# -- SM_Key, methods, queries


@BOTH
def test_a_wrong_sm_key_gets_no_answer(quirks: Quirks) -> None:
    sa = Sa(quirks)
    for method in SaMethod:
        assert sa.handle(A, method, CREATE, record(), sm_key=2) is None
    assert sa.group(MGID) is None
    assert sa.handle(0x77, SaMethod.SET, CREATE, record()) is None, "nor does a port out of service"


def test_an_unknown_method() -> None:
    assert Sa().ask(0x14, record(), 0, A).status == SaStatus.UNSUP_METHOD_ATTR
    assert Sa(OPENSM).ask(0x14, record(), 0, A).status == SaStatus.UNSUP_METHOD_ATTR, "GetMulti"
    assert Sa(OPENSM).handle(A, 0x13, 0, record()) is None


def populated(quirks: Quirks) -> Sa:
    """MGID with full A and proxied non-member B; OTHER with C alone, in partition 1; the broadcast group."""
    sa = Sa(quirks)
    sa.add_port(SaPort(C, pkeys=(0xFFFF, 0x8001)))
    sa.create(scope=2)
    sa.join(B, 2, by=A)
    sa.create(C, mgid=OTHER, pkey=0x8001, state=8, scope=2)
    return sa


@BOTH
def test_an_untrusted_table_has_one_bare_record_per_group(quirks: Quirks) -> None:
    sa = populated(quirks)
    found = sa.table(by=C, sm_key=0)
    assert [rec.mgid for rec in found] == [ipoib_broadcast_mgid(), MGID, OTHER]
    assert {(rec.port_gid, rec.join_state, rec.proxy_join) for rec in found} == {(ZERO_GID, 0, False)}
    assert found[1] == record(scope=2)._replace(
        port_gid=ZERO_GID,
        join_state=0,
        mlid=0xC001,
        mtu_selector=2,
        mtu=4,
        rate_selector=2,
        rate=3,
        life_selector=2,
    )


@BOTH
def test_a_trusted_table_has_one_record_per_member(quirks: Quirks) -> None:
    found = populated(quirks).table(by=C)
    assert [(rec.mgid, rec.port_gid, rec.join_state, rec.proxy_join) for rec in found] == [
        (MGID, gid(A), 1, False),
        (MGID, gid(B), 2, True),
        (OTHER, gid(C), 8, False),
    ]


@BOTH
@pytest.mark.parametrize("sm_key", [0, 1])
def test_a_table_leaves_out_foreign_partitions(quirks: Quirks, sm_key: int) -> None:
    assert OTHER not in {rec.mgid for rec in populated(quirks).table(sm_key=sm_key)}


@BOTH
def test_an_empty_table_is_ok(quirks: Quirks) -> None:
    sa = Sa(quirks)
    assert sa.ask(SaMethod.GET_TABLE, McMemberRecord(mgid=OTHER), McMask.MGID, A) == SaReply(OK)


@BOTH
def test_get_wants_exactly_one(quirks: Quirks) -> None:
    sa = populated(quirks)
    get = SaMethod.GET
    assert sa.ask(get, McMemberRecord(), 0, A).status == SaStatus.TOO_MANY_RECORDS
    assert sa.ask(get, McMemberRecord(mgid=OTHER[::-1]), McMask.MGID, A).status == SaStatus.NO_RECORDS
    assert len(sa.ask(get, McMemberRecord(mgid=MGID), McMask.MGID, A).records) == 1


MATCHES: dict[str, tuple[McMask, dict[str, Any], int]] = {
    "mgid": (McMask.MGID, {"mgid": MGID}, 2),
    "mlid": (McMask.MLID, {"mlid": 0xC002}, 1),
    "mlid none": (McMask.MLID, {"mlid": 0xC003}, 0),
    "port": (McMask.PORT_GID, {"port_gid": gid(B)}, 1),
    "port none": (McMask.PORT_GID, {"port_gid": gid(0x77)}, 0),
    "qkey": (McMask.QKEY, {"qkey": 0x1234567}, 3),
    "qkey none": (McMask.QKEY, {"qkey": 1}, 0),
    "pkey": (McMask.PKEY, {"pkey": 0x8001}, 1),
    "join state": (McMask.JOIN_STATE, {"join_state": 2}, 1),
    "join state none": (McMask.JOIN_STATE, {"join_state": 3}, 0),
    "scope": (McMask.SCOPE, {"scope": 2}, 3),
    "scope none": (McMask.SCOPE, {"scope": 5}, 0),
    "mtu greater": (MTU_BOTH, {"mtu": 3, "mtu_selector": GT}, 3),
    "mtu exactly": (MTU_BOTH, {"mtu": 3, "mtu_selector": EQ}, 0),
}


@BOTH
@pytest.mark.parametrize(("mask", "fields", "hits"), MATCHES.values(), ids=MATCHES)
def test_query(quirks: Quirks, mask: McMask, fields: dict[str, Any], hits: int) -> None:
    assert len(populated(quirks).table(by=C, mask=mask, **fields)) == hits


@BOTH
def test_a_query_checks_mtu_and_rate_codes(quirks: Quirks) -> None:
    sa = Sa(quirks)
    for mask in (MTU_BOTH, RATE_BOTH):
        assert sa.ask(SaMethod.GET_TABLE, McMemberRecord(), mask, A).status == REQ_INVALID
        assert sa.ask(SaMethod.GET, McMemberRecord(), mask, A).status == REQ_INVALID


def test_what_queries_match_against() -> None:
    """The specification matches members; OpenSM the request that created the group."""
    mask = McMask.MGID | McMask.JOIN_STATE
    for quirks, full, non in ((SPEC, 1, 1), (OPENSM, 1, 0)):
        sa = populated(quirks)
        assert len(sa.table(mask=mask, sm_key=0, mgid=MGID, join_state=1)) == full
        assert len(sa.table(mask=mask, sm_key=0, mgid=MGID, join_state=2)) == non
    proxied: dict[str, Any] = {"mask": McMask.MGID | McMask.PROXY_JOIN, "mgid": MGID, "proxy_join": True}
    assert [rec.port_gid for rec in populated(SPEC).table(**proxied)] == [gid(B)]
    assert populated(OPENSM).table(**proxied) == ()
    unmasked: dict[str, Any] = {"mask": McMask.MGID, "mgid": MGID, "proxy_join": True}
    assert [len(populated(quirks).table(**unmasked)) for quirks in (SPEC, OPENSM)] == [2, 2]
    foreign: dict[str, Any] = {"mask": McMask.PORT_GID, "port_gid": gid(A, bytes(8))}
    assert [len(populated(quirks).table(**foreign)) for quirks in (SPEC, OPENSM)] == [0, 1]


# -- well-known groups, ports, restart, traps, forwarding


@BOTH
def test_well_known_groups_stay_and_lose_their_others(quirks: Quirks) -> None:
    broadcast = ipoib_broadcast_mgid()
    sa = Sa(quirks)
    sa.join(A, mgid=broadcast)
    sa.join(B, 4, mgid=broadcast)
    sa.leave(A, mgid=broadcast)
    assert sa.states(broadcast) == {}
    assert sa.join(B, 2, mgid=broadcast).records[0].mlid == 0xC000


def test_the_default_broadcast_group() -> None:
    assert next(Sa().groups).values == McMemberRecord(
        ipoib_broadcast_mgid(), ZERO_GID, IPOIB_QKEY, 0xC000, EQ, 4, 0, 0xFFFF, EQ, 3, EQ, 18, 0, 0, 0, 2, 0
    )


def test_well_known_groups_of_a_partition_file() -> None:
    site = bytes((0xFF, 0x15)) + MGID[2:]
    sa = Sa(well_known=(WellKnownGroup(pkey=0x8001, mtu=5, rate=7, sl=2), WellKnownGroup(mgid=site)))
    made = [(g.mlid, g.mgid, g.values.pkey, g.values.mtu, g.values.hop_limit) for g in sa.groups]
    assert made == [(0xC000, ipoib_broadcast_mgid(0x8001), 0x8001, 5, 0), (0xC001, site, 0xFFFF, 4, 255)]


BAD_OPTIONS = {
    "prefix": ({"subnet_prefix": b"short"}, "8 bytes, not 5"),
    "max_mlid": ({"max_mlid": 0xBFFF}, "0xc000..0xfffe"),
    "twice": ({"well_known": (WellKnownGroup(),) * 2}, "twice"),
    "too many": (
        {"well_known": (WellKnownGroup(), WellKnownGroup(pkey=1)), "max_mlid": 0xC000},
        "raise max_mlid",
    ),
}


@pytest.mark.parametrize(("options", "text"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_explained(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SubnetAdmin(**options)


@BOTH
def test_port_down_is_a_leave_of_everything(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create(state=9)
    sa.join(B, 2)
    sa.create(B, mgid=OTHER)
    sa.join(A, mgid=OTHER)
    assert sa.port_down(A) == (Notice(67, MGID),)
    assert (sa.states(MGID), sa.states(OTHER)) == (None, {B: 1})
    assert sa.join(A, mgid=OTHER, by=B).status == REQ_INVALID, "unknown while it is down"
    assert sa.handle(A, SaMethod.SET, CREATE, record()) is None
    sa.port_up(A)
    assert sa.states(OTHER) == {B: 1}, "the link's return restores nothing"
    assert sa.leave(A, mgid=OTHER).status == REQ_INVALID
    with pytest.raises(KeyError):
        sa.port_up(A)


@BOTH
def test_sm_restart(quirks: Quirks) -> None:
    sa = Sa(quirks)
    sa.create()
    sa.create(mgid=OTHER)
    sa.restart()
    assert [group.mgid for group in sa.groups] == [ipoib_broadcast_mgid()]
    assert sa.leave(A).status == REQ_INVALID
    assert sa.join(A).status == INSUF_COMPS
    assert sa.create(mgid=OTHER).records[0].mlid == 0xC001


@BOTH
def test_traps(quirks: Quirks) -> None:
    sa = Sa(quirks)
    steps = [sa.create(state=8), sa.join(B), sa.join(B, 8), sa.leave(A, 8), sa.leave(B, 9), sa.create(B)]
    assert [[n.trap for n in reply.notices] for reply in steps] == [[66], [], [], [], [67], [66]]
    broadcast = ipoib_broadcast_mgid()
    steps = [sa.join(A, 2, mgid=broadcast), sa.join(A, mgid=broadcast), sa.leave(A, 3, mgid=broadcast)]
    assert [reply.notices for reply in steps] == [(), (Notice(66, broadcast),), (Notice(67, broadcast),)]


@pytest.mark.parametrize("state", [1, 8, 9, 15])
def test_a_group_tells_its_members_bits(state: int) -> None:
    sa = Sa()
    sa.create(state=state)
    group = sa.group(MGID)
    assert group is not None
    assert (group.join_state(A), group.join_state(B)) == (state, 0)


def test_forwarding_and_its_changes() -> None:
    sa = Sa()
    sa.create()
    assert (sa.drain_changes(), sa.forwarding(0xC001)) == ((0xC001,), ())
    sa.join(B, 4)
    assert (sa.drain_changes(), sa.forwarding(0xC001)) == ((0xC001,), (A, B))
    sa.join(B, 8)
    sa.join(C, 0)
    assert sa.drain_changes() == (), "more bits of a member and a refused request move nothing"
    sa.leave(A)
    sa.create(mgid=OTHER)
    assert (sa.drain_changes(), sa.forwarding(0xC001)) == ((0xC001, 0xC002), ())
    sa.restart()
    assert set(sa.drain_changes()) >= {0xC001, 0xC002}
    assert sa.forwarding(0xC001) == ()


# -- any request at all

MGIDS_DRAWN = st.sampled_from(
    [MGID, OTHER, ZERO_GID, ipoib_broadcast_mgid(), mgid_of("ff12:401b:ffff"), mgid_of("fe80")]
)
REQUESTS = st.tuples(
    st.sampled_from([A, B, C]),
    st.sampled_from([*SaMethod, 0x14]),
    st.one_of(st.sampled_from([JOIN, CREATE, CREATE | McMask.MLID, ALL_BITS]), st.integers(0, ALL_BITS)),
    st.builds(
        record,
        st.sampled_from([A, B, C, 0x77]),
        MGIDS_DRAWN,
        st.integers(0, 15),
        qkey=st.sampled_from([IPOIB_QKEY, 1]),
        pkey=st.sampled_from([0xFFFF, 0x7FFF, 0x8001, 0]),
        mlid=st.sampled_from([0, 0xC000, 0xC001, 0xC003]),
        mtu=st.integers(0, 7),
        mtu_selector=st.integers(0, 3),
        rate=st.sampled_from([*RATE.value, 0, 63]),
        rate_selector=st.integers(0, 3),
    ),
    st.sampled_from([0, 1, 7]),
)


def snapshot(sa: SubnetAdmin) -> object:
    return [(g.values, g.well_known, tuple(g.members)) for g in sa.groups]


def check_invariants(sa: SubnetAdmin) -> None:
    groups = list(sa.groups)
    mlids = [group.mlid for group in groups]
    assert len(set(mlids)) == len(mlids), "MLIDs are unique"
    for group in groups:
        full = [m for m in group.members if m.join_state & 9]
        assert full or group.well_known, "a group lives by its full members"
        assert all(m.join_state for m in group.members), "no member without a bit"
        assert set(group.ports) <= set(sa.ports)
        wanted = tuple(group.ports) if len(group.ports) > 1 else ()
        assert sa.forwarding(group.mlid) == wanted


@BOTH
@settings(max_examples=150)
@given(steps=st.lists(st.one_of(REQUESTS, st.sampled_from(["down", "restart"])), max_size=40))
def test_any_requests_keep_the_invariants(quirks: Quirks, steps: list[Any]) -> None:
    sa = Sa(quirks, max_mlid=0xC003)
    sa.add_port(SaPort(B, pkeys=(0xFFFF, 0x8001)))
    for step in steps:
        before = snapshot(sa)
        if step == "down":
            sa.port_down(B)
            sa.port_up(B)
        elif step == "restart":
            sa.restart()
        else:
            reply = sa.handle(*step)
            if reply is None or reply.status != OK or step[1] not in (SaMethod.SET, SaMethod.DELETE):
                assert snapshot(sa) == before, "refusals and queries change nothing"
            if reply is not None:
                assert bool(reply.records) <= (reply.status == OK)
                assert all(McMemberRecord.unpack(rec.pack()) == rec for rec in reply.records)
        if quirks is SPEC:
            check_invariants(sa)


@settings(max_examples=50)
@given(steps=st.lists(REQUESTS, max_size=30))
def test_the_same_requests_get_the_same_answers(steps: list[Any]) -> None:
    answers = []
    for _ in range(2):
        sa = Sa()
        answers.append([sa.handle(*step) for step in steps] + [snapshot(sa), sa.drain_changes()])
    assert answers[0] == answers[1]


def test_empty_partition_loses_its_groups() -> None:
    """A partition without ports loses its groups on OpenSM.

    The next group gets the MLID that became free; the partition's own comes back with its first port.
    """
    for quirks, first, second in ((SPEC, 0xC002, 0xC003), (OPENSM, 0xC001, 0xC002)):
        sa = Sa(quirks, well_known=[WellKnownGroup(), WellKnownGroup(pkey=0x8001)])
        sa.add_port(SaPort(0xD1, pkeys=(0xFFFF, 0x8001)))
        sa.port_down(0xD1)
        lonely = ipoib_broadcast_mgid(0x8001)
        assert (sa.group(lonely) is None) == (quirks is OPENSM)
        assert sa.create().records[0].mlid == first
        sa.port_up(0xD1)
        kept = sa.group(lonely)
        assert kept is not None
        assert sorted(group.mlid for group in sa.groups)[-1] == max(first, kept.mlid)
        assert kept.mlid == (0xC001 if quirks is SPEC else second)
