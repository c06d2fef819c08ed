"""A file by NORM (RFC 5740), for `benchmarks.rdma.files`: python -m benchmarks.rdma.norm receive|send ...

NORM is a library, without a command of its own. This is a program as its manual describes one: congestion
control chooses the rate, and receivers are named to the sender, which ends when each has acknowledged all.
"""

from __future__ import annotations

import argparse
import ctypes
from ctypes import c_bool, c_char_p, c_double, c_uint, c_uint8, c_uint16, c_uint32, c_void_p
from pathlib import Path

ADDRESS, PORT = b"239.1.1.9", 6003
SEGMENT, BLOCK, PARITY = 1400, 64, 16
"""Bytes of a packet, packets of a block, parity for a block: those of NORM's own examples."""
MEMORY = 64 << 20
"""Bytes for each of: what is repaired from, what a receiver keeps, a socket."""
WATERMARK_COMPLETED, OBJECT_COMPLETED = 3, 20
ACKED = 3


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("session", c_void_p),
        ("sender", c_void_p),
        ("object", c_void_p),
    )


class Session:
    """A NORM session on the interface, as the node of that number."""

    def __init__(self, interface: str, node: int) -> None:
        self._norm = ctypes.CDLL("libnorm.so.1")
        for name in ("NormCreateInstance", "NormCreateSession", "NormFileEnqueue"):
            getattr(self._norm, name).restype = c_void_p
        for name in ("NormGetNextEvent", "NormStartReceiver", "NormStartSender"):
            getattr(self._norm, name).restype = c_bool
        self._instance = c_void_p(self._norm.NormCreateInstance(c_bool(False)))
        made = self._norm.NormCreateSession(self._instance, ADDRESS, c_uint16(PORT), c_uint32(node))
        self._session = c_void_p(made)
        self("NormSetMulticastInterface", c_char_p(interface.encode()))

    def __call__(self, call: str, *arguments: object) -> int:
        """Call a function of this session."""
        found: int = getattr(self._norm, call)(self._session, *arguments)
        return found

    def _next(self, wanted: int) -> c_void_p:
        """The object of the next event of that type."""
        event = _Event()
        while self._norm.NormGetNextEvent(self._instance, ctypes.byref(event), c_bool(True)):
            if event.type == wanted:
                return c_void_p(event.object)
        raise SystemExit("NORM has ended")

    def receive(self, into: Path) -> None:
        """Files into the folder, until the process is ended."""
        self._norm.NormSetCacheDirectory(self._instance, f"{into}/".encode())
        self("NormSetRxSocketBuffer", c_uint(MEMORY))
        if not self("NormStartReceiver", c_uint32(MEMORY)):
            raise SystemExit("NORM does not receive")
        while True:
            self._norm.NormFileRename(self._next(OBJECT_COMPLETED), str(into / "file").encode())

    def send(self, file: Path, receivers: int, segment: int) -> None:
        """The file to nodes 1 and so on."""
        for node in range(1, receivers + 1):
            self("NormAddAckingNode", c_uint32(node))
        self("NormSetCongestionControl", c_bool(True), c_bool(True))
        self("NormSetTxRate", c_double(1e8))  # to begin with
        self("NormSetTxSocketBuffer", c_uint(MEMORY))
        numbers = c_uint32(1), c_uint32(MEMORY), c_uint16(segment), c_uint16(BLOCK), c_uint16(PARITY)
        if not self("NormStartSender", *numbers, c_uint8(0)):
            raise SystemExit("NORM does not send")
        enqueued = self("NormFileEnqueue", str(file).encode(), c_char_p(b"file"), c_uint(4))
        self("NormSetWatermark", c_void_p(enqueued), c_bool(True))
        while True:
            self._next(WATERMARK_COMPLETED)
            status = {self("NormGetAckingStatus", c_uint32(node)) for node in range(1, receivers + 1)}
            if status == {ACKED}:
                return
            self("NormSetWatermark", c_void_p(enqueued), c_bool(True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("receive", "send"))
    parser.add_argument("path", type=Path, help="the file, or the folder for it")
    parser.add_argument("--interface", required=True)
    parser.add_argument("--node", type=int, default=100, help="the number of this process")
    parser.add_argument("--receivers", type=int, default=3)
    parser.add_argument("--segment", type=int, default=SEGMENT, help="bytes of a packet")
    given = parser.parse_args()
    session = Session(given.interface, given.node)
    if given.role == "receive":
        session.receive(given.path)
    else:
        session.send(given.path, given.receivers, given.segment)


if __name__ == "__main__":
    main()
