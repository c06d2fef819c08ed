"""What an errno most likely means: (phase, errno) -> ranked causes, each with the next thing to do.

Data, not code: `McastError.causes` and the command's messages are made from this table.
"""

from __future__ import annotations

import errno as E
from enum import Enum
from typing import NamedTuple

ENOTSUPP = 524
"""The kernel's internal 'not supported'; it has no name in libc or Python (facts: kernel)."""


class Phase(Enum):
    """Where in the life of a group an error happened."""

    OPEN = "open"
    BIND = "bind"
    RESOLVE = "resolve"
    CREATE_QP = "create_qp"
    JOIN = "join"
    LEAVE = "leave"
    DESTROY = "destroy"
    ATTACH = "attach"
    DETACH = "detach"
    MODIFY = "modify"
    EVENT = "event"
    SEND = "send"
    RECV = "recv"
    REGISTER = "register"
    CLOSE = "close"


class Cause(NamedTuple):
    """One likely cause, and what to do about it."""

    why: str
    next_step: str


CAUSES: dict[tuple[Phase, int], tuple[Cause, ...]] = {
    (Phase.BIND, E.EADDRNOTAVAIL): (
        Cause("the address is on no local interface", "bind to an address that `ip addr` shows"),
    ),
    (Phase.BIND, E.EINVAL): (Cause("this port space cannot bind to an IP address", "use PortSpace.UDP"),),
    (Phase.BIND, E.ENODEV): (
        Cause("no RDMA device belongs to that address", "bind to an address that `mcast info` lists"),
    ),
    (Phase.RESOLVE, E.ENETUNREACH): (
        Cause("no route leads to the group", "give src=, or add a route: ip route add 239.0.0.0/8 dev DEV"),
    ),
    (Phase.RESOLVE, E.ETIMEDOUT): (
        Cause("nothing answered the resolution in time", "check the link of the port, then try again"),
    ),
    (Phase.CREATE_QP, E.EINVAL): (
        Cause("the QP type does not fit the port space", "UD goes with PortSpace.UDP, RC and UC with TCP"),
        Cause("the id has a QP already, or is bound to no device", "one QP an id; bind it first"),
    ),
    (Phase.CREATE_QP, E.ENOMEM): (
        Cause("a limit of the device or of locked memory", "ask for fewer receives; see `ulimit -l`"),
    ),
    (Phase.JOIN, E.EINVAL): (
        Cause("the id is not bound to a device", "bind_addr, or resolve_addr and fetch ADDR_RESOLVED"),
        Cause("the id is of a port space without UD", "create the id with PortSpace.UDP"),
        Cause("a field of the join is out of range", "use JoinAttrEx.full_member or .send_only"),
        Cause(
            "on InfiniBand the SA refused: Q_Key, P_Key, SL, MTU or rate differ from the group's, "
            "no MLID is left, or the SM lacks send-only support",
            "compare with `saquery -g` for that MGID",
        ),
    ),
    (Phase.JOIN, E.EOPNOTSUPP): (
        Cause("a reserved bit of comp_mask is set", "comp_mask takes ADDRESS and JOIN_FLAGS only"),
        Cause("the SM has no send-only support (kernels before 5.12)", "join as a full member"),
    ),
    (Phase.JOIN, ENOTSUPP): (
        Cause("RoCEv2 carries no IPv6 group and no raw MGID", "join an IPv4 group, 239.0.0.0/8 for example"),
    ),
    (Phase.JOIN, E.EADDRNOTAVAIL): (
        Cause(
            "the IPoIB broadcast group is unknown on this port",
            "bring the port's IPoIB interface up (ip link set ib0 up)",
        ),
    ),
    (Phase.JOIN, E.EADDRINUSE): (
        Cause("this id joined that address before", "leave it first, or join from another id"),
    ),
    (Phase.JOIN, E.ENOMEM): (
        Cause(
            "the group has all the QPs the device allows",
            "detach one, or share a QP; see max_mcast_qp_attach",
        ),
    ),
    (Phase.JOIN, E.ETIMEDOUT): (
        Cause("the SA did not answer", "check that a subnet manager runs (`sminfo`), then join again"),
    ),
    (Phase.JOIN, E.ENXIO): (Cause("the device was removed", "close the id; bind to another device"),),
    (Phase.JOIN, E.ENODEV): (Cause("the port has lost its interface", "check `rdma link`"),),
    (Phase.JOIN, E.ENETRESET): (
        Cause("the port or the SM restarted: the membership is gone", "leave, then join again"),
    ),
    (Phase.LEAVE, E.EADDRNOTAVAIL): (
        Cause(
            "the id has not joined exactly this address and port",
            "leave with the same McastAddress, port included",
        ),
        Cause("it was left before", "leave once for each join"),
    ),
    (Phase.LEAVE, E.ENXIO): (Cause("the device was removed", "destroy the id: nothing is left to leave"),),
    (Phase.ATTACH, E.EINVAL): (
        Cause("the QP is not UD", "create it with QpType.UD"),
        Cause("the GID is not a multicast GID", "take it from the join event's destination"),
        Cause("on InfiniBand the MLID is outside 0xC000..0xFFFE", "take it from the event's destination"),
    ),
    (Phase.ATTACH, E.EEXIST): (
        Cause("the QP is attached to this MGID with another MLID", "detach that pair first"),
    ),
    (Phase.ATTACH, E.ENOMEM): (
        Cause("max_mcast_qp_attach or max_mcast_grp is reached", "detach something; see Backend.devices()"),
    ),
    (Phase.ATTACH, E.ENOSYS): (Cause("the device has no multicast", "use another device"),),
    (Phase.DETACH, E.EINVAL): (
        Cause(
            "the QP is not attached with exactly this MGID and MLID",
            "use the pair of the attach; see attachments",
        ),
        Cause("the GID is not multicast, or the QP is not UD", "nothing can be attached there"),
    ),
    (Phase.DETACH, E.ENOSYS): (Cause("the device has no multicast", "use another device"),),
    (Phase.MODIFY, E.EINVAL): (
        Cause("the state machine has no such step", "RESET, INIT, RTR, RTS in turn; RESET and ERR from any"),
    ),
    (Phase.SEND, E.EMSGSIZE): (
        Cause(
            "UD carries at most one MTU in a message; a longer one would vanish",
            "split it: max_message_size says how much fits",
        ),
    ),
    (Phase.SEND, E.EINVAL): (
        Cause("the QP is not in RTS", "modify it to RTS"),
        Cause("the destination's port or GID does not exist here", "use the destination of the join event"),
    ),
    (Phase.SEND, E.EIO): (
        Cause(
            "the QP went into ERR; the status says why",
            "mend the cause, then reset() brings it back to RTS",
        ),
    ),
    (Phase.RECV, E.EIO): (
        Cause(
            "the QP went into ERR; the status says why",
            "mend the cause, then reset() brings it back to RTS",
        ),
    ),
    (Phase.DESTROY, E.EBUSY): (
        Cause("the QP is attached still", "leave its groups or detach it, then destroy"),
    ),
}


def likely_causes(phase: Phase, errno: int) -> tuple[Cause, ...]:
    """The ranked causes of `errno` in `phase`; empty where the errno says all there is to say."""
    return CAUSES.get((phase, errno), ())
