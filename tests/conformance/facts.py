"""What was measured on the real stack (Soft-RoCE, Linux 6.1 and 6.12), with an id for each row or sentence.

A test names the facts it shows with the mark `fact(*ids)`. A fact without one says in `beyond` why no
test through the contract can show it.
"""

from __future__ import annotations

from typing import NamedTuple

TOPICS = {
    "JOIN": "join",
    "EVENT": "the join event",
    "LEAVE": "leave and destroy",
    "SENDONLY": "send-only",
    "ATTACH": "attach and detach",
    "DATA": "data",
    "DEVICE": "device events",
    "FABRIC": "making the fabric",
    "PEERS": "other programs",
}


class Fact(NamedTuple):
    """One row or sentence: id, topic, what was seen, and why no test can show it ("" if one does)."""

    id: str
    topic: str
    says: str
    beyond: str = ""


_NO_WR = "the contract posts work requests itself: a user cannot make this one"
_RECIPE = "it tells how to make a fabric, which is a test bed's business"
_FIGURE = "it is a figure for benchmarks, not a rule"

_ROWS: tuple[tuple[str, str] | tuple[str, str, str], ...] = (
    ("K-JOIN-1", "comp_mask 0, 1, 2: EINVAL"),
    ("K-JOIN-2", "comp_mask with a reserved bit (4, 7, 8, 0xb, 0x80000003): EOPNOTSUPP, checked first"),
    ("K-JOIN-3", "join_flags 0 and 1: JOIN, same parameters for both"),
    ("K-JOIN-4", "join_flags 2, 3, 0xffff, 0x10000: EINVAL"),
    ("K-JOIN-5", "address NULL, AF_UNSPEC, AF_UNIX: EINVAL"),
    ("K-JOIN-6", "0.0.0.0, ::: EINVAL"),
    (
        "K-JOIN-7",
        "unicast, own address, 240.0.0.1, 255.255.255.255, with a QP: MULTICAST_ERROR, status -1, EINVAL; "
        "the IGMP reference stays until leave, which succeeds",
    ),
    ("K-JOIN-8", "unicast without a QP: JOIN, status 0"),
    ("K-JOIN-9", "224.0.0.1, 224.0.0.251, 232.1.1.1, 239.255.255.255: JOIN"),
    ("K-JOIN-10", "239.1.1.1 port 5000: JOIN; the port is part of the key that leave compares"),
    ("K-JOIN-11", "any IPv6 group, any AF_IB address: 524"),
    (
        "K-JOIN-12",
        "IPv4 group on an id bound to an IPv6 address: JOIN with the IPv6 sgid_index; sending kills the QP",
    ),
    (
        "K-JOIN-13",
        "PS_TCP id; unbound id; id bound to 0.0.0.0 or 127.0.0.1, which binds to no device: EINVAL",
    ),
    ("K-JOIN-14", "bind to an address that is not local: EADDRNOTAVAIL"),
    ("K-JOIN-15", "bind in PS_IPOIB: EINVAL; in PS_IB it takes the device, and the join is EINVAL"),
    ("K-JOIN-16", "after resolve_addr, ADDR_RESOLVED not fetched: EINVAL; works once fetched"),
    ("K-JOIN-17", "resolve_addr without source: no route ENETUNREACH; a route: that route's device"),
    ("K-JOIN-18", "link down: JOIN, status 0"),
    ("K-JOIN-19", "the id's address removed: MULTICAST_ERROR, status 0, no parameters; leave succeeds"),
    ("K-JOIN-20", "after DEVICE_REMOVAL: ENXIO"),
    ("K-JOIN-21", "one QP more than max_mcast_qp_attach: MULTICAST_ERROR, status -1, ENOMEM"),
    ("K-JOIN-22", "QP in ERR: JOIN, status 0"),
    (
        "K-JOIN-23",
        "a synchronous id keeps its event; leave then hangs",
        "the contract has no synchronous ids: every id reports to a channel",
    ),
    (
        "K-EVENT-1",
        "JOIN: qp_num 0xffffff, Q_Key 0x01234567, the context itself; "
        "dlid 0, sl 0, global, port 1, dgid ::ffff:a.b.c.d, hop limit 64",
    ),
    ("K-EVENT-2", "IGMP happens in the join call"),
    ("K-EVENT-3", "the attach happens when the event is fetched: 0 of 10 before, 10 of 10 after"),
    (
        "K-EVENT-4",
        "without a QP: the same event; a QP made later is not attached; "
        "a manual attach (dgid, lid 0) works, and leave detaches it",
    ),
    (
        "K-EVENT-5",
        "one address twice on one id: two events, one copy of a message, and the first leave detaches: "
        "guard G-JOIN refuses the second join",
    ),
    ("K-EVENT-6", "two ids on one device are counted: leaving one does not affect the other"),
    ("K-EVENT-7", "1000 groups on one id: no failure, events in call order"),
    (
        "K-LEAVE-1",
        "leave at once, or with the event unfetched: no event, ever; the descriptor is unreadable, IGMP gone",
    ),
    ("K-LEAVE-2", "leave with an event fetched and not acked blocks: here holding an event blocks nothing"),
    ("K-LEAVE-3", "destroy with an unfetched event: the event is discarded"),
    ("K-LEAVE-4", "leave: never joined, twice, another id's group, unbound, other port: EADDRNOTAVAIL"),
    ("K-LEAVE-5", "leave with a nonzero sin_zero: EADDRNOTAVAIL", "addresses here have no such field"),
    ("K-LEAVE-6", "leave of AF_UNSPEC or NULL: EINVAL"),
    ("K-LEAVE-7", "leave after MULTICAST_ERROR succeeds and releases the IGMP reference"),
    ("K-LEAVE-8", "leave after DEVICE_REMOVAL: ENXIO; destroy still works"),
    ("K-LEAVE-9", "leave with 10 completions not yet polled: all 10 can be; new messages 0"),
    ("K-LEAVE-10", "destroying a QP while attached: EBUSY; here closing it detaches it first"),
    (
        "K-LEAVE-11",
        "rdma_destroy_qp while joined: EBUSY inside, the QP leaks: here nothing is left behind",
    ),
    ("K-LEAVE-12", "destroying an id with joined groups: IGMP gone, and the attachment with the QP"),
    (
        "K-LEAVE-13",
        "process exit: IGMP gone",
        "a test cannot outlive its process; closing the backend, which every test ends with, stands for it",
    ),
    ("K-LEAVE-14", "the right order is ack, leave, destroy QP, destroy id"),
    ("K-SENDONLY-1", "the JOIN event is that of a full member; IGMP list and snooping table are unchanged"),
    ("K-SENDONLY-2", "nothing on the wire, where a full member sends an IGMP report"),
    ("K-SENDONLY-3", "the QP is not attached: receives 0 of 10, sends 10 of 10"),
    ("K-SENDONLY-4", "a QP that never joined can send too"),
    ("K-SENDONLY-5", "a send to an empty group completes with success"),
    (
        "K-ATTACH-1",
        "UD in RESET, INIT, RTR, RTS, ERR: both succeed; the attachment survives RESET, INIT, RTR",
    ),
    ("K-ATTACH-2", "RC, UC: both EINVAL"),
    ("K-ATTACH-3", "ff0e::1234, ff01:0:2:c985::: both succeed"),
    ("K-ATTACH-4", "fe80::1, ::, ::ffff:<unicast>: both EINVAL"),
    ("K-ATTACH-5", "any lid: both succeed with the same lid (Ethernet does not check it)"),
    (
        "K-ATTACH-6",
        "duplicate: succeeds, one copy of a message; the first detach ends delivery, the second is EINVAL",
    ),
    ("K-ATTACH-7", "one GID with a second lid: the kernel leaks the attachment: guard G-MLID refuses it"),
    ("K-ATTACH-8", "detach with another lid, never attached, twice: EINVAL, the attachment kept"),
    ("K-ATTACH-9", "a QP or a group past the device's limit: ENOMEM; after one detach it fits"),
    ("K-DATA-1", "two QPs, two devices: each gets every message; detaching one group leaves the other"),
    ("K-DATA-2", "a full member hears itself, and so do other members on the device"),
    (
        "K-DATA-3",
        "BLOCK_SELF_MCAST_LB: EOPNOTSUPP",
        "the contract has no such creation flag: from_self tells own messages",
    ),
    ("K-DATA-4", "attach without a join on the port: nothing arrives"),
    (
        "K-DATA-5",
        "wrong Q_Key: sending succeeds, nothing is received, one violation a message and attached QP",
    ),
    ("K-DATA-6", "larger than the MTU: reported as sent, nothing sent: guard G-MTU refuses it"),
    (
        "K-DATA-7",
        "receive too small: on 6.1 the QP goes into ERR, on 6.12 the message is dropped in silence",
    ),
    ("K-DATA-8", "empty receive queue: silent drop; later messages arrive"),
    ("K-DATA-9", "zero length and immediates are fine"),
    ("K-DATA-10", "a completion has 40 bytes and the payload, the GRH flag, the real source QP"),
    (
        "K-DATA-11",
        "a failed completion has only its id, status and QP number",
        "a failed completion is an exception here: QpError carries its status",
    ),
    ("K-DATA-12", "the GRH area names source and group; the payload begins after it"),
    ("K-DATA-13", "a reply is addressed to the source in the GRH"),
    ("K-DATA-14", "order is as sent; receives are used first in, first out"),
    ("K-DATA-15", "IPv4 group with an IPv6 source GID: the QP goes into ERR and stays there"),
    ("K-DATA-16", "own link down: the QP goes into ERR and stays there"),
    ("K-DATA-17", "own address removed: the QP goes into ERR and stays there"),
    ("K-DATA-18", "bad lkey or RDMA_WRITE: the QP goes into ERR and stays there", _NO_WR),
    (
        "K-DATA-19",
        "receive CQ overrun: the QP goes into ERR",
        "a provider sizes its CQ for its QP: a user cannot overrun it",
    ),
    (
        "K-DATA-20",
        "completion channel: one event per arm",
        "the contract has no completion channel: recv waits itself",
    ),
    ("K-DATA-21", "an address handle with is_global 0 or port 2: EINVAL; with an empty sgid: ENODATA"),
    ("K-DATA-22", "RC on PS_UDP, a second QP on an id: EINVAL"),
    ("K-DATA-23", "a PD of another device: EINVAL", "the contract has no PDs"),
    ("K-DATA-24", "not being root works", "who runs the suite is not the suite's to choose"),
    ("K-DEVICE-1", "device removed: DEVICE_REMOVAL, IGMP gone, no receive flushed"),
    ("K-DEVICE-2", "link down and up: no event; the membership is kept, traffic resumes"),
    ("K-DEVICE-3", "asynchronous PORT_ERR, PORT_ACTIVE", "the contract has no asynchronous device events"),
    ("K-DEVICE-4", "an address change makes no event"),
    (
        "K-DEVICE-5",
        "a MAC or MTU change makes no event; ADDR_CHANGE comes only on bond failover",
        "a test bed changes neither MAC nor MTU, and has no bonds",
    ),
    ("K-DEVICE-6", "100 joins: events in call order"),
    (
        "K-DEVICE-7",
        "destroying a channel does not wake a thread that waits in it: poll the descriptor",
        "the wait of the contract has a deadline of its own",
    ),
    (
        "K-DEVICE-8",
        "a full join enters the snooping table; members' ports get messages, others do not; "
        "leave removes it; send-only never appears",
    ),
    (
        "K-DEVICE-9",
        "the device leaks 33:33:... MAC entries",
        "MAC lists are no evidence; IGMP lists are",
    ),
    ("K-FABRIC-1", "errno 524 has no name in libc or Python"),
    ("K-FABRIC-2", "modules, bridge, veth pairs, accept_local and rp_filter, rxe links", _RECIPE),
    ("K-FABRIC-3", "packages, ways to boot, memory and CPUs, start-up times", _RECIPE),
    ("K-FABRIC-4", "deleting a device blocks until every verbs context is closed", _RECIPE),
    ("K-FABRIC-5", "a device in another network namespace receives nothing", _RECIPE),
    ("K-PEERS-1", "messages per second of C and pyverbs, 64 to 1024 bytes", _FIGURE),
    ("K-PEERS-2", "join, event and leave per second; round-trip times", _FIGURE),
    ("K-PEERS-3", "mckey's time; perftest's multicast mode does not work on rxe", _FIGURE),
    (
        "K-PEERS-4",
        "pyverbs: no event status, blocking calls hold the GIL, no attach or detach",
        "it describes another binding",
    ),
    ("K-PEERS-5", "UDP sockets, pyzmq and deques in one process, messages per second", _FIGURE),
)

FACTS = {row[0]: Fact(row[0], TOPICS[row[0].split("-")[1]], *row[1:]) for row in _ROWS}
"""Id -> fact, in the order of the sheet."""
