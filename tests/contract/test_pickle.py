"""Public values and errors survive pickle and copy with all their state; handles refuse both."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import pkgutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import mcast
from mcast import aio, api, cast, open_backend, open_endpoint
from mcast.api import (
    AlreadyJoined,
    Cause,
    CmEvent,
    Gid,
    Handle,
    HeaderBodyBatch,
    LinkLayer,
    McastError,
    Message,
    Phase,
    Series,
)

GROUP = "239.1.1.1"


def pickled(protocol: int, one: object) -> Any:
    return pickle.loads(pickle.dumps(one, protocol))


WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"pickle {protocol}": partial(pickled, protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}

# --- errors ------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, object] = {
    "address": api.McastAddress.of(GROUP, 5000),
    "amid": "join",
    "arguments": {"addr": api.McastAddress.of(GROUP), "lid": 3},
    "attached_lid": 0xC002,
    "call": "join_multicast",
    "console": ("the last line",),
    "detail": "a detail",
    "errno": 110,
    "failed": {1: "no port"},
    "fix": "a fix",
    "gid": Gid("ff12::1"),
    "group_mtu": 1024,
    "index": 7,
    "lid": 0xC001,
    "limit": 1024,
    "message": "a message",
    "name": "sim",
    "offset": 24,
    "phase": Phase.JOIN,
    "reason": api.UnavailableReason.NO_DEVICE,
    "size": 4096,
    "sentence": "a sentence",
    "source": "from a test",
    "status": api.WcStatus.LOC_QP_OP_ERR,
    "what": "a thing",
}
"""An argument for each parameter of an error's constructor."""

LEARNT = {
    "found": (Cause("why", "check", "next step"),),
    "link_layer": LinkLayer.INFINIBAND,
    "posted": 3,
    "unsent": 2,
}
"""Attributes that are set after an error was made."""


def subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for one in cls.__subclasses__():
        yield one
        yield from subclasses(one)


def error_classes() -> list[type[BaseException]]:
    """Every exception class of the package."""
    for module in pkgutil.walk_packages(mcast.__path__, "mcast."):
        if not module.name.startswith(("mcast.conformance", "mcast.__main__")):
            with suppress(ImportError):  # an optional dependency is not installed
                import_module(module.name)
    found = {one for one in subclasses(BaseException) if one.__module__.startswith("mcast.")}
    return sorted(found, key=lambda one: (one.__module__, one.__qualname__))


def made(cls: type[BaseException]) -> BaseException:
    """An error of the class, with everything set that can be set on it."""
    if type(cls.__init__).__name__ == "wrapper_descriptor":  # Python's own constructor
        error = cls("a sentence")
    else:
        names = [name for name in inspect.signature(cls).parameters if name in ARGUMENTS]
        error = cls(**{name: ARGUMENTS[name] for name in names})
    for name, value in LEARNT.items():
        if hasattr(cls, name):
            setattr(error, name, value)
    if hasattr(error, "add_note"):
        error.add_note("a note")
    return error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_errors_keep_their_state(cls: type[BaseException], way: str) -> None:
    """All that is in `__dict__`, notes included, `args` and the text; OSError's own fields too."""
    error = made(cls)
    again: object = WAYS[way](error)
    assert isinstance(again, BaseException)
    assert type(again) is cls
    assert again is not error
    assert vars(again) == vars(error)
    assert again.args == error.args
    assert str(again) == str(error)
    if isinstance(again, OSError) and isinstance(error, OSError):
        assert (again.errno, again.strerror) == (error.errno, error.strerror)
    if isinstance(again, McastError) and isinstance(error, McastError):
        assert again.arguments == error.arguments
        assert again.causes == error.causes


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_pickled_becomes_text(way: str) -> None:
    """Else a process pool would raise that it cannot pickle a lock, in place of the error."""
    lock, end = threading.Lock(), socket.socket()
    with end:
        error = AlreadyJoined("join_multicast", end)
        error._arguments["lock"] = lock
        error.add_note("a note")
        again = WAYS[way](error)
    assert isinstance(again, AlreadyJoined)
    assert (again.errno, again.call, again.__notes__) == (error.errno, "join_multicast", ["a note"])
    assert again.arguments["lock"] == repr(lock)
    assert "<socket.socket" in str(again.address)


