"""What each message begins with, the numbers of ends, and the texts that ends show each other."""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b

TEXT = 64
"""Names and reasons are cut to this many bytes."""

HEADER = struct.Struct("!4sB3xQ")
"""Magic, kind, session."""


class Rejected(Exception):
    """The bytes are no message of the protocol. The text is the reason under which they are counted."""


FOREIGN, MALFORMED, FORGED = "foreign", "malformed", "another's number"
VERSION = "of another version of this protocol: install the same mcast at both ends"


@lru_cache(maxsize=4096)
def number_at(address: str, salt: int) -> int:
    """The number of an end at that address, from a random salt of 1..2^32-1.

    No other address can use the number.

    Its lower half is a digest of salt and address, so an end at another address does not get the same number.
    """
    digest = blake2b(f"{salt} {address}".encode(), digest_size=4).digest()
    return salt << 32 | int.from_bytes(digest)


def printable(text: str) -> str:
    """The text cut to TEXT bytes, without characters that move a cursor."""
    clean = text
    if not text.isprintable():
        clean = "".join(letter if letter.isprintable() else "?" for letter in text)
    return clean.encode()[:TEXT].decode(errors="ignore")
