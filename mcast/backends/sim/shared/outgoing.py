"""The client's side of what a queue pair sends: payloads go into the ring, and headers to the server.

The first send to a destination is a request, whose answer says how it ended. The next ones to the same
destination are posted without a question, as long as the server's page says that nothing has changed that a
send depends on; so a send that cannot be carried out still fails in its own call.
"""

from __future__ import annotations

from mcast.api import Destination, Headed
from mcast.backends.sim.shared import frames, posts
from mcast.backends.sim.shared.connection import Connection

_NOTHING = frames.Sent(None, 0)
_NOWHERE = None, _NOTHING, b""


class SharedOutgoing:
    """The sends of the queue pair `number`."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number
        self._sent: dict[Destination, frames.Sent] = {}
        self._last: tuple[Destination | None, frames.Sent, bytes] = _NOWHERE
        """The last destination, how the request was answered, and what posts of one message begin with; in
        one piece, for other threads send, too."""

    def note(self, to: Destination, sent: frames.Sent, pipe: int | None) -> None:
        """How a request to send was answered, and what came with that."""
        if pipe is not None:
            self._connection.take_posts(pipe)
        self._sent[to] = sent
        self._last = _NOWHERE

    def _last_to(self, to: Destination) -> tuple[frames.Sent, bytes]:
        """How the last request to send there was answered, and what posts of one message there begin with."""
        last, sent, head = self._last
        if last is not to:  # a destination's hash takes as long as the rest
            sent = self._sent.get(to, _NOTHING)
            head = b"" if sent.slot is None else posts.one_head(self._number, sent.slot)
            self._last = to, sent, head
        return sent, head

    def post_one(self, to: Destination, payload: bytes) -> bool:
        """Send a message without an immediate value; False if that takes more than a word in the pipe.

        Raises Gone.
        """
        last, sent, head = self._last
        if last is not to:
            sent, head = self._last_to(to)
        connection = self._connection
        page = connection.memory.page
        if not head or page is None or page.words[0] != sent.change:
            return False
        return connection.post_one(head, payload)

    def post(
        self,
        to: Destination,
        payloads: list[bytes] | memoryview | Headed,
        lengths: list[int],
        imm: int | None,
        end: float | None,
    ) -> bool:
        """Send without a question; False if that must be asked for. Raises Gone, Late."""
        sent, _ = self._last_to(to)
        page, slot = self._connection.memory.page, sent.slot
        if slot is None or page is None or page.words[0] != sent.change:
            return False
        payload: bytes | memoryview | Headed
        if type(payloads) is Headed:
            payload = payloads
        elif isinstance(payloads, memoryview):
            payload = payloads.cast("B")
        else:
            payload = payloads[0] if len(payloads) == 1 else b"".join(payloads)
        return self._connection.post(
            payload,
            lambda place: posts.pack_post(posts.PostedFrame(self._number, slot, imm, place, lengths)),
            end,
        )
