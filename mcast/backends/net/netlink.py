"""Asks the kernel by netlink: interfaces, multicast databases of bridges, RDMA devices, RDMA objects.

`ip link`, `bridge mdb show`, `rdma dev` and `rdma resource show` show the same, but starting a process costs
more than the question itself. The numbers are those of <linux/if_bridge.h>, <linux/rtnetlink.h> and
<rdma/rdma_netlink.h>.
"""

from __future__ import annotations

import errno as E
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

_ROUTE, _RDMA = 0, 20
"""Netlink families: NETLINK_ROUTE, NETLINK_RDMA."""
_DUMP, _ACK = 0x301, 0x5
"""Flags of a request: NLM_F_REQUEST with NLM_F_DUMP, or with NLM_F_ACK."""
_ERROR, _DONE = 2, 3
_HEADER = 16
"""Bytes of struct nlmsghdr."""
_GETLINK, _DELMDB, _GETMDB = 18, 85, 86
"""Requests: RTM_GETLINK, RTM_DELMDB, RTM_GETMDB."""
_LINK = struct.Struct("@BxHiII")
"""struct ifinfomsg: family, type, index, flags, change."""
_IFNAME, _IFLA_LINK, _LINKINFO, _SLAVE_KIND = 3, 5, 18, 4
_DEV_GET, _RES_GET, _GET_CHARDEV = (5 << 10 | command for command in (1, 9, 15))
"""Requests of the client RDMA_NL_NLDEV: RDMA_NLDEV_CMD_GET, _RES_GET, _GET_CHARDEV."""
_BRIDGE, _ENTRY = struct.Struct("@B3xI"), struct.Struct("@IBBH16sH2x")
"""struct br_port_msg: family, interface. struct br_mdb_entry: port, state, flags, VLAN, group, protocol."""
_SET_ENTRY = 1
_MDB, _MDB_ENTRY, _MDB_ENTRY_INFO = 1, 1, 1
_DEV_INDEX, _CHARDEV_TYPE, _CHARDEV_NAME, _DRIVER_ID = 1, 69, 70, 73
_DEV_NAME, _SUMMARY, _SUMMARY_ENTRY, _ENTRY_NAME, _ENTRY_CURR = 2, 15, 16, 17, 18
_PROTOCOLS: dict[int, tuple[type[IPv4Address | IPv6Address], int]] = {
    0x0800: (IPv4Address, 4),
    0x86DD: (IPv6Address, 16),
}
"""Ethernet type of a group -> its class of addresses, and the length of an address in bytes."""
_TYPE = 0x3FFF
"""The bits of an attribute's type, below its two flags."""


class SnoopingEntry(NamedTuple):
    """One entry of a bridge's multicast database.

    `bridge` sends `group` to its `port`, on the VLAN `vlan`.
    """

    bridge: str
    port: str
    group: IPv4Address | IPv6Address
    vlan: int = 0


class Link(NamedTuple):
    """An interface. `peer` is the number of a veth's other end, or of what the interface lies on; 0 if none.

    `is_bridge_port`  True if a bridge has it as a port
    """

    name: str
    peer: int
    is_bridge_port: bool


class RdmaDevice(NamedTuple):
    """An RDMA device of this network namespace.

    file       the name of its device file in /dev/infiniband, such as `uverbs0`; "" if it has none
    driver_id  its driver, by the numbers of `enum rdma_driver_id`; 0: not known
    """

    file: str = ""
    driver_id: int = 0


def snooping_table() -> list[SnoopingEntry]:
    """The IP groups in the multicast databases of all bridges of this network namespace.

    Raises OSError with the kernel's answer.
    """
    request = _BRIDGE.pack(socket.AF_BRIDGE, 0)
    return list(_snooping_entries(_ask(_ROUTE, _GETMDB, _DUMP, request)))


