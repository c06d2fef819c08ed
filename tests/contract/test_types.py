"""Wrong types are refused before any effect: each argument of each call, alike on every provider."""

from __future__ import annotations

import enum
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from ipaddress import IPv4Address
from typing import Any

import numpy as np
import pytest

from mcast import CqModeration, RejoinPolicy, open_endpoint
from mcast.api import (
    Backend,
    Batch,
    Capability,
    CmId,
    CompMask,
    Destination,
    DeviceRegion,
    EventChannel,
    JoinAttrEx,
    JoinFlag,
    McastAddress,
    QpInit,
    QpState,
    QpType,
    QueuePair,
    Region,
)

from ..card.ends import BOUND, GROUP, End
from ..networks import KINDS, SHARED

EVERYWHERE = pytest.mark.parametrize("network", [*KINDS, *SHARED], indirect=True)
OTHER = "239.9.9.9"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Index:
    """Not an int, but may stand for one."""

    def __index__(self) -> int:
        return 1


class Flagged(int):
    """A subclass of int."""


HUGE = 10**5000
"""More digits than Python prints."""
NO_NUMBER: dict[str, object] = {
    "float": 1.0,
    "text": "1",
    "bytes": b"1",
    "bool": True,
    "none": None,
    "list": [1],
    "complex": 1j,
    "decimal": Decimal(1),
    "fraction": Fraction(1),
    "object": object(),
    "np.float": np.float64(1),
    "np.bool": np.bool_(True),
    "np.array": np.array([1, 2]),
}
NUMBERS: dict[str, Any] = {
    "np.int64": np.int64(1),
    "np.uint8": np.uint8(1),
    "IntEnum": Number.ONE,
    "subclass": Flagged(1),
    "index": Index(),
}
NO_TIME_OF_VALUES = {
    name: NO_NUMBER[name] for name in ("text", "bytes", "bool", "list", "complex", "object", "np.array")
} | {"nan": float("nan")}
NO_TIME = NO_TIME_OF_VALUES | {
    "np.bool": NO_NUMBER["np.bool"],
    "signaling nan": Decimal("sNaN"),
    "np.complex": np.complex64(1),
    "np.flags": np.array(True),
    "np.timedelta": np.timedelta64(1, "s"),
}
TIMES: dict[str, Any] = {
    "np.float32": np.float32(0.001),
    "np.int64": np.int64(0),
    "decimal": Decimal("0.001"),
    "fraction": Fraction(1, 1000),
}
NO_FLAG = {name: one for name, one in NO_NUMBER.items() if name != "bool"} | {"int": 1}
NO_ADDRESS = {name: one for name, one in NO_NUMBER.items() if name != "none"} | {"int": 1, "none ": None}
NO_TEXT = {name: one for name, one in NO_ADDRESS.items() if name != "text"} | {
    "address": IPv4Address("10.0.0.1")
}
NO_STATE: dict[str, object] = {**NO_NUMBER, "int": 3, "name": "RTS", "other": QpType.UD}
NO_SPACE: dict[str, object] = {**NO_NUMBER, "int": 0x111, "other": QpType.UD}
NO_OBJECT: dict[str, object] = {**NO_NUMBER, "int": 1, "dict": {}, "zero": 0, "empty": ""}


def without_none(values: Mapping[str, object]) -> dict[str, object]:
    """The values for an argument that may be None."""
    return {name: one for name, one in values.items() if one is not None}


def without_bytes(values: Mapping[str, object]) -> dict[str, object]:
    return {name: one for name, one in values.items() if not isinstance(one, bytes)}


def out_of(*bounds: int) -> dict[str, object]:
    return {f"{bound:#x}"[:12]: bound for bound in (*bounds, -HUGE, HUGE)}


@dataclass
class Site:
    """Objects that the calls are made on, and the state that may not change."""

    backend: Backend
    end: End
    to: Destination
    fd: int

    @property
    def qp(self) -> Any:
        return self.end.qp

    @property
    def id(self) -> Any:
        return self.end.id

    def census(self) -> tuple[object, ...]:
        """All state that a call could have changed, as a program sees it."""
        qp = self.end.qp
        return (
            qp.state,
            dict(qp.attachments),
            qp.counters,
            self.end.channel.pending,
            self.id.device,
            self.id.qp is qp,
            self.backend.groups() if Capability.GROUP_TABLE in self.backend.capabilities else None,
        )


