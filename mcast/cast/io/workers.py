"""Threads of a session, which compute digests, parity and tags while the session sends or receives.

Theory of operation. `submit` puts a task into a queue, which the threads empty in order; `result` waits for
the task, and raises what the task has raised. A task touches only what it was given, and the session leaves
that alone until it has the result; so nothing needs a lock, and one thread keeps the order of tasks that
depend on each other. Tasks last milliseconds and never wait.

- The threads start with the first task, and end in `close`, or with the interpreter, which must not go amid a
  task: they are joined in both cases. If `Workers` are dropped without a `close`, their threads end within a
  second. A finalizer would be sooner, and would drop the exception of a signal handler.
- A fork has no threads. `submit` and `result` refuse there, as all calls of an endpoint do.

`concurrent.futures` does the same in ten times the time of a task's hand-over, which would be as long as the
digest of a block takes.
"""

from __future__ import annotations

import os
from atexit import register
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, current_thread
from typing import Any, Generic, TypeVar, cast
from weakref import ref

T = TypeVar("T")

DEFAULT_THREADS = 1 if len(os.sched_getaffinity(0)) > 1 else 0
"""Default number of threads beside that of the caller: on one processor a thread only costs time."""

MAX_THREADS = 64
"""Maximum number of threads of a session."""


MIN_TASK = 1 << 16
"""Minimum size of a task, in bytes: to hand over a smaller one takes longer than to carry it out."""

_OWNER_INTERVAL = 1.0
"""Seconds after which a thread without tasks looks whether its `Workers` are still there."""


class Task(Generic[T]):
    """A call that another thread makes; without threads, `result` makes it."""

    __slots__ = ("_call", "_done", "_error", "_pid", "_result")

    def __init__(self, call: Callable[[], T], pid: int) -> None:
        self._call: Callable[[], T] | None = call
        self._pid = pid
        self._result: T | None = None
        self._error: BaseException | None = None
        self._done = Lock()
        if pid:
            self._done.acquire()

    def run(self) -> None:
        """Make the call, in one of the threads."""
        call, self._call = self._call, None
        assert call is not None
        try:
            self._result = call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    @property
    def done(self) -> bool:
        """True if `result` does not wait."""
        return not self._done.locked()

    def result(self) -> T:
        """Return the call's result once it is there, or raise its error. To be called once."""
        if not self._pid:
            assert self._call is not None
            return self._call()
        if self._done.locked():
            _require_process(self._pid)
        self._done.acquire()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it refers to frames that refer to this task
        return cast(T, self._result)


def _require_process(pid: int) -> None:
    """Raise RuntimeError in a fork of the process, which has none of its threads."""
    if pid != os.getpid():
        raise RuntimeError(
            f"this transfer began in process {pid}: open an endpoint in its fork {os.getpid()}"
        )


class Workers:
    """Threads that carry out tasks in order. Raises ValueError for a number of them that cannot be.

    threads  0: each task is carried out where its result is asked for
    """

    def __init__(self, threads: int) -> None:
        if threads not in range(MAX_THREADS + 1):
            raise ValueError(
                f"threads is {threads!r}: give 0 to {MAX_THREADS} threads for digests and parity"
            )
        self.threads: int = threads
        self._pid = os.getpid()
        self._queue = SimpleQueue[Task[Any] | None]()
        self._started = 0

    def submit(self, call: Callable[[], T], size: int | None = None) -> Task[T]:
        """Have a thread make the call as soon as one is free, unless it is about few bytes."""
        if not self.threads or _exiting.is_set() or (size is not None and size < MIN_TASK):
            return Task(call, 0)
        _require_process(self._pid)
        task = Task(call, self._pid)
        self._queue.put(task)
        while self._started < self.threads:
            thread = Thread(target=_work, args=(self._queue, ref(self)), name="mcast.cast", daemon=True)
            _queues[thread] = self._queue
            thread.start()
            self._started += 1  # an interrupt before this leaves one more thread, and never one less
        return task

    def close(self) -> None:
        """End the threads, after the tasks that were submitted. Idempotent; later tasks need no thread."""
        self.threads = 0
        _end({thread: queue for thread, queue in _queues.copy().items() if queue is self._queue})


_queues: dict[Thread, SimpleQueue[Task[Any] | None]] = {}
"""Threads that run, and where their tasks come from."""


def _work(queue: SimpleQueue[Task[Any] | None], owner: ref[Workers]) -> None:
    while owner() is not None:
        try:
            task = queue.get(timeout=_OWNER_INTERVAL)
        except Empty:
            continue
        if task is None:
            break
        task.run()
        del task  # what it holds is free while this thread waits
    _queues.pop(current_thread(), None)


def _end(threads: dict[Thread, SimpleQueue[Task[Any] | None]]) -> None:
    for queue in threads.values():
        queue.put(None)
    for thread in threads:
        if thread.is_alive():
            thread.join()
        _queues.pop(thread, None)


_exiting = Event()
"""Set when the interpreter ends: a program's own function for that may still send, without threads."""


@register
def _exit() -> None:
    _exiting.set()
    _end(_queues.copy())
