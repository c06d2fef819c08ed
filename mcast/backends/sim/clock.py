"""The time of a fabric: virtual (jumps to the next step that is due, deterministic) or real (for threads).

A clock owns the lock of its fabric, and every method is called with that lock held. Times are ints,
nanoseconds since the fabric was made.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from types import TracebackType
from weakref import ref

from mcast.api import McastError, Phase
from mcast.arguments.seconds import seconds_of
from mcast.backends.model.times import NS
from mcast.interrupts import Lock, Sleepers, do_what_was_put_off, take_interrupt, uninterrupted

logger: logging.Logger = logging.getLogger("mcast")

POLL_NS = 1_000
"""Virtual time that an unsuccessful poll (timeout 0) takes, so that a polling loop gets somewhere."""


class SimulationStalled(McastError, RuntimeError):
    """EDEADLK: a call without a timeout waits for something that nothing will ever cause."""

    def __init__(self, call: str, phase: Phase) -> None:
        super().__init__(
            errno.EDEADLK,
            call,
            phase,
            None,
            "nothing is due on this fabric, the call would wait for ever: "
            'give a timeout, or make the fabric with clock="wall" if another thread is to act',
        )


class Clock(ABC):
    """The steps that are due, in order of time, and for the same time in order of scheduling."""

    watched: bool
    """Whether others may wait for the fabric outside the running call, so that leaving a call must do more
    than unlock."""

    def __init__(self) -> None:
        self.mutex: Lock = Lock()
        self.call: uninterrupted = uninterrupted(self.mutex)
        self._depth = 0
        """Of calls into the fabric, one in the other; where none waits without the lock."""
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._scheduled = count()

    @property
    @abstractmethod
    def now(self) -> int: ...

    @abstractmethod
    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        """Run `action` `delay` ns from now."""

    @abstractmethod
    def wait(self, ready: Callable[[], bool], timeout: float | None, call: str, phase: Phase) -> bool:
        """Let time pass until `ready()` or until `timeout` seconds have passed; return what `ready()` says
        then.

        Called inside a whole call (see below), so that a signal is taken only between two steps.
        """

    def run_out(self) -> None:
        """Do every step that is scheduled now, and those that these schedule."""
        with self:
            self.wait(lambda: not self._due, None, "run_out", Phase.EVENT)

    @abstractmethod
    def want_descriptor(self) -> None:
        """Note that a descriptor is waited on, so time must pass although no call waits."""

    def close(self) -> None:
        """Nothing scheduled happens any more."""
        self._due.clear()

    # `with clock:` is one call into the fabric, which no signal ends half-way, as none ends a system call.
    # The fastest calls, where a tenth of a microsecond counts, use `with clock.call:` instead, and call
    # `settle` if the clock is `watched`. Code that makes a single change, and code inside of such a block,
    # holds the bare `mutex`.

    def settle(self) -> None:
        """Do what the end of `with clock:` does, besides unlocking."""
        with self:
            pass

    def __enter__(self) -> None:
        self.call.__enter__()
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        self.call.__exit__(kind, error, trace)


class VirtualClock(Clock):
    """Starts at 0 and moves only while a call waits, straight to the next step that is due.

    Once a descriptor has been asked for, perhaps no call ever waits. From then on every step that a call
    schedules is done before that call returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0
        self.watched: bool = False

    @property
    def now(self) -> int:
        return self._now

    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        due = self._now + delay if delay > 0 else self._now
        heappush(self._due, (due, next(self._scheduled), action))

    def wait(self, ready: Callable[[], bool], timeout: float | None, call: str, phase: Phase) -> bool:
        if ready():
            return True
        limit, due = inf, self._due
        if timeout is not None:
            ns = round(timeout * NS)
            limit = self._now + (ns if ns > POLL_NS else POLL_NS)
        while due and due[0][0] <= limit:
            self._now, _, action = heappop(due)
            action()
            do_what_was_put_off()
            if ready():
                return True
            take_interrupt()
        if timeout is None:
            raise SimulationStalled(call, phase)
        self._now = int(limit)
        return False

    def settle(self) -> None:
        if self._due:
            super().settle()

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, with all that falls due in them."""
        with self:
            self.wait(lambda: False, seconds_of(seconds, "seconds"), "advance", Phase.EVENT)

    def want_descriptor(self) -> None:
        self.watched = True

    def _step(self) -> None:
        self._now, _, action = heappop(self._due)
        action()
        do_what_was_put_off()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.watched and self._depth == 1:
                while self._due:
                    self._step()
        finally:
            super().__exit__(kind, error, trace)


class WallClock(Clock):
    """Real time, for several threads and for asyncio: a thread of the clock does the steps when they are
    due."""

    watched = True

    def __init__(self) -> None:
        super().__init__()
        self._start = time.monotonic_ns()
        self._sleepers = Sleepers(self.mutex)
        self._alarm = Sleepers(self.mutex)  # the clock's own thread, which no call but `call_later` concerns
        self._pump: threading.Thread | None = None
        self._driver: Callable[[], None] | None = None
        self._stopped = threading.Event()

    @property
    def now(self) -> int:
        return time.monotonic_ns() - self._start

    def call_later(self, delay: int, action: Callable[[], None]) -> None:
        heappush(self._due, (self.now + delay, next(self._scheduled), action))
        if self._driver is not None:
            self._driver()
        else:
            self._begin()

    def drive(self, driver: Callable[[], None] | None) -> None:
        """Leave the steps to a loop that calls `run_due`, and has `driver` called when there are more of
        them; None: no longer."""
        self._driver = driver
        if driver is None and self._due and not self._stopped.is_set():
            self._begin()

    def _begin(self) -> None:
        """Wake the thread of this clock."""
        if self._pump is None:
            run = partial(_pump, ref(self), self.mutex, self._alarm, self._stopped)
            self._pump = threading.Thread(target=run, name="mcast-sim-clock", daemon=True)
            self._pump.start()
        self._alarm.wake()

    def wait(self, ready: Callable[[], bool], timeout: float | None, call: str, phase: Phase) -> bool:
        end = None if timeout is None else self.now + round(timeout * NS)
        while not ready():
            left = None if end is None else (end - self.now) / NS
            if left is not None and left <= 0:
                return False
            self._sleepers.sleep(left)
        return True

    def want_descriptor(self) -> None:
        """Real time passes anyway."""

    def close(self) -> None:
        super().close()
        self._stopped.set()
        self._sleepers.wake()
        self._alarm.wake()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sleepers.wake()
        super().__exit__(kind, error, trace)

    def run_due(self) -> float | None:
        """Do the steps that are due; return the seconds until the next one, None if there is none."""
        while self._due:
            left = self._due[0][0] - self.now
            if left > 0:
                return left / NS
            try:
                heappop(self._due)[2]()
            except Exception:  # a rule of the user; what else is due must not wait for ever
                logger.exception("what was due on the fabric failed")
            do_what_was_put_off()
            self._sleepers.wake()
        return None

    def __del__(self) -> None:
        if self._pump is None or self._stopped.is_set():
            return
        self._stopped.set()
        if self.mutex.acquire(timeout=1.0):  # at exit the thread may be frozen with the lock in its hands
            self._alarm.wake()
            self.mutex.release()


def _pump(clock_of: ref[WallClock], mutex: Lock, alarm: Sleepers, stopped: threading.Event) -> None:
    """The thread of a clock.

    It ends when the clock is closed, and when nothing else refers to the clock any more.
    """
    with mutex:
        while not stopped.is_set():
            clock = clock_of()
            left = None if clock is None else clock.run_due()
            del clock  # perhaps the last reference, and then the clock has stopped
            if not stopped.is_set():
                alarm.sleep(left)


CLOCKS: dict[str, Callable[[], Clock]] = {"virtual": VirtualClock, "wall": WallClock}
