"""Threads of a session: order, errors, ends; and what is sent with them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from typing_extensions import Buffer

from mcast import cast
from mcast.backends.sim import Fabric
from mcast.backends.sim.faults import Drop, Messages
from mcast.backends.sim.testbed import SimObserver
from mcast.cast.io.workers import MAX_THREADS, Workers
from mcast.cast.protocol.blocks import Digest

from ...waiting import until
from .test_objects import BOUND, DATA, body, gets, member, others


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(1)
    yield workers
    workers.close()


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_tasks_run_in_order_elsewhere(workers: Workers) -> None:
    order: list[int] = []

    def note(step: int) -> int:
        order.append(step)
        return threading.get_ident()

    tasks = [workers.submit(partial(note, step)) for step in range(9)]
    found = {task.result() for task in tasks}
    assert order == [*range(9)]
    assert len(found) == 1
    assert threading.get_ident() not in found


def test_without_threads_result_makes_the_call() -> None:
    workers, made = Workers(0), list[int]()
    task = workers.submit(lambda: made.append(threading.get_ident()))
    assert made == []
    task.result()
    assert made == [threading.get_ident()]


def test_several_threads_work_at_once() -> None:
    """Each of two tasks waits for the other."""
    workers, meet = Workers(2), threading.Barrier(2, timeout=20)
    assert sorted(task.result() for task in [workers.submit(meet.wait) for _ in range(2)]) == [0, 1]
    workers.close()


@pytest.mark.parametrize("threads", [0, 1])
def test_an_error_reaches_the_caller(threads: int) -> None:
    workers = Workers(threads)
    task = workers.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        task.result()
    assert workers.submit(lambda: 7).result() == 7
    workers.close()


def test_close_ends_the_threads_after_their_tasks(workers: Workers) -> None:
    tasks = [workers.submit(lambda: 7) for _ in range(100)]
    assert "mcast.cast" in names()
    workers.close()
    workers.close()
    assert "mcast.cast" not in names()
    assert [task.result() for task in tasks] == [7] * 100


def test_dropped_workers_leave_no_thread() -> None:
    workers = Workers(1)
    workers.submit(lambda: None).result()
    del workers
    gc.collect()
    until(lambda: "mcast.cast" not in names())


def test_the_interpreter_ends_after_the_tasks() -> None:
    """A thread that returns from C while the interpreter goes is ended amid that."""
    program = (
        "import os\n"
        "from blake3 import blake3\n"
        "from mcast.cast.io.workers import Workers\n"
        "workers, data = Workers(2), bytes(1 << 24)\n"
        "for _ in range(8):\n"
        "    workers.submit(lambda: (blake3(data).digest(), os.write(1, b'.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", 8 * ".")


def test_a_program_may_submit_tasks_as_it_ends() -> None:
    """In a function for the exit that it has registered before: the threads have ended then."""
    program = (
        "import atexit\n"
        "atexit.register(lambda: print(workers.submit(lambda: 'done').result()))\n"
        "from mcast.cast.io.workers import Workers\n"
        "workers = Workers(1)\n"
        "workers.submit(lambda: None).result()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "done\n")


def test_a_fork_is_refused_and_closes(workers: Workers) -> None:
    held = threading.Lock()
    held.acquire()
    task = workers.submit(held.acquire)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        said = "nothing"
        try:
            task.result()
        except RuntimeError as error:
            said = str(error)
        workers.close()
        os.write(writer, said.encode())
        os._exit(0)
    held.release()
    assert os.waitpid(child, 0)[1] == 0
    assert (
        f"began in process {os.getpid()}: open an endpoint in its fork {child}"
        in os.read(reader, 999).decode()
    )
    os.close(reader)
    os.close(writer)


def test_a_fork_takes_no_tasks(workers: Workers) -> None:
    """No thread is there to carry them out, and their result would be waited for without end."""
    workers.submit(lambda: None).result()
    if not (child := os.fork()):
        status = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            workers.submit(lambda: None).result()
        except RuntimeError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("threads", [-1, MAX_THREADS + 1, 1.5, None, "1"])
def test_impossible_numbers_are_refused(threads: Any) -> None:
    with pytest.raises(ValueError, match="give 0 to 64 threads"):
        Workers(threads)


PIECES = [DATA[at : at + 70_001] for at in range(0, len(DATA), 70_001)]


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric.roce(3, clock="wall")
    yield made
    assert SimObserver(made).leftovers() == ()
    assert "mcast.cast" not in names()


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("key", [None, bytes(16)], ids=["open", "closed"])
def test_objects_arrive_with_any_number_of_threads(
    fabric: Fabric, threads: int, key: bytes | None, tmp_path: Path
) -> None:
    """Of memory, of a file and of an iterable, despite losses that take parity."""
    path = tmp_path / "object"
    path.write_bytes(DATA)
    with (
        fabric.rules.when(Messages(rate=0.05), Drop()),
        others(lambda: gets(fabric, 1, 4, key=key, threads=threads)) as ends,
        member(fabric, 0) as group,
        cast.open_session(group, threads=threads, key=key) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        reports = [session.send(one) for one in (DATA, path, iter(PIECES), DATA[:100])]
        assert ("mcast.cast" in names()) == (threads > 0)
        got = ends[0].result(BOUND)
    assert [body(one) for one in got] == [DATA, DATA, DATA, DATA[:100]]
    assert [report.digest for report in reports] == [blake3(body(one)).digest() for one in got]
    assert sum(report.repairs for report in reports) > 0


@pytest.mark.parametrize("threads", [0, 2])
def test_a_carousel_has_the_same_blocks_in_each_cycle(fabric: Fabric, threads: int) -> None:
    objects = [cast.Object(DATA, "a"), cast.Object(DATA[::-1], "b")]
    with (
        others(lambda: gets(fabric, 1, 2)) as ends,
        member(fabric, 0) as group,
    ):
        group.ready(1, timeout=BOUND)  # a carousel waits for nobody
        with cast.open_session(group, rate=20e6, threads=threads) as session:
            reports = session.send_carousel(objects, cast.carousel(cycles=4))
        assert [body(one) for one in ends[0].result(BOUND)] == [DATA, DATA[::-1]]
    assert [report.cycles for report in reports] == [4, 4]


def test_a_small_object_starts_no_thread(fabric: Fabric) -> None:
    with member(fabric, 0) as group, cast.open_session(group, threads=1) as session:
        session.send(b"small")
        assert "mcast.cast" not in names()


def test_an_error_of_a_thread_ends_the_object_alone(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(digest: Digest, data: Buffer) -> None:
        raise MemoryError("no memory for the digest")

    with member(fabric, 0) as group, cast.open_session(group, threads=1) as session:
        with monkeypatch.context() as patch:
            patch.setattr(Digest, "update", fails)
            with pytest.raises(MemoryError, match="for the digest"):
                session.send(DATA)
        assert session.send(DATA).offered == len(DATA)


def test_an_interrupt_leaves_no_thread(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the caller waits for a digest."""
    interrupted = threading.Event()

    def handler(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def waits(digest: Digest, data: Buffer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait(BOUND)

    monkeypatch.setattr(Digest, "update", waits)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with member(fabric, 0) as group, pytest.raises(KeyboardInterrupt):
            cast.send(group, DATA, receivers=0, threads=1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted.is_set()
    assert "mcast.cast" not in names()


def test_sessions_refuse_impossible_numbers(fabric: Fabric) -> None:
    with member(fabric, 0) as group:
        with pytest.raises(ValueError, match="threads is -1: give 0 to 64 threads"):
            cast.open_session(group, threads=-1)
        cast.open_session(group, threads=64).close()
