"""One sender and N receivers of a file in one process: join, wait, send in windows, drain."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import BinaryIO

from mcast.api import (
    Backend,
    CmId,
    Destination,
    EventChannel,
    JoinAttrEx,
    McastAddress,
    QpInit,
    QueuePair,
)
from mcast.cli.filecast import HEADER, Reassembly, count_pieces, read_pieces
from mcast.cli.terminal import Failure
from mcast.endpoint.ports import Place, active

BOUND = 10.0
"""The longest that a join or the first message may take, in seconds."""

GRACE = 3.0
"""How long a receiver waits for the last message of a window before it counts as lost, in seconds."""

_KNOCK = 0.2
_RECEIVE_MEMORY = 64 << 20
_WINDOW = range(16, 513)
_COPIES = 512
"""In flight at the most, of all receivers together: on software devices each copy waits in a queue of the
host, which drops what is beyond 1000 (net.core.netdev_max_backlog) without a word."""


class Receiver:
    """A member of the group that puts the file together."""

    def __init__(self, place: Place, qp: QueuePair, file: Reassembly, window: int) -> None:
        self.place, self.qp, self.file = place, qp, file
        self.finished = time.perf_counter()
        self._window = window

    def hears(self, timeout: float) -> bool:
        """Whether any message comes in time."""
        with self.qp.recv(self._window, timeout) as batch:
            return len(batch) > 0

    def drain(self, last: int | None, sender_qp: int) -> None:
        """Take what has been sent: up to the piece `last`, which one sender's order makes the last to come.

        None: until the file is whole. Gives up when nothing comes any more.
        """
        number: int | None = -1
        while self.file.lost if last is None else number != last:
            with self.qp.recv(self._window, GRACE) as batch:
                if not len(batch):
                    break
                for message in batch:
                    if message.src_qp == sender_qp:
                        number = self.file.add(message.payload)
        self.finished = time.perf_counter()


class Transfer:
    """A file on its way: made when all have joined and hear the sender; `run` sends it.

    Raises Failure where there is no port, or a receiver stays deaf.
    """

    def __init__(
        self, backend: Backend, channel: EventChannel, group: McastAddress, receivers: int, file: BinaryIO
    ) -> None:
        try:
            ports = active(backend, group)
        except ValueError as error:
            raise Failure(str(error)) from None
        self.place, *others = ports
        seats = list(islice(cycle(others or ports), receivers))
        affordable = (
            min(_RECEIVE_MEMORY // max(place.port.active_mtu for place in ports), _COPIES) // receivers
        )
        window = min(max(affordable, _WINDOW[0]), _WINDOW[-1], *(place.device.max_qp_wr for place in ports))

        sender = _bind(channel, self.place, QpInit(max_send_wr=window, max_recv_wr=1))
        # Twice the window: what the fabric doubles must not take the place of what is to come.
        ids = [
            _bind(channel, place, QpInit(max_recv_wr=min(2 * window, place.device.max_qp_wr)))
            for place in seats
        ]
        for cm_id in ids:
            cm_id.join_multicast_ex(JoinAttrEx.full_member(group))
        sender.join_multicast_ex(JoinAttrEx.send_only(group))
        self._destination = _await_joins(channel, sender, len(ids) + 1)

        self._qp, *qps = map(_qp_of, (sender, *ids))
        self.message_size = min(qp.max_message_to(self._destination) for qp in (self._qp, *qps))
        piece = self.message_size - HEADER.size
        size = file.seek(0, os.SEEK_END)
        self.messages = count_pieces(size, piece)
        self._file, self._piece, self._window = file, piece, window
        self.receivers = [
            Receiver(place, qp, Reassembly(size, piece, window), window)
            for place, qp in zip(seats, qps, strict=True)
        ]
        self._wait_until_heard(group)

    def run(self) -> Iterator[int]:
        """Send the file; yield how many messages have been sent, after each window that was drained.

        Never more is in flight than the receivers have free receives, so a healthy fabric loses nothing.
        """
        sent = 0
        self._file.seek(0)
        for messages in read_pieces(self._file, self._piece, self._window):
            while messages:
                free = min(receiver.qp.counters.recv_free for receiver in self.receivers)
                room = max(1, min(free, self._window))
                sent += self._qp.send(self._destination, messages[:room], timeout=BOUND)
                for receiver in self.receivers:
                    receiver.drain(sent - 1, self._qp.qp_num)
                yield sent
                messages = messages[room:]
        for receiver in self.receivers:
            receiver.drain(None, self._qp.qp_num)

    def _wait_until_heard(self, group: McastAddress) -> None:
        """Send empty messages until every receiver has one: a joined group may not be programmed yet."""
        deaf = self.receivers
        for _ in range(round(BOUND / _KNOCK)):
            self._qp.send_one(self._destination, b"", timeout=BOUND)
            deaf = [receiver for receiver in deaf if not receiver.hears(_KNOCK)]
            if not deaf:
                return
        raise Failure(
            f"{deaf[0].place.device.name} ({deaf[0].place.address}) joined {group} and hears nothing "
            f"of it from {self.place.device.name} within {BOUND:g} s: check the cabling, and IGMP snooping "
            "or the SM"
        )


def _bind(channel: EventChannel, place: Place, init: QpInit) -> CmId:
    cm_id = channel.create_id()
    cm_id.bind_addr(place.address)
    cm_id.create_qp(init)
    return cm_id


def _qp_of(cm_id: CmId) -> QueuePair:
    assert cm_id.qp is not None
    return cm_id.qp


def _await_joins(channel: EventChannel, sender: CmId, count: int) -> Destination:
    """Wait until `count` ids have joined; return where the sender sends to. Raises what a join met."""
    destination: Destination | None = None
    for joined in range(count):
        event = channel.get_event(BOUND)
        if event is None:
            raise Failure(f"{joined} of {count} have joined within {BOUND:g} s: is a subnet manager running?")
        ud = event.check().ud
        if event.id is sender and ud:
            destination = ud.destination
    assert destination is not None
    return destination
