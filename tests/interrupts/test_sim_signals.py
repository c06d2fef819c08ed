"""Signals on a simulated fabric: real ones at any time, and handlers that call the fabric themselves."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mcast import open_backend
from mcast.api import McastError
from mcast.backends.sim import Fabric
from mcast.contract import poison

from ..waiting import is_asleep, until
from .sim_world import AS_MEMBER, CALLS, ENDS, OTHER, SOON, World, check, made
from .sweep import bounded, reenter

ROUNDS = 300 if os.environ.get("MCAST_TESTS") == "long" else 25
MAX_DELAY = 0.004
"""Maximum seconds, of the processor's time, before a signal comes."""


@pytest.fixture(autouse=True)
def recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "MAX_SLEEP", 0.05)


@contextmanager
def exits(number: int) -> Iterator[None]:
    """The signal ends the program by SystemExit."""

    def leave(*_: object) -> None:
        raise SystemExit

    before = signal.signal(number, leave)
    gc.disable()  # Python drops what a handler raises in the finalizers of another test's garbage
    try:
        yield
    finally:
        gc.enable()
        signal.signal(number, before)


def send_to_main(number: int) -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, number)


def send_and_receive(world: World) -> None:
    world.qp.send_one(world.to, b"x")
    world.qp.recv_one(0)


def join_and_leave(world: World) -> None:
    world.id.join_multicast(OTHER)
    world.channel.get_event(SOON)
    world.id.leave_multicast(OTHER)


LOOPS: dict[str, Callable[[World], object]] = {
    "send": lambda w: w.qp.send(w.to, [b"x"] * 3),
    "recv": lambda w: w.qp.recv(timeout=0.0001).release(),
    "send and recv": send_and_receive,
    "join and leave": join_and_leave,
    "objects": World.use_another,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a handler in a finalizer
@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize("make", [Fabric.roce, Fabric.infiniband], ids=["roce", "infiniband"])
@pytest.mark.parametrize("name", LOOPS)
def test_signals_at_any_time(name: str, make: Callable[..., Fabric], clock: str) -> None:
    """The handler raises SystemExit, in a program that calls in a loop."""
    chance = random.Random(name)
    for _ in range(ROUNDS):
        world = World(make, clock, joined=True)
        with exits(signal.SIGPROF):
            try:
                # Python drops what a handler raises in a finalizer: then the signal comes again.
                signal.setitimer(signal.ITIMER_PROF, chance.uniform(0.0005, MAX_DELAY), 1.0)
                while True:
                    LOOPS[name](world)
            except SystemExit as error:
                found = error
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        bounded(lambda: check(world, found), name)  # noqa: B023


@pytest.mark.parametrize(
    "wait", [lambda w: w.qp.recv(), lambda w: w.channel.get_event()], ids=["recv", "get_event"]
)
def test_waiting_call_is_not_done(wait: Callable[[World], object]) -> None:
    """A call that a signal interrupts where it waits leaves its object usable, each time."""
    main = threading.main_thread()
    for _ in range(5):
        world, begun = World(Fabric.roce, "wall", joined=True), threading.Event()

        def come(begun: threading.Event = begun) -> None:
            begun.wait()
            until(lambda: is_asleep(main))
            send_to_main(signal.SIGTERM)

        coming = threading.Thread(target=come)
        coming.start()
        begun.set()
        with exits(signal.SIGTERM), pytest.raises(SystemExit) as found:
            wait(world)
        coming.join()
        assert bounded(lambda: check(world, found.value)) == "usable"  # noqa: B023


@pytest.mark.parametrize("opened", [False, True], ids=["before", "after"])
def test_asyncio_takes_ctrl_c(opened: bool) -> None:
    """Its runner cancels the main task, before a backend was opened and after it; nobody sets a handler."""
    seen: list[object] = []

    async def main() -> None:
        before = signal.getsignal(signal.SIGINT)
        backend = open_backend("sim", clock="wall") if opened else None
        assert signal.getsignal(signal.SIGINT) is before
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(SOON)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            if backend is not None:
                backend.close()

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert seen == ["cancelled"]
    assert signal.getsignal(signal.SIGINT) is handler


OUTER: dict[str, Callable[[World], object]] = {
    "send": AS_MEMBER["send"],
    "recv": lambda w: w.qp.recv(timeout=0.02),
    "recv_one": lambda w: w.qp.recv_one(timeout=0.02),
    "get_event": lambda w: w.channel.get_event(0.02),
    "join": CALLS["join"],
    "leave": AS_MEMBER["leave"],
    "create_qp": CALLS["create_qp"],
    "close": ENDS["close"],
}
ENDINGS: dict[str, Callable[[World], object]] = {
    "close": lambda w: w.backend.close(),
    "destroy": lambda w: w.id.destroy(),
    "close_qp": lambda w: w.qp.close(),
    "close_channel": lambda w: w.channel.close(),
}
INNER: dict[str, Callable[[World], object]] = {
    "send": lambda w: w.qp.send(w.to, [b"x"]) if hasattr(w, "to") else None,
    "recv": lambda w: w.qp.recv(timeout=0),
    "join": lambda w: w.id.join_multicast(OTHER),
    "devices": lambda w: w.backend.devices(),
    "counters": lambda w: w.qp.counters,
    "advance": lambda w: w.channel.get_event(0),
}


@pytest.mark.parametrize("clock", ["virtual", "wall"])
@pytest.mark.parametrize("first", OUTER)
@pytest.mark.parametrize("second", [*INNER, *ENDINGS])
def test_handler_calls_the_fabric(first: str, second: str, clock: str) -> None:
    """Amid a call, only what closes and what counts is allowed; a close is carried out when the call ends."""
    things = {"destroy": "id", "close_qp": "qp", "close_channel": "channel", "close": "backend"}

    def after(world: World, found: object, inner: object) -> None:
        assert not world.fabric.clock.guard.broken
        assert not isinstance(found, Exception) or isinstance(found, McastError), found
        if isinstance(inner, RuntimeError) and not isinstance(inner, McastError):
            assert "this thread is in the middle of" in str(inner)
            assert second not in ("counters", *ENDINGS)
        elif isinstance(inner, Exception):
            assert isinstance(inner, McastError), inner
        elif second in ENDINGS and inner is None:
            assert getattr(world, things[second]).closed
        world.close()

    reenter(made(first, Fabric.roce, clock), OUTER[first], (INNER | ENDINGS)[second], after)