Call = Callable[[Site, Any], object]


@dataclass(frozen=True)
class Row:
    """An argument of a call: what it refuses, and how the call is made with it."""

    call: Call
    refused: Mapping[str, object]
    taken: Mapping[str, Any] = None  # type: ignore[assignment]


ROWS: dict[str, Row] = {
    "port_counters device": Row(lambda s, x: s.backend.port_counters(x), NO_TEXT),
    "port_counters port_num": Row(
        lambda s, x: s.backend.port_counters("card0", x), {**NO_NUMBER, **out_of(0, 256)}, NUMBERS
    ),
    "suspicions quiet": Row(lambda s, x: s.backend.suspicions(x), {**NO_TIME, "none": None}, TIMES),
    "create_id port_space": Row(lambda s, x: s.end.channel.create_id(x), NO_SPACE),
    "get_event timeout": Row(lambda s, x: s.end.channel.get_event(x), NO_TIME, TIMES),
    "bind_addr src": Row(lambda s, x: s.id.bind_addr(x), NO_ADDRESS),
    "resolve_addr dst": Row(lambda s, x: s.id.resolve_addr(x), NO_ADDRESS),
    "resolve_addr src": Row(lambda s, x: s.id.resolve_addr(GROUP, x), without_none(NO_ADDRESS)),
    "resolve_addr timeout": Row(
        lambda s, x: s.id.resolve_addr(GROUP, "10.0.0.1", x), {**NO_TIME, "none": None}
    ),
    "create_qp init": Row(lambda s, x: s.id.create_qp(x), without_none(NO_OBJECT)),
    "join_multicast addr": Row(lambda s, x: s.id.join_multicast(x), NO_ADDRESS),
    "join_multicast_ex attr": Row(lambda s, x: s.id.join_multicast_ex(x), {**NO_OBJECT, "address": OTHER}),
    "join_multicast_ex comp_mask": Row(
        lambda s, x: s.id.join_multicast_ex(raw(comp_mask=x)), {**NO_NUMBER, **out_of(-1, 1 << 32)}
    ),
    "join_multicast_ex join_flags": Row(
        lambda s, x: s.id.join_multicast_ex(raw(join_flags=x)), {**NO_NUMBER, **out_of(-1, 1 << 32)}
    ),
    "leave_multicast addr": Row(lambda s, x: s.id.leave_multicast(x), NO_ADDRESS),
    "modify state": Row(lambda s, x: s.qp.modify(x), NO_STATE),
    "attach_mcast gid": Row(lambda s, x: s.qp.attach_mcast(x, 0xC001), {**NO_ADDRESS, "int": 1}),
    "attach_mcast lid": Row(
        lambda s, x: s.qp.attach_mcast(s.to.gid, x), {**NO_NUMBER, "near": 49153.5, **out_of(-1, 1 << 16)}
    ),
    "detach_mcast gid": Row(lambda s, x: s.qp.detach_mcast(x, 0xC001), NO_ADDRESS),
    "detach_mcast lid": Row(
        lambda s, x: s.qp.detach_mcast(s.to.gid, x), {**NO_NUMBER, **out_of(-1, 1 << 16)}
    ),
    "max_message_to destination": Row(lambda s, x: s.qp.max_message_to(x), NO_OBJECT),
    "send destination": Row(lambda s, x: s.qp.send(x, [b"x"]), NO_OBJECT),
    "send batch": Row(
        lambda s, x: s.qp.send(s.to, x), {"text": "x", "none": None, "int": 1, "float": 1.5, "bytes": b"x"}
    ),
    "send imm": Row(
        lambda s, x: s.qp.send(s.to, [b"x"], x), without_none({**NO_NUMBER, **out_of(-1, 1 << 32)}), NUMBERS
    ),
    "send timeout": Row(lambda s, x: s.qp.send(s.to, [b"x"], None, x), NO_TIME, TIMES),
    "send_one destination": Row(lambda s, x: s.qp.send_one(x, b"x"), NO_OBJECT),
    "send_one imm": Row(
        lambda s, x: s.qp.send_one(s.to, b"x", x), without_none({**NO_NUMBER, **out_of(-1, 1 << 32)}), NUMBERS
    ),
    "send_one timeout": Row(lambda s, x: s.qp.send_one(s.to, b"x", None, x), NO_TIME, TIMES),
    "flush timeout": Row(lambda s, x: s.qp.flush(x), NO_TIME, TIMES),
    "recv max": Row(
        lambda s, x: s.qp.recv(x, 0).release(),
        {**NO_NUMBER, "0": 0, "-1": -1, "-huge": -HUGE},
        {**NUMBERS, "huge": HUGE, "2**31": 1 << 31, "2**32": 1 << 32, "2**64": 1 << 64},
    ),
    "recv timeout": Row(lambda s, x: s.qp.recv(1, x).release(), NO_TIME, TIMES),
    "recv events": Row(lambda s, x: s.qp.recv(1, 0, x).release(), NO_FLAG, {"True": True, "False": False}),
    "recv_one timeout": Row(lambda s, x: s.qp.recv_one(x), NO_TIME, TIMES),
    "register buffer": Row(
        lambda s, x: s.qp.register(x), {"text": "x", "none": None, "int": 1, "float": 1.5}
    ),
    "register recv_slot": Row(
        lambda s, x: s.qp.register(bytearray(64), x),
        without_none({**NO_NUMBER, "half": 0.5, "sixty": 60.0, **out_of(0, -1, 65)}),
        NUMBERS,
    ),
    "register relaxed_ordering": Row(lambda s, x: s.qp.register(b"x", relaxed_ordering=x), NO_FLAG),
    "register constant": Row(lambda s, x: s.qp.register(b"x", constant=x), NO_FLAG),
    "register_dmabuf fd": Row(lambda s, x: s.qp.register_dmabuf(x, 64), {**NO_NUMBER, **out_of(-1, 1 << 31)}),
    "register_dmabuf nbytes": Row(
        lambda s, x: s.qp.register_dmabuf(s.fd, x), {**NO_NUMBER, **out_of(0, -1, 1 << 63)}, NUMBERS
    ),
    "register_dmabuf offset": Row(
        lambda s, x: s.qp.register_dmabuf(s.fd, 64, x), {**NO_NUMBER, **out_of(-1, (1 << 63) - 1)}, NUMBERS
    ),
    "register_dmabuf recv_slot": Row(
        lambda s, x: s.qp.register_dmabuf(s.fd, 64, 0, x),
        without_none({**NO_NUMBER, **out_of(0, 65)}),
        NUMBERS,
    ),
    "register_dmabuf relaxed_ordering": Row(
        lambda s, x: s.qp.register_dmabuf(s.fd, 64, relaxed_ordering=x), NO_FLAG
    ),
    "DeviceRegion.at offset": Row(
        lambda s, x: s.qp.register_dmabuf(s.fd, 64).at(x, 1), {**NO_NUMBER, **out_of(-1, 64)}, NUMBERS
    ),
    "DeviceRegion.at nbytes": Row(
        lambda s, x: s.qp.register_dmabuf(s.fd, 64).at(0, x), {**NO_NUMBER, **out_of(-1, 65)}, NUMBERS
    ),
    "send_one payload": Row(lambda s, x: s.qp.send_one(s.to, x), {"text": "x", "none": None, "int": 1}),
    "Batch.count_from source": Row(
        lambda s, x: received(s, lambda b: b.count_from(x, 1)), without_bytes(NO_ADDRESS)
    ),
    "Batch.count_from src_qp": Row(
        lambda s, x: received(s, lambda b: b.count_from(s.to.gid, x)),
        {**NO_NUMBER, **out_of(-1, 1 << 32)},
        NUMBERS,
    ),
}


