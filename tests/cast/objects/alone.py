"""A receiver of objects without a network: what its sender says is handed to it."""

from __future__ import annotations

from mcast.api import Series
from mcast.cast.nack.header import number_at
from mcast.cast.nack.messages import Admit, Describe, Offer, Spoken, packed
from mcast.cast.nack.payload import BlockBytes, Digest
from mcast.cast.objects.bytes_in import ReceiveTarget
from mcast.cast.objects.receiving import ObjectsIn
from mcast.cast.objects.turns import Seat
from mcast.wire.addresses import Gid

SESSION = number_at("10.0.0.3", 1)
PIECE, WIDTH = 976, 4


def heard(spoken: Spoken, address: str = "10.0.0.3") -> Series:
    """A message of the end at that address, as a turn gets it."""
    message = memoryview(packed(spoken))
    return Series(message, len(message), len(message), 1, Gid(f"::ffff:{address}"), 7, False)


def cut(data: bytes) -> list[BlockBytes]:
    """The blocks of an object, each with the digest of all up to its end."""
    size, digest = PIECE * WIDTH, Digest()
    found = []
    for at in range(0, len(data), size):
        block = data[at : at + size]
        digest.update(block)
        found.append(BlockBytes(block, PIECE, WIDTH, bytes(digest)))
    return found


class Alone:
    """A receiver that takes part, and has been told of an object of `size` bytes, in blocks of 4 pieces.

    It was not admitted where the object goes round and round, with others if `around` is more than 1.
    """

    def __init__(self, into: ReceiveTarget, size: int, around: int = 0, one_session: bool = False) -> None:
        self.now = 1.0
        seat = Seat(number_at("10.0.0.9", 1), "me", 1024, lambda: self.now, "mine")
        self.receiving = ObjectsIn(seat, into, None, 1000, 1000, 10.0, None, None, one_session)
        self._turns = self.receiving.next(None)
        next(self._turns)
        self.hears(Offer(SESSION, 0, 1, 1, 1000, 0, "sender"))
        nonce = self.receiving.sessions[SESSION].core.who.nonce
        if not around:
            self.hears(Admit(SESSION, {seat.number: (0, nonce)}))
        self.hears(Describe(SESSION, 0, size, PIECE, WIDTH, 0, around, 0, "thing", b""))

    def __del__(self) -> None:
        self.receiving.close()

    def hears(self, *spoken: Spoken, address: str = "10.0.0.3") -> None:
        """Messages of the sender come, or of another one, all in one turn."""
        self._turns.send([heard(one, address) for one in spoken])

    def pauses(self, seconds: float) -> None:
        """The program does something else, and asks for the next object then."""
        self._turns.close()
        self.now += seconds
        self._turns = self.receiving.next(None)
        next(self._turns)

    @property
    def blocks(self) -> int:
        """How many blocks have been taken."""
        arriving = self.receiving.sessions[SESSION].core.arriving
        assert arriving is not None
        return arriving.base
