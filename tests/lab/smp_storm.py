"""Sends malformed management datagrams through /dev/infiniband/umad*, in the lab's guest; counts answers.

usage: smp_storm.py DEVICE COUNT SEED

Each is a valid SMP, or a request to a PMA or the SA, in which some bytes were changed, sent by directed route
or by LID to some node of the fabric. Nothing is expected but that the kernel lives, and that a new SM manages
all nodes; answers say that requests came that far. Lines on file descriptor 3 tell how far the storm is.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys

MAD_BYTES, SMI, GSI = 256, 0, 1
LID_ROUTED, DIRECTED, PERFORMANCE, ADMINISTRATION = 0x01, 0x81, 0x04, 0x03
CLASS_VERSIONS = {LID_ROUTED: 1, DIRECTED: 1, PERFORMANCE: 1, ADMINISTRATION: 2}
SET, PORT_INFO, SMP_DATA, KEY_BYTES = 0x02, b"\x00\x15", 64, 8
GSI_QKEY = 0x80010000
PERMISSIVE = 0xFFFF
SA_METHODS, SA_ATTRIBUTES = (0x01, 0x02, 0x12, 0x13, 0x14, 0x15), (0x01, 0x02, 0x11, 0x12, 0x31, 0x35, 0x38)
ATTRIBUTES = (0x02, *range(0x10, 0x1E), 0x20, 0x31, 0xFF90)
SM = 1
TOLD = 500
"""After how many datagrams a line tells how far the storm is."""
LIDS = (*range(16), 0xBFFF, 0xC000, 0xC001, PERMISSIVE)


def request(draw: random.Random) -> tuple[bytearray, int]:
    """A request, and the queue pair that it is for."""
    kind = draw.choice((DIRECTED, DIRECTED, LID_ROUTED, PERFORMANCE, ADMINISTRATION))
    mad = bytearray(MAD_BYTES)
    mad[0:4] = bytes((1, kind, CLASS_VERSIONS[kind], draw.choice((0x01, 0x02, 0x02, 0x05, 0x07, 0x81))))
    mad[8:16] = draw.randbytes(8)
    if kind == ADMINISTRATION:
        mad[3] = draw.choice(SA_METHODS)
        mad[16:18] = draw.choice(SA_ATTRIBUTES).to_bytes(2)
        mad[48:56] = draw.choice((bytes(8), draw.randbytes(8)))  # the component mask
        mad[56:] = draw.randbytes(MAD_BYTES - 56)
        return mad, GSI
    attributes = (0x01, 0x12, 0x1D) if kind == PERFORMANCE else ATTRIBUTES
    mad[16:18] = draw.choice(attributes).to_bytes(2)
    modifier = draw.choice((0, 1, 2, 0x1FF, 0x2FF, 0xF00001FF, 0x10000000, 0xFFFFFFFF, draw.getrandbits(32)))
    mad[20:24] = modifier.to_bytes(4)
    if kind == PERFORMANCE:
        mad[64:] = draw.randbytes(MAD_BYTES - 64)
        return mad, GSI
    mad[64:128] = draw.randbytes(64) if draw.random() < 0.5 else bytes(64)
    if kind == DIRECTED:
        path = [draw.choice((1, 1, 2, 3, 4, 9, 255)) for _ in range(draw.choice((0, 1, 2, 3, 4, 62, 63)))]
        mad[6], mad[7] = draw.choice((0, 0, 0, 1, 2, 64, 255)), len(path)
        mad[32:36] = b"\xff\xff\xff\xff"
        mad[128 : 129 + len(path)] = bytes((0, *path))
    return mad, SMI


def changed(draw: random.Random, mad: bytearray) -> bytes:
    """The request with up to three bytes changed anywhere but in the transaction's number."""
    for _ in range(draw.choice((0, 0, 1, 2, 3))):
        at = draw.choice((*range(8), *range(16, MAD_BYTES)))
        mad[at] = draw.choice((0, 1, 63, 64, 65, 0x7F, 0x80, 0xFF, draw.getrandbits(8)))
    return bytes(mad)


def without_key(mad: bytes) -> bytes:
    """The datagram, but that no port gets an M_Key: such a port obeys no SM that does not know the key."""
    is_smp = mad[1] in (LID_ROUTED, DIRECTED)
    sets_port = is_smp and mad[3] == SET and mad[16:18] == PORT_INFO
    return mad[:SMP_DATA] + bytes(KEY_BYTES) + mad[SMP_DATA + KEY_BYTES :] if sets_port else mad


def storm(device: str, count: int, seed: int) -> tuple[int, int]:
    """Send so many; how many went out, and how many answers came."""
    umad = ctypes.CDLL("libibumad.so.3", use_errno=True)
    umad.umad_size.restype = ctypes.c_size_t
    assert umad.umad_init() == 0
    handle = umad.umad_open_port(device.encode(), 1)
    assert handle >= 0, f"{device}: {handle}"
    agents = {kind: umad.umad_register(handle, kind, v, 0, None) for kind, v in CLASS_VERSIONS.items()}
    assert min(agents.values()) >= 0, agents
    draw, header, sent, answered = random.Random(seed), umad.umad_size(), 0, 0
    for number in range(1, count + 1):
        mad, qpn = request(draw)
        kind = mad[1]
        payload = without_key(changed(draw, mad))
        buffer = ctypes.create_string_buffer(header + MAD_BYTES)
        ctypes.memmove(ctypes.byref(buffer, header), payload, MAD_BYTES)
        lid = PERMISSIVE if kind == DIRECTED else SM if kind == ADMINISTRATION else draw.choice(LIDS)
        umad.umad_set_addr(buffer, lid, qpn, 0, GSI_QKEY if qpn else 0)
        sent += umad.umad_send(handle, agents[kind], buffer, MAD_BYTES, 1, 0) == 0
        length = ctypes.c_int(MAD_BYTES)
        while umad.umad_recv(handle, buffer, ctypes.byref(length), 0) >= 0:
            answered += umad.umad_status(buffer) == 0
            length = ctypes.c_int(MAD_BYTES)
        if number % TOLD == 0:
            os.write(3, b"%d of %d datagrams\n" % (number, count))
    umad.umad_close_port(handle)
    return sent, answered


if __name__ == "__main__":
    print(*storm(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
