"""Threads of a session: order, errors, ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from mcast.cast.io.workers import MAX_THREADS, Workers


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
    assert "mcast.cast" not in names()


def test_an_exit_amid_tasks_is_clean() -> None:
    """A thread that hashes while the interpreter goes would abort the process."""
    program = (
        "from blake3 import blake3\n"
        "from mcast.cast.io.workers import Workers\n"
        "workers, data = Workers(2), bytes(1 << 24)\n"
        "tasks = [workers.submit(lambda: blake3(data).digest()) for _ in range(8)]\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


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


@pytest.mark.parametrize("threads", [-1, MAX_THREADS + 1])
def test_impossible_numbers_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="give 0 to 64 threads"):
        Workers(threads)
