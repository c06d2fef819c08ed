"""The time of a fabric: virtual (jumps to the next step that is due, deterministic) or real (for threads).

A clock owns the guard of its fabric: one lock and one flag for all tables. A fabric is entered in one way:
`clock.guard.run(...)` carries out a change (`mcast.contract.poison`), and `wait` lets time pass between two
changes. The fastest calls, where a tenth of a microsecond counts, have the lines of `run` themselves.

Each step that is due is a change of its own, of the call that lets the time pass. In virtual time that is the
call that waits: an interrupt between two steps ends the call and nothing else. In real time it is a thread of
the clock, and a call that waits sleeps outside of the lock, until a change wakes it. A step that raises, such
as a rule of the user's that fails, breaks the fabric, as any exception in the middle of a change does.

`with clock:` is for threads that no exception interrupts, such as those of a server: it holds the lock, and
sets no flag. Times are ints, nanoseconds since the fabric was made.

Deliberately not handled: a real-time step that is due while the lock is held is late, and a trace is
not deterministic if several threads share virtual time: the order of their calls decides it.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any
from weakref import ref

from mcast.api import Guard, McastError, Phase, Waiters
from mcast.arguments.seconds import check_seconds
from mcast.backends.model.times import NS

logger: logging.Logger = logging.getLogger("mcast")

POLL_NS = 1_000
"""Virtual time that an unsuccessful poll (timeout 0) takes, so that a polling loop gets somewhere."""


THREAD_NAME = "mcast-sim-clock"
"""Name of the thread of a clock in real time."""


class SimulationStalled(McastError, RuntimeError):
    """EDEADLK: a call without a timeout waits for something that nothing will ever cause."""

    def __init__(self, call: str, phase: Phase) -> None:
        super().__init__(
            errno.EDEADLK,
            call,
            phase,
            None,
            "no event is scheduled on this fabric, so the call would never return: "
            'give a timeout, or make the fabric with clock="wall" if another thread will act',
        )


class Clock(ABC):
    """The steps that are due, in order of time, and for the same time in order of scheduling."""

    def __init__(self) -> None:
        self.guard: Guard = Guard("simulated fabric", "close the backend and open another one")
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = count()
        self.virtual_now: int = 0
        """Virtual time; in real time, when the last step was due."""
        self._deferred: deque[Callable[[], object]] = deque()
        self._held = 0
        """Depth of nested `with clock:`."""

    @property
    @abstractmethod
    def now(self) -> int: ...

    @abstractmethod
    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        """Run `action` `delay` ns from now, as a step. Called with the lock held."""

    def wait(self, ready: Callable[[], bool], timeout: float | None, call: str, phase: Phase) -> bool:
        """Let time pass until `ready()` or until `timeout` seconds have passed.

        Returns the last value of `ready()`.

        `ready` is called with the lock held, and changes nothing.
        """
        return self.wait_until(ready, self.end_of(timeout), call, phase)

    @abstractmethod
    def end_of(self, timeout: float | None) -> int | float | None:
        """Return when a call with this timeout ends, for `wait_until`."""

    @abstractmethod
    def wait_until(self, ready: Callable[[], bool], end: int | float | None, call: str, phase: Phase) -> bool:
        """Do the same as `wait`, until that time."""

    def run_until_idle(self) -> None:
        """Do every step that is scheduled now, and those that these schedule."""
        self.wait(lambda: not self._due, None, "run_until_idle", Phase.EVENT)

    @abstractmethod
    def descriptor_requested(self) -> None:
        """Note that a descriptor is waited on, so time must pass although no call waits."""

    def defer(self, action: Callable[[], object]) -> None:
        """Have it called after the step that is being done, when it can change the fabric itself."""
        self._deferred.append(action)

    def close(self) -> None:
        """Nothing scheduled happens any more."""
        self._due.clear()

    def _step(self, call: str) -> None:
        """Do the next step as a change of its own, and what has come aside."""
        guard = self.guard
        guard.amid = call
        now, _, action = heappop(self._due)
        self.virtual_now = now
        action()
        guard.amid = ""
        if guard.deferred:
            guard.run_deferred_closes()
        while self._deferred:
            self._deferred.popleft()()

    def __enter__(self) -> None:
        self.guard.lock.acquire()
        self._held += 1

    def __exit__(self, *_: object) -> None:
        try:
            after_change = self.guard.after_change
            if self._held == 1 and after_change is not None and not self.guard.amid:
                after_change("")
        finally:
            self._held -= 1
            self.guard.lock.release()


class VirtualClock(Clock):
    """Starts at 0 and moves only while a call waits, straight to the next step that is due.

    Once a descriptor has been asked for, perhaps no call ever waits. From then on every step that a call
    schedules is done before that call returns.
    """

    virtual_now: int

    @property
    def now(self) -> int:
        return self.virtual_now

    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        due = self.virtual_now + delay if delay > 0 else self.virtual_now
        heappush(self._due, (due, next(self._scheduled), action))

    def end_of(self, timeout: float | None) -> int | float | None:
        if timeout is None:
            return None
        ns = round(timeout * NS)
        return self.virtual_now + (ns if ns > POLL_NS else POLL_NS)

    def wait_until(self, ready: Callable[[], bool], end: int | float | None, call: str, phase: Phase) -> bool:
        guard, due = self.guard, self._due
        limit = inf if end is None else end
        with guard.lock:
            if guard.amid:
                guard.refuse(call, phase)
            if ready():
                return True
            while due and due[0][0] <= limit:
                self._step(call)
                if ready():
                    return True
            if end is not None:
                self.virtual_now = max(self.virtual_now, int(end))
        if end is None:
            raise SimulationStalled(call, phase)
        return False

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, with all that falls due in them."""
        self.wait(lambda: False, check_seconds(seconds, "seconds"), "advance", Phase.EVENT)

    def descriptor_requested(self) -> None:
        self.guard.after_change = self._after_change

    def _after_change(self, call: str) -> None:
        while self._due and not self.guard.amid:
            self._step(call or "a step that was due")


