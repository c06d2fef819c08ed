"""MADs to the subnet administrator: their numbers and their headers.

Source: IBA vol 1, 13.4 (MADs, ClassPortInfo) and 15.2 (the SA's class).
"""

from __future__ import annotations

import struct

GSI_QP, GSI_QKEY = 1, 0x80010000
"""The queue pair and the Q_Key that a port receives these MADs with."""

SA_CLASS, SA_CLASS_VERSION = 3, 2
CLASS_PORT_INFO, MC_MEMBER_RECORD = 0x0001, 0x0038
RESPONSE = 0x80
"""The bit of the method that marks an answer."""

MAD_BYTES, DATA_AT = 256, 56

SEND_ONLY_FULL_MEMBER = 1 << 12
"""The bit of ClassPortInfo:CapabilityMask2 that says the SA knows send-only full members (SA-JOIN-7)."""

_HEADER = struct.Struct(">BBBBHHQHHI12x8xHHQ")
"""The common header; that of RMPP, which is not used; a zero SM_Key; the rest of the SA's header."""
_CLASS_PORT_INFO = struct.Struct(">BBHI")


def sa_mad(
    method: int, tid: int, attribute: int, mask: int, data: bytes, status: int = 0, words: int = 0
) -> bytes:
    """The 256 bytes of a MAD; `words` is the size of a record in an answer, in units of 8 bytes."""
    common = (1, SA_CLASS, SA_CLASS_VERSION, method, status, 0, tid, attribute, 0, 0)
    return (_HEADER.pack(*common, words, 0, mask) + data).ljust(MAD_BYTES, b"\0")


def capability_mask2(class_port_info: bytes) -> int:
    """The 27 bits of CapabilityMask2."""
    capabilities: int = _CLASS_PORT_INFO.unpack_from(class_port_info)[3]
    return capabilities >> 5
