"""A signal ends a command, whatever Python is at when it comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from mcast.api import Guard, Phase
from mcast.cli.signals import interruptible, on_signal
from mcast.cli.sim import serve
from mcast.cli.terminal import Failure, NonBlockingWriter
from mcast.endpoint.waiting import call_user

from ..waiting import is_asleep, until

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class Target:
    pass


def until_interrupted() -> None:
    limit = time.monotonic() + 200
    while time.monotonic() < limit:
        time.sleep(0.001)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_block_and_tidies_up(number: int) -> None:
    tidied = False

    @interruptible()
    def command() -> None:
        nonlocal tidied
        try:
            os.kill(os.getpid(), number)
            until_interrupted()
        finally:
            tidied = True

    with pytest.raises(Failure, match="interrupted") as caught:
        command()
    assert (caught.value.status, tidied) == (128 + number, True)


@pytest.mark.parametrize(
    ("number", "ignored"),
    [*((number, None) for number in SIGNALS), *((number, signal.SIGINT) for number in SIGNALS[1:])],
)
def test_a_signal_breaks_nothing_half_way(number: int, ignored: int | None) -> None:
    """Else the other hosts would not be reported, because nothing can be sent any more."""
    done: list[str] = []
    guard = Guard("thing")

    def change() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.05)
        done.append("change")

    @interruptible()
    def command() -> None:
        guard.run("change", Phase.EVENT, change)
        until_interrupted()

    before = signal.getsignal(signal.SIGINT)
    if ignored is not None:
        signal.signal(ignored, signal.SIG_IGN)
    try:
        with pytest.raises(Failure, match="interrupted") as caught:
            command()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (caught.value.status, done, guard.broken) == (128 + number, ["change"], False)


@pytest.mark.parametrize("given", [call_user, None], ids=["a caller's file", "a change without an end"])
def test_a_signal_ends_what_waits_amid_a_change(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcast.cli.signals._AGAIN", 0.001)
    guard = Guard("thing")

    def wait() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        until_interrupted()

    with pytest.raises(Failure, match="interrupted"), interruptible():
        guard.run("change", Phase.EVENT, *([given, wait] if given else [wait]))
    assert guard.broken == (given is None)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_in_a_callback_is_not_lost(number: int) -> None:
    """A signal in a callback that raises to nobody is not lost."""

    @interruptible()
    def command() -> None:
        thing = Target()
        watched = weakref.ref(thing, lambda _: os.kill(os.getpid(), number))
        del thing
        assert watched() is None
        until_interrupted()

    with pytest.raises(Failure, match="interrupted") as caught:
        command()
    assert caught.value.status == 128 + number


def test_second_signal_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that is sent again is not dropped again."""
    monkeypatch.setattr("mcast.cli.signals._AGAIN", 0.0)  # at once: while Python still tells of the first
    for _ in range(50):
        test_signal_in_a_callback_is_not_lost(signal.SIGINT)


def test_afterwards_signals_and_hooks_are_as_before() -> None:
    def found() -> list[object]:
        return [sys.unraisablehook, threading.active_count(), *map(signal.getsignal, SIGNALS)]

    before = found()
    with interruptible():
        assert found() != before
    assert found() == before


def test_what_else_goes_wrong_in_a_callback_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reported.append(type(args.exc_value)))
    thing = Target()
    watched = weakref.ref(thing, lambda _: [][0])
    with interruptible():
        del thing
    assert (reported, watched()) == ([IndexError], None)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_stops_and_the_second_ends(number: int) -> None:
    stopped: list[int] = []
    before = [signal.getsignal(one) for one in SIGNALS]

    @interruptible()
    def command() -> None:
        with on_signal(lambda: stopped.append(number)):
            signal.raise_signal(number)
            stopped.append(0)
            signal.raise_signal(number)
            until_interrupted()

    with pytest.raises(Failure, match="interrupted"):
        command()
    assert stopped == [number, 0]
    assert [signal.getsignal(one) for one in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_ignored_stays_ignored(number: int) -> None:
    """nohup ignores SIGHUP, and a script's shell ignores SIGINT in background jobs."""
    stopped: list[int] = []
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with interruptible(), on_signal(lambda: stopped.append(number)):
            signal.raise_signal(number)
        with interruptible():
            signal.raise_signal(number)
        assert (stopped, signal.getsignal(number)) == ([], signal.SIG_IGN)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_interrupts_no_step_of_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A signal breaks off nothing that a server does.

    Else a lock that is held there stays held, and the end waits for the lock for ever.
    """
    said, say = list[str](), NonBlockingWriter.say

    def say_after_a_signal(writer: NonBlockingWriter, line: str) -> None:
        if not said:
            signal.raise_signal(number)
        said.append(line)
        say(writer, line)

    monkeypatch.setattr(NonBlockingWriter, "say", say_after_a_signal)
    monkeypatch.setattr("mcast.cli.sim.resource.setrlimit", lambda *_: None)
    serve(None, tmp_path / "fabric.sock", None, 2, None, None)
    assert said[0].startswith("serving 2 ports")
    assert said[-1] == "end with Ctrl-C"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_server_that_it_does_not_wake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It comes to another thread, or just before the server's sleep."""
    served, woken = threading.Event(), list[bool]()
    main = threading.get_ident()

    def serves() -> bool:
        handler = getattr(signal.getsignal(number), "__qualname__", "")
        return handler.startswith("on_signal") and is_asleep(threading.main_thread())

    def comes_here() -> None:
        until(serves)
        signal.pthread_kill(threading.get_ident(), number)
        woken.append(served.wait(60))
        if not woken[0]:
            signal.pthread_kill(main, number)

    monkeypatch.setattr("mcast.cli.sim.resource.setrlimit", lambda *_: None)
    thread = threading.Thread(target=comes_here)
    thread.start()
    serve(None, tmp_path / "fabric.sock", None, 2, None, None)
    served.set()
    thread.join()
    assert woken == [True]