def raw(**fields: object) -> JoinAttrEx:
    usual: dict[str, Any] = {
        "comp_mask": CompMask.ADDRESS | CompMask.JOIN_FLAGS,
        "join_flags": JoinFlag.FULLMEMBER,
        "addr": McastAddress.of(OTHER),
    }
    return JoinAttrEx.model_construct(**(usual | fields))


def received(site: Site, read: Callable[[Batch], object]) -> object:
    """Return the result of reading a batch with a message; the batch is received anew for each."""
    site.qp.send_one(site.to, b"x")
    with site.qp.recv(1, BOUND) as batch:
        return read(batch)


@pytest.fixture
def site(backend: Backend) -> Any:
    fd = os.memfd_create("device")
    os.truncate(fd, 4096)
    end = End(backend)
    yield Site(backend, end, end.join(), fd)
    os.close(fd)


def outcome(call: Call, site: Site, given: object) -> type[BaseException]:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(site, given)
    text = str(caught.value)
    assert len(text) < 400
    return caught.type


EXPECTED: dict[tuple[str, str], type[BaseException]] = {}
"""Row and value -> the class of the error on the first provider that was tried."""


@EVERYWHERE
@pytest.mark.parametrize("name", ROWS)
def test_wrong_arguments_change_nothing(site: Site, name: str) -> None:
    """The class of each error is the same on every provider, and nothing that can be seen has changed."""
    row, before = ROWS[name], site.census()
    for what, given in row.refused.items():
        found = outcome(row.call, site, given)
        assert issubclass(found, TypeError | ValueError), what
        assert EXPECTED.setdefault((name, what), found) is found, what
        if not name.startswith("Batch."):  # for which a message is sent and received each time
            assert site.census() == before, what
    site.qp.send_one(site.to, b"still works")
    message = site.qp.recv_one(BOUND)
    assert bytes(message.payload) == b"still works"