def test_an_error_of_a_program_needs_no_reduce() -> None:
    """A subclass with a constructor of its own."""

    error = OfProgram("sensor 5")
    error.posted = 4
    again = pickle.loads(pickle.dumps(error))
    assert (vars(again), str(again)) == (vars(error), str(error))


class OfProgram(McastError):
    def __init__(self, sensor: str) -> None:
        super().__init__(5, "recv", Phase.RECV, {"sensor": sensor})
        self.sensor = sensor


# --- values ------------------------------------------------------------------------------------------


def values() -> list[object]:
    """Instances of the public values, as a program gets them."""
    found: list[object] = []
    with open_backend("sim-ib", ports=2) as backend, backend.event_channel() as channel:
        found += [*backend.devices(), backend.devices()[0].ports[0]]
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp()
        cm_id.join_multicast(GROUP)
        event = channel.get_event(1)
        assert event is not None
        assert event.ud is not None
        to = event.ud.destination
        found += [event._replace(id=None), event.ud, to, qp.counters, backend.groups()]
        found += [backend.groups().groups[0], backend.groups().groups[0].members[0]]
        qp.send(to, [b"one", b"two"], imm=5)
        message = qp.recv_one(1)
        assert message is not None
        found += [message, api.Status(True, "fine"), api.ClientProcess(1, "ping", "1", ("mlx0",))]
        found += [mcast.McastAddress.of(GROUP, 7), to.gid, mcast.Mgid(to.gid), api.Cause("a", "b", "c")]
        found.append(
            api.UnusableDevice("mlx0", api.UnavailableReason.NO_PROVIDER, "no provider", "install it", 19)
        )
        found += [api.JoinAttrEx.full_member(GROUP), api.QpInit(), mcast.CqModeration(count=1, period=1)]
        found += [
            mcast.RejoinPolicy(),
            mcast.Peer(to.gid, 5),
            api.Finding("a check", "what", api.Level.OK, "next"),
        ]
        error = api.TimedOut(110, "recv", Phase.RECV)
        address = mcast.McastAddress.of(GROUP)
        found += [mcast.Lost(address, error), mcast.GaveUp(address, error, 3)]
        found += [mcast.Rejoined(address, 0.5, 1), mcast.PortDown("a/1"), mcast.PortUp("a/1")]
        found += [mcast.AddressChanged("a/1", True), mcast.ReceiveQueueLow(1, 2)]
        found += [mcast.MessagesMissing(address, to.gid, 5, 1, 2, 3)]
    with open_endpoint("sim", "10.0.0.1", sequence=True) as endpoint, endpoint.join(GROUP) as group:
        group.send(b"x")
        group.recv(timeout=1)
        stats = endpoint.stats()
        found += [stats, stats.groups[0], stats.groups[0].sources[0], endpoint.loopback]
    return [*found, *values_of_cast()]


def values_of_cast() -> list[object]:
    account = cast.ReceiverReport("one", "10.0.0.2", True, 0.5, 0, 0, "", 1)
    offered = cast.Offered("a name", 4, b"{}", "a sender", "10.0.0.1", 0)
    whole = memoryview(bytearray(b"data"))
    return [
        account,
        offered,
        cast.Received(offered, 4, bytes(32), whole, None, {"stranger": 1}),
        cast.Missed(offered, "given up", part_file=Path("part")),
        cast.Object(memoryview(b"data"), "a name"),
        cast.ObjectReport("a name", 4, bytes(32), True, 0.5, 1, 0, True, (account,), {}, 0, 0),
        cast.Progress("a name", 4, 2, 1),
        cast.ReceiverVersion("one", "10.0.0.2", 1, 3),
        cast.Strategy.of("quorum:3"),
        api.Identity({"libibverbs": "1.14"}, {"mlx5_0": api.DeviceIdentity("mlx5_core", firmware="20.1")}),
        api.DeviceIdentity("mlx5_core"),
    ]


