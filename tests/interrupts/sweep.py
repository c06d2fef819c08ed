"""Sweeps: an exception made pending at each line of a call in turn, on fresh objects each time.

`sweep` makes the exception pending by a C tracer (csrc/tracer.c), so it is raised where Python raises that of
a signal or of another thread, and nowhere else. Then it checks, in another thread and within `BOUND` seconds,
what `after` asks: no lock is held, nobody waits for ever. A hang fails the test with the stacks of all
threads.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import mcast
from mcast.api import Broken

from ..waiting import until

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "tracer"
FOLDER = str(Path(mcast.__file__).parent) + os.sep
EVERY = 1 if os.environ.get("MCAST_TESTS") == "long" else 59
"""Which lines are tried: each in a long run, else every 59th, from another one on in each test."""
BOUND = 60.0
"""Seconds after which a check counts as a hang; never a delay."""

W = TypeVar("W")


class Interrupt(BaseException):
    """The asynchronous exception."""


class Kind(Enum):
    """Origin of the exception, and its class."""

    CTRL_C = (signal.SIGINT, KeyboardInterrupt)
    SYSTEM_EXIT = (signal.SIGTERM, SystemExit)
    """A service that ends itself by `sys.exit` in a handler of SIGTERM."""
    ASYNCHRONOUS = (Interrupt, Interrupt)
    """`PyThreadState_SetAsyncExc`, which any thread may get."""

    @property
    def error(self) -> type[BaseException]:
        """The class of the exception."""
        error: type[BaseException] = self.value[1]
        return error


class _Place:
    """Where a call was interrupted; a text only if it is shown, because that reads the sources."""

    def __init__(self, name: str, stack: traceback.StackSummary) -> None:
        self._name, self._stack = name, stack

    def __str__(self) -> str:
        return "".join([f"{self._name}, raised in\n", *self._stack.format()])


class Outcome(NamedTuple):
    """Result of the call that was interrupted.

    at     the number of the line, or bytecode
    error  what the call raised: the interrupt, as a rule; None if it had fewer lines, and returned
    state  what `after` returned, for counting: "usable" or "broken", say
    """

    at: int
    error: BaseException | None
    state: object


def sweep(
    make: Callable[[], W],
    call: Callable[[W], object],
    after: Callable[[W, BaseException | None], object],
    kind: Kind = Kind.CTRL_C,
    *,
    opcodes: bool = False,
    every: int | None = None,
    folder: str = FOLDER,
) -> list[Outcome]:
    """Interrupt `call(make())` at its first line, at a later one, and so on until it ends before that line.

    after    checks the object, in another thread, where it may block: see `works` and `close`. It closes all
             that `make` has opened: no thread and no descriptor may be left
    opcodes  count bytecodes, and not lines
    every    which ones to try: each for 1
    folder   the files whose lines count
    """
    outcomes = []
    for at in _tried(every or EVERY):
        seen, outcome = _interrupt(make, call, after, kind, at, opcodes, folder)
        outcomes.append(outcome)
        if seen < at:
            return outcomes
    raise AssertionError("lines without end")


def _interrupt(
    make: Callable[[], W],
    call: Callable[[W], object],
    after: Callable[[W, BaseException | None], object],
    kind: Kind,
    at: int,
    opcodes: bool,
    folder: str,
) -> tuple[int, Outcome]:
    """Interrupt at one line; return how many lines were begun, too."""
    gc.collect(0)
    before = _descriptors(), set(threading.enumerate())
    world = make()
    try:
        with _unraisable() as lost, _handled(kind), _stacks_after(BOUND):
            seen, error = _run(lambda: call(world), at, kind.value[0], opcodes, folder)
        where = _place(kind, "bytecode" if opcodes else "line", at, error)
        swallowed = bool(lost) and all(_THREADS in one for one in lost)
        assert swallowed or not lost, f"{where}: {lost}"
        if seen == at and not swallowed:
            assert isinstance(error, kind.error), f"{where} became {error!r}"
    except BaseException:
        bounded(lambda: after(world, None), "cleaning up")
        raise
    state = bounded(lambda: after(world, error), where)  # the traceback lives, as in a program's `except`
    if error is not None:
        error.__traceback__ = error.__context__ = None
    outcome = Outcome(at, error, state)
    if not _descriptors() <= before[0] or not set(threading.enumerate()) <= before[1]:
        gc.collect()
        until(lambda: set(threading.enumerate()) <= before[1])
        end = monotonic() + _SETTLING
        while left := _descriptors() - before[0]:  # an ending thread may have had the last reference
            assert monotonic() < end, f"{where}: descriptors are left: {left}"
            threading.Event().wait(0.001)
            gc.collect()
    return seen, outcome


def reenter(
    make: Callable[[], W],
    call: Callable[[W], object],
    second: Callable[[W], object],
    after: Callable[[W, object, object], None],
    *,
    every: int | None = None,
) -> None:
    """Let a signal's handler call `second(world)` at the first line of `call(make())`, at a later one, and so
    on.

    `after(world, found, inner)` is told what became of both: a result, or the exception; `...` if the call
    had fewer lines.
    """
    for at in _tried(every or EVERY):
        world = make()
        inner: list[object] = []

        def handler(*_: object, world: W = world, inner: list[object] = inner) -> None:
            inner.append(_outcome(lambda: second(world)))

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with _unraisable() as lost, _stacks_after(BOUND):
                seen, found = _run(lambda world=world: call(world), at, signal.SIGUSR1, False, FOLDER)  # type: ignore[misc]
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert not lost, f"handler at line {at}: {lost}"
        place = f"handler at line {at}"
        bounded(lambda: after(world, found, inner[0] if inner else ...), place)  # noqa: B023
        if seen < at:
            return
    raise AssertionError("lines without end")


def _outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        return error


def _descriptors() -> set[str]:
    """Return the numbers of this process's descriptors, without that of the listing itself, now closed."""
    return {one for one in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{one}")}  # noqa: PTH208 - a tenth of the time


def _place(kind: Kind, unit: str, at: int, error: BaseException | None) -> _Place:
    """Say where a call was interrupted."""
    stack = traceback.StackSummary.extract(
        traceback.walk_tb(error.__traceback__ if error is not None else None), lookup_lines=False
    )
    return _Place(f"{kind.name} at {unit} {at}", stack)


def works(*uses: Callable[[], object]) -> bool:
    """Return True if all uses return, False if one raises `Broken`."""
    try:
        for use in uses:
            use()
    except Broken:
        return False
    return True


def states(outcomes: list[Outcome]) -> Counter[object]:
    """Count the outcomes by state."""
    return Counter(outcome.state for outcome in outcomes)


def bounded(check: Callable[[], Any], where: object = "") -> Any:
    """Return what `check` returns in a thread of its own; fail with all stacks if it hangs."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(check())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(BOUND)
    if thread.is_alive():
        raise AssertionError(f"{where}: hangs\n{all_stacks()}")
    if errors:
        errors[0].add_note(str(where))
        raise errors[0]
    return result[0]


def all_stacks() -> str:
    """Return the stacks of all threads."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def _tried(every: int) -> Iterator[int]:
    """Yield the first line, and each `every`-th from another one on in each test."""
    yield 1
    yield from count(2 + crc32(os.environ.get("PYTEST_CURRENT_TEST", "").encode()) % every, every)


def _run(
    call: Callable[[], object], at: int, how: object, opcodes: bool, folder: str
) -> tuple[int, BaseException | None]:
    """Run `call` with an exception at the line; return how many lines were begun, and what it raised."""
    outer, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # Python drops what is raised in a finalizer of another test's garbage
    try:
        found: tuple[int, BaseException | None] = _tracer.run(call, _settle, folder, at, how, opcodes)
        return found
    finally:
        sys.settrace(outer)
        if collects:
            gc.enable()


def _settle() -> None:
    """Let Python raise what is still pending."""
    for _ in range(3):
        pass


@contextmanager
def _handled(kind: Kind) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise kind.error

    if not isinstance(kind.value[0], signal.Signals):
        yield
        return
    before = signal.signal(kind.value[0], handler)
    try:
        yield
    finally:
        signal.signal(kind.value[0], before)


_SETTLING = 10.0
"""Seconds in which what threads had must be closed."""

_THREADS = "WeakSet.__init__.<locals>._remove"
"""Callback of Python's own set of threads, when one has ended: what is raised in there, Python drops."""


@contextmanager
def _unraisable() -> Iterator[list[str]]:
    """Collect the exceptions that Python dropped, as of `__del__`."""
    lost: list[str] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda args: lost.append(repr(args))
    try:
        yield lost
    finally:
        sys.unraisablehook = before


@contextmanager
def _stacks_after(seconds: float) -> Iterator[None]:
    """Print all stacks if the block takes longer; pytest's own limit then ends it."""
    faulthandler.dump_traceback_later(seconds, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _load() -> Any:
    """Build the tracer for this Python, unless it is there, and import it."""
    source = HERE / "csrc" / "tracer.c"
    flags = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    include = sysconfig.get_path("include")
    text = repr([flags, include, sys.version]).encode() + source.read_bytes()
    found = BUILD / hashlib.sha256(text).hexdigest()[:16] / "_tracer.so"
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        half = found.with_suffix(f".{os.getpid()}")  # another process may build it, too
        subprocess.run(["cc", *flags, f"-I{include}", "-o", half, source], check=True, timeout=500)
        half.replace(found)
    loader = ExtensionFileLoader("_tracer", str(found))
    spec = spec_from_loader("_tracer", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


_tracer: Any = _load()
