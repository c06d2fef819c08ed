"""Closed membership: messages that only those can write who have the key, and each of which counts once.

A message of a closed group is one of `messages` with another sign, and two fields after it: how many messages
its end has written, and a tag. The tag is the keyed BLAKE3 of the message, the count and the session's nonce.
Keyed BLAKE3 is a MAC by its specification (section 2.3 there), costs 3 µs for 4 KiB, and comes from the
library that the digests need anyway. Bytes are not encrypted.

A sender draws the nonce, and says it in its OFFER; so an answer to an earlier session has a wrong tag. A
receiver draws a nonce for each session, which the sender's ADMIT repeats; so a recorded session admits
nobody. Within a session a count is taken once, and none that is far behind the latest (RFC 4303, section
3.4.3). Of receivers that come and go, those heard last are known. What a forgotten one has said is refused
for the sender's time in it, which those that speak now have left behind.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hmac import compare_digest

from blake3 import blake3
from typing_extensions import Buffer

from mcast.api import HeaderBodyBatch, list_rows
from mcast.cast.protocol.packets import (
    HEADER,
    MAGIC,
    MAX_MEMBERS,
    MEMBER_PACKETS,
    VERSION,
    Offer,
    Packet,
    Rejected,
    decode_from,
    decode_run,
    number_at,
)

MIN_KEY = 16
"""The fewest bytes of a key."""
KEYED_MAGIC = b"mcK2"
WRONG_KEY = "without the key of this group"
REPLAYED = "replayed"
NEEDS_KEY = "of a closed group: this end has no key"
UNKNOWN_SESSION = "of a session in which this end takes no part"

_CONTEXT = "mcast 2026-11-22 messages of a closed group"
_WINDOW = 4096
"""A message may come so many places late, in the order in which its end wrote its messages."""
_COUNT = struct.Struct("!Q")
_TAG = 16


class Authenticator:
    """The messages of an end without a key."""

    overhead: int = 0
    """Bytes of a message besides those of the protocol."""

    def begin(self, session: int, nonce: int) -> None:
        """This end takes part in the session of that number, whose sender drew that nonce."""

    def suspend(self, session: int) -> None:
        """This end takes no part while the sender is silent; `begin` with the same nonce goes on."""

    def forget(self, session: int, nonce: int) -> None:
        """This end has rested in the session of that number and nonce, and does not go on with it."""

    def end(self, session: int) -> None:
        """This end takes part no more."""

    def sign(self, messages: Sequence[Buffer] | memoryview) -> Sequence[Buffer] | memoryview:
        """The messages as they are sent: a list, or the rows of a view."""
        return messages

    def decode_run(
        self, memory: Buffer, begin: int, step: int, size: int, most: int, address: str
    ) -> tuple[int, int, int, int, int] | None:
        """As `messages.decode_run`, for messages of that address; None leaves the first to `read`."""
        found = decode_run(memory, begin, step, size, most)
        return found if found is not None and found[0] == number_at(address, found[0] >> 32) else None

    def decode(self, message: Buffer, address: str) -> Packet:
        """The values in a message that came from that address. Raises Rejected as `messages.told` does."""
        sign = bytes(memoryview(message)[: len(MAGIC)])
        if sign == KEYED_MAGIC:
            raise Rejected(NEEDS_KEY)
        if _other_version(sign):
            raise Rejected(VERSION)
        return decode_from(message, address)


class _ReplayWindow:
    """Which counts of one end have been heard, and the latest stamp of the sender's in its messages."""

    __slots__ = ("_bits", "_latest", "stamp")

    def __init__(self) -> None:
        self._latest = self._bits = self.stamp = 0

    def accept(self, count: int) -> bool:
        """Whether the count is heard for the first time, and not too late."""
        if count > self._latest:
            shift = count - self._latest
            self._bits = 1 if shift >= _WINDOW else (self._bits << shift | 1) & (1 << _WINDOW) - 1
            self._latest = count
            return True
        late = self._latest - count
        if late >= _WINDOW or self._bits >> late & 1:
            return False
        self._bits |= 1 << late
        return True


