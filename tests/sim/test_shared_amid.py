"""What comes amid a call of a client: a signal's handler, a finalizer, and what another thread does."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mcast import Backend, open_backend
from mcast.api import Closed, CmId, EventChannel, McastError, QpState
from mcast.backends.sim.shared import connection, frames
from mcast.backends.sim.shared.client import SharedBackend, SharedQueuePair
from mcast.backends.sim.shared.server import FabricServer
from mcast.interrupts import later

from ..interleave import Reentered, interrupted_everywhere
from ..waiting import is_asleep, until
from .served import End, end

Amid = Callable[[Callable[[], object]], Reentered]
Call = Callable[[Backend, EventChannel, CmId], object]
HANGS = 60.0
"""Seconds after which a thread counts as one that waits for ever."""


def at_each_line(part: str, call: Callable[[Amid], object], signalled: bool = False) -> None:
    """`call(amid)` once for each line that it has in that file of the client: at this line `amid(action)`, in
    a `with`, has the action come, or a signal whose handler it is."""
    at, came = 0, [True]
    while came:
        came.clear()
        at += 1

        def amid(action: Callable[[], object], at: int = at) -> Reentered:
            def comes() -> None:
                came.append(True)
                action()

            return Reentered(at, comes, signalled, f"backends/sim/shared/{part}.py")

        call(amid)
    assert at > 10


CALLS: dict[str, tuple[str, Call]] = {
    "groups": ("connection", lambda backend, channel, cm_id: backend.groups()),
    "create_id": ("client", lambda backend, channel, cm_id: channel.create_id()),
    "destroy": ("client", lambda backend, channel, cm_id: cm_id.destroy()),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_server_s_end_is_seen(server: FabricServer, path: Path, name: str) -> None:
    """Then the answer that the call was about to take is gone, and so are its channel's ids."""
    part, call = CALLS[name]

    def make_the_call(amid: Amid) -> None:
        with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
            cm_id = channel.create_id()
            assert isinstance(backend, SharedBackend)
            server_end = backend._connection._socket

            def hang_up_and_look() -> None:
                server_end.shutdown(socket.SHUT_RDWR)
                assert not channel.pending, "no id has a device that could be removed"

            with suppress(McastError), amid(hang_up_and_look):
                call(backend, channel, cm_id)

    at_each_line(part, make_the_call)


def test_what_had_no_room_is_sent(sender: End) -> None:
    """By what a handler sends, at whatever line of a call that was about to send it."""

    def look(amid: Amid) -> None:
        sender.client._connection.tell_later(frames.AskFor(op="seed"))
        with amid(lambda: sender.send(b"x")):
            assert sender.qp.state is QpState.RTS

    at_each_line("connection", look)


def test_a_frame_is_taken_and_no_other_comes(server: FabricServer, path: Path, sender: End) -> None:
    """The server tells no more, which the call that had the frame meets."""
    with end(path) as known, known.backend.event_channel() as channel:
        sender.send(b"in a ring that is known from now on")
        known.take(1)

        def receive(amid: Amid) -> None:
            with channel.create_id() as cm_id, suppress(Closed):
                cm_id.bind_addr(known.backend.devices()[0].ports[0].addresses[0])
                qp = cm_id.create_qp()
                assert isinstance(qp, SharedQueuePair)
                qp.attach_mcast(sender.to.gid, 0)
                sender.send(b"one", b"two")
                sender.qp.flush()

                def take_and_hang_up() -> None:
                    qp.recv(2, 0)
                    with socket.socket(fileno=os.dup(qp._incoming._fd)) as server_end:
                        server_end.shutdown(socket.SHUT_RDWR)

                with amid(take_and_hang_up):
                    qp.recv_one(0)

        at_each_line("incoming", receive, signalled=True)


@pytest.mark.parametrize("rings", [False, True])
def test_what_a_bell_looks_at_changes(rings: bool) -> None:
    """By a signal's handler, amid the look."""
    is_true, poller = [rings], select.poll()

    def look() -> bool:
        found = is_true[0]
        if found is rings:
            is_true[0] = not rings
            bell.show()
        return found

    bell = connection.Beacon(look)
    poller.register(bell, select.POLLIN)
    bell.listen()
    assert bool(poller.poll(0)) is not rings
    bell.close()


def test_ctrl_c_comes_before_a_descriptor_is_there(sender: End, receiver: End) -> None:
    """Who asks for it again is told of what lies here all the same."""
    incoming = receiver.client._incoming

    def check(returned: bool) -> None:
        sender.send(b"one", b"other")
        assert receiver.qp.recv_one(30) is not None
        poller = select.poll()
        poller.register(receiver.qp.fileno(), select.POLLIN)
        assert poller.poll(0)
        assert receiver.take(1) == [b"other"]
        incoming._polled = False
        while incoming._bell._listeners:
            incoming._bell.leave()

    assert interrupted_everywhere(receiver.qp.fileno, check, "backends/sim/shared/incoming.py", 1) > 3


def test_what_a_sleep_is_on_is_closed() -> None:
    def sleep_once(amid: Amid) -> None:
        slept, before = connection.Sleep(), descriptors()

        def close() -> None:
            if not later(slept.close):
                slept.close()

        with amid(close):
            slept.until([], 0.0)
        if slept._closed:
            assert descriptors() == before
        slept.close()

    at_each_line("connection", sleep_once)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_batch_is_dropped_while_another_thread_receives(receiver: End, path: Path) -> None:
    """Which waits for the connection that this thread has: neither waits for the other for ever."""
    with end(path, sends=True) as other:
        other.send(b"first")
        batches = [receiver.qp.recv(timeout=HANGS)]
        other.send(b"in a ring that is not known yet")
        incoming, dropped = receiver.client._incoming, threading.Event()

        def drop_amid_a_request() -> None:
            with receiver.client._connection._whole:
                receiving.start()
                until(lambda: incoming._frame is not None and is_asleep(receiving))
                batches.clear()
            dropped.set()

        receiving = threading.Thread(target=lambda: receiver.qp.recv(1, 2 * HANGS), daemon=True)
        threading.Thread(target=drop_amid_a_request, daemon=True).start()
        assert dropped.wait(HANGS)
        receiving.join(HANGS)
        assert receiver.qp.counters.recv_free == 512
