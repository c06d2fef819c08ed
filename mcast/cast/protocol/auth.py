"""Authentication of the packets of a closed group by one shared key, with protection against replay.

A packet of a closed group is one of `packets` with another magic, followed by a sequence number of its end
and a tag. The tag is the keyed BLAKE3 of the packet, the sequence number and the session's nonce. Keyed
BLAKE3 is a MAC by its specification (section 2.3), takes 3 µs for 4 KiB, and is in the library that the
digests need anyway. Nothing is encrypted.

Replay of another session: the sender draws a nonce, which its OFFER announces, so a packet of an earlier
session has a wrong tag. Each receiver draws a nonce for each session, which ADMIT repeats, so a recorded
session admits nobody.

Replay within a session: there is a replay window for each other end (RFC 4303, section 3.4.3), of receivers
for the MAX_MEMBERS heard last. After a receiver's window was dropped, packets of receivers are refused unless
their stamp is later than the last one of that receiver, so its packets cannot be replayed.

A receiver whose sender is silent suspends the session: its window stays, so that a recording of the silent
sender is refused. An OFFER is verified with its own nonce, because a receiver learns the nonce from it.

Not handled: a member that misuses the key, which can speak as any other member.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

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
"""Minimum bytes of a key."""
KEYED_MAGIC = b"mcK4"
WRONG_KEY = "without the key of this group"
REPLAYED = "replayed"
NEEDS_KEY = "of a closed group: this end has no key"
UNKNOWN_SESSION = "of a session that this end has not joined"

_CONTEXT = "mcast 2026-11-22 messages of a closed group"
_WINDOW = 4096
"""Size of the replay window, in packets: an end accepts a packet that arrives this much out of order."""
_COUNT = struct.Struct("!Q")
_TAG = 16


class Authenticator:
    """Authenticator of an open group: adds no tag, and accepts every packet of the protocol."""

    overhead: int = 0
    """Bytes that `sign` adds to a message."""

    def begin(self, session: int, nonce: int) -> None:
        """Join or resume a session, whose sender drew that nonce."""

    def suspend(self, session: int) -> None:
        """Leave a session whose sender is silent; `begin` with the same nonce resumes it."""

    def forget(self, session: int, nonce: int) -> None:
        """Drop the state of a suspended session."""

    def end(self, session: int) -> None:
        """Leave a session for good."""

    def sign(self, messages: Sequence[Buffer] | memoryview) -> Sequence[Buffer] | memoryview:
        """Return the messages as they are sent: a list, or the rows of a view."""
        return messages

    def decode_run(
        self, memory: Buffer, begin: int, step: int, size: int, count: int, address: str
    ) -> tuple[int, int, int, int, int] | None:
        """Decode a run of DATA packets from one address as `packets.decode_run` does.

        None if the first is to be decoded by `decode`.
        """
        found = decode_run(memory, begin, step, size, count)
        return found if found is not None and found[0] == number_at(address, found[0] >> 32) else None

    def decode(self, message: Buffer, address: str) -> Packet:
        """Decode a message from that address. Raises Rejected as `packets.decode_from` does."""
        magic = bytes(memoryview(message)[: len(MAGIC)])
        if magic == KEYED_MAGIC:
            raise Rejected(NEEDS_KEY)
        if _other_version(magic):
            raise Rejected(VERSION)
        return decode_from(message, address)


class _ReplayWindow:
    """Sequence numbers that were received from one end, and the latest stamp of the sender in its packets."""

    __slots__ = ("_bits", "_latest", "stamp")

    def __init__(self) -> None:
        self._latest = self._bits = self.stamp = 0

    def accept(self, count: int) -> bool:
        """Return True if that sequence number is new and inside the window; it is not new from then on."""
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
    """Nonce and replay windows of one session."""

    def __init__(self, nonce: int) -> None:
        self.nonce = _COUNT.pack(nonce)
        self._sender = _ReplayWindow()
        self._receivers: dict[int, _ReplayWindow] = {}
        """By member number; the one heard last is at the end."""
        self._forgotten = -1
        """Latest stamp of a dropped window: packets of receivers with no later stamp may be replayed ones."""

    def accept(self, packet: Packet, count: int) -> bool:
        """Return True if an authentic packet with that sequence number is no replay, and note it.

        Drops the window of the receiver that was silent longest if there are more than MAX_MEMBERS.
        """
        if not isinstance(packet, MEMBER_PACKETS):
            return self._sender.accept(count)
        window = self._receivers.get(packet.member) or _ReplayWindow()
        if packet.stamp <= self._forgotten or not window.accept(count):
            return False
        window.stamp = max(window.stamp, packet.stamp)
        self._receivers.pop(packet.member, None)
        self._receivers[packet.member] = window
        if len(self._receivers) > MAX_MEMBERS:
            dropped = self._receivers.pop(next(iter(self._receivers)))
            self._forgotten = max(self._forgotten, dropped.stamp)
        return True

    def suspend(self) -> None:
        """Drop the windows of the receivers, which may be many."""
        self._forgotten = max([self._forgotten, *(window.stamp for window in self._receivers.values())])
        self._receivers.clear()


class KeyedAuthenticator(Authenticator):
    """Authenticator of a closed group. Raises ValueError if the key is shorter than MIN_KEY."""

    overhead: int = _COUNT.size + _TAG

    def __init__(self, key: bytes) -> None:
        if len(key) < MIN_KEY:
            raise ValueError(
                f"a key of {len(key)} bytes: at least {MIN_KEY} are needed; use 32 bytes from /dev/urandom"
            )
        self._key = blake3(key, derive_key_context=_CONTEXT).digest()
        from hmac import compare_digest  # which loads OpenSSL, and most groups have no key

        self._equals: Callable[[bytes, bytes], bool] = compare_digest
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
        signed: list[Buffer] = []
        for message in (
            list_rows(messages) if isinstance(messages, memoryview | HeaderBodyBatch) else messages
        ):
            raw = bytes(message)
            self._count += 1
            body = KEYED_MAGIC + raw[len(MAGIC) :] + _COUNT.pack(self._count)
            signed.append(body + self._tag(body, self._sessions[_session_of(raw)].nonce))
        return signed

    def decode_run(self, *where: object) -> None:
        """Return None: each packet has a tag of its own, which `decode` verifies."""

    def decode(self, message: Buffer, address: str) -> Packet:
        """Decode a message from that address.

        Raises Rejected as an open group does, and for a wrong tag, a replay, and a session not joined.
        """
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
        if not self._equals(tag, self._tag(body, nonce)):
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
    magic = raw[: len(MAGIC)]
    return magic[:-1] in (MAGIC[:-1], KEYED_MAGIC[:-1]) and magic[-1:] != MAGIC[-1:]


def _session_of(raw: bytes) -> int:
    number: int = HEADER.unpack_from(raw)[2]
    return number


def authenticator_for(key: bytes | None) -> Authenticator:
    """Return the authenticator for that key; None is an open group."""
    return Authenticator() if key is None else KeyedAuthenticator(key)
