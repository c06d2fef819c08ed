"""Read the packets that capture.py captures in a running guest, and write them as a pcapng file."""

import os
import secrets
import select
import shlex
import signal
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

from rdma_lab.control import Guest
from rdma_lab.errors import GuestStoppedError, LabError, LabTimeoutError

CAPTURE = Path(str(files("rdma_lab") / "capture.py"))
_PID = "/run/rdma-lab-tap.pid"
DRAIN_TIMEOUT = 30.0
"""Seconds that the guest may take to hand over what it has captured, once it is asked to stop."""
_INTERFACE, _STATISTICS, _PACKET = 1, 5, 6
_DROPPED_BEFORE, _ALL_DROPPED = 4, 5
"""epb_dropcount and isb_ifdrop."""


@dataclass
class Tally:
    """Packets of a capture, written and lost."""

    packets: int = 0
    limit: int | None = None
    _dropped: dict[int, int] = field(default_factory=dict)
    _all_dropped: dict[int, int] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Packets that the guest has dropped because the reader was slow.

        Each interface counts twice: before a packet those since the last one, and in its statistics all.
        """
        interfaces = self._dropped.keys() | self._all_dropped.keys()
        return sum(max(self._dropped.get(one, 0), self._all_dropped.get(one, 0)) for one in interfaces)

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.packets >= self.limit

    def count(self, block: bytes) -> bool:
        """Count a block of the file; return False if it is a packet beyond the limit."""
        (kind,) = struct.unpack_from("<I", block)
        if kind == _PACKET:
            if self.is_full:
                return False
            interface, captured = struct.unpack_from("<I8xI", block, 8)
            for value in _options(block, 28 + captured + -captured % 4, _DROPPED_BEFORE):
                self._dropped[interface] = self._dropped.get(interface, 0) + value
            self.packets += 1
        elif kind == _STATISTICS:
            (interface,) = struct.unpack_from("<I", block, 8)
            for value in _options(block, 20, _ALL_DROPPED):
                self._all_dropped[interface] = value
        return True


def _options(block: bytes, at: int, wanted: int) -> Iterator[int]:
    """The values of the option `wanted`, of 8 bytes, among those that begin at `at`."""
    while at + 4 <= len(block) - 4:
        code, length = struct.unpack_from("<HH", block, at)
        if code == wanted and length == 8:
            yield struct.unpack_from("<Q", block, at + 4)[0]
        if code == 0:
            return
        at += 4 + length + -length % 4


class Stream:
    """The blocks of a capture between its two marks."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._data = bytearray()
        self._began = False
        self.ended: bool = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the blocks that `data` completes."""
        self._data += data
        if not self._began:
            _, mark, after = self._data.partition(self._mark)
            if not mark:
                del self._data[: -len(self._mark)]
                return
            self._began, self._data = True, after
        while not self.ended:
            if self._data.startswith(self._mark):
                self.ended = True
                return
            if len(self._data) < 8:
                return
            (length,) = struct.unpack_from("<I", self._data, 4)
            if length < 12 or length % 4:
                raise LabError(
                    "the guest's capture is damaged from here on: the packets written before are complete"
                )
            if len(self._data) < max(length, len(self._mark)):
                return
            yield bytes(self._data[:length])
            del self._data[:length]


@contextmanager
def until_signalled() -> Iterator[int]:
    """A descriptor that can be read once SIGINT, SIGTERM or SIGHUP has come.

    A second one raises KeyboardInterrupt.
    """
    reading, writing = os.pipe()
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        os.write(writing, b"!")

    before = {one: signal.signal(one, note) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield reading
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        os.close(reading)
        os.close(writing)


class Tap:
    """A capture of a running guest's fabric; it ends with the connection to the guest."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        mark = secrets.token_hex(16)
        self._stream = Stream(mark.encode())
        about = guest.about
        start = [sys.executable, "-I", "-S", str(CAPTURE), about.fabric, str(about.ports), mark]
        guest.send(shlex.join(start), after=f"kill -KILL $(cat {_PID}); rm -f {_PID}", tap=True)
        fds: list[int] = []
        guest.receive(fds)
        self._pipe = os.fdopen(fds[0], "rb", 0)
        guest.output(guest.receive())

    def copy(self, to: BinaryIO, tally: Tally, signalled: int) -> None:
        """Write the packets to `to` until `tally` is full, `signalled` can be read, or the guest ends.

        Raises BrokenPipeError when nobody reads `to`, LabTimeoutError when the guest does not finish the
        capture; what was written is whole blocks all the same.
        """
        pipe = self._pipe.fileno()
        stopping: float | None = None
        while not self._stream.ended:
            left = None if stopping is None else stopping - time.monotonic()
            if left is not None and left <= 0:
                raise LabTimeoutError(
                    f"{self._guest.about.name} does not finish the capture within {DRAIN_TIMEOUT:g} s: "
                    "its QEMU is stopped or very slow; the last packets are missing"
                )
            sources = [pipe, signalled] if stopping is None else [pipe]
            ready, _, _ = select.select(sources, [], [], left)
            if pipe in ready:
                data = self._pipe.read(1 << 16)
                if not data:  # the guest has ended
                    return
                for block in self._stream.feed(data):
                    if tally.count(block):
                        _write(to, block)
            if stopping is None and (signalled in ready or tally.is_full):
                with suppress(GuestStoppedError):  # its end is read from the pipe
                    self._guest.send(f"kill $(cat {_PID})")
                stopping = time.monotonic() + DRAIN_TIMEOUT


def _write(to: BinaryIO, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[to.write(view) :]