def public_classes() -> Iterator[type[Any]]:
    for module, names in ((mcast, dir(mcast)), (api, api.__all__), (cast, dir(cast))):
        yield from (one for name in names if inspect.isclass(one := getattr(module, name)))


def test_every_public_value_is_tried() -> None:
    """Each type that is neither an error, an enumeration nor a handle has an instance among the values."""
    tried = {type(one) for one in values()} | {Message, Series, HeaderBodyBatch, CmEvent}
    # DeviceBytes is a place in a handle; the others have functions or locks
    places = (BaseException, Enum, Handle, api.DeviceBytes)
    locks = (api.SignalSafeWeakSet, api.Guard, api.Lease, api.Leases, api.Waiters)
    others = (*places, *locks, api.Observer, api.Provider, api.Testbed)
    assert [one for one in public_classes() if not issubclass(one, (*others, *tried))] == []


def comparable(value: object) -> object:
    """Return the value in a form to compare: errors, which it may hold, compare by identity."""
    if isinstance(value, McastError):
        return type(value), vars(value), value.args
    return tuple(map(comparable, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("way", WAYS)
def test_values_keep_their_state(way: str) -> None:
    for value in values():
        again = WAYS[way](value)
        assert type(again) is type(value)
        assert comparable(again) == comparable(value), value


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("member", [*api.QpState, *api.Capability, *mcast.LoopbackPolicy], ids=str)
def test_enumerations_stay_the_same_member(member: Enum, way: str) -> None:
    assert WAYS[way](member) is member


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_message_outlives_its_batch(way: str) -> None:
    with open_endpoint("sim", "10.0.0.1") as endpoint, endpoint.join(GROUP) as group:
        group.send_batch([b"one", b"two"])
        with endpoint.recv_batch(timeout=1) as batch:
            message, series = batch[1], next(batch.series())
            again, alike = WAYS[way](message), WAYS[way](series)
            assert (type(again), again) == (Message, message)
            assert (type(alike), alike) == (Series, series)
        with pytest.raises(ValueError, match="released"):
            bytes(message.payload)
        assert bytes(again.payload) == b"two"
        assert [bytes(one) for one in alike.payloads()] == [b"one", b"two"]


@pytest.mark.parametrize("way", WAYS)
def test_messages_of_two_parts_keep_their_bytes(way: str) -> None:
    heads, bodies = (memoryview(text * 2).cast("B", (2, len(text))) for text in (b"ab", b"cde"))
    again = WAYS[way](HeaderBodyBatch(heads, bodies))
    assert [*again] == [b"abcde"] * 2


# --- handles -----------------------------------------------------------------------------------------


def refuses(handle: object) -> None:
    """By each way, in a sentence that names the class and says what to do instead."""
    for way in WAYS.values():
        with pytest.raises(TypeError, match=f"a {type(handle).__name__} cannot be pickled or copied: .*; "):
            way(handle)


@pytest.mark.parametrize("name", ["sim-roce", "sim-ib"])
def test_handles_refuse(name: str) -> None:
    with open_backend(name, ports=2) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr("10.0.0.1")
        qp = cm_id.create_qp()
        for handle in (backend, channel, cm_id, qp, qp.register(bytearray(64))):
            refuses(handle)
        with qp.recv(timeout=0) as batch:
            refuses(batch)
        cm_id.join_multicast(GROUP)
        event = channel.get_event(1)
        with pytest.raises(TypeError, match="cannot be pickled or copied"):  # it holds the id
            pickle.dumps(event)


def test_endpoints_and_what_they_joined_refuse() -> None:
    with (
        open_endpoint("sim", "10.0.0.1") as endpoint,
        endpoint.join(GROUP) as group,
        endpoint.sender("239.1.1.2") as sender,
        cast.open_session(group) as session,
    ):
        for handle in (endpoint, group, sender, session, cast.Chunks()):
            refuses(handle)


def test_endpoints_of_aio_refuse() -> None:
    async def run() -> None:
        async with aio.open_endpoint("sim", "10.0.0.1") as endpoint, await endpoint.join(GROUP) as group:
            refuses(endpoint)
            refuses(group)

    asyncio.run(run())