class _Session:
    """What is known of one session."""

    def __init__(self, nonce: int) -> None:
        self.nonce = _COUNT.pack(nonce)
        self._sender = _ReplayWindow()
        self._receivers: dict[int, _ReplayWindow] = {}
        """By number, the one heard last at the end."""
        self._forgotten = -1
        """No message counts whose stamp is not later: its receiver's counts may be forgotten."""

    def accept(self, packet: Packet, count: int) -> bool:
        """Whether that message of the session, its end's with that count, is heard for the first time.

        A receiver more than a session can have takes the place of the one that was silent longest.
        """
        if not isinstance(packet, MEMBER_PACKETS):
            return self._sender.accept(count)
        heard = self._receivers.get(packet.member) or _ReplayWindow()
        if packet.stamp <= self._forgotten or not heard.accept(count):
            return False
        heard.stamp = max(heard.stamp, packet.stamp)
        self._receivers.pop(packet.member, None)
        self._receivers[packet.member] = heard
        if len(self._receivers) > MAX_MEMBERS:
            gone = self._receivers.pop(next(iter(self._receivers)))
            self._forgotten = max(self._forgotten, gone.stamp)
        return True

    def suspend(self) -> None:
        """Forget the receivers, of which there may be many."""
        self._forgotten = max([self._forgotten, *(heard.stamp for heard in self._receivers.values())])
        self._receivers.clear()


class KeyedAuthenticator(Authenticator):
    """The messages of an end of a closed group. Raises ValueError for a key that is too short."""

    overhead: int = _COUNT.size + _TAG

    def __init__(self, key: bytes) -> None:
        if len(key) < MIN_KEY:
            raise ValueError(
                f"a key of {len(key)} bytes: at least {MIN_KEY}, all random, such as 32 of /dev/urandom"
            )
        self._key = blake3(key, derive_key_context=_CONTEXT).digest()
        self._count = 0
        self._sessions: dict[int, _Session] = {}
        self._suspended: dict[tuple[int, int], _Session] = {}

    def begin(self, session: int, nonce: int) -> None:
        key = session, nonce
        self._sessions[session] = self._suspended.pop(key) if key in self._suspended else _Session(nonce)

    def suspend(self, session: int) -> None:
        known = self._sessions.pop(session)
        known.suspend()
        self._suspended[session, _COUNT.unpack(known.nonce)[0]] = known

    def forget(self, session: int, nonce: int) -> None:
        self._suspended.pop((session, nonce), None)

    def end(self, session: int) -> None:
        self._sessions.pop(session, None)

    def sign(self, messages: Sequence[Buffer] | memoryview) -> Sequence[Buffer] | memoryview:
        found: list[Buffer] = []
        for message in (
            list_rows(messages) if isinstance(messages, memoryview | HeaderBodyBatch) else messages
        ):
            raw = bytes(message)
            self._count += 1
            body = KEYED_MAGIC + raw[len(MAGIC) :] + _COUNT.pack(self._count)
            found.append(body + self._tag(body, self._sessions[_session_of(raw)].nonce))
        return found

    def decode_run(self, *where: object) -> None:
        """Each message is read whole, for its tag."""

    def decode(self, message: Buffer, address: str) -> Packet:
        """As without a key. Raises Rejected, too, for what has no right tag, or was heard before."""
        raw = bytes(message)
        if raw[: len(MAGIC)] != KEYED_MAGIC or len(raw) < HEADER.size + self.overhead:
            raise Rejected(VERSION if _other_version(raw) else WRONG_KEY)
        body, tag = raw[:-_TAG], raw[-_TAG:]
        packet = decode_from(MAGIC + body[len(MAGIC) : -_COUNT.size], address)
        session = self._sessions.get(packet.session)
        if isinstance(packet, Offer):
            nonce = _COUNT.pack(packet.nonce)
            session = session or self._suspended.get((packet.session, packet.nonce))
        elif session is not None:
            nonce = session.nonce
        else:
            raise Rejected(UNKNOWN_SESSION)
        if not compare_digest(tag, self._tag(body, nonce)):
            raise Rejected(WRONG_KEY)
        count: int = _COUNT.unpack(body[-_COUNT.size :])[0]
        if session is not None and (nonce != session.nonce or not session.accept(packet, count)):
            raise Rejected(REPLAYED)
        return packet

    def _tag(self, body: bytes, nonce: bytes) -> bytes:
        found: bytes = blake3(body + nonce, key=self._key).digest(length=_TAG)
        return found


def _other_version(raw: bytes) -> bool:
    """Return True for a message of this protocol, with a key or without, in another version."""
    sign = raw[: len(MAGIC)]
    return sign[:-1] in (MAGIC[:-1], KEYED_MAGIC[:-1]) and sign[-1:] != MAGIC[-1:]


def _session_of(raw: bytes) -> int:
    number: int = HEADER.unpack_from(raw)[2]
    return number


def authenticator_for(key: bytes | None) -> Authenticator:
    """The messages of an end with that key, or without one."""
    return Authenticator() if key is None else KeyedAuthenticator(key)
