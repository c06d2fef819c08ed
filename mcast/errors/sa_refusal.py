"""Why the SA refused a join: compares the request with what the SA says of the group and of the port.

The kernel reports every refusal as EINVAL (SA-STATUS-1). A program that may ask the SA finds out more, by a
Get of the group's MCMemberRecord and of ClassPortInfo. Pure: records in, causes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mcast.errors.cause import Cause
from mcast.wire.addresses import Gid
from mcast.wire.mad import SEND_ONLY_FULL_MEMBER
from mcast.wire.mcmember import JoinState, McMask, McMemberRecord
from mcast.wire.partition import find_pkey, matching_pkeys
from mcast.wire.units import MTU, RATE, Selector, is_selected

_OTHER_GROUP = "take another group address, or have the group created again with the values of the request"


class PortView(NamedTuple):
    """The port that sent the request: its P_Keys; its MTU and rate as SA codes, 0 if unknown."""

    pkeys: tuple[int, ...]
    mtu: int = 0
    rate: int = 0


def refusal_causes(
    mask: int,
    asked: McMemberRecord,
    group: McMemberRecord | None,
    port: PortView,
    capability_mask2: int | None = None,
) -> tuple[Cause, ...]:
    """The reasons to refuse the request `asked` (whose valid fields are in `mask`); () if none can be seen.

    `group` is the group's record as the SA shows it to this port; None: there is no such group, or it is in a
    partition that the port is not in. `capability_mask2` is the SA's; None if it is not known.
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
    if mask & McMask.PKEY and find_pkey(port.pkeys, asked.pkey) is None:
        table = ", ".join(f"{pkey:#06x}" for pkey in port.pkeys if pkey)
        yield Cause(
            f"P_Key is {asked.pkey:#06x}, the port's table has {table or 'none'}",
            "cat /sys/class/infiniband/*/ports/*/pkeys/* | sort -u",
            "have the port put into the partition (partitions.conf of the SM), or bind to another port",
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
        same = mine in matching_pkeys(theirs) if field == "pkey" else mine == theirs
        if mask & bit and not same:
            shown = f"{name} is {form.format(mine)}, the group's is {form.format(theirs)}"
            yield Cause(shown, check, _OTHER_GROUP)
    for pair, name, field, unit in (
        (McMask.MTU | McMask.MTU_SELECTOR, "MTU", "mtu", MTU),
        (McMask.RATE | McMask.RATE_SELECTOR, "rate", "rate", RATE),
    ):
        selector, mine, theirs = (
            getattr(asked, f"{field}_selector"),
            getattr(asked, field),
            getattr(group, field),
        )
        if mask & pair == pair and not is_selected(selector, unit.rank[theirs], unit.rank[mine]):
            wanted = {Selector.GREATER: "more than ", Selector.LESS: "less than "}.get(selector, "")
            shown = f"{name} is {wanted}{unit.describe(mine)}, the group's is {unit.describe(theirs)}"
            yield Cause(shown, check, _OTHER_GROUP)


def _too_much(group: McMemberRecord, port: PortView) -> Iterator[Cause]:
    """A port that is slower than the group, or has a smaller MTU, is refused (SA-JOIN-6)."""
    raise_it = "repair the link (cable, speed), or have the group created again with less"
    for name, unit, mine, theirs, check in (
        ("MTU", MTU, port.mtu, group.mtu, "ibv_devinfo"),
        ("rate", RATE, port.rate, group.rate, "ibstat"),
    ):
        if mine and unit.rank[mine] < unit.rank[theirs]:
            seen = f"the port's {name} is {unit.describe(mine)}, the group's {unit.describe(theirs)}"
            yield Cause(seen, check, raise_it)
