"""The script of the card: what a test lets it do, and what it says was done to it.

card = Card(build())                      # or the card that MCAST_LIBRDMACM names
card.ethernet(ports=2)                    # devices card0, card1 with 10.0.0.1 and 10.0.0.2
card.fail("ibv_create_cq", E.ENOMEM, nth=2)
card.hold(Stage.SEND)                     # completions of sends wait until they are released
...
assert card.reports() == () and card.leftovers() == ()
"""

from __future__ import annotations

import ctypes as c
import os
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum, IntFlag
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, NamedTuple

from mcast.api import CmEventType, Gid, PortEvent, PortState, WcStatus

_HEADER = (Path(__file__).parent / "csrc" / "card.h").read_text()
_ENUM = re.compile(r"enum (\w* ?)\{(.*?)\};", re.DOTALL)
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
_FIELD = re.compile(r"^\t(\w+) (\w+)((?:\[\w+\])*);", re.MULTILINE)
_TYPES: Mapping[str, Any] = {
    "char": c.c_char,
    "uint8_t": c.c_uint8,
    "uint16_t": c.c_uint16,
    "uint32_t": c.c_uint32,
    "uint64_t": c.c_uint64,
}


def enumerators() -> dict[str, dict[str, int]]:
    """The enums of card.h by their names; what has none is ""."""
    found: dict[str, dict[str, int]] = {}
    for name, body in _ENUM.findall(re.sub(r"/\*.*?\*/", "", _HEADER, flags=re.DOTALL)):
        members = [one.partition("=") for one in body.split(",") if one.strip()]
        found[name.strip()] = {
            member.strip(): int(value or place) for place, (member, _, value) in enumerate(members)
        }
    return found


_CONSTANTS = enumerators()[""]
GRH_BYTES = _CONSTANTS["GRH_BYTES"]


def _fields(name: str) -> tuple[tuple[str, Any], ...]:
    """Those of a struct of card.h, as ctypes takes them."""
    found = []
    for kind, field, sizes in _FIELD.findall(dict(_STRUCT.findall(_HEADER))[name]):
        shape = _TYPES[kind]
        for size in reversed(re.findall(r"\w+", sizes)):
            shape *= int(_CONSTANTS.get(size, size))
        found.append((field, shape))
    return tuple(found)


ETHERNET, INFINIBAND = 2, 1
"""enum: IBV_LINK_LAYER_ETHERNET and its like."""


class Stage(IntEnum):
    """Where a message and its completions may be kept."""

    WIRE = 0
    """Before the device reads the payload and sends it."""
    SEND = 1
    """Before the send is seen to be complete; the message has been delivered."""
    RECV = 2
    """Before a message that has arrived is seen by its receiver."""


class Grh(IntEnum):
    """Header in front of a payload that arrives."""

    AUTO = 0
    NONE = 1
    IPV4 = 2
    IPV6 = 3
    IPV4_WRONG = 4
    """An IPv4 header whose checksum is wrong."""
    IPV4_JUNK = 5
    """Like IPV4, with bytes in front that look like the start of an IPv6 header."""


class Clock(IntFlag):
    """Clock with which a device stamps completions."""

    OWN = 1
    OF_DAY = 2


class Blocking(IntEnum):
    """Behaviour of a device with IBV_QP_CREATE_BLOCK_SELF_MCAST_LB."""

    HONOURED = 0
    REFUSED = 1
    IGNORED = 2


