"""A receiver of objects without a network: what its sender says is handed to it."""

from __future__ import annotations

from mcast.api import Series
from mcast.cast.io.driver import SessionContext
from mcast.cast.io.receiving import ReceivingSession
from mcast.cast.io.sinks import ReceiveTarget
from mcast.cast.protocol.blocks import Digest, SourceBlock
from mcast.cast.protocol.packets import Admit, Describe, Offer, Packet, encode, number_at
from mcast.wire.addresses import Gid

SESSION = number_at("10.0.0.3", 1)
PIECE, WIDTH = 976, 4


def heard(packet: Packet, address: str = "10.0.0.3") -> Series:
    """A message of the end at that address, as a turn gets it."""
    message = memoryview(encode(packet))
    return Series(message, len(message), len(message), 1, Gid(f"::ffff:{address}"), 7, False)


def cut(data: bytes) -> list[SourceBlock]:
    """The blocks of an object, each with the digest of all up to its end."""
    size, digest = PIECE * WIDTH, Digest()
    found = []
    for at in range(0, len(data), size):
        block = data[at : at + size]
        digest.update(block)
        found.append(SourceBlock(block, PIECE, WIDTH, bytes(digest)))
    return found


class Alone:
    """A receiver that takes part, and has been told of an object of `size` bytes, in blocks of 4 pieces.

    It was not admitted where the object goes round and round, with others if `around` is more than 1.
    """

    def __init__(self, into: ReceiveTarget, size: int, carousel: int = 0, one_session: bool = False) -> None:
        self.now = 1.0
        context = SessionContext(number_at("10.0.0.9", 1), "me", 1024, lambda: self.now, "mine")
        self.receiving = ReceivingSession(context, into, None, 1000, 1000, 10.0, None, None, one_session)
        self._steps = self.receiving.next(None)
        next(self._steps)
        self.on_packets(Offer(SESSION, 0, 1, 1, 1000, 0, "sender"))
        nonce = self.receiving.sessions[SESSION].core.config.nonce
        if not carousel:
            self.on_packets(Admit(SESSION, {context.number: (0, nonce)}))
        self.on_packets(Describe(SESSION, 0, size, PIECE, WIDTH, 0, carousel, 0, "thing", b""))

    def __del__(self) -> None:
        self.receiving.close()

    def on_packets(self, *packet: Packet, address: str = "10.0.0.3") -> None:
        """Messages of the sender come, or of another one, all in one turn."""
        self._steps.send([heard(one, address) for one in packet])

    def pauses(self, seconds: float) -> None:
        """The program does something else, and asks for the next object then."""
        self._steps.close()
        self.now += seconds
        self._steps = self.receiving.next(None)
        next(self._steps)

    @property
    def blocks(self) -> int:
        """How many blocks have been taken."""
        incoming = self.receiving.sessions[SESSION].core.incoming
        assert incoming is not None
        return incoming.base