@EVERYWHERE
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.taken])
def test_what_stands_for_a_number_is_taken(site: Site, name: str) -> None:
    for given in ROWS[name].taken.values():
        found = ROWS[name].call(site, given)
        if hasattr(found, "close"):
            found.close()
        while site.qp.recv_one(0) is not None:
            pass


OTHERS = {
    "context": "any object, which comes back in the event",
    "require_fits": "is for endpoints, which have looked at the payloads",
}
"""Arguments and calls that take anything, and why."""


def test_every_argument_of_every_call_is_tried() -> None:
    found = set()
    for cls in (Backend, EventChannel, CmId, QueuePair, Region, DeviceRegion, Batch):
        for call, method in inspect.getmembers(cls, inspect.isfunction):
            prefix = f"{cls.__name__}." if cls in (DeviceRegion, Batch) else ""
            if not call.startswith("_") and call not in OTHERS:
                names = [*inspect.signature(method).parameters][1:]
                found |= {f"{prefix}{call} {name}" for name in names if name not in OTHERS}
    assert found - ROWS.keys() == set()


# --- values and options ------------------------------------------------------------------------------

VALUES: dict[str, tuple[Callable[[Any], object], Mapping[str, object]]] = {
    "JoinAttrEx comp_mask": (lambda x: JoinAttrEx(comp_mask=x, addr=McastAddress.of(GROUP)), NO_NUMBER),
    "JoinAttrEx join_flags": (
        lambda x: JoinAttrEx(join_flags=x, addr=McastAddress.of(GROUP)),
        {**NO_NUMBER, "2": 2},
    ),
    "JoinAttrEx addr": (lambda x: JoinAttrEx(addr=x), NO_ADDRESS),
    "QpInit max_send_wr": (lambda x: QpInit(max_send_wr=x), NO_NUMBER),
    "QpInit max_recv_wr": (lambda x: QpInit(max_recv_wr=x), {**NO_NUMBER, "huge": HUGE}),
    "QpInit max_recv_size": (lambda x: QpInit(max_recv_size=x), without_none(NO_NUMBER)),
    "QpInit comp_vector": (lambda x: QpInit(comp_vector=x), without_none(NO_NUMBER)),
    "QpInit block_loopback": (lambda x: QpInit(block_loopback=x), NO_FLAG),
    "QpInit timestamps": (lambda x: QpInit(timestamps=x), NO_FLAG),
    "QpInit busy_poll": (lambda x: QpInit(busy_poll=x), {**NO_TIME_OF_VALUES, "none": None, "-1": -1}),
    "QpInit qp_type": (lambda x: QpInit(qp_type=x), {**NO_NUMBER, "state": QpState.RTS}),
    "QpInit moderation": (lambda x: QpInit(moderation=x), without_none(NO_OBJECT) | {"dict": 5}),
    "CqModeration count": (lambda x: CqModeration(count=x, period=1), NO_NUMBER),
    "Destination dlid": (lambda x: Destination(gid=Index6, dlid=x), {**NO_NUMBER, **out_of(-1, 1 << 16)}),
    "Destination sl": (lambda x: Destination(gid=Index6, sl=x), NO_NUMBER),
    "Destination gid": (lambda x: Destination(gid=x), {**NO_ADDRESS, "int": 1}),
    "Destination.marked": (lambda x: Destination(gid=Index6).marked(x), without_none(NO_NUMBER)),
    "McastAddress.of port": (
        lambda x: McastAddress.of(GROUP, x),
        without_none(NO_NUMBER) | out_of(-1, 65536),
    ),
    "McastAddress port": (lambda x: McastAddress(address=GROUP, port=x), {**NO_NUMBER, **out_of(-1, 65536)}),
    "RejoinPolicy first": (lambda x: RejoinPolicy(first=x), {**NO_TIME_OF_VALUES, "none": None}),
}
Index6: Any = "ff12::1"


