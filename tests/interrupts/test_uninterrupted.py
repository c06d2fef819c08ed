"""`uninterrupted` and `interruptible`: when SIGINT is taken, with signals that are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from importlib import import_module
from types import FrameType

import pytest

from mcast import interrupts
from mcast.interrupts import (
    Alive,
    Enterable,
    Lock,
    Sleepers,
    do_what_was_put_off,
    interruptible,
    is_held,
    is_within,
    later,
    made_or_undone,
    take_interrupt,
    uninterrupted,
)

from ..interleave import BOUND, Reentered, Signal

IN_C = import_module("mcast.interrupts._interrupts")
CTRL_C = signal.SIGINT
COARSE = 6
"""CLOCK_MONOTONIC_COARSE."""
WRITTEN = set(interrupts.__all__) - {"Alive", "Sleepers", "WITHIN", "copy_rows", "made_or_undone"}


@pytest.fixture(autouse=True, params=["mcast.interrupts._interrupts", "mcast.interrupts.by_exchange"])
def written_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both what is written in C and what Python does without a compiler."""
    module = import_module(request.param)
    for name in WRITTEN:
        monkeypatch.setattr(interrupts, name, getattr(module, name))
        monkeypatch.setattr(sys.modules[__name__], name, getattr(module, name), raising=False)
    before = time.clock_gettime(COARSE)
    while time.clock_gettime(COARSE) == before:  # until then a handler is not looked for once more
        pass


@pytest.fixture(autouse=True)
def handler(written_in: None) -> Iterator[None]:
    before = signal.getsignal(CTRL_C)
    yield
    assert signal.getsignal(CTRL_C) is before


def test_a_signal_waits_for_the_end_of_the_outermost_block() -> None:
    done: list[str] = []

    def work() -> None:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(CTRL_C)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]


def test_what_was_done_is_undone_if_its_caller_does_not_get_it() -> None:
    undone: list[int] = []

    def make(interrupt: Callable[[], None]) -> int:
        interrupt()
        return 1

    assert made_or_undone(lambda: make(lambda: None), undone.append) == 1
    assert undone == []
    with pytest.raises(KeyboardInterrupt):
        made_or_undone(lambda: make(lambda: signal.raise_signal(CTRL_C)), undone.append)
    assert undone == [1]


def test_what_waits_is_interrupted_at_once_and_its_cleaning_up_is_not() -> None:
    cleaned: list[str] = []

    def work() -> None:
        with uninterrupted():
            try:
                with interruptible():
                    signal.raise_signal(CTRL_C)
                    cleaned.append("not reached")
            finally:
                cleaned.append("held" if is_held() else "")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == ["held"]


@pytest.mark.parametrize(
    "wait", [lambda: take_interrupt(), lambda: interruptible().__enter__()], ids=["take", "enter"]
)
def test_a_signal_that_came_before_a_wait_is_taken_before_it(wait: Callable[[], None]) -> None:
    went_on: list[str] = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(CTRL_C)
            wait()
            went_on.append("after the wait")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert went_on == []


def test_a_second_signal_is_taken_at_once() -> None:
    done: list[str] = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(CTRL_C)
            done.append("after the first")
            signal.raise_signal(CTRL_C)
            done.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after the first"]
    with uninterrupted():
        pass


def test_a_handler_of_the_user_is_called_once_and_need_not_raise() -> None:
    called: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        called.append(number)

    before = signal.signal(CTRL_C, handle)
    try:
        with uninterrupted():
            signal.raise_signal(CTRL_C)
            assert called == []
        assert called == [CTRL_C]
        assert signal.getsignal(CTRL_C) is handle
    finally:
        signal.signal(CTRL_C, before)


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_nothing_would_be_raised_nothing_is_changed(ignored: signal.Handlers) -> None:
    before = signal.signal(CTRL_C, ignored)
    try:
        with uninterrupted():
            assert signal.getsignal(CTRL_C) is ignored
            assert not is_held()
    finally:
        signal.signal(CTRL_C, before)


