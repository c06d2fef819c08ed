"""Why the SA refused a join: the request is compared with what the SA says of the group and of the port.

The kernel reports every refusal as EINVAL (facts: SA, event status). Who can ask the SA finds out more: a Get
of the group's MCMemberRecord, and of ClassPortInfo. Pure: records in, causes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mcast.errors.cause import Cause
from mcast.wire.addresses import Gid
from mcast.wire.mcmember import GBPS, MTU_BYTES, RATES, JoinState, McMask, McMemberRecord, Selector

SEND_ONLY_FULL_MEMBER = 1 << 12
"""Bit 12 of ClassPortInfo:CapabilityMask2: the SA knows send-only full members."""

_FULL_MEMBER = 0x8000
_OTHER_GROUP = "take another group address, or have the group made anew with the values of the request"


class PortView(NamedTuple):
    """What matters of the port that asked: its P_Keys; MTU and rate as the SA encodes them, 0 if unknown."""

    pkeys: tuple[int, ...]
    mtu: int = 0
    rate: int = 0


def rate_code(gbps: float) -> int:
    """The encoding of the rate that is nearest: links are named after it, 103.125 Gbit/s is 100."""
    return min(GBPS, key=lambda code: abs(GBPS[code] - gbps))


def found_causes(
    mask: int,
    asked: McMemberRecord,
    group: McMemberRecord | None,
    port: PortView,
    capability_mask2: int | None = None,
) -> tuple[Cause, ...]:
    """What speaks against the request `asked` (the fields in `mask`); () if nothing that can be seen does.

    `group` is what the SA shows this port of the group: None is no such group, or one of a partition that the
    port is not in. `capability_mask2` is the SA's, None if it is not known.
    """
    causes = (
        *_send_only(asked, capability_mask2),
        *_partition(mask, asked, port),
        *(_differences(mask, asked, group) if group is not None else ()),
        *(_too_much(group, port) if group is not None else ()),
    )
    return tuple(causes)


def _send_only(asked: McMemberRecord, capability_mask2: int | None) -> Iterator[Cause]:
    unknown = capability_mask2 is None or capability_mask2 & SEND_ONLY_FULL_MEMBER
    if asked.join_state & JoinState.SEND_ONLY_FULL and not unknown:
        yield Cause(
            "the SM does not know send-only full members (ClassPortInfo:CapabilityMask2 bit 12 is 0)",
            "saquery -c",
            "join as a full member, or update the SM",
        )


def _partition(mask: int, asked: McMemberRecord, port: PortView) -> Iterator[Cause]:
    if mask & McMask.PKEY and asked.pkey & ~_FULL_MEMBER not in {pkey & ~_FULL_MEMBER for pkey in port.pkeys}:
        table = ", ".join(f"{pkey:#06x}" for pkey in port.pkeys if pkey)
        yield Cause(
            f"P_Key is {asked.pkey:#06x}, the port's table has {table or 'none'}",
            "cat /sys/class/infiniband/*/ports/*/pkeys/* | sort -u",
            "have the port put into the partition (partitions.conf of the SM), or bind to one it is in",
        )


_FIELDS = (
    (McMask.QKEY, "Q_Key", "qkey", "{:#x}"),
    (McMask.PKEY, "P_Key", "pkey", "{:#06x}"),
    (McMask.SL, "SL", "sl", "{}"),
    (McMask.FLOW_LABEL, "flow label", "flow_label", "{:#x}"),
    (McMask.TCLASS, "traffic class", "tclass", "{}"),
    (McMask.HOP_LIMIT, "hop limit", "hop_limit", "{}"),
)


def _differences(mask: int, asked: McMemberRecord, group: McMemberRecord) -> Iterator[Cause]:
    check = f"saquery MCMR | grep -A 20 {Gid(asked.mgid)}"
    for bit, name, field, form in _FIELDS:
        mine, theirs = getattr(asked, field), getattr(group, field)
        same = _pkeys_match(mine, theirs) if field == "pkey" else mine == theirs
        if mask & bit and not same:
            shown = f"{name} is {form.format(mine)}, the group's is {form.format(theirs)}"
            yield Cause(shown, check, _OTHER_GROUP)
    for pair, name, field, show in (
        (McMask.MTU | McMask.MTU_SELECTOR, "MTU", "mtu", _mtu),
        (McMask.RATE | McMask.RATE_SELECTOR, "rate", "rate", _rate),
    ):
        selector, mine, theirs = (
            getattr(asked, f"{field}_selector"),
            getattr(asked, field),
            getattr(group, field),
        )
        if mask & pair == pair and not _selected(selector, mine, theirs, field == "rate"):
            wanted = {Selector.GREATER: "more than ", Selector.LESS: "less than "}.get(selector, "")
            yield Cause(f"{name} is {wanted}{show(mine)}, the group's is {show(theirs)}", check, _OTHER_GROUP)


def _pkeys_match(mine: int, theirs: int) -> bool:
    """The same partition, and one of the two a full member (facts: SA, P_Key)."""
    return (mine ^ theirs) & ~_FULL_MEMBER == 0 and bool((mine | theirs) & _FULL_MEMBER)


def _selected(selector: int, mine: int, theirs: int, by_rate: bool) -> bool:
    low, high = (_rank(mine), _rank(theirs)) if by_rate else (mine, theirs)
    if selector == Selector.GREATER:
        return high > low
    if selector == Selector.LESS:
        return high < low
    return selector == Selector.LARGEST or high == low


def _too_much(group: McMemberRecord, port: PortView) -> Iterator[Cause]:
    """A port slower, or with a smaller MTU, than the group is refused (facts: SA, join mismatch)."""
    raise_it = "mend the link (cable, speed), or have the group made anew with less"
    if port.mtu and port.mtu < group.mtu:
        yield Cause(
            f"the port's MTU is {_mtu(port.mtu)}, the group's {_mtu(group.mtu)}", "ibv_devinfo", raise_it
        )
    if port.rate and _rank(port.rate) < _rank(group.rate):
        seen = f"the port's rate is {_rate(port.rate)}, the group's {_rate(group.rate)}"
        yield Cause(seen, "ibstat", raise_it)


def _rank(rate: int) -> int:
    return RATES.index(rate) if rate in RATES else -1


def _mtu(code: int) -> str:
    return f"{MTU_BYTES[code]} bytes" if code in MTU_BYTES else f"code {code}"


def _rate(code: int) -> str:
    return f"{GBPS[code]:g} Gbit/s" if code in GBPS else f"code {code}"
