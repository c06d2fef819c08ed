"""Inject actions between two lines of mcast, by `sys.settrace`: Ctrl-C, a call of this thread or of another.

A tracer that raised KeyboardInterrupt itself would put it where Python never takes a signal, between the end
of a `with` and its `__exit__` for one. So SIGINT comes when a line begins, and Python takes it as it does.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import PyDLL
from itertools import count
from pathlib import Path
from signal import SIGINT, SIGUSR1
from types import FrameType
from typing import Any
from zlib import crc32

import mcast

from .waiting import until

ROOT = str(Path(mcast.__file__).parent)
EVERY = 1 if os.environ.get("MCAST_TESTS") == "long" else 13
"""Which lines are tried: each in a long run, else every 13th."""
BOUND = 300.0
"""Seconds; the longest that anything may take, never a delay."""

STOP_TIMEOUT = 0.003
"""Seconds without a new line after which a thread counts as waiting; too short only means another order."""


def tried(every: int) -> Iterator[int]:
    """The lines to try: the first, and each `every`-th from another one on in each test.

    So tests of one call on several providers divide its lines among them.
    """
    yield 1
    yield from count(2 + crc32(os.environ["PYTEST_CURRENT_TEST"].encode()) % every, every)


class Signal(int):
    """`comes`: the system sends it. No call, at whose end Python would take the signal."""

    comes = property(PyDLL(None)["raise"])


_CTRL_C, _USER = Signal(SIGINT), Signal(SIGUSR1)


class Lines:
    """Counts the lines of mcast that the current thread begins within the `with`, in files that `counts`."""

    def __init__(self, counts: Callable[[str], bool] = lambda _: True) -> None:
        self._counts, self.begun = counts, 0

    def __enter__(self) -> Lines:
        self._outer = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._outer)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        counts = name.startswith(ROOT) and self._counts(name[len(ROOT) + 1 :]) and not _finalizes(frame)
        return self._line if counts else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.begun += 1
            self.on_line()
        return self._line

    def on_line(self) -> None: ...


def _finalizes(frame: FrameType | None) -> bool:
    """Return True if a `__del__` runs: Python itself drops what is raised there."""
    while frame is not None and frame.f_code.co_name not in ("__del__", "_drop"):
        frame = frame.f_back
    return frame is not None


class CtrlC(Lines):
    """SIGINT comes when the `at`-th line begins, of those in files whose name begins with `part`."""

    def __init__(self, at: int, part: str = "") -> None:
        super().__init__(lambda name: name.startswith(part))
        self._at = at

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.begun += 1
            if self.begun == self._at:
                sys.settrace(None)  # else the signal were taken in here, at the next line
                _CTRL_C.comes  # noqa: B018
        return self._line


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """That of other tests, too: Python drops what a signal raises in a callback of a weak reference to it."""
    if collects := gc.isenabled():
        gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def interrupted_everywhere(
    call: Callable[[], object], check: Callable[[bool], None], part: str = "", every: int = 0
) -> int:
    """`call` with SIGINT at each line that is tried, until it has no more; how many it has.

    `part` narrows them to the files whose name begins with it; `every` is EVERY where it is not given.

    `check(returned)` follows each: it finds the call done or not done, and leaves all as it was before.
    """
    outer = sys.gettrace()
    for at in tried(every or EVERY):
        returned = False
        try:
            with _garbage_kept(), (lines := CtrlC(at, part)):
                call()
                returned = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(outer)
        check(returned)
        if lines.begun < at:
            return lines.begun
    raise AssertionError("lines without end")


class Reentered(Lines):
    """`action` is called when the `at`-th line begins: there, as a finalizer is, or by a signal's handler."""

    def __init__(self, at: int, action: Callable[[], object], signalled: bool, part: str = "") -> None:
        super().__init__(lambda name: name.startswith(part))
        self._at, self._action, self._signalled = at, action, signalled

    def __enter__(self) -> Reentered:
        self._before = signal.signal(SIGUSR1, lambda *_: self._action())
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        signal.signal(SIGUSR1, self._before)

    def on_line(self) -> None:
        if self.begun == self._at:
            sys.settrace(None)
            if self._signalled:
                _USER.comes  # noqa: B018
            else:
                self._action()


class _Halt(Lines):
    """Stops the thread when its `at`-th line begins, until it may go on."""

    def __init__(self, at: int, counts: Callable[[str], bool]) -> None:
        super().__init__(counts)
        self._at, self.reached, self.may_go_on = at, threading.Event(), threading.Event()

    def on_line(self) -> None:
        if self.begun == self._at:
            self.reached.set()
            assert self.may_go_on.wait(BOUND)


class _Thread(threading.Thread):
    """Runs a call under its tracer; what came of it is its `outcome`."""

    def __init__(self, call: Callable[[], object], lines: Lines) -> None:
        super().__init__(daemon=True)
        self._call, self.lines, self.ended = call, lines, threading.Event()
        self.outcome: object = None
        self.start()

    def run(self) -> None:
        try:
            with self.lines:
                self.outcome = self._call()
        except BaseException as error:
            self.outcome = error
        finally:
            self.ended.set()

    def get_on(self) -> None:
        """Wait until it has ended, or waits for another thread."""
        begun = -1
        while not self.ended.wait(STOP_TIMEOUT) and begun != self.lines.begun:
            begun = self.lines.begun

    def result(self) -> object:
        assert self.ended.wait(BOUND), f"{self._call} hangs"
        self.join(BOUND)
        return self.outcome


def interleaved(
    first: Callable[[], object], second: Callable[[], object], at: int, counts: Callable[[str], bool]
) -> tuple[object, object, bool]:
    """The outcomes of `first`, stopped when its `at`-th line begins, and of `second`, which runs meanwhile.

    Whether `first` had so many lines comes third.
    """
    halt = _Halt(at, counts)
    one = _Thread(first, halt)
    while not (halt.reached.wait(STOP_TIMEOUT) or one.ended.is_set()):
        pass
    stopped = halt.reached.is_set()
    other = _Thread(second, Lines())
    other.get_on()
    halt.may_go_on.set()
    return one.result(), other.result(), stopped


@contextmanager
def nothing_left() -> Iterator[None]:
    """No thread, no descriptor and no other handler of SIGINT is there after the block."""

    def found() -> tuple[set[threading.Thread], int]:
        return set(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))

    def is_left() -> bool:  # what an earlier test has left may end meanwhile
        threads, descriptors = found()
        return not threads <= before[0] or descriptors > before[1]

    before, handler = found(), signal.getsignal(SIGINT)
    yield
    until(lambda: not is_left())
    assert signal.getsignal(SIGINT) == handler
