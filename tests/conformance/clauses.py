"""Every normative sentence of the five source documents, with an id: the spine of the suite.

A test names the clauses it proves with the mark `clause(*ids)`; the report is a table of clause and provider.
"""

from __future__ import annotations

from typing import NamedTuple

DOCUMENTS = {
    "JEX": "rdma_join_multicast_ex(3)",
    "JM": "rdma_join_multicast(3)",
    "AT": "ibv_attach_mcast(3)",
    "LV": "rdma_leave_multicast(3)",
    "DT": "ibv_detach_mcast()",
}


class Clause(NamedTuple):
    """One sentence: its id, the document it stands in, what it says in short, and what proves it."""

    id: str
    document: str
    says: str
    proof: str


_ROWS = (
    (
        "JEX-1",
        "`comp_mask` is a bitwise OR of the mask enum; says which fields are valid",
        "ADDRESS missing -> EINVAL; JOIN_FLAGS missing -> EINVAL; a reserved bit -> ENOTSUP",
    ),
    (
        "JEX-2",
        "`join_flags` is a single flag",
        "FULLMEMBER 0, SENDONLY_FULLMEMBER 1 accepted; 2 and above -> EINVAL",
    ),
    (
        "JEX-3",
        "FULLMEMBER creates the group",
        "first member anywhere: the group exists afterwards, seen from another port",
    ),
    ("JEX-4", "FULLMEMBER may send to the group", "a message it sends arrives at another member"),
    ("JEX-5", "FULLMEMBER receives from the group", "a message another member sends arrives"),
    ("JEX-6", "SENDONLY_FULLMEMBER creates the group, may send", "as JEX-3/4"),
    ("JEX-7", "SENDONLY_FULLMEMBER does not receive", "nothing arrives, nothing is queued"),
    (
        "JEX-8",
        "send-only: the QP is not attached",
        "detach of that QP from the group -> EINVAL; attach list empty",
    ),
    (
        "JEX-9",
        "send-only on InfiniBand needs SM support, else the join fails",
        "SM without the capability bit: join fails and says so (kernels differ in how: facts: SA)",
    ),
    (
        "JEX-10",
        "send-only on RoCEv2 sends no IGMP; full member does",
        "membership report seen on the wire / in the snooping table for one, not for the other",
    ),
    ("JEX-11", "0, or -1 and errno", "every failing call carries its errno"),
    (
        "JEX-12",
        "the id must be bound to a device first",
        "join on an unbound id -> error, nothing left behind",
    ),
    (
        "JEX-13",
        "resolve_addr needs a route to the group unless a source is given",
        "no route, no source -> error; with a source -> works",
    ),
    (
        "JEX-14",
        "the user must leave, to release resources",
        "after leave the membership, the attachment and the group (if last) are gone",
    ),
    (
        "JEX-15",
        "with a QP on the id, it is attached when the event is *retrieved*",
        "before the event is retrieved no message is delivered; after it is, one is",
    ),
    (
        "JEX-16",
        "without a QP, the user must attach",
        "no delivery after the event until attach_mcast, then delivery",
    ),
    (
        "JEX-17",
        "the join context comes back in the event's private_data",
        "same object, for each of several joins",
    ),
    ("JM-1", "rdma_join_multicast = join_ex with FULLMEMBER", "same observable result as JEX-3..5"),
    ("JM-2", "joins and attaches an associated QP", "as JEX-15, through this call"),
    (
        "AT-1",
        "attaches the QP to the group with that MGID and MLID",
        "messages to that group arrive; to another group do not",
    ),
    (
        "AT-2",
        "returns 0 or the errno *value*",
        "value returned, not -1/errno (provider-internal; visible as the error's errno)",
    ),
    ("AT-3", "only UD QPs", "RC, UC -> EINVAL"),
    (
        "AT-4",
        "attached several times: still one copy of each message",
        "attach x3, send 10, receive exactly 10",
    ),
    (
        "AT-5",
        "to receive, a join must also have been sent to the SA",
        "attach without any join on that port: nothing is routed to it",
    ),
    (
        "LV-1",
        "leaves the group and detaches an associated QP",
        "no delivery after; a further detach -> EINVAL",
    ),
    (
        "LV-2",
        "leave before fully joined cancels the join",
        "no join event ever arrives; the group does not stay behind",
    ),
    (
        "LV-3",
        "messages may still be queued right after leaving",
        "messages received before the leave are still readable after it",
    ),
    ("LV-4", "destroying the id leaves all its groups", "all memberships gone, last-member groups gone"),
    ("LV-5", "errno says why", "never joined -> EADDRNOTAVAIL; second leave -> EADDRNOTAVAIL"),
    ("DT-1", "after detach this QP gets no copy", "as said; other QPs still do"),
    (
        "DT-2",
        "detach changes the local device only; the fabric still delivers until a leave is sent",
        "after detach the port is still a member at the SA / in the snooping table",
    ),
    (
        "DT-3",
        "must be called with the attributes of the attach",
        "same gid, other lid -> EINVAL; the attachment stands",
    ),
    ("DT-4", "other groups of the QP are not affected", "two groups, detach one, the other still delivers"),
    ("DT-5", "in any QP state", "RESET, INIT, RTR, RTS, SQD, ERR"),
    ("DT-6", "EINVAL: not a multicast gid; not a UD QP; not attached", "three tests"),
    (
        "DT-7",
        "ENOMEM: out of resources (as ibv_attach_mcast gives past the device's limits)",
        "past max_mcast_qp_attach / max_mcast_grp",
    ),
    ("DT-8", "ENOSYS: no multicast on this device", "a device without the capability"),
    (
        "DT-9",
        "attached twice by accident: detach once is enough",
        "one detach, then nothing arrives; a second -> EINVAL",
    ),
    (
        "DT-10",
        "the document's own example: MGID ff01:0:2:c985::, MLID 0xc001: attach, then detach",
        "both return 0",
    ),
)

CLAUSES = {id_: Clause(id_, DOCUMENTS[id_.split("-")[0]], says, proof) for id_, says, proof in _ROWS}
"""Id -> clause, in the order of the documents."""