class WallClock(Clock):
    """Real time, for several threads and for asyncio.

    A thread of the clock carries out the steps when they are due.
    """

    def __init__(self) -> None:
        super().__init__()
        self._start = time.monotonic_ns()
        self._waiters = Waiters()
        self._alarm = Waiters()  # the clock's own thread, which no call but `call_later` concerns
        self._thread: threading.Thread | None = None
        self._driver: Callable[[], None] | None = None
        self._stopped = False
        self.guard.after_change = self._after_change

    @property
    def now(self) -> int:
        return time.monotonic_ns() - self._start

    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        heappush(self._due, (self.now + delay, next(self._scheduled), action))
        self._alert()

    def set_driver(self, driver: Callable[[], None] | None) -> None:
        """Leave the steps to a loop that calls `run_due`.

        `driver` is called when steps are added; None: the clock's thread does the steps again.
        """
        self._driver = driver
        if driver is None and self._due:
            self._alert()

    def _alert(self) -> None:
        """Have somebody do the steps when they are due."""
        if self._driver is not None:
            self._driver()
        elif not self._stopped:
            self._ensure_thread()
            self._alarm.wake()

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads of its parent's
            self._thread = threading.Thread(
                target=_clock_thread, args=(ref(self),), name=THREAD_NAME, daemon=True
            )
            self._thread.start()

    def end_of(self, timeout: float | None) -> int | float | None:
        return None if timeout is None else self.now + round(timeout * NS)

    def wait_until(self, ready: Callable[[], bool], end: int | float | None, call: str, phase: Phase) -> bool:
        guard, waiter = self.guard, None
        while True:
            with guard.lock:
                self._waiters.discard(waiter)
                if guard.amid:
                    guard.refuse(call, phase)
                if ready():
                    return True
                left = None if end is None else (end - self.now) / NS
                if left is not None and left <= 0:
                    return False
                guard.require_outermost(call, phase)
                if self._due and self._driver is None and not self._stopped:
                    self._ensure_thread()
                waiter = self._waiters.add()
            self._waiters.sleep(waiter, left)

    def descriptor_requested(self) -> None:
        """Real time passes anyway."""

    def close(self) -> None:
        super().close()
        self._stopped = True
        self._waiters.wake()
        self._alarm.wake()

    def _after_change(self, call: str) -> None:
        self._waiters.wake()

    def run_due(self) -> float | None:
        """Do the steps that are due; return the seconds until the next one, None if there is none.

        Called with the lock held.
        """
        while self._due and not self.guard.amid:
            left = self._due[0][0] - self.now
            if left > 0:
                return left / NS
            self._step("a step that was due")
            self._waiters.wake()
        return None

    def thread_step(self, waiter: Any) -> tuple[Any, float | None] | None:
        """Do the steps that are due, in the clock's thread.

        The thread has slept on `waiter`. Returns what it sleeps on next, and how long; None to end it.
        """
        with self.guard.lock:
            self._alarm.discard(waiter)
            left = self.run_due()
            if self._stopped or self._driver is not None or self.guard.amid:
                self._waiters.wake()
                return None
            return self._alarm.add(), left


def _clock_thread(clock_of: ref[WallClock]) -> None:
    """The thread of a clock.

    It ends when the clock is closed, when nothing else refers to the clock any more, and when a step raises.
    """
    waiter: Any = None
    while (clock := clock_of()) is not None:
        try:
            found = clock.thread_step(waiter)
        except Exception:  # a rule of the user's: the fabric is broken, and all that wait are told
            logger.exception("a scheduled step of the simulated fabric failed, and the fabric is now broken")
            found = clock.thread_step(waiter)
        del clock  # perhaps the last reference
        if found is None:
            return
        waiter, seconds = found
        Waiters.sleep(waiter, seconds)


CLOCKS: dict[str, Callable[[], Clock]] = {"virtual": VirtualClock, "wall": WallClock}
