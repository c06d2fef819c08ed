"""The causes of each errno: one row for each cause, the likeliest first. `mcast.errors.causes` reads them.

To add a cause, add a `Row` here, and in tests/errors/test_causes.py the simulated fabric that shows it, or
`only`.
"""

from __future__ import annotations

import errno as E

from mcast.errors.cause import ENOTSUPP, Cause, Phase, Row
from mcast.wire.kinds import LinkLayer

_IB, _ETH = LinkLayer.INFINIBAND, LinkLayer.ETHERNET
_ENDPOINT = "join"
"""The join of an Endpoint, which includes the calls and the event."""
_CALL = ("join_multicast", "join_multicast_ex", _ENDPOINT)
_EVENT = ("MULTICAST_ERROR", _ENDPOINT)

_REAL = "needs the real stack"
_MEMLOCK = "only the real stack locks memory"
_SERVED = "needs a served fabric"
_CLOSED_FIRST = "close and destroy detach first; by plain verbs"

ROWS: tuple[Row, ...] = (
    # --- in every phase
    Row(
        None,
        E.EBADF,
        Cause(
            "the object was closed or destroyed before",
            "print(object.closed)",
            "make a new one; the end of `with` closes, too",
        ),
        "mcast.api, Closed",
    ),
    Row(
        None,
        E.EBADF,
        Cause(
            "the object was opened before a fork, and is used in the child",
            "print(os.getpid())",
            "open the backend in the process that uses it; multiprocessing: start method 'spawn'",
        ),
        "docs/pitfalls.md, 18",
        only=_REAL,
    ),
    Row(
        None,
        E.EDEADLK,
        Cause(
            "a call without timeout waits for what nothing on this fabric will ever cause",
            "print(fabric.trace)",
            'give a timeout, or make the fabric with clock="wall" if another thread is to act',
        ),
        "mcast.backends.sim.clock",
    ),
    Row(
        None,
        E.ENOBUFS,
        Cause(
            "the kernel has no buffer left for this", "dmesg | tail; free -m", "free memory, then try again"
        ),
        "errno(3)",
        only=_REAL,
    ),
    # --- open
    Row(
        Phase.OPEN,
        E.ENODEV,
        Cause(
            "the connection manager has no device file, or the kernel no RDMA device",
            "mcast doctor",
            "load the modules: modprobe rdma_ucm ib_uverbs",
        ),
        "rdma_create_event_channel(3)",
        only=_REAL,
    ),
    Row(
        Phase.OPEN,
        E.EACCES,
        Cause(
            "this process may not open the files in /dev/infiniband",
            "ls -l /dev/infiniband",
            "give the process read and write access (docker: --device=/dev/infiniband)",
        ),
        "open(2)",
        only=_REAL,
    ),
    Row(
        Phase.OPEN,
        E.EPERM,
        Cause(
            "a device cgroup keeps the files in /dev/infiniband from this container",
            "ls -l /dev/infiniband",
            "start the container with --device=/dev/infiniband",
        ),
        "cgroups(7)",
        only=_REAL,
    ),
    Row(
        Phase.OPEN,
        E.EMFILE,
        Cause(
            "the process has all the file descriptors it may have",
            "ulimit -n",
            "raise the limit: ulimit -n 65536; or close channels and backends",
        ),
        "open(2)",
        only=_REAL,
    ),
    Row(
        Phase.OPEN,
        E.ENFILE,
        Cause(
            "the host has all the open files that it may have",
            "sysctl fs.file-nr",
            "raise the limit, as root: sysctl -w fs.file-max=1000000",
        ),
        "open(2)",
        only=_REAL,
    ),
    Row(
        Phase.OPEN,
        E.EAGAIN,
        Cause(
            "an rdma cgroup allows no further device handle",
            "cat /sys/fs/cgroup/$(cut -d: -f3 /proc/self/cgroup)/rdma.max",
            "raise hca_handle there",
        ),
        "kernel's cgroup-v2.rst, rdma",
        only=_REAL,
    ),
    Row(
        Phase.OPEN,
        E.EINVAL,
        Cause(
            "the words name no fault, or a field that the fault has not",
            "mcast sim ctl --help",
            "write the fault as the message says",
        ),
        "mcast.backends.sim.shared.control",
        calls=("ctl",),
        only=_SERVED,
    ),
    Row(
        Phase.OPEN,
        E.EBUSY,
        Cause(
            "this process taps the served fabric already",
            "print(backend.path)",
            "close the first tap, or tap from another process",
        ),
        "mcast.backends.sim.shared.tap",
        calls=("tap",),
        only=_SERVED,
    ),
    # --- bind
    Row(
        Phase.BIND,
        E.EADDRNOTAVAIL,
        Cause(
            "the address is on no local interface",
            "ip -br addr",
            "bind to an address that `mcast info` lists",
        ),
        "K-JOIN-14",
    ),
    Row(
        Phase.BIND,
        E.ENOSYS,
        Cause(
            "the device or its driver has no multicast",
            "mcast info",
            "use another device; Backend.devices() has the driver and the limits of each",
        ),
        "DT-8; mcast.backends.rdma.drivers",
        calls=("open_endpoint",),
    ),
    Row(
        Phase.BIND,
        E.EINVAL,
        Cause(
            "PortSpace.IPOIB binds on InfiniBand alone",
            "rdma link",
            "create the id with PortSpace.UDP",
        ),
        "K-JOIN-15",
        link_layer=_ETH,
    ),
    Row(
        Phase.BIND,
        E.EINVAL,
        Cause(
            "the id is bound, or being resolved, already",
            "print(cm_id.device)",
            "one id for one port: create another",
        ),
        "kernel's cma.c, rdma_bind_addr",
    ),
    Row(
        Phase.BIND,
        E.ENODEV,
        Cause(
            "no RDMA device belongs to that address",
            "rdma link",
            "bind to an address that `mcast info` lists",
        ),
        "kernel's cma.c",
        only=_REAL,
    ),
    # --- resolve
    Row(
        Phase.RESOLVE,
        E.ENETUNREACH,
        Cause(
            "no route leads to the group, and no source was given",
            "ip route get 239.1.1.1",
            "give src=, or add a route: ip route add 239.0.0.0/8 dev DEV",
        ),
        "JEX-13, K-JOIN-17",
    ),
    Row(
        Phase.RESOLVE,
        E.EADDRNOTAVAIL,
        Cause(
            "the source is on no local interface", "ip -br addr", "give an address that `mcast info` lists"
        ),
        "K-JOIN-14",
    ),
    Row(
        Phase.RESOLVE,
        E.EINVAL,
        Cause(
            "the id is resolved, or being resolved, already",
            "print(cm_id.device)",
            "resolve an id once; create another for another port",
        ),
        "kernel's cma.c, rdma_resolve_addr",
    ),
    Row(
        Phase.RESOLVE,
        E.ENODEV,
        Cause(
            "the route to the group leads over an interface without an RDMA device",
            "ip route get 239.1.1.1",
            "give src= with an address that `mcast info` lists",
        ),
        "kernel's cma.c",
        only=_REAL,
    ),
    Row(
        Phase.RESOLVE,
        E.EHOSTUNREACH,
        Cause(
            "the route to the group is a prohibition or a black hole",
            "ip route get 239.1.1.1",
            "delete the route: ip route del 239.0.0.0/8, or give src=",
        ),
        "ip-route(8), type unreachable",
        only=_REAL,
    ),
    Row(
        Phase.RESOLVE,
        E.ETIMEDOUT,
        Cause(
            "nothing answered the resolution in time",
            "rdma link",
            "bring the port's link up, then resolve again with a longer timeout",
        ),
        "rdma_resolve_addr(3)",
        only=_REAL,
    ),
    # --- create_qp
    Row(
        Phase.CREATE_QP,
        E.EINVAL,
        Cause(
            "the id is bound to no device",
            "print(cm_id.device)",
            "bind_addr first, or resolve_addr and fetch ADDR_RESOLVED",
        ),
        "mcast.api, CmId.create_qp",
    ),
    Row(
        Phase.CREATE_QP,
        E.EINVAL,
        Cause("the id has a QP already", "print(cm_id.qp)", "one QP an id: close it, or create another id"),
        "K-DATA-22",
    ),
    Row(
        Phase.CREATE_QP,
        E.EINVAL,
        Cause(
            "the QP type does not go with the port space",
            "print(init.qp_type)",
            "UD goes with PortSpace.UDP, RC and UC with PortSpace.TCP",
        ),
        "K-DATA-22",
    ),
    Row(
        Phase.CREATE_QP,
        E.EINVAL,
        Cause(
            "a queue is deeper than the device allows",
            "ibv_devinfo -v | grep max_qp_wr",
            "ask for at most DeviceInfo.max_qp_wr work requests",
        ),
        "ibv_create_qp(3)",
    ),
    Row(
        Phase.CREATE_QP,
        E.ENOENT,
        Cause(
            "the port's P_Key table lacks the partition of the id's address",
            "cat /sys/class/infiniband/*/ports/*/pkeys/* | sort -u",
            "have the port's GUID put into the partition (partitions.conf of the SM), or use another port",
        ),
        "SA-PKEY-4",
        link_layer=_IB,
    ),
    Row(
        Phase.CREATE_QP,
        E.ENOMEM,
        Cause(
            "the limit of locked memory is smaller than the QP's buffers",
            "ulimit -l",
            "raise the limit: ulimit -l unlimited (docker: --ulimit memlock=-1); or make the queues shorter",
        ),
        "docs/pitfalls.md, 19",
        only=_MEMLOCK,
    ),
    Row(
        Phase.CREATE_QP,
        E.ENOMEM,
        Cause(
            "the device has no QP or no CQ left",
            "rdma resource show",
            "close QPs, or use another device",
        ),
        "ibv_create_qp(3)",
        only=_REAL,
    ),
    *(
        Row(
            Phase.CREATE_QP,
            errno,
            Cause(
                "the device, or its driver, cannot keep a QP's own multicast from it",
                "print(init.block_loopback)",
                "leave out block_loopback, and skip messages with from_self; an Endpoint: loopback='filter'",
            ),
            "K-DATA-3",
            only=only,
        )
        for errno, only in ((E.EOPNOTSUPP, ""), (E.EINVAL, "some drivers of the real stack"))
    ),
    # --- join
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "the id is not bound to a device; 0.0.0.0 and 127.0.0.1 bind to none",
            "print(cm_id.device)",
            "bind_addr to a port's address, or resolve_addr and fetch ADDR_RESOLVED",
        ),
        "JEX-12, K-JOIN-13, K-JOIN-16",
        calls=_CALL,
    ),
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "the id is of a port space without UD", "print(port_space)", "create the id with PortSpace.UDP"
        ),
        "K-JOIN-13",
        calls=_CALL,
    ),
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "comp_mask or join_flags is none that exists",
            "print(attr)",
            "use JoinAttrEx.full_member or .send_only",
        ),
        "JEX-1, JEX-2, K-JOIN-1, K-JOIN-4",
        calls=("join_multicast_ex",),
    ),
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "the group is a unicast or the zero address, or of an unknown family",
            "mcast mgid ADDRESS",
            "take an address from 239.0.0.0/8",
        ),
        "G-GROUP, K-JOIN-5, K-JOIN-6, K-JOIN-7",
    ),
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "the SA refused: Q_Key, P_Key, SL, flow label, traffic class, MTU or rate are not the group's",
            "saquery -g",
            "join with the values of the group, or take another group address",
        ),
        "SA-JOIN-4, SA-JOIN-5, SA-JOIN-6",
        link_layer=_IB,
        status="REQ_INVALID",
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "the SA refused: this port is no member of the group's partition",
            "cat /sys/class/infiniband/*/ports/*/pkeys/* | sort -u",
            "have the port's GUID put into the partition (partitions.conf of the SM), or use another port",
        ),
        "SA-PKEY-1",
        link_layer=_IB,
        status="REQ_INVALID",
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "the SM does not know send-only full members",
            "saquery -c | grep -i CapabilityMask2",
            "join as a full member, or update the SM",
        ),
        "JEX-9, SA-JOIN-7",
        link_layer=_IB,
        status="REQ_INVALID",
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "the SA refused: no MLID is left for another group",
            "saquery -g | grep -c MLID",
            "leave groups that nobody needs, or let several applications share one",
        ),
        "SA-MLID-3",
        link_layer=_IB,
        status="NO_RESOURCES",
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "the SA refused the port's GID: it is not of this subnet",
            "ibaddr -g",
            "let the SM set the subnet prefix anew (restart the port), then join again",
        ),
        "SA-REQUEST-3",
        link_layer=_IB,
        status="INVALID_GID",
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.EINVAL,
        Cause(
            "the group does not exist, and the request names too little to create it",
            "saquery -g",
            "let a full member with the partition's values join first",
        ),
        "SA-CREATE-1",
        link_layer=_IB,
        status="INSUF_COMPS",
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.EOPNOTSUPP,
        Cause(
            "a reserved bit of comp_mask is set",
            "print(attr.comp_mask)",
            "comp_mask takes ADDRESS and JOIN_FLAGS only",
        ),
        "JEX-1, K-JOIN-2",
        calls=("join_multicast_ex",),
    ),
    Row(
        Phase.JOIN,
        E.EOPNOTSUPP,
        Cause(
            "the SM has no send-only support, and this kernel (before 5.12) asks it first",
            "saquery -c | grep -i CapabilityMask2",
            "join as a full member, or update the SM",
        ),
        "JEX-9, SA-ENTRY-3",
        link_layer=_IB,
        only="kernels before 5.12",
    ),
    Row(
        Phase.JOIN,
        E.ENOSYS,
        Cause(
            "librdmacm is older than 19 and has no rdma_join_multicast_ex",
            "ls -l /usr/lib/*/librdmacm.so.1",
            "update rdma-core, or join as a full member with join_multicast",
        ),
        "rdma_join_multicast_ex(3)",
        calls=("join_multicast_ex",),
        only=_REAL,
    ),
    Row(
        Phase.JOIN,
        E.ENOSYS,
        Cause(
            "the device is neither InfiniBand nor RoCE: iWARP has no multicast",
            "rdma link",
            "use another device",
        ),
        "SA-ENTRY-1",
        only=_REAL,
    ),
    Row(
        Phase.JOIN,
        ENOTSUPP,
        Cause(
            "RoCEv2 carries no IPv6 group and no raw MGID",
            "rdma link",
            "join an IPv4 group, from 239.0.0.0/8 for example",
        ),
        "K-JOIN-11",
        link_layer=_ETH,
        calls=_CALL,
    ),
    Row(
        Phase.JOIN,
        E.EADDRNOTAVAIL,
        Cause(
            "the IPoIB broadcast group is unknown on this port",
            "ip -br link show type ipoib",
            "bring the port's IPoIB interface up: ip link set ib0 up",
        ),
        "SA-PATH-1",
        link_layer=_IB,
        calls=_CALL,
    ),
    Row(
        Phase.JOIN,
        E.EADDRNOTAVAIL,
        Cause(
            "the endpoint is bound to an IPv6 address, and RoCE sends to an IPv4 group from an IPv4 address",
            "mcast info",
            "bind to an IPv4 address of the port; give it one first: ip addr add 10.0.0.1/24 dev DEV",
        ),
        "K-JOIN-12, K-DATA-15",
        link_layer=_ETH,
        calls=(_ENDPOINT,),
    ),
    Row(
        Phase.JOIN,
        E.EADDRINUSE,
        Cause(
            "this id joined that group before: the first leave would detach for both",
            "print(error.address)",
            "leave the group first, or join from another id",
        ),
        "G-JOIN, K-EVENT-5",
        calls=_CALL,
    ),
    Row(
        Phase.JOIN,
        E.ENOMEM,
        Cause(
            "the group has all the QPs that the device allows, or the device all its groups",
            "ibv_devinfo -v | grep max_mcast",
            "detach or leave one, or share a QP; Backend.devices() has the limits",
        ),
        "DT-7, K-JOIN-21",
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.ETIMEDOUT,
        Cause(
            "the SA did not answer",
            "sminfo",
            "start a subnet manager (opensm), or repair the path to it, then join again",
        ),
        "SA-STATUS-1",
        link_layer=_IB,
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.ENXIO,
        Cause("the device was removed", "rdma link", "close the id; bind another to a device that is there"),
        "K-JOIN-20",
    ),
    Row(
        Phase.JOIN,
        E.ENODEV,
        Cause(
            "the device was removed, and the endpoint waits for the device to come back",
            "rdma link",
            "bring the device back, or open an endpoint on another device",
        ),
        "mcast.endpoint.blocking, RejoinPolicy",
        calls=(_ENDPOINT,),
    ),
    Row(
        Phase.JOIN,
        E.ENODEV,
        Cause(
            "the port has lost its network interface",
            "rdma link",
            "bring the interface back into this network namespace, then join again",
        ),
        "SA-MAP-4",
        link_layer=_ETH,
        only=_REAL,
        calls=_CALL,
    ),
    Row(
        Phase.JOIN,
        E.EIO,
        Cause(
            "the address that the id is bound to was removed",
            "ip -br addr",
            "give the port its address back, leave, and join from a new id",
        ),
        "K-JOIN-19",
        link_layer=_ETH,
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.EIO,
        Cause(
            "the request to the SA could not be sent",
            "dmesg | tail",
            "check the port (ibstat), then leave and join again",
        ),
        "SA-STATUS-1",
        link_layer=_IB,
        only=_REAL,
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.EINTR,
        Cause(
            "the request to the SA was flushed: the port is going away",
            "dmesg | tail",
            "leave, and join again when the port is back",
        ),
        "SA-STATUS-1",
        link_layer=_IB,
        only=_REAL,
        calls=_EVENT,
    ),
    Row(
        Phase.JOIN,
        E.ENETRESET,
        Cause(
            "the port or the SM restarted, or the port's LID or P_Key changed: the membership is gone",
            "ibstat",
            "leave, then join again; an Endpoint does so by itself (RejoinPolicy)",
        ),
        "SA-RESET-1",
        link_layer=_IB,
        calls=_EVENT,
    ),
    # --- leave
    Row(
        Phase.LEAVE,
        E.EADDRNOTAVAIL,
        Cause(
            "the id has not joined exactly this address and port",
            "print(address)",
            "leave with the McastAddress of the join, port included",
        ),
        "LV-5, K-LEAVE-4",
    ),
    Row(
        Phase.LEAVE,
        E.EADDRNOTAVAIL,
        Cause("the group was left before", "cat /proc/net/igmp", "leave once for each join"),
        "LV-5, K-LEAVE-4",
    ),
    Row(
        Phase.LEAVE,
        E.EINVAL,
        Cause(
            "the address is of an unknown family",
            "print(address.family)",
            "leave with the join's McastAddress",
        ),
        "K-LEAVE-6",
    ),
    Row(
        Phase.LEAVE,
        E.ENXIO,
        Cause("the device was removed", "rdma link", "destroy the id: nothing is left to leave"),
        "K-LEAVE-8",
    ),
    Row(
        Phase.LEAVE,
        E.ENOENT,
        Cause("the kernel does not know the id any more", "rdma resource show cm_id", "destroy the id"),
        "SA-ENTRY-2",
        only=_REAL,
    ),
    # --- attach, detach
    Row(
        Phase.ATTACH,
        E.EINVAL,
        Cause("the QP is not UD", "print(qp.qp_type)", "create it with QpType.UD"),
        "AT-3, K-ATTACH-2",
    ),
    Row(
        Phase.ATTACH,
        E.EINVAL,
        Cause(
            "the GID is not a multicast GID",
            "mcast mgid ADDRESS",
            "take the GID from the join event: event.ud.destination.gid",
        ),
        "DT-6, K-ATTACH-4",
    ),
    Row(
        Phase.ATTACH,
        E.EINVAL,
        Cause(
            "the MLID is outside 0xC000..0xFFFE",
            "saquery -g",
            "take the MLID from the join event: event.ud.destination.dlid",
        ),
        "SA-ATTACH-2",
        link_layer=_IB,
    ),
    Row(
        Phase.ATTACH,
        E.EEXIST,
        Cause(
            "the QP is attached to this MGID with another MLID: the kernel would leak the attachment",
            "print(qp.attachments)",
            "detach that pair first",
        ),
        "G-MLID, K-ATTACH-7",
    ),
    Row(
        Phase.ATTACH,
        E.ENOMEM,
        Cause(
            "max_mcast_qp_attach or max_mcast_grp is reached",
            "ibv_devinfo -v | grep max_mcast",
            "detach something; Backend.devices() has the limits",
        ),
        "DT-7, K-ATTACH-9",
    ),
    Row(
        Phase.ATTACH,
        E.ENOSYS,
        Cause("the device has no multicast", "ibv_devinfo -v | grep max_mcast", "use another device"),
        "DT-8",
    ),
    Row(
        Phase.ATTACH,
        E.EOPNOTSUPP,
        Cause(
            "the device's driver has no multicast", "ibv_devinfo -v | grep max_mcast", "use another device"
        ),
        "SA-ATTACH-1",
        only=_REAL,
    ),
    Row(
        Phase.DETACH,
        E.EINVAL,
        Cause(
            "the QP is not attached with exactly this MGID and MLID, or was detached before",
            "print(qp.attachments)",
            "detach once, with the pair of the attach",
        ),
        "DT-3, DT-6, DT-9, K-ATTACH-8",
    ),
    Row(
        Phase.DETACH,
        E.EINVAL,
        Cause(
            "the GID is not multicast, or the QP is not UD",
            "print(qp.qp_type)",
            "nothing can be attached there: nothing is to be detached",
        ),
        "DT-6, K-ATTACH-2, K-ATTACH-4",
    ),
    Row(
        Phase.DETACH,
        E.ENOMEM,
        Cause("the host is out of memory", "free -m", "free some, then detach again"),
        "DT-7",
        only=_REAL,
    ),
    Row(
        Phase.DETACH,
        E.ENOSYS,
        Cause("the device has no multicast", "ibv_devinfo -v | grep max_mcast", "use another device"),
        "DT-8",
    ),
    # --- modify, destroy, close
    Row(
        Phase.MODIFY,
        E.EIO,
        Cause(
            "the device's driver reports a state that no queue pair has",
            "ibv_devinfo -v; ethtool -i INTERFACE",
            "reset() the QP; update the driver and the firmware",
        ),
        "QueuePair.state",
        calls=("state",),
        only="needs a driver that errs",
    ),
    Row(
        Phase.MODIFY,
        E.EINVAL,
        Cause(
            "the state machine has no such step",
            "print(qp.state)",
            "RESET, INIT, RTR, RTS in turn; RESET and ERR from any; reset() does it all",
        ),
        "IBA vol 1, 10.3.1",
    ),
    Row(
        Phase.MODIFY,
        E.EINVAL,
        Cause(
            "this kernel (6.12) refuses the step from SQD to RTS right after the one to SQD",
            "uname -r",
            "reset() brings the QP to RTS from any state",
        ),
        "K-DATA-25",
        link_layer=_ETH,
        only="Linux 6.12 with Soft-RoCE",
    ),
    Row(
        Phase.DESTROY,
        E.EBUSY,
        Cause(
            "the QP is attached still",
            "rdma resource show qp",
            "leave its groups or detach it, then destroy",
        ),
        "K-LEAVE-10, K-LEAVE-11",
        only=_CLOSED_FIRST,
    ),
    Row(
        Phase.CLOSE,
        E.EBUSY,
        Cause(
            "a QP that uses the protection domain is still there",
            "rdma resource show",
            "close the QPs and regions first",
        ),
        "K-LEAVE-11",
        only=_CLOSED_FIRST,
    ),
    # --- event
    Row(
        Phase.EVENT,
        E.ENODEV,
        Cause(
            "the device was removed, and every membership on it has ended",
            "rdma link",
            "destroy the id; join again from one on a device that is there",
        ),
        "K-DEVICE-1",
    ),
    Row(
        Phase.EVENT,
        E.ENETRESET,
        Cause(
            "the port's address moved to another link (ADDR_CHANGE): memberships stay with the old one",
            "cat /proc/net/bonding/*",
            "leave, then join again; an Endpoint does so by itself (RejoinPolicy)",
        ),
        "K-DEVICE-5",
    ),
    Row(
        Phase.EVENT,
        E.EADDRNOTAVAIL,
        Cause(
            "the address that the endpoint is bound to has gone from its port",
            "ip addr; mcast info",
            "give the port its address back: the endpoint joins again once it is there (RejoinPolicy)",
        ),
        "mcast.api, QueuePair.port_events",
        calls=("port_events",),
        only="an endpoint keeps it as the reason of what was lost",
    ),
    Row(
        Phase.EVENT,
        E.EIO,
        Cause(
            "the peer cannot be reached, or is gone",
            "rdma link",
            "check the link of both ports",
        ),
        "rdma_get_cm_event(3), UNREACHABLE",
        only="multicast has no peer: by other uses of the channel",
    ),
    # --- send, receive
    Row(
        Phase.SEND,
        E.EMSGSIZE,
        Cause(
            "UD carries at most one MTU in a message; a longer one would vanish",
            "ibv_devinfo | grep active_mtu; saquery MCMR: the group's MTU, on InfiniBand",
            "split the payload: max_message_size of the membership says how much fits",
        ),
        "G-MTU, K-DATA-6",
    ),
    Row(
        Phase.SEND,
        E.EINVAL,
        Cause("the QP is not in RTS", "print(qp.state)", "reset() brings it to RTS from any state"),
        "mcast.api, QueuePair.send",
    ),
    Row(
        Phase.SEND,
        E.EINVAL,
        Cause(
            "the destination's port or GID does not exist on this device",
            "print(destination)",
            "send to the destination of the join event: event.ud.destination",
        ),
        "K-DATA-21",
    ),
    Row(
        Phase.SEND,
        E.EINVAL,
        Cause(
            "the destination has no GRH, which RoCE always needs",
            "print(destination.is_global)",
            "send to the destination of the join event: event.ud.destination",
        ),
        "K-DATA-21",
        link_layer=_ETH,
    ),
    Row(
        Phase.SEND,
        E.EINVAL,
        Cause("the QP is not UD", "print(qp.qp_type)", "create it with QpType.UD"),
        "mcast.api, QueuePair.send",
    ),
    Row(
        Phase.SEND,
        E.EACCES,
        Cause(
            "the process has changed its user or its rights since RDMA was first used in it",
            "dmesg | grep 'changed security contexts'",
            "call setuid first, or use RDMA only in a process that has not changed them",
        ),
        "ib_safe_file_access in drivers/infiniband/core/rdma_core.h of Linux",
        only=_REAL,
    ),
    Row(
        Phase.SEND,
        E.ENODATA,
        Cause(
            "the source GID that the destination names has gone with its address",
            "rdma link; ip -br addr",
            "give the port its address back, or join again",
        ),
        "K-DATA-21",
    ),
    Row(
        Phase.SEND,
        E.ETIMEDOUT,
        Cause(
            "the send queue stayed full or halted for the whole timeout",
            "print(qp.state)",
            "give a longer timeout, or send less at a time; in SQD, go on with modify(RTS)",
        ),
        "mcast.api, QueuePair.send",
    ),
    *(
        Row(phase, E.EIO, cause, source, status=status, only=only)
        for phase in (Phase.SEND, Phase.RECV)
        for status, cause, source, only in (
            (
                "LOC_QP_OP_ERR",
                Cause(
                    "the device could not send or receive: link down, address removed, an IPv4 group from an "
                    "IPv6 source (Linux 6.1: also a receive that is too small)",
                    "mcast doctor",
                    "repair the link or the address, then reset()",
                ),
                "K-DATA-7, K-DATA-15, K-DATA-16, K-DATA-17",
                "",
            ),
            (
                "LOC_LEN_ERR",
                Cause(
                    "a message did not fit its receive or the MTU",
                    "print(qp.max_message_size)",
                    "leave QpInit.max_recv_size at one MTU, then reset()",
                ),
                "IBA vol 1, 11.6.2",
                "",
            ),
            (
                "LOC_PROT_ERR",
                Cause(
                    "memory was used that is not registered any more",
                    "print(region.closed)",
                    "keep a Region open while its buffer is in use, then reset()",
                ),
                "K-DATA-18; IBA vol 1, 11.6.2",
                "",
            ),
            (
                "WR_FLUSH_ERR",
                Cause(
                    "the QP was put into ERR, or its CQ overran, and all that was posted is flushed",
                    "print(qp.state)",
                    "find who called modify(ERR), then reset()",
                ),
                "K-DATA-19; IBA vol 1, 11.6.2",
                "",
            ),
            (
                "",
                Cause(
                    "the QP went into ERR and stays there; the status of the error says why",
                    "print(error.status)",
                    "repair the cause, then reset() brings the QP back to RTS",
                ),
                "K-DATA-15, K-DATA-16, K-DATA-17, K-DATA-18",
                "",
            ),
        )
    ),
    Row(
        Phase.RECV,
        E.ETIMEDOUT,
        Cause(
            "fewer members than asked for have joined yet",
            "mcast groups",
            "start the others, or ask ready() for fewer members",
        ),
        "mcast.endpoint.blocking, Membership.ready",
        calls=("ready",),
    ),
    Row(
        Phase.RECV,
        E.ETIMEDOUT,
        Cause(
            "the fabric does not deliver the group to them, or their answers to this port",
            "mcast doctor",
            "repair what the doctor names: IGMP snooping without a querier, a filter, the SM",
        ),
        "docs/pitfalls.md, 3 and 22",
        calls=("ready",),
    ),
    # --- register
    Row(
        Phase.RECV,
        E.EOPNOTSUPP,
        Cause(
            "messages arrive in the memory of another device, which the CPU cannot read",
            "print(message.device)",
            "use recv, and copy by that device's own means before the batch is released",
        ),
        "mcast.api, QueuePair.register_dmabuf",
        calls=("recv_one",),
    ),
    Row(
        Phase.REGISTER,
        E.EIO,
        Cause(
            "the QP is in ERR, where its receive memory stays as it is",
            "print(qp.state)",
            "reset() the QP, then register",
        ),
        "mcast.api, QueuePair.register",
    ),
    Row(
        Phase.REGISTER,
        E.EBUSY,
        Cause(
            "messages are queued or leased, so the receive memory is in use",
            "print(qp.counters)",
            "register receive memory before the QP joins, and release every batch",
        ),
        "G-RECV, QueuePair.register",
    ),
    Row(
        Phase.REGISTER,
        E.ENOMEM,
        Cause(
            "the limit of locked memory is smaller than the buffer",
            "ulimit -l",
            "raise the limit: ulimit -l unlimited (docker: --ulimit memlock=-1)",
        ),
        "docs/pitfalls.md, 19",
        only=_MEMLOCK,
    ),
    Row(
        Phase.REGISTER,
        E.EFAULT,
        Cause(
            "the buffer is no memory that can be locked: a mapped device or a truncated file",
            "cat /proc/self/maps",
            "register ordinary memory, a bytearray or a numpy array",
        ),
        "ibv_reg_mr(3)",
        only=_REAL,
    ),
    Row(
        Phase.REGISTER,
        E.EOPNOTSUPP,
        Cause(
            "the device, its driver or the kernel takes no DMA-BUF",
            "uname -r; modinfo mlx5_ib",
            "copy to host memory and register that",
        ),
        "ibv_reg_mr(3)",
        calls=("register_dmabuf",),
        only=_REAL,
    ),
    Row(
        Phase.REGISTER,
        E.ENOSYS,
        Cause(
            "this libibverbs has no ibv_reg_dmabuf_mr",
            "dpkg -l libibverbs1",
            "upgrade rdma-core to 34 or newer",
        ),
        "ibv_reg_mr(3)",
        calls=("register_dmabuf",),
        only=_REAL,
    ),
    Row(
        Phase.REGISTER,
        E.EBADF,
        Cause(
            "the descriptor of the DMA-BUF is closed",
            "ls -l /proc/self/fd",
            "keep the descriptor open until register_dmabuf has returned",
        ),
        "ibv_reg_mr(3)",
        calls=("register_dmabuf",),
        only=_REAL,
    ),
    Row(
        Phase.REGISTER,
        E.EINVAL,
        Cause(
            "the descriptor is no DMA-BUF, or the part is not inside it",
            "ls -l /proc/self/fd",
            "export the memory by its own library, and give that descriptor",
        ),
        "ibv_reg_mr(3)",
        calls=("register_dmabuf",),
        only=_REAL,
    ),
)
"""Every cause. Among the rows of one errno in one phase the likeliest comes first."""
