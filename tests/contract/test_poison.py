"""Guards: what a change that was interrupted leaves, and what it does not."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from functools import partial
from threading import Event, Thread
from weakref import ref

import pytest

from mcast.api import Broken, Guard, Phase, Refused


class Interrupt(BaseException):
    pass


def raise_it(error: BaseException) -> None:
    raise error


@pytest.fixture
def guard() -> Guard:
    return Guard("endpoint")


def test_interrupt_amid_a_change_breaks(guard: Guard) -> None:
    with pytest.raises(Interrupt):
        guard.run("join", Phase.JOIN, raise_it, Interrupt())
    assert guard.broken
    with pytest.raises(Broken, match="the endpoint was interrupted in the middle of join: close it and open"):
        guard.run("send", Phase.SEND, lambda: None)


def test_own_error_leaves_the_object_whole(guard: Guard) -> None:
    with pytest.raises(ValueError, match="no"):
        guard.run("join", Phase.JOIN, raise_it, Refused(ValueError("no")))
    assert guard.run("send", Phase.SEND, lambda: 7) == 7


def test_close_resumes_and_does_not_mend(guard: Guard) -> None:
    """A close that was interrupted breaks the object, and may be called again."""
    left = [Interrupt()]

    def end() -> None:
        if left:
            raise left.pop()

    with pytest.raises(Interrupt):
        guard.close(end)
    assert guard.broken
    guard.close(end)
    assert guard.broken


def test_close_finds_what_was_broken(guard: Guard) -> None:
    """A close of a broken object knows that nothing can rely on its tables."""
    found: list[bool] = []
    guard.close(lambda: found.append(guard.was_broken))
    with pytest.raises(Interrupt):
        guard.run("join", Phase.JOIN, raise_it, Interrupt())
    guard.close(lambda: found.append(guard.was_broken))
    assert found == [False, True]


def test_close_may_refuse(guard: Guard) -> None:
    with pytest.raises(TimeoutError):
        guard.close(lambda: raise_it(Refused(TimeoutError())))
    assert not guard.broken


def test_each_close_within_a_call_follows(guard: Guard) -> None:
    """One that refuses is logged, because its caller has gone on."""
    closed: list[str] = []

    def change() -> None:
        guard.close(lambda: closed.append("queue pair"))
        guard.close(lambda: raise_it(Refused(TimeoutError("late"))))
        guard.close(lambda: closed.append("channel"))

    guard.run("join", Phase.JOIN, change)
    assert closed == ["queue pair", "channel"]
    assert not guard.broken


def test_change_of_another_thread_is_no_break(guard: Guard) -> None:
    within, go_on = Event(), Event()

    def change() -> None:
        within.set()
        go_on.wait(10)

    thread = Thread(target=guard.run, args=("join", Phase.JOIN, change))
    thread.start()
    assert within.wait(10)
    asking = Thread(target=go_on.set)
    asking.start()
    assert not guard.broken
    thread.join()


def test_sleep_with_the_lock_is_refused(guard: Guard) -> None:
    """A handler that came before the outer call set its flag would wait for a thread that waits for it."""
    with guard.lock:
        guard.require_outermost("recv", Phase.RECV)
        with guard.lock, pytest.raises(RuntimeError, match="recv: this thread is in the middle of a call"):
            guard.require_outermost("recv", Phase.RECV)


def test_change_is_settled(guard: Guard) -> None:
    """After it the object is whole, and its lock still held."""
    found: list[tuple[str, str, bool]] = []
    guard.after_change = lambda call: found.append((call, guard.amid, guard.lock._is_owned()))
    guard.run("join", Phase.JOIN, lambda: None)
    guard.close(lambda: None)
    assert found == [("join", "", True), ("close", "", True)]


def test_call_within_a_call_is_refused(guard: Guard) -> None:
    def change() -> None:
        with pytest.raises(RuntimeError, match="send: this thread is in the middle of join"):
            guard.run("send", Phase.SEND, lambda: None)

    guard.run("join", Phase.JOIN, change)
    assert not guard.broken


@pytest.mark.parametrize("error", [None, Interrupt()])
def test_close_within_a_call_follows(guard: Guard, error: BaseException | None) -> None:
    """It is carried out when the outer call ends, however that ends."""
    closed: list[bool] = []

    def change() -> None:
        guard.close(lambda: closed.append(True))
        assert not closed
        if error is not None:
            raise error

    if error is None:
        guard.run("join", Phase.JOIN, change)
    else:
        with pytest.raises(Interrupt):
            guard.run("join", Phase.JOIN, change)
    assert closed == [True]


def test_child_finds_no_lock_of_the_parent(guard: Guard) -> None:
    """A thread of the parent was amid a change: in the child the object is broken, and not locked."""
    within, go_on = Event(), Event()

    def change() -> None:
        within.set()
        go_on.wait(10)

    thread = Thread(target=guard.run, args=("join", Phase.JOIN, change))
    thread.start()
    assert within.wait(10)
    child = os.fork()
    if not child:
        try:
            guard.run("send", Phase.SEND, lambda: None)
        except Broken:
            os._exit(0)
        finally:
            os._exit(1)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert not guard.broken


class Recorder:
    """Records the arguments of changes."""


def refuse(thing: Recorder) -> None:
    raise Refused(ValueError("no"))


@pytest.mark.parametrize("closes", [False, True])
def test_refusal_leaves_no_garbage(guard: Guard, closes: bool) -> None:
    """The error does not refer to itself by its traceback: what the frames held is freed at once."""
    thing = Recorder()
    known = ref(thing)
    gc.disable()
    try:
        with suppress(ValueError):
            if closes:
                guard.close(partial(refuse, thing))
            else:
                guard.run("join", Phase.JOIN, refuse, thing)
        del thing
        assert known() is None
    finally:
        gc.enable()