@pytest.mark.parametrize("name", VALUES)
def test_values_refuse_wrong_types(name: str) -> None:
    make, refused = VALUES[name]
    for what, given in refused.items():
        with pytest.raises((TypeError, ValueError)):
            print(what, make(given))


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_values_take_what_stands_for_a_number(value: Any) -> None:
    assert McastAddress.of(GROUP, value) == McastAddress.of(GROUP, 1)
    assert type(McastAddress.of(GROUP, value).port) is int
    assert QpInit(max_send_wr=value, comp_vector=value) == QpInit(max_send_wr=1, comp_vector=1)
    assert Destination(gid=Index6, sl=value) == Destination(gid=Index6, sl=1)
    assert (
        JoinAttrEx(join_flags=value, addr=McastAddress.of(GROUP)).join_flags is JoinFlag.SENDONLY_FULLMEMBER
    )


@pytest.mark.parametrize("text", [GROUP, "ff0e::1"])
def test_no_cache_stands_in_front_of_a_type_check(text: str) -> None:
    assert McastAddress.of(text, 1).port == 1
    for given in (True, 1.0, "1"):
        with pytest.raises(ValueError, match="port is"):
            McastAddress.of(text, given)  # type: ignore[arg-type]


OPTIONS: dict[str, Mapping[str, object]] = {
    "receive_depth": NO_NUMBER | out_of(0),
    "send_depth": NO_NUMBER | out_of(0),
    "max_message": without_none(NO_NUMBER) | out_of(0),
    "seed": without_none(NO_NUMBER),
    "traffic_class": without_none(NO_NUMBER) | out_of(-1, 256),
    "service_level": without_none(NO_NUMBER) | out_of(-1, 16),
    "comp_vector": without_none(NO_NUMBER) | out_of(-1),
    "busy_poll": NO_TIME | {"none": None, "-1": -1},
    "timestamps": NO_FLAG,
    "sequence": without_none(NO_FLAG),
    "moderation": without_none(NO_OBJECT),
    "loopback": NO_OBJECT,
    "rejoin": without_none(NO_OBJECT),
    "port_num": NO_NUMBER | out_of(0, 256),
    "device": without_none(NO_TEXT),
}


@EVERYWHERE
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_an_endpoint_are_checked_first(backend: Backend, name: str) -> None:
    """Nothing is opened, and the sentence names the option."""
    where = {} if name == "device" else {"bind": "10.0.0.1"}
    for what, given in OPTIONS[name].items():
        with pytest.raises((TypeError, ValueError), match=name) as caught:
            open_endpoint(backend, **where, **{name: given})  # type: ignore[arg-type]
        assert EXPECTED.setdefault((name, what), caught.type) is caught.type, what


@pytest.mark.parametrize("bind", [1, b"\n\0\0\1", True, 1.5, ["10.0.0.1"]])
def test_an_address_to_bind_is_text_or_an_address(bind: Any) -> None:
    with pytest.raises(TypeError, match="bind is"):
        open_endpoint("sim", bind)


@pytest.mark.parametrize("value", NUMBERS.values(), ids=NUMBERS)
def test_options_take_what_stands_for_a_number(value: Any) -> None:
    with open_endpoint("sim", "10.0.0.1", receive_depth=value, send_depth=value, seed=value) as endpoint:
        assert endpoint.stats().receive_depth == 1