class AsyncEvent(IntEnum):
    """enum ibv_event_type, but for those of a port: PortEvent."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    DEVICE_FATAL = 8


class Access(IntFlag):
    """enum ibv_access_flags."""

    LOCAL_WRITE = 1
    RELAXED_ORDERING = 1 << 20


class WcFlag(IntEnum):
    """enum ibv_wc_flags."""

    GRH = 1
    WITH_IMM = 2


NO_EVENT = -1
"""For `Card.answer`: nothing comes."""


class Port(c.Structure):
    _fields_ = _fields("card_port")


class Device(c.Structure):
    _fields_ = _fields("card_device")


class _Message(c.Structure):
    _fields_ = _fields("card_message")


class _Qp(c.Structure):
    _fields_ = _fields("card_qp")


class Qp(NamedTuple):
    """A queue pair as the card has it. `kept`: how much waits at each stage; pairs: of sends, of receives."""

    qp_num: int
    state: int
    kept: Mapping[Stage, int]
    receives: int
    attachments: int
    sent: int
    dropped: int
    moderation: tuple[tuple[int, int], tuple[int, int]]
    vectors: tuple[int, int]


class Leftover(NamedTuple):
    """An object that lives. `excused`: a destroy of it failed by the script, or others use it."""

    kind: str
    number: int
    excused: bool


def key(address: IPv4Address | IPv6Address | str | bytes) -> bytes:
    """An address or a GID in 16 bytes."""
    if isinstance(address, bytes):
        return address
    found = ip_address(address)
    return found.packed if found.version == 6 else bytes(10) + b"\xff\xff" + found.packed


def _own(count: int, address: object) -> Any:
    return None if address is None else (c.c_uint8 * count).from_buffer_copy(key(address))  # type: ignore[arg-type]


class Card:
    """One library, one card; its state is the library's."""

    def __init__(self, library: Path | str, sysfs: Path | None = None) -> None:
        """`sysfs`: a directory where the devices are written as in /sys/class/infiniband."""
        self.numbers: dict[str, int] = {}
        """The devices' numbers by their names."""
        self.sysfs: Path | None = sysfs
        self._lib = c.CDLL(str(library))
        for name in re.findall(r"\b(card_\w+)\(", _HEADER):
            getattr(self._lib, name)  # ctypes keeps it; where two threads had it do that, CPython 3.11 broke
        self._lib.card_count.restype = self._lib.card_access.restype = c.c_int64
        self._lib.card_call_name.restype = c.c_char_p
        self._lib.card_delay.argtypes = (c.c_uint32, c.c_int, c.c_int64)

    # --- devices ---

    def reset(self, usual: bool = False) -> None:
        """A new card without devices; `usual`: with the one that it has if nobody scripts it."""
        self._lib.card_reset(int(usual))
        self.numbers.clear()

    def add(self, *ports: Port, **fields: Any) -> int:
        """Add a device; the answer is its number. `fields` are those of Device."""
        usual: dict[str, Any] = {
            "max_qp_wr": 16384,
            "max_mcast_grp": 8192,
            "max_mcast_qp_attach": 56,
            "max_inline": 256,
            "max_send_sge": 4,
            "comp_vectors": 4,
            "has_cq_ex": 1,
            "has_modify_cq": 1,
            "has_gid_table": 1,
            "has_relaxed_ordering": 1,
            "has_dmabuf": 1,
            "clock_khz": 1_000_000,
            "clocks": Clock.OWN | Clock.OF_DAY,
        }
        device = Device(**{**usual, **fields, "ports": len(ports)})
        number = int(self._lib.card_add_device(c.byref(device), (Port * len(ports))(*ports)))
        assert number >= 0, "too many devices"
        name = os.fsdecode(device.name)
        self.numbers[name] = number
        for index, port in enumerate(ports, 1):
            self._write_sysfs(name, index, port)
        return number

    def _write_sysfs(self, name: str, number: int, port: Port) -> None:
        if self.sysfs is not None:
            home = self.sysfs / name / "ports" / str(number)
            home.mkdir(parents=True, exist_ok=True)
            (home / "link_layer").write_text("Ethernet" if port.link_layer == ETHERNET else "InfiniBand")

    def ethernet(self, ports: int = 2, **fields: Any) -> list[int]:
        """Devices card0, card1, ... with one port each, at 10.0.0.1, 10.0.0.2, ..."""
        return [
            self.add(ethernet_port(f"10.0.0.{number}"), name=b"card%d" % (number - 1), guid=number, **fields)
            for number in range(1, ports + 1)
        ]

    def infiniband(self, ports: int = 2, **fields: Any) -> list[int]:
        """Add a device with InfiniBand ports: LIDs 1, 2, ...; the addresses are those of IPoIB."""
        return [
            self.add(
                infiniband_port(f"10.0.0.{number}", number),
                name=b"card%d" % (number - 1),
                guid=number,
                **fields,
            )
            for number in range(1, ports + 1)
        ]

    def network(self, layer: str, ports: int, **fields: Any) -> list[int]:
        """`ethernet` for "roce", `infiniband` for "infiniband"."""
        return (self.infiniband if layer == "infiniband" else self.ethernet)(ports, **fields)

    def port(self, device: int, port: int = 1) -> Port:
        """A copy of the port as it is now."""
        found = Port()
        self._lib.card_get_port(device, port, c.byref(found))
        return found

    def set_port(self, device: int, port: int = 1, **fields: Any) -> None:
        """Change fields of a port; no event tells of it."""
        changed = self.port(device, port)
        for name, value in fields.items():
            assert hasattr(changed, name), name
            setattr(changed, name, value)
        self._lib.card_set_port(device, port, c.byref(changed))

    def remove(self, device: int, disassociated: bool = False) -> None:
        """The device goes: DEVICE_REMOVAL to its ids, and DEVICE_FATAL.

        `disassociated`: the kernel does not wait until all have let go. It answers EIO from now on, and
        poll(2) gives POLLERR for each completion channel.
        """
        self._lib.card_remove(device, int(disassociated))

    def break_channels(self, device: int) -> None:
        """poll(2) gives POLLERR for its completion channels from now on; no event says why."""
        self._lib.card_break_channels(device)

    def restore(self, device: int) -> int:
        """A removed device comes back under a new number."""
        number = int(self._lib.card_restore(device))
        assert number >= 0, "too many devices"
        name = next(name for name, old in self.numbers.items() if old == device)
        self.numbers[name] = number
        return number

    # --- what fails, and how a join is answered ---

    @property
    def calls(self) -> Iterator[str]:
        """The names that `fail` takes."""
        number = 0
        while name := self._lib.card_call_name(number):
            yield name.decode()
            number += 1

    def fail(self, call: str, error: int, nth: int = 1, times: int = 1, take: int = 0) -> None:
        """The `nth` call from now on fails with this errno, and the `times` - 1 after it (-1: all).

        A call of libibverbs returns the errno; of a negative one it returns -1 and sets errno, as in some
        drivers. A post takes `take` of its chain first. "send_completion" and "recv_completion" fail with a
        WcStatus.
        """
        assert not self._lib.card_fail(call.encode(), nth, times, int(error), take), f"no call {call!r}"

    def lie(self, about: str, value: int, nth: int = 1, times: int = 1) -> None:
        """The device says this number instead of the true one, as `fail` has its arguments.

        `about` is the rest of the name of a "lie_..." among the calls; `value` is of 32 bits with a sign.
        """
        self.fail(f"lie_{about}", value or _CONSTANTS["LIE_ZERO"], nth, times)

    def fail_no_more(self) -> None:
        """Forget what was to fail, and what was to be lied about."""
        self._lib.card_fail_no_more()

    def count(self, call: str) -> int:
        """Return the number of calls."""
        found = int(self._lib.card_count(call.encode()))
        assert found >= 0, f"no call {call!r}"
        return found

    def answer_join(self, event: CmEventType | int, status: int = 0, nth: int = 1) -> None:
        """The `nth` join from now on is answered by this event; NO_EVENT: by none."""
        assert not self._lib.card_answer(1, nth, int(event), status)

    def answer_resolve(self, event: CmEventType | int, status: int = 0, nth: int = 1) -> None:
        """Script the answer of rdma_resolve_addr, as `answer_join` does."""
        assert not self._lib.card_answer(0, nth, int(event), status)

    def stall(self, call: str, nth: int = 1) -> None:
        """The `nth` call from now on stands still until `go_on`, at most for 30 s, which is reported."""
        assert not self._lib.card_stall(call.encode(), nth), f"no call {call!r}"

    def stalled(self, call: str) -> int:
        """Return the number of these calls that are stalled now."""
        return int(self._lib.card_stalled(call.encode()))

    def go_on(self, call: str) -> None:
        """Those that stand still go on."""
        assert not self._lib.card_go_on(call.encode()), f"no call {call!r}"

    # --- what comes when ---

    def delay(self, stage: Stage, microseconds: float, qp_num: int = 0) -> None:
        """From now on, what passes this stage waits so long; of one queue pair, or of all."""
        assert not self._lib.card_delay(qp_num, int(stage), int(microseconds * 1000)), f"no QP {qp_num}"

    def hold(self, stage: Stage, qp_num: int = 0) -> None:
        """From now on, what passes this stage waits until it is released."""
        assert not self._lib.card_delay(qp_num, int(stage), -1), f"no QP {qp_num}"

    def release(self, stage: Stage, qp_num: int, index: int | None = None) -> int:
        """Let go what waits there: all in order, or the one at this place. Says how much waited."""
        found = int(self._lib.card_release(qp_num, int(stage), -1 if index is None else index))
        assert found >= 0, f"no QP {qp_num}"
        return found

    def release_at(self, call: str, stage: Stage, qp_num: int, nth: int = 1) -> None:
        """Release the work held there as the `nth` call from now on begins: before it, after all else."""
        assert not self._lib.card_release_at(call.encode(), nth, qp_num, int(stage)), f"no call {call!r}"

    def release_all(self) -> None:
        """No stage delays anything any more, and what waits goes on."""
        for stage in Stage:
            self.delay(stage, 0)
            for qp in self.qps():
                self.delay(stage, 0, qp.qp_num)
                self.release(stage, qp.qp_num)

    def inject(
        self,
        qp_num: int,
        payload: bytes,
        *,
        src_qp: int = 1,
        imm: int | None = None,
        grh: bytes | None = None,
        slid: int = 0,
        sl: int = 0,
        path_bits: int = 0,
        pkey_index: int = 0,
        status: WcStatus = WcStatus.SUCCESS,
    ) -> bool:
        """A message that nobody sent. `grh` None: there is none. Whether a receive was there for it."""
        message = _Message(
            status=status,
            src_qp=src_qp,
            imm=0xFFFFFFFF if imm is None else imm,  # what a device leaves where it says nothing
            slid=slid,
            sl=sl,
            path_bits=path_bits,
            pkey_index=pkey_index,
        )
        message.wc_flags = (WcFlag.GRH if grh is not None else 0) | (
            WcFlag.WITH_IMM if imm is not None else 0
        )
        message.grh = (c.c_uint8 * GRH_BYTES)(*(grh or b""))
        found = int(self._lib.card_inject(qp_num, c.byref(message), payload, len(payload)))
        assert found >= 0, f"no QP {qp_num}"
        return found == 0

    # --- events ---

    def event(
        self,
        kind: CmEventType | int,
        status: int = 0,
        address: IPv4Address | IPv6Address | str | None = None,
        group: IPv4Address | IPv6Address | str | bytes | None = None,
    ) -> int:
        """A communication event for each id that is bound to the address (None: each id).

        Multicast events come for each membership of these ids, or for that of one group. Says how many came.
        """
        return int(self._lib.card_cm_event(_own(16, address), int(kind), status, _own(16, group)))

    def port_event(self, device: int, kind: PortEvent | AsyncEvent, port: int = 1) -> None:
        """An asynchronous event of a port, or DEVICE_FATAL. ERR takes the port down, ACTIVE up."""
        self._lib.card_port_event(device, port, int(kind))

    def qp_event(self, qp_num: int, kind: AsyncEvent) -> None:
        """An asynchronous event of a queue pair. QP_FATAL puts the queue pair into ERR."""
        assert not self._lib.card_qp_event(qp_num, 0, int(kind)), f"no QP {qp_num}"

    def cq_event(self, qp_num: int, receives: bool, kind: AsyncEvent = AsyncEvent.CQ_ERR) -> None:
        """An asynchronous event of a queue pair's completion queue: of receives, or of sends."""
        assert not self._lib.card_qp_event(qp_num, 2 if receives else 1, int(kind)), f"no QP {qp_num}"

    # --- what there is ---

    def qps(self) -> tuple[Qp, ...]:
        """The queue pairs, in the order they were made."""
        room = (_Qp * 256)()
        found = room[: self._lib.card_qps(room, len(room))]
        return tuple(
            Qp(
                one.qp_num,
                one.state,
                dict(zip(Stage, one.kept, strict=True)),
                one.receives,
                one.attachments,
                one.sent,
                one.dropped,
                (tuple(one.moderation[0]), tuple(one.moderation[1])),
                tuple(one.vectors),
            )
            for one in found
        )

    def qp(self, qp_num: int) -> Qp:
        """The queue pair of that number."""
        return next(qp for qp in self.qps() if qp.qp_num == qp_num)

    def access(self, lkey: int) -> Access:
        """Return the access of the device to the memory of that key."""
        found = int(self._lib.card_access(lkey))
        assert found >= 0, f"no memory has the key {lkey}"
        return Access(found)

    def last_rate(self) -> int:
        """The static rate (ibv_rate) of the last address handle that was made."""
        return int(self._lib.card_last_rate())

    def reports(self) -> tuple[str, ...]:
        """Return the uses that real libraries punish: use after destroy, events not acked, and so on."""
        return tuple(self._text(self._lib.card_reports).splitlines())

    def leftovers(self) -> tuple[Leftover, ...]:
        """Return the objects that were made and not destroyed; librdmacm's own contexts do not count."""
        lines = (line.split("|") for line in self._text(self._lib.card_leftovers).splitlines())
        return tuple(
            Leftover(kind, int(number), refused + uses != "00") for kind, number, refused, uses in lines
        )

    def _text(self, call: Any) -> str:
        room = c.create_string_buffer(1 << 16)
        call(room, len(room))
        return room.value.decode()


