"""Exceptions at any moment of an asyncio program: no task waits for ever, and what is broken says so."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import pytest

from mcast import aio, open_backend
from mcast.api import Backend, Broken, Phase

from .test_interrupts import GROUP, SOON, Interrupt, raise_interrupt

BOUND = 60.0


@pytest.fixture
def backend() -> Iterator[Backend]:
    with open_backend("sim-roce", ports=2, clock="wall") as opened:
        yield opened


def test_ctrl_c_cancels_the_main_task(backend: Backend) -> None:
    """The main task is cancelled as without mcast; the endpoint can be used afterwards."""
    found: list[object] = []

    async def main() -> None:
        async with aio.open_endpoint(backend, "10.0.0.1") as endpoint, endpoint.join(GROUP) as group:
            found.append(signal.getsignal(signal.SIGINT))
            asyncio.get_running_loop().call_later(0.02, signal.raise_signal, signal.SIGINT)
            try:
                await group.recv()
            except asyncio.CancelledError:
                await group.send(b"x")
                found.append(await group.recv(BOUND))
                raise

    async def without() -> None:
        found.append(signal.getsignal(signal.SIGINT))

    asyncio.run(without())
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert str(found[0]).partition(" at ")[0] == str(found[1]).partition(" at ")[0]
    assert found[2] is not None


def test_broken_endpoint_wakes_its_tasks(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcast.endpoint.awaiting.MAX_SLEEP", SOON)

    async def main() -> None:
        endpoint = aio.open_endpoint(backend, "10.0.0.1")
        group = await endpoint.join(GROUP)
        tasks = [
            asyncio.create_task(one) for one in (endpoint.recv(), group.recv(), group.ready(timeout=None))
        ]
        await asyncio.sleep(0.05)
        with pytest.raises(Interrupt):
            endpoint._guard.run("join", Phase.JOIN, raise_interrupt)
        for task in tasks:
            with pytest.raises(Broken):
                await asyncio.wait_for(task, BOUND)
        with pytest.raises(Broken):
            await group.send(b"x")
        assert endpoint.stats().joins == 1
        await endpoint.close()
        assert endpoint.closed

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a handler in a finalizer
def test_handlers_that_raise_hang_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At random moments of a program that sends and receives; then its loop and its backend are closed.

    A handler that raises between two lines of asyncio itself may make asyncio forget to resume a task, and
    Python drops what it raises in a finalizer. So the signal comes again, and the task's end has a bound.
    """
    monkeypatch.setattr("mcast.endpoint.awaiting.MAX_SLEEP", SOON)
    random = Random(1)
    interrupted = 0

    async def main(backend: Backend) -> None:
        async with aio.open_endpoint(backend, "10.0.0.1") as endpoint, endpoint.join(GROUP) as group:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-3), 1.0)
            while True:
                await group.send(b"x")
                await group.recv(0.001)

    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        for _ in range(100):
            backend = open_backend("sim-roce", clock="wall")
            loop = asyncio.new_event_loop()
            coroutine = main(backend)
            task = loop.create_task(coroutine)
            try:
                loop.run_until_complete(task)
            except (Interrupt, Broken):
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                task.cancel()
                loop.run_until_complete(asyncio.wait({task}, timeout=1.0))
                if not task.done():  # asyncio has forgotten it: it ends here, and not in another test
                    with suppress(RuntimeError):
                        coroutine.close()
                elif not task.cancelled():
                    task.exception()
                backend.close()
                loop.close()
            assert backend.closed
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 100
