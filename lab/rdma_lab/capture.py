"""Capture the fabric's packets in the guest and write them as pcapng; `tap.py` starts it and reads.

It is a program of its own, run as root by the host's Python without site-packages. It opens what it
captures from, says in a word on stdout that it captures, and goes on in the background until SIGTERM. Its
stream is MARK, the pcapng file, MARK again: what an earlier capture left in the port comes before the first
mark, and nothing after the last.

InfiniBand: the module's own pcapng file (softib/tap.c), block by block. RoCE: a packet socket for each
interface eN, with the kernel's time, so that a packet is seen where it leaves its device and where it
arrives. The packets that a socket has dropped are counted in the next packet's epb_dropcount, and in
statistics at the end.
"""

import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

PORT, PID = "/dev/virtio-ports/lab.tap", "/run/rdma-lab-tap.pid"
BUSY_SECONDS = 5.0
"""Seconds to wait for a capture that was killed to leave the port."""
SOFTIB_TAP = "/sys/kernel/debug/softib/tap"
SOFTIB_RING = 1 << 20
SOCKET_BUFFER = 8 << 20
"""Bytes of packets that wait in the kernel while the reader is slow, for each interface."""
BATCH = 32 << 10
"""Bytes that a virtio port takes at once."""
ETH_P_ALL, SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE, SO_TIMESTAMPNS = 3, 263, 6, 33, 35
LINKTYPE_ETHERNET, MAX_FRAME = 1, 1 << 17
INBOUND, OUTBOUND = 1, 2


class _Stopped(Exception):
    """SIGTERM has come."""


stopping: bool = False
may_raise: bool = False


def _stop(*_: object) -> None:
    global stopping
    stopping = True
    if may_raise:
        raise _Stopped


def _waiting(call: Callable[[], Any]) -> Any:
    """Return what a blocking call returns; None when SIGTERM ends it."""
    global may_raise
    try:
        may_raise = True
        return None if stopping else call()
    except _Stopped:
        return None
    finally:
        may_raise = False


def _block(kind: int, body: bytes, options: bytes = b"") -> bytes:
    body += bytes(-len(body) % 4) + options
    length = struct.pack("<I", len(body) + 12)
    return struct.pack("<I", kind) + length + body + length


def _option(code: int, value: bytes) -> bytes:
    return struct.pack("<HH", code, len(value)) + value + bytes(-len(value) % 4)


END_OF_OPTIONS: bytes = _option(0, b"")


class Ethernet:
    """The packets of the interfaces e1 ... eN."""

    def __init__(self, ports: int) -> None:
        self._sockets = []
        self._dropped, self._all_dropped = [0] * ports, [0] * ports
        self._poll = select.poll()
        self._index = {}
        for number in range(ports):
            sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, SOCKET_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            sock.bind((f"e{number + 1}", ETH_P_ALL))
            sock.setblocking(False)
            self._sockets.append(sock)
            self._index[sock.fileno()] = number
            self._poll.register(sock, select.POLLIN)

    def blocks(self) -> Iterator[bytes]:
        yield _block(0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1))
        for number in range(len(self._sockets)):
            name, nanoseconds = f"e{number + 1}".encode(), bytes([9])
            options = _option(2, name) + _option(9, nanoseconds) + END_OF_OPTIONS
            yield _block(1, struct.pack("<HHI", LINKTYPE_ETHERNET, 0, 0), options)
        while (ready := _waiting(self._poll.poll)) is not None:
            yield b"".join(self._received([self._index[fd] for fd, _ in ready]))  # in few writes
        yield b"".join(self._received(range(len(self._sockets))))
        for number in range(len(self._sockets)):
            self._count(number)
            if self._all_dropped[number]:
                dropped = _option(5, struct.pack("<Q", self._all_dropped[number])) + END_OF_OPTIONS
                yield _block(5, struct.pack("<I", number) + _stamp(time.time_ns()), dropped)

    def _received(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """At most 256 packets from each socket: others must have their turn, and SIGTERM an end."""
        for number in numbers:
            self._count(number)
            for _ in range(256):
                try:
                    data, extra, _flags, address = self._sockets[number].recvmsg(MAX_FRAME, 64)
                except BlockingIOError:
                    break
                except OSError:  # ENETDOWN, once, when the interface goes down
                    continue
                yield self._packet(number, data, extra, address[2] == socket.PACKET_OUTGOING)

    def _count(self, number: int) -> None:
        counts = self._sockets[number].getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        dropped = struct.unpack("=II", counts)[1]  # since the last call
        self._dropped[number] += dropped
        self._all_dropped[number] += dropped

    def _packet(self, number: int, data: bytes, extra: list[Any], outgoing: bool) -> bytes:
        now = time.time_ns()
        for level, kind, value in extra:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                seconds, nanoseconds = struct.unpack("=qq", value)
                now = seconds * 1_000_000_000 + nanoseconds
        options = _option(2, struct.pack("<I", OUTBOUND if outgoing else INBOUND))
        if self._dropped[number]:
            options += _option(4, struct.pack("<Q", self._dropped[number]))
            self._dropped[number] = 0
        head = struct.pack("<I", number) + _stamp(now) + struct.pack("<II", len(data), len(data))
        return _block(6, head + data, options + END_OF_OPTIONS)


def _stamp(nanoseconds: int) -> bytes:
    return struct.pack("<II", nanoseconds >> 32, nanoseconds & 0xFFFFFFFF)


class Softib:
    """The packets at each HCA's cable."""

    def __init__(self) -> None:
        self._fd = os.open(SOFTIB_TAP, os.O_RDONLY)  # EBUSY if somebody else reads it

    def blocks(self) -> Iterator[bytes]:
        while data := _waiting(lambda: os.read(self._fd, BATCH)):
            yield data
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_NONBLOCK)
        left = SOFTIB_RING  # of what was sent before SIGTERM
        try:
            while left > 0:
                data = os.read(self._fd, BATCH)
                left -= len(data)
                yield data
        except BlockingIOError:
            pass


def _open_port() -> int:
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return os.open(PORT, os.O_WRONLY)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _write(port: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(port, view) :]


def main(fabric: str, ports: str, mark: str) -> NoReturn:
    try:
        source = Softib() if fabric == "infiniband" else Ethernet(int(ports))
        port = _open_port()
    except OSError as error:
        sys.exit(f"the packets cannot be captured: {error}")
    signal.signal(signal.SIGTERM, _stop)
    if child := os.fork():
        Path(PID).write_text(str(child))
        print("capturing", flush=True)
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    _write(port, mark.encode())
    for data in source.blocks():
        _write(port, data)
    _write(port, mark.encode())
    Path(PID).unlink(missing_ok=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