def ethernet_port(*addresses: str, **fields: Any) -> Port:
    """A RoCE port with these addresses, which are its GIDs."""
    usual = {
        "link_layer": ETHERNET,
        "state": int(PortState.ACTIVE),
        "active_mtu": 3,
        "max_mtu": 5,
        "active_speed": 32,
        "active_width": 1,
        "group_hop_limit": 1,
    }
    port = Port(**{**usual, **fields})
    port.pkeys[0] = 0xFFFF
    for index, address in enumerate(addresses):
        port.addresses[index] = port.gids[index] = _own(16, address)
    return port


def infiniband_port(address: str, lid: int, **fields: Any) -> Port:
    """An InfiniBand port; the address is that of its IPoIB interface."""
    usual = {
        "link_layer": INFINIBAND,
        "state": int(PortState.ACTIVE),
        "active_mtu": 4,
        "max_mtu": 5,
        "group_mtu": 4,
        "active_speed": 32,
        "active_width": 2,
        "lid": lid,
        "sm_lid": 1,
        "group_qkey": 0x0B1B,
    }
    port = Port(**{**usual, **fields})
    port.pkeys[0] = 0xFFFF
    port.gids[0] = _own(16, bytes(Gid(bytes.fromhex("fe80000000000000") + lid.to_bytes(8, "big"))))
    port.addresses[0] = _own(16, address)
    return port


def addresses_of(port: Port) -> tuple[IPv4Address | IPv6Address, ...]:
    """The addresses that may be bound to it."""
    found = (IPv6Address(bytes(one)) for one in port.addresses if any(one))
    return tuple(one.ipv4_mapped or one for one in found)
