"""SIGINT at random moments, sent by another process: `python -m tests.endpoint.storm PLACE COUNT`.

PLACE is a simulated provider, or card-roce. Prints what is wrong, and nothing if all is well.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from mcast import open_backend, open_endpoint
from mcast.api import AlreadyJoined, Backend, Broken, McastError

from ..card.build import build
from ..card.provider import CardBackend, loaded
from ..interleave import BOUND

GROUP, OTHER = "239.1.2.3", "239.4.5.6"
SOON = 0.0005
TIMES = 30
"""Number of calls while one signal may arrive."""


@contextmanager
def opened(place: str) -> Iterator[Backend]:
    if place != "card-roce":
        with open_backend(place, ports=2) as backend:
            yield backend
        return
    with tempfile.TemporaryDirectory() as sysfs, loaded(build(), Path(sysfs)) as card:
        card.network("roce", ports=2)
        with CardBackend(card) as on_card:
            yield on_card


class Sender:
    """A process that sends one SIGINT at a random moment each time that it is armed."""

    def __init__(self) -> None:
        self._shared, parent = mmap.mmap(-1, 1), os.getpid()
        self._pid = os.fork()
        if self._pid:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        random = Random(1)
        while os.getppid() == parent:
            time.sleep(random.random() * 0.0008)
            if self._shared[0]:
                os.kill(parent, signal.SIGINT)
                self._shared[0] = 0
        os._exit(0)

    def arm(self) -> None:
        self._shared[0] = 1

    def wait(self) -> None:
        """Until the signal has been sent: none comes later."""
        while self._shared[0]:
            time.sleep(0.0001)
        time.sleep(0.0)  # the system delivers it at the end of a system call

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class Storm:
    """Two endpoints and an id, all of them on the first port but one endpoint."""

    def __init__(self, backend: Backend) -> None:
        first, second = (device.ports[0].addresses[0] for device in backend.devices())
        self.backend, self.second = backend, second
        self.here, self.there = open_endpoint(backend, first), open_endpoint(backend, second)
        self.out = self.there.join(GROUP)
        self.here.join(GROUP)
        self.channel = backend.event_channel()
        self.id = self.channel.create_id()
        self.id.bind_addr(first)
        self.qp = self.id.create_qp()
        self.id.join_multicast(GROUP)
        event = self.channel.get_event(BOUND)
        assert event is not None
        assert event.ud is not None
        self.to = event.ud.destination
        self.calls: list[Callable[[], object]] = [
            self.batch,
            self.dropped_batch,
            self.membership,
            self.message,
            self.join,
            self.objects,
            lambda: self.here.recv(SOON),
        ]

    def batch(self) -> None:
        self.qp.send(self.to, [b"x"] * 3)
        with self.qp.recv(8, 0) as batch:
            list(batch)

    def dropped_batch(self) -> None:
        self.qp.send(self.to, [b"x"] * 3)
        self.qp.recv(8, 0)

    def membership(self) -> None:
        with self.here.join(OTHER):
            pass

    def message(self) -> None:
        self.out.send(b"x")
        self.here.recv(SOON)

    def join(self) -> None:
        self.id.join_multicast(OTHER)
        self.channel.get_event(SOON)
        self.id.leave_multicast(OTHER)

    def objects(self) -> None:
        with self.backend.event_channel() as channel, channel.create_id() as cm_id:
            cm_id.bind_addr(self.second)
            with cm_id.create_qp() as qp, qp.register(bytearray(4096)):
                cm_id.join_multicast(OTHER)

    def settle(self) -> None:
        """Take what the call has left by right. Raises Broken."""
        try:
            self.id.leave_multicast(OTHER)
        except Broken:
            raise
        except McastError:  # it is no member
            pass
        while self.channel.get_event(SOON):
            pass
        while self.qp.recv(64, 0):
            pass
        for endpoint in (self.here, self.there):
            while endpoint.recv(SOON):
                pass
        for group in self.here.groups[1:]:
            group.leave()
        gc.collect(0)

    def wrongs(self) -> list[str]:
        """Return all that it has left besides."""
        asked: list[object] = []
        other = threading.Thread(target=lambda: asked.append(self.here.stats()), daemon=True)
        other.start()
        other.join(BOUND)
        stats = self.here.stats() if asked else None
        found = {
            "a lock is held": stats is None,
            "receives are leased": self.qp.counters.recv_free != 512
            or (stats is not None and stats.receive_free != stats.receive_depth),
            "a membership is left": len(self.here.groups) != 1,
        }
        return [wrong for wrong, is_so in found.items() if is_so]

    def close(self) -> list[str]:
        """Close all, in another thread; return what does not close."""
        ends: dict[str, Any] = {
            "here": self.here,
            "there": self.there,
            "channel": self.channel,
            "backend": self.backend,
        }

        def close_all() -> None:
            for end in ends.values():
                end.close()

        other = threading.Thread(target=close_all, daemon=True)
        other.start()
        other.join(BOUND)
        return [f"{name} is open" for name, end in ends.items() if not end.closed]


def main(place: str, count: int) -> None:
    sender, interrupted = Sender(), 0
    while interrupted < count:
        with opened(place) as backend:
            storm = Storm(backend)
            for call in cycle(storm.calls):
                came = interrupted
                try:
                    sender.arm()
                    for _ in range(TIMES):
                        with suppress(AlreadyJoined):
                            call()
                    sender.wait()
                except KeyboardInterrupt:
                    interrupted += 1
                if interrupted == came:
                    continue
                # Not in the `except`: its traceback refers to what the call had.
                try:
                    storm.settle()
                    wrongs = storm.wrongs()
                except Broken:
                    wrongs = storm.close()
                    if not wrongs:
                        break
                if wrongs:
                    print(f"{getattr(call, '__name__', call)}, signal {interrupted}: {', '.join(wrongs)}")
                    count = 0
                if interrupted >= count:
                    break
    sender.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
