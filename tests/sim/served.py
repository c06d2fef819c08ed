"""Processes of a served fabric that send to a group and receive from it, by the contract's calls."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mcast import Backend, open_backend
from mcast.api import Destination, JoinAttrEx, QpInit, QueuePair
from mcast.backends.sim.served.client import ServedQueuePair

GROUP = "239.1.1.1"


class End(NamedTuple):
    """A process that sends to the group or receives from it."""

    qp: QueuePair
    to: Destination
    backend: Backend

    def send(self, *payloads: bytes) -> None:
        self.qp.send(self.to, payloads)

    def take(self, count: int) -> list[bytes]:
        """The payloads of so many messages."""
        found: list[bytes] = []
        while len(found) < count:
            with self.qp.recv(count - len(found), 30) as batch:
                assert len(batch), f"{len(found)} of {count} messages came"
                found += [bytes(message.payload) for message in batch]
        return found

    @property
    def client(self) -> ServedQueuePair:
        assert isinstance(self.qp, ServedQueuePair)
        return self.qp


@contextmanager
def end(path: Path, sends: bool = False, depth: int = 512) -> Iterator[End]:
    with open_backend("sim", socket=path) as backend, backend.event_channel() as channel:
        cm_id = channel.create_id()
        cm_id.bind_addr(backend.devices()[0].ports[0].addresses[0])
        qp = cm_id.create_qp(QpInit(max_recv_wr=depth))
        cm_id.join_multicast_ex(JoinAttrEx.send_only(GROUP) if sends else JoinAttrEx.full_member(GROUP))
        event = channel.get_event(30)
        assert event is not None
        ud = event.check().ud
        assert ud is not None
        yield End(qp, ud.destination, backend)


@contextmanager
def crowded(path: Path) -> Iterator[socket.socket]:
    """A server, which has as many newcomers waiting as may wait."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        server.bind(str(path))
        server.listen(0)
        with suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                waiting.setblocking(False)
                waiting.connect(str(path))
        yield server
