"""The two ends of the protocol on endpoints: their messages are sent, and received messages are handed to
them."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from random import SystemRandom
from typing import Any, Generic, TypeVar

from mcast.api import McastAddress, McastError, Message, QpError
from mcast.cast.files import Sink, Source
from mcast.cast.packets import WINDOW, number_at
from mcast.cast.receiver import FileReceiver
from mcast.cast.sender import FileSender, Patience
from mcast.endpoint.blocking import Endpoint
from mcast.endpoint.probe import Peer
from mcast.endpoint.view import EndpointView
from mcast.wire.addresses import Gid

logger: logging.Logger = logging.getLogger("mcast")

DEPTH = 2 * WINDOW
"""The receive queue of each end, in messages: duplicates and answers of others must leave room for the
pieces."""

BOUND = 10.0
"""The longest that a join or a send may take, in seconds."""

_TURNS = 8
"""How many batches are received in a row, so that a flood of other messages does not keep an end from
sending."""

_NAP = 0.5
_SHORT_NAP = 0.01
"""The longest that an end sleeps, in seconds; the short one where a pipe may have become ready."""

Core = TypeVar("Core", FileSender, FileReceiver)

Way = tuple[Any, ...]
"""The fields of a received message after its payload: how its sender can be answered alone."""

_NOTHING = memoryview(b"")


@lru_cache(maxsize=4096)  # asked for each message, and most messages come from a few ends
def in_words(gid: Gid) -> str:
    """The address of an end, as text."""
    return str(gid.ipv4 or gid)


def address_of(message: Message) -> str:
    """The address that a message came from, as text."""
    return in_words(message.source)


def name_of(endpoint: EndpointView[Any]) -> str:
    """The name that an end gives itself."""
    return f"{socket.gethostname()} {endpoint.device.name}"


class Party(Generic[Core]):
    """One end of the protocol, as a member of a group."""

    def __init__(self, endpoint: Endpoint, group: McastAddress) -> None:
        self.endpoint = endpoint
        self.core: Core
        self._group = endpoint.join(group, timeout=BOUND)
        source = endpoint.port.gids.get(self._group.destination.sgid_index, Gid(endpoint.address))
        self.number: int = number_at(in_words(source), SystemRandom().randrange(1, 1 << 32))
        self.peer: Peer = Peer(source, endpoint.qp_num)
        self.heeds: Container[Peer] | None = None
        """The only queue pairs whose messages this end takes; None: all."""

    @property
    def now(self) -> float:
        """Seconds on the clock by which timeouts run."""
        return self.endpoint.backend.now()

    def hear(self, timeout: float) -> bool:
        """Hand the messages that are there to the core; wait for one at most `timeout` seconds.

        True if there were any.
        """
        for turn in range(_TURNS):
            with self.endpoint.recv_batch(WINDOW, timeout) as batch:
                now = self.now
                for message in batch:
                    if self.heeds is None or Peer(message.source, message.src_qp) in self.heeds:
                        self.core.hears(message.payload, address_of(message), now, self._way_back(message))
                if not len(batch):
                    return turn > 0
            timeout = 0.0
        return True

    def say(self) -> bool:
        """Send what the core has to say. True if there was anything."""
        messages = self.core.messages(self.now)
        if messages:
            self._group.send_batch(messages, timeout=BOUND)
        answers = self.core.answers()
        for way, answer in answers:
            try:
                self._group.reply(Message(_NOTHING, *way), answer, timeout=BOUND)
            except QpError:
                raise
            except (McastError, ValueError) as error:  # as if the network had lost it
                logger.debug("no answer to %s: %s", way[0], error)
        return bool(messages or answers)

    def _way_back(self, message: Message) -> Way | None:
        """How its sender can be answered alone; None where the group is to hear the answer."""
        raise NotImplementedError

    def idle(self, limit: float) -> float:
        """How many seconds, at most `limit`, the core has nothing to say unless a message comes."""
        due = self.core.due
        return limit if due is None else min(max(0.0, due - self.now), limit)


class SendingParty(Party[FileSender]):
    """The sender of a file: `source` on `endpoint`, to `wanted` receivers (None: to all that join)."""

    def __init__(
        self,
        endpoint: Endpoint,
        group: McastAddress,
        source: Source,
        wanted: int | None = None,
        patience: Patience = Patience(),  # noqa: B008  (immutable)
    ) -> None:
        super().__init__(endpoint, group)
        self._source = source
        largest = self._group.max_message_size
        self.core: FileSender = FileSender(
            self.number, name_of(endpoint), source.size, largest, wanted, patience, self.now
        )

    def _way_back(self, message: Message) -> Way | None:
        return None if message.group == self._group.mgid else message[1:]

    def turn(self, limit: float = _NAP) -> bool:
        """Send what there is to send, then receive answers for at most `limit` seconds.

        True if anything was sent or came.
        """
        core = self.core
        waits = False
        if room := core.wants:
            data = self._source.read(room * core.piece)
            waits = data is None
            if data:
                core.offer(data[at : at + core.piece] for at in range(0, len(data), core.piece))
            elif data is not None:
                core.end()
        said = self.say()
        return self.hear(self.idle(min(limit, _SHORT_NAP) if waits else limit)) or said


class ReceivingParty(Party[FileReceiver]):
    """The receiver of a file, which goes to `sink`.

    `silence` is how many seconds the sender may be silent.
    """

    def __init__(
        self, endpoint: Endpoint, group: McastAddress, sink: Sink, silence: float, room: int = WINDOW
    ) -> None:
        super().__init__(endpoint, group)
        self._sink = sink
        largest = self._group.max_message_size
        self.core: FileReceiver = FileReceiver(self.number, name_of(endpoint), room, largest, silence)

    def _way_back(self, message: Message) -> Way | None:
        return message[1:]

    def turn(self, limit: float = _NAP) -> bool:
        """Store what has come, send what there is to send, then receive for at most `limit` seconds.

        True if anything was sent or came. A sink that fails ends the transfer; the sender is told why.
        """
        core = self.core
        try:
            while self._sink.ready() and (piece := core.take()):
                self._sink.write(piece)
            if core.storable and self._sink.commit():
                core.stored(self.now)
        except OSError as error:
            core.fail(f"{self._sink.name}: {error.strerror}", told_of(error))
        said = self.say()
        if core.over:
            return said
        waits = core.untaken or core.storable
        return self.hear(self.idle(min(limit, _SHORT_NAP) if waits else limit)) or said


def run(party: SendingParty | ReceivingParty, watch: Callable[[], None] = lambda: None) -> None:
    """Carry out the transfer, and call `watch` after each turn.

    If it ends early, for whatever reason, the others are told.
    """
    with telling(party):
        while not party.core.over:
            party.turn()
            watch()


@contextmanager
def telling(party: SendingParty | ReceivingParty) -> Iterator[None]:
    """Tell the others if the block ends early, for whatever reason."""
    core = party.core
    try:
        yield
    except BaseException as error:
        core.abort(told_of(error)) if isinstance(core, FileSender) else core.fail(told_of(error))
        raise
    finally:
        with suppress(McastError):
            party.say()


def told_of(error: BaseException) -> str:
    """What the group learns of an error: no path and no address of this host."""
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return "internal error" if isinstance(error, Exception) else "interrupted"