def test_other_threads_do_not_touch_the_handler() -> None:
    found: list[object] = []

    def work() -> None:
        with uninterrupted():
            found.append(is_held())
            with interruptible():
                found.append(signal.getsignal(CTRL_C))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(BOUND)
    assert found == [False, signal.default_int_handler]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_another_thread_can_be_interrupted() -> None:
    ended: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(CTRL_C)
                os._exit(1)
            os._exit(0)
        ended.append(os.waitpid(child, 0)[1])

    with uninterrupted():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join(BOUND)
    assert ended == [0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("holder", ["another thread", "the thread that forks"])
def test_a_fork_has_the_locks_of_its_own_thread_alone(holder: str) -> None:
    """A thread of the parent's releases none there, and the parent's locks stay as they are."""
    lock, held, over = Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait(BOUND)

    def taken_by_another() -> bool:
        found: list[bool] = []

        def take() -> None:
            found.append(lock.acquire(False))
            if found[0]:
                lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return found[0]

    def in_child() -> list[bool]:
        here = [taken_by_another() for _ in range(2)] if holder == "another thread" else [taken_by_another()]
        here.append(lock.acquire(True, BOUND) and taken_by_another())
        lock.release()
        return here

    with lock if holder == "the thread that forks" else nullcontext():
        thread = threading.Thread(target=hold)
        thread.start()
        if holder == "another thread":
            assert held.wait(BOUND)
        child = os.fork()
        if not child:
            try:
                expected = [True, True, False] if holder == "another thread" else [False, False]
                os._exit(in_child() != expected)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert not taken_by_another()
    over.set()
    thread.join(BOUND)
    assert taken_by_another()


def test_what_is_asked_for_under_a_lock_is_done_when_the_last_one_is_let_go() -> None:
    done: list[str] = []
    first, second = Lock(), Lock()
    assert not later(lambda: done.append("never"))
    with first:
        with uninterrupted(second):
            assert is_within()
            with first:
                assert later(lambda: done.append(f"one {is_within()}"))
            assert later(lambda: done.append("two"))
        assert done == []
    assert done == ["one False", "two"]
    assert not is_within()


def test_it_is_done_as_well_if_the_block_raises() -> None:
    done: list[str] = []

    def work() -> None:
        with Lock():
            later(lambda: done.append("done"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert done == ["done"]


def test_a_lock_of_level_1_puts_off_what_asks_for_that_level() -> None:
    done: list[int] = []
    with Lock(1):
        assert not is_within()
        assert not later(lambda: done.append(0))
        assert later(lambda: done.append(1), 1)
        with Lock():
            assert later(lambda: done.append(0))
        assert done == [0]
    assert done == [0, 1]


def test_a_lock_of_no_level_puts_nothing_off() -> None:
    with Lock(None):
        assert not later(list, 1)


def test_what_is_asked_for_by_another_thread_does_not_wait_for_this_one() -> None:
    found: list[bool] = []
    with Lock():
        thread = threading.Thread(target=lambda: found.append(later(list)))
        thread.start()
        thread.join(BOUND)
    assert found == [False]


def test_its_error_is_told_to_the_hook_and_the_rest_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: done.append(type(given.exc_value)))
    with Lock():
        later(lambda: 1 / 0)
        later(lambda: done.append("done"))
    assert done == [ZeroDivisionError, "done"]


@pytest.mark.parametrize("raised", [TimeoutError, SystemExit])
def test_what_a_handler_has_ended_half_way_is_done_once_more(
    monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    done: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: done.append(type(given.exc_value)))

    def handler(number: int, frame: object) -> None:
        raise raised

    def close() -> None:
        done.append("begun")
        if len(done) == 1:
            signal.raise_signal(signal.SIGUSR1)
        done.append("closed")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with Lock():
            later(close)
            later(lambda: done.append("the next"))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert done == ["begun", "begun", "closed", raised, "the next"]


def test_ctrl_c_does_not_end_it_half_way() -> None:
    done: list[str] = []

    def end() -> None:
        signal.raise_signal(CTRL_C)
        done.append("done")

    def work() -> None:
        with Lock():
            later(end)
        pytest.fail("the signal was not taken")

    with uninterrupted():
        pass  # which finds the handler
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["done"]


def test_whoever_waits_with_a_lock_does_it_before() -> None:
    done: list[str] = []
    lock = Lock()

    def close() -> None:
        assert not is_within()
        with lock:
            later(lambda: done.append("by what was put off"))
        done.append("done")

    with lock:
        later(close)
        do_what_was_put_off()
        assert done == ["by what was put off", "done"]
        assert is_within()
        later(lambda: done.append("later"))
    assert done[2:] == ["later"]


def test_whoever_sleeps_does_it_before() -> None:
    lock = Lock()
    sleepers = Sleepers(lock)
    with lock, lock:
        later(sleepers.wake)
        sleepers.sleep(BOUND)  # without end, were it done afterwards
        assert is_within()
    assert not is_within()


def test_a_lock_with_a_refusal_is_not_taken_twice() -> None:
    lock = Lock(1, "not again")
    with lock:
        with pytest.raises(RuntimeError, match="not again"), lock:
            pass
        with pytest.raises(RuntimeError, match="not again"):
            lock.acquire(timeout=1)
    assert not lock._is_owned()
    assert not later(list, 1)


@pytest.mark.parametrize("level", [-1, 2])
def test_there_is_no_other_level(level: int) -> None:
    with pytest.raises(ValueError, match="level"):
        Lock(level)
    with pytest.raises(ValueError, match="level"):
        later(list, level)


def test_a_sleeper_that_is_interrupted_holds_its_lock_again() -> None:
    lock = Lock()
    sleepers = Sleepers(lock)
    woken = threading.Event()
    other = threading.Thread(target=lambda: interrupt_once_asleep(sleepers, woken))
    other.start()
    held: list[bool] = []

    def sleep() -> None:
        with lock:
            try:
                sleepers.sleep(BOUND)
            finally:
                woken.set()
                held.append(lock._is_owned())

    with pytest.raises(KeyboardInterrupt):
        sleep()
    other.join(BOUND)
    assert held == [True]
    assert not lock._is_owned()
    assert sleepers._asleep == []


def interrupt_once_asleep(sleepers: Sleepers, woken: threading.Event) -> None:
    while not sleepers._asleep:
        pass
    main = threading.main_thread().ident
    assert main is not None
    while sleepers._asleep:  # without C, Python misses a signal that comes just before a lock is waited for
        signal.pthread_kill(main, CTRL_C)
        woken.wait(1)


def test_wake_wakes_all_who_sleep() -> None:
    lock = Lock()
    sleepers = Sleepers(lock)

    def sleep() -> None:
        with lock:
            sleepers.sleep(None)

    threads = [threading.Thread(target=sleep) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(sleepers._asleep) < len(threads):
        pass
    with lock:
        sleepers.wake()
    for thread in threads:
        thread.join(BOUND)
        assert not thread.is_alive()


def test_a_handler_may_wake_at_each_line_of_a_sleep() -> None:
    lock, at, came = Lock(), 0, [True]
    while came:
        at += 1
        came.clear()
        sleepers = Sleepers(lock)

        def wake(sleepers: Sleepers = sleepers) -> None:
            came.append(True)
            sleepers.wake()

        with Reentered(at, wake, signalled=bool(at % 2), part="interrupts/"), lock:
            sleepers.sleep(0.0)
        assert sleepers._asleep == []
    assert at > 10


def test_a_block_gives_the_object_itself_to_an_exit_stack_as_well() -> None:
    ended: list[Thing] = []

    class Thing(Enterable):
        _ended_by = "end"

        def end(self) -> None:
            if self not in ended:
                ended.append(self)

    thing = Thing()
    with ExitStack() as stack, thing as entered:
        assert entered is stack.enter_context(thing) is thing
    assert ended == [thing]


def test_what_a_block_has_entered_ends_before_a_signal_is_taken() -> None:
    came: list[int] = []
    ended: list[str] = []

    class Thing(Enterable):
        _ended_by = "end"

        def end(self) -> None:
            if not came:
                came.append(CTRL_C)
                signal.raise_signal(CTRL_C)
            ended.append("ended")

    def work() -> None:
        with Thing():
            pass
        pytest.fail("the signal was not taken")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert ended


@pytest.fixture(params=[CTRL_C, signal.SIGUSR1], ids=lambda number: number.name)
def coming(request: pytest.FixtureRequest) -> Iterator[Signal]:
    """One whose handler raises KeyboardInterrupt, as a program may have that of SIGTERM do."""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    yield Signal(request.param)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("outer", [nullcontext, lambda: uninterrupted()], ids=["alone", "within"])
@pytest.mark.parametrize("made", [lambda lock: lock, lambda lock: uninterrupted(lock)], ids=["lock", "block"])
def test_a_signal_that_comes_just_before_a_block_leaves_no_lock_taken(
    coming: Signal,
    outer: Callable[[], AbstractContextManager[None]],
    made: Callable[[Lock], AbstractContextManager[None]],
) -> None:
    """Python notices the signal at the end of a call. The next call is that of `__enter__`."""
    lock = Lock()
    block = made(lock)

    def work() -> None:
        coming.comes  # noqa: B018
        with block:
            pass

    with pytest.raises(KeyboardInterrupt), outer():
        work()
    assert not lock._is_owned()
    assert not is_held()


def test_what_a_signal_keeps_from_its_block_has_ended(coming: Signal) -> None:
    ended: list[str] = []
    held: list[bool] = []

    class Thing(Enterable):
        _ended_by = "end"

        def end(self) -> None:
            ended.append("ended")

    def work(comes: bool) -> None:
        if comes:
            coming.comes  # noqa: B018
        with thing:
            held.append(is_held())

    if Enterable.__module__.endswith("by_exchange") and sys.version_info[:2] == (3, 14):
        pytest.skip("CPython 3.14 itself takes the signal between __enter__ and the block; only C can help")
    thing = Thing()
    with pytest.raises(KeyboardInterrupt):
        work(True)
    assert ended
    held.clear()
    work(False)
    assert held == [False]


def test_a_signal_is_taken_after_what_was_known_has_gone(coming: Signal) -> None:
    """It comes just before: Python would take it in a callback, and drop what is raised there."""

    class Thing:
        pass

    known = Alive[Thing]()

    def work() -> None:
        things = [Thing(), Thing()]
        for thing in (*things, things[0]):
            known.add(thing)
        assert things[0] in known
        assert {*known} == {*things}
        del thing
        coming.comes  # noqa: B018
        things = []
        for _ in range(2):
            pass
        pytest.fail("the signal was not taken")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert [*known] == []


def test_a_handler_that_is_set_and_set_back_is_found() -> None:
    """As asyncio's runner does; without a block in between it is found at the clock's next tick."""
    before = signal.getsignal(CTRL_C)
    for one in (lambda *_: None, before):
        signal.signal(CTRL_C, one)
        done: list[str] = []
        with suppress(KeyboardInterrupt), uninterrupted():
            signal.raise_signal(CTRL_C)
            done.append("held")
        assert done == ["held"]


CHAINED = """
import faulthandler, signal, time
from mcast.interrupts import uninterrupted

COARSE = 6  # CLOCK_MONOTONIC_COARSE

def stand_in_front():
    before = time.clock_gettime(COARSE)
    while time.clock_gettime(COARSE) == before:
        pass
    with uninterrupted():
        pass

stand_in_front()
faulthandler.register(signal.SIGINT, chain=True)
for _ in range(3):
    stand_in_front()
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_a_handler_that_passes_the_signal_on_to_the_one_before_may_stand_between() -> None:
    """The one before is ours, which stands in front again."""
    done = subprocess.run([sys.executable, "-c", CHAINED], capture_output=True, text=True, timeout=BOUND)
    assert (done.returncode, done.stdout) == (0, "interrupted\n" * 3)
    assert done.stderr.count("most recent call first") == 3


def test_who_does_not_hold_a_lock_cannot_let_go_of_it() -> None:
    lock = import_module("mcast.interrupts._interrupts").Lock()
    refused: list[BaseException] = []

    def let_go() -> None:
        for call in (lock.release, lock._release_save):
            try:
                call()
            except RuntimeError as error:
                refused.append(error)

    lock.acquire()
    lock.acquire()
    thread = threading.Thread(target=let_go)
    thread.start()
    thread.join(BOUND)
    assert len(refused) == 2
    lock.release()
    assert lock._is_owned()
    lock.release()
    assert not lock._is_owned()