def links() -> dict[int, Link]:
    """Number -> interface, of this network namespace. Raises OSError with the kernel's answer."""
    found = {}
    for message in _ask(_ROUTE, _GETLINK, _DUMP, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        _, _, number, _, _ = _LINK.unpack_from(message)
        payload = message[_LINK.size :]
        fields = dict(_attributes(payload))
        peer = int.from_bytes(fields.get(_IFLA_LINK, b""), sys.byteorder)
        kinds = [_text(kind) for kind in _nested(payload, _LINKINFO, _SLAVE_KIND)]
        found[number] = Link(_text(fields.get(_IFNAME, b"")), peer, kinds == ["bridge"])
    return found


def rdma_devices() -> dict[str, RdmaDevice]:
    """Name -> RDMA device, of this network namespace alone. Raises OSError with the kernel's answer."""
    devices = [dict(_attributes(message)) for message in _ask(_RDMA, _DEV_GET, _DUMP, b"")]
    return {
        _text(device[_DEV_NAME]): _with_file(device[_DEV_INDEX])
        for device in devices
        if _DEV_NAME in device and _DEV_INDEX in device
    }


def _with_file(index: bytes) -> RdmaDevice:
    """Ask for the device file of the device with that index; without ib_uverbs there is none."""
    wanted = struct.pack("@HH", 4 + len(index), _DEV_INDEX) + index
    kind = b"uverbs\0"
    wanted += struct.pack("@HH", 4 + len(kind), _CHARDEV_TYPE) + kind.ljust(_aligned(len(kind)), b"\0")
    with suppress(OSError):
        for message in _ask(_RDMA, _GET_CHARDEV, _ACK, wanted):
            found = dict(_attributes(message))
            driver = int.from_bytes(found.get(_DRIVER_ID, b"")[:4], sys.byteorder)
            return RdmaDevice(_text(found.get(_CHARDEV_NAME, b"")), driver)
    return RdmaDevice()


def rdma_objects() -> dict[tuple[str, str], int]:
    """(device, kind of object: qp, cq, mr, pd, cm_id, ctx, srq) -> how many there are.

    Raises OSError with the kernel's answer.
    """
    return dict(_object_counts(_ask(_RDMA, _RES_GET, _DUMP, b"")))


def more_objects(
    before: Mapping[tuple[str, str], int], now: Mapping[tuple[str, str], int]
) -> tuple[str, ...]:
    """In words, of which objects there are more than `before`, but for contexts, which librdmacm keeps."""
    return tuple(
        f"{count - before.get((device, kind), 0)} {kind} on {device}"
        for (device, kind), count in now.items()
        if kind != "ctx" and count > before.get((device, kind), 0)
    )


def delete_entries(entries: Iterable[SnoopingEntry]) -> None:
    """Remove entries from their bridge's database, where they would stay until their members time out.

    An entry that the kernel does not remove is left to the caller, who looks again. Needs CAP_NET_ADMIN.
    """
    for one in entries:
        kind = next(kind for kind, (address, _) in _PROTOCOLS.items() if isinstance(one.group, address))
        with suppress(OSError):
            port, bridge = socket.if_nametoindex(one.port), socket.if_nametoindex(one.bridge)
            entry = _ENTRY.pack(port, 0, 0, one.vlan, one.group.packed, socket.htons(kind))
            attribute = struct.pack("@HH", 4 + len(entry), _SET_ENTRY) + entry
            list(_ask(_ROUTE, _DELMDB, _ACK, _BRIDGE.pack(socket.AF_BRIDGE, bridge) + attribute))


def _snooping_entries(messages: Iterator[bytes]) -> Iterator[SnoopingEntry]:
    """The entries in the answers to RTM_GETMDB, without those of interfaces that are gone meanwhile."""
    name_of = cache(socket.if_indextoname)  # a table of a thousand groups names the same few interfaces
    for message in messages:
        _, bridge = _BRIDGE.unpack_from(message)
        for entry in _nested(message[_BRIDGE.size :], _MDB, _MDB_ENTRY, _MDB_ENTRY_INFO):
            port, _, _, vlan, group, protocol = _ENTRY.unpack_from(entry)
            kind, length = _PROTOCOLS.get(socket.ntohs(protocol), (None, 0))
            if kind is not None:
                with suppress(OSError):  # one of the interfaces is gone meanwhile
                    names = name_of(bridge), name_of(port)
                    yield SnoopingEntry(*names, kind(group[:length]), vlan)


def _object_counts(messages: Iterator[bytes]) -> Iterator[tuple[tuple[str, str], int]]:
    """The counts in the answers to RDMA_NLDEV_CMD_RES_GET, of which each is about one device."""
    for message in messages:
        device = next(_text(value) for kind, value in _attributes(message) if kind == _DEV_NAME)
        for entry in _nested(message, _SUMMARY, _SUMMARY_ENTRY):
            fields = dict(_attributes(entry))
            yield (device, _text(fields[_ENTRY_NAME])), struct.unpack("@Q", fields[_ENTRY_CURR])[0]


def _ask(family: int, request: int, flags: int, payload: bytes) -> Iterator[bytes]:
    """The messages that answer a request, without their netlink headers. Raises OSError with the kernel's."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family) as kernel:
        kernel.send(struct.pack("@IHHII", _HEADER + len(payload), request, flags, 1, 0) + payload)
        while True:
            data = kernel.recv(1 << 18)
            while data:
                length, kind = struct.unpack("@IH", data[:6].ljust(6, b"\0"))
                if not _HEADER <= length <= len(data):
                    raise OSError(E.EBADMSG, f"netlink request {request}: the answer is cut off")
                if kind in (_ERROR, _DONE):
                    (status,) = struct.unpack("@i", data[_HEADER:length][:4].ljust(4, b"\0"))
                    if status < 0:
                        raise OSError(-status, f"netlink request {request}: {os.strerror(-status)}")
                    return
                yield data[_HEADER:length]
                data = data[_aligned(length) :]


def _nested(data: bytes, *path: int) -> Iterator[bytes]:
    """The values of all attributes of the first type, in them those of the second, and so on."""
    for kind, value in _attributes(data):
        if kind == path[0]:
            if len(path) == 1:
                yield value
            else:
                yield from _nested(value, *path[1:])


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("@HH", data)
        if length < 4:
            return
        yield kind & _TYPE, data[4:length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return length + 3 & ~3


def _text(value: bytes) -> str:
    return os.fsdecode(value.rstrip(b"\0"))
