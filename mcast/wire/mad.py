"""MADs to the subnet administrator: their numbers and their headers.

Source: IBA vol 1, 13.4 (MADs, ClassPortInfo) and 15.2 (the SA's class).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from mcast.wire.mcmember import MLID_FIRST, SaMethod

GSI_QP, GSI_QKEY = 1, 0x80010000
"""The queue pair and the Q_Key that a port receives these MADs with."""

SA_CLASS, SA_CLASS_VERSION = 3, 2
CLASS_PORT_INFO, MC_MEMBER_RECORD = 0x0001, 0x0038
RESPONSE = 0x80
"""The bit of the method that marks an answer."""

MAD_BYTES, DATA_AT = 256, 56

SEND_ONLY_FULL_MEMBER = 1 << 12
"""The bit of ClassPortInfo:CapabilityMask2 that says the SA knows send-only full members (SA-JOIN-7)."""

SMP_CLASS, SMP_CLASS_VERSION = 1, 1
PKEY_TABLE, MULTICAST_FORWARDING_TABLE = 0x0016, 0x001B
PKEY_BLOCK = 32
"""P_Keys in a block of a port's table."""
MFT_PORTS, MFT_MLIDS = 16, 32
"""A block of a switch's multicast forwarding table has so many ports, a bit each, of so many MLIDs."""
SMP_DATA_AT = 64

_HEADER = struct.Struct(">BBBBHHQHHI12xQHHQ")
"""The common header; that of RMPP, which is not used; the SM_Key and the rest of the SA's header."""
_SMP_HEADER = struct.Struct(">BBBBHHQHHIQ")
"""The common header, and the M_Key."""
_CLASS_PORT_INFO = struct.Struct(">BBHI")


def sa_mad(
    method: int,
    tid: int,
    attribute: int,
    mask: int,
    data: bytes,
    status: int = 0,
    words: int = 0,
    sm_key: int = 0,
) -> bytes:
    """The 256 bytes of a MAD; `words` is the size of a record in an answer, in units of 8 bytes.

    A holder of the SM_Key is told who is in a group (SA-REQUEST-5).
    """
    common = (1, SA_CLASS, SA_CLASS_VERSION, method, status, 0, tid, attribute, 0, 0)
    return (_HEADER.pack(*common, sm_key, words, 0, mask) + data).ljust(MAD_BYTES, b"\0")


def get_mft_block(tid: int, port: int, mlid: int) -> bytes:
    """The 256 bytes that ask a switch for the block of its multicast table with that port and MLID.

    Source: IBA vol 1, 14.2.5.12: the modifier's low bits have the block of MLIDs, its upper 4 that of ports.
    """
    modifier = port // MFT_PORTS << 28 | (mlid - MLID_FIRST) // MFT_MLIDS
    return _smp(SaMethod.GET, tid, MULTICAST_FORWARDING_TABLE, modifier)


def set_pkeys(tid: int, pkeys: Sequence[int]) -> bytes:
    """The 256 bytes that write these P_Keys, at most 32, into the first block of an HCA port's table.

    Source: IBA vol 1, 14.2.5.7.
    """
    block = b"".join(pkey.to_bytes(2) for pkey in pkeys).ljust(2 * PKEY_BLOCK, b"\0")
    return _smp(SaMethod.SET, tid, PKEY_TABLE, 0, block)


def _smp(method: int, tid: int, attribute: int, modifier: int, data: bytes = b"") -> bytes:
    """A MAD by LID to a subnet management agent, with M_Key 0."""
    common = (1, SMP_CLASS, SMP_CLASS_VERSION, method, 0, 0, tid, attribute, 0, modifier)
    return (_SMP_HEADER.pack(*common, 0).ljust(SMP_DATA_AT, b"\0") + data).ljust(MAD_BYTES, b"\0")


def mft_block_forwards(block: bytes, port: int, mlid: int) -> bool:
    """Return True if the 64-byte block with that port and MLID forwards the MLID to the port."""
    at = 2 * ((mlid - MLID_FIRST) % MFT_MLIDS)
    return bool(int.from_bytes(block[at : at + 2]) >> port % MFT_PORTS & 1)


def capability_mask2(class_port_info: bytes) -> int:
    """The 27 bits of CapabilityMask2."""
    capabilities: int = _CLASS_PORT_INFO.unpack_from(class_port_info)[3]
    return capabilities >> 5
