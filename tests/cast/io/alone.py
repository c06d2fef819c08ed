"""A receiver of objects without a network: a test passes it the messages of its sender."""

from __future__ import annotations

from mcast.api import Batch, CopiedBatch
from mcast.cast.io.driver import SessionContext, from_others
from mcast.cast.io.receiving import Received, ReceivingSession
from mcast.cast.io.sinks import ReceiveTarget
from mcast.cast.protocol.blocks import Digest, SourceBlock
from mcast.cast.protocol.packets import Admit, Describe, Offer, Packet, encode, number_at
from tests.cast.batches import batch_of

SESSION = number_at("10.0.0.3", 1)
SEGMENT, K = 976, 4


def heard(*packets: Packet, address: str = "10.0.0.3") -> Batch:
    """Return messages of the member at that address, as a step receives them."""
    return batch_of(*((encode(one), address) for one in packets))


def cut(data: bytes) -> list[SourceBlock]:
    """Cut an object into blocks, each with the digest of all bytes up to its end."""
    size, digest = SEGMENT * K, Digest()
    found = []
    for at in range(0, len(data), size):
        block = data[at : at + size]
        digest.update(block)
        found.append(SourceBlock(block, SEGMENT, K, bytes(digest)))
    return found


class Alone:
    """A receiver in a session that has announced an object of `size` bytes, in blocks of 4 segments.

    carousel  number of objects of a carousel, which admits no receivers; 0: an object that is sent once
    parity    maximum parity segments of a block
    in_c      False to handle all messages in Python
    threads   number of threads that verify blocks
    """

    def __init__(
        self,
        into: ReceiveTarget,
        size: int,
        carousel: int = 0,
        one_session: bool = False,
        parity: int = 0,
        in_c: bool = True,
        threads: int = 0,
    ) -> None:
        self.now = 1.0
        context = SessionContext(number_at("10.0.0.9", 1), "me", 1024, lambda: self.now, "mine")
        self.receiving = ReceivingSession(
            context, into, None, 1 << 20, 1000, 10.0, None, None, one_session, threads=threads
        )
        self.receiving._config = self.receiving._config._replace(uses_parity=parity > 0)
        if not in_c:
            self.receiving._placer = None
        self._steps = self.receiving.next(None)
        next(self._steps)
        self.on_packets(Offer(SESSION, 0, 1, 1, 1000, 0, "sender"))
        nonce = self.receiving.sessions[SESSION].core.config.nonce
        if not carousel:
            self.on_packets(Admit(SESSION, {context.number: (0, nonce)}))
        self.on_packets(Describe(SESSION, 0, size, SEGMENT, K, parity, carousel, 0, "thing", b""))

    def __del__(self) -> None:
        self.receiving.close()

    def on_packets(self, *packet: Packet, address: str = "10.0.0.3") -> None:
        """Pass messages of the sender, or of another one, in one step."""
        self._steps.send(heard(*packet, address=address))

    def on_batch(self, batch: Batch) -> Received | None:
        """Pass a batch in one step; return the object if it is complete.

        In Python message by message, because runs of segments would be handled together.
        """
        if self.receiving._placer is None:
            for message in batch:
                self.receiving._on_messages(from_others(CopiedBatch([message])), self.now)
            batch = batch_of()
        try:
            self._steps.send(batch)
        except StopIteration as done:
            found: Received = done.value
            return found
        return None

    def pauses(self, seconds: float) -> None:
        """Let the program do something else before it asks for the next object."""
        self._steps.close()
        self.now += seconds
        self._steps = self.receiving.next(None)
        next(self._steps)

    @property
    def blocks(self) -> int:
        """Number of blocks that were received in order."""
        incoming = self.receiving.sessions[SESSION].core.incoming
        assert incoming is not None
        return incoming.base
