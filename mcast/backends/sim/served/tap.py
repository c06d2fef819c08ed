"""Live trace of a served fabric, as lines in a pipe: the server's end and a client's.

The server never waits for the reader. Lines that do not fit into the pipe are queued in the server, up to a
bound; beyond it packets are dropped and counted, and the next line that is written has the count.
"""

from __future__ import annotations

import errno as E
import fcntl
import json
import os
import select
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO, UnsupportedOperation
from typing import BinaryIO, NamedTuple, Self

from mcast.api import LinkLayer, McastError
from mcast.arguments.file_objects import FileWriter
from mcast.backends.model.times import NS
from mcast.backends.sim.clock import Clock
from mcast.backends.sim.trace.events import (
    Entry,
    IgmpLeave,
    IgmpReport,
    MessagesLost,
    SaAnswered,
    SaAsked,
    Send,
    Trace,
    TraceEvent,
    parse,
)
from mcast.backends.sim.trace.pcapng import Packets
from mcast.pcapng.writer import Writer

TAPPED_EVENTS = (Send, MessagesLost, IgmpReport, IgmpLeave, SaAsked, SaAnswered)
"""The events that packets are made of."""

MAX_QUEUED_BYTES = 4 << 20
"""Bytes that wait in the server at most."""
PIPE_BYTES = 1 << 20
"""Bytes that the pipe holds, if the system lets it."""
FLUSH_RETRY_NS = NS // 100
"""Time in ns until the server writes to a full pipe again."""
MISSED = "missed"
"""The field of a line that says how many packets there was no room for."""


class TapWriter:
    """The server's end; each call is made in the fabric's lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._theirs, self._ours = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.fcntl(self._ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError:  # the user has many pipes: this one is as small as they come
            pass
        self._waiting = bytearray()
        self._flushes = False
        self._unsaid = 0
        self.lost: int = 0
        """Packets for which there was no room."""

    def open_reader(self) -> int:
        """Return the reader's end of the pipe, which is the caller's from now on."""
        given, self._theirs = self._theirs, -1
        return given

    def note(self, now: int, event: TraceEvent) -> None:
        """Take an event. It leaves once the running call into the fabric is over, with what becomes of it."""
        if not isinstance(event, TAPPED_EVENTS):
            return
        line = b'{"t":%d,%b\n' % (now, event.model_dump_json().encode()[1:])
        if self._unsaid:
            line = b'{"%b":%d}\n%b' % (MISSED.encode(), self._unsaid, line)
        if len(self._waiting) + len(line) > MAX_QUEUED_BYTES:
            missed = len(event.payloads) if isinstance(event, Send) else not isinstance(event, MessagesLost)
            self._unsaid += missed
            self.lost += missed
            return
        self._unsaid = 0
        self._waiting += line
        self._flush_in(0)

    def _flush_in(self, ns: int) -> None:
        if not self._flushes:
            self._flushes = True
            self._clock.call_later(ns, self._flush)

    def _flush(self) -> None:
        self._flushes = False
        try:
            while self._waiting:
                del self._waiting[: os.write(self._ours, self._waiting)]
        except BlockingIOError:
            self._flush_in(FLUSH_RETRY_NS)
        except OSError:  # nobody reads any more, or it is closed
            self._waiting.clear()

    def close(self) -> None:
        """The reader finds the end of the pipe."""
        self._flush()
        self._waiting.clear()
        self._flushes = True  # and so nothing is scheduled any more
        os.close(self._ours)
        if self._theirs >= 0:
            os.close(self._theirs)


class TapChunk(NamedTuple):
    """Entries of the trace that were read at once, and the number of packets lost before them."""

    entries: tuple[Entry, ...]
    missed: int


class TapReader:
    """Reader of a live trace: `introduction` has the fabric and its ports, iteration yields `TapChunk`s.

    Iteration waits, and ends when the server has ended. Close it, or use `with`. `output` is the
    descriptor that the packets go to; iterating raises BrokenPipeError once nobody reads there any more.
    """

    output: int | None = None
    written = 0
    """Packets that `write_pcapng` has written."""

    def __init__(self, introduction: str, pipe: FileIO, end: Callable[[], int]) -> None:
        self.introduction: Trace = Trace.load(introduction)
        self._pipe = pipe
        self._end: Callable[[], int] | None = end
        self._lost = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[TapChunk]:
        rest, seen, ended = b"", 0, False
        poller = select.poll()
        poller.register(self._pipe, select.POLLIN)
        if self.output is not None:
            poller.register(self.output, 0)  # POLLERR is always told
        while not ended:
            if any(fd == self.output for fd, _ in poller.poll()):
                raise BrokenPipeError(E.EPIPE, os.strerror(E.EPIPE))
            data, ended = self._read()
            *lines, rest = (rest + data).split(b"\n")
            entries, missed = [], 0
            for number, line in enumerate(lines, seen + 1):
                if line.startswith(b'{"%b"' % MISSED.encode()):
                    missed += int(json.loads(line)[MISSED])
                else:
                    entries.append(parse(number, line.decode()))
            seen += len(lines)
            if entries or missed:
                yield TapChunk(tuple(entries), missed)

    def _read(self) -> tuple[bytes, bool]:
        """Return the lines in the pipe, up to its size, and True at the end of the stream."""
        blocks, room = list[bytes](), PIPE_BYTES
        try:
            while room > 0:
                block = os.read(self._pipe.fileno(), 1 << 16)
                if not block:
                    return b"".join(blocks), True
                blocks.append(block)
                room -= len(block)
        except BlockingIOError:
            pass
        return b"".join(blocks), False

    def close(self) -> int:
        """End the tap; how many packets the server had no room for. Idempotent, also after an interrupt."""
        self._pipe.close()
        if self._end is not None:
            with suppress(McastError):  # the server has gone, and all that it said was read
                self._lost = self._end()
            self._end = None
        return self._lost


def write_pcapng(
    tapped: TapReader, file: BinaryIO, link_layer: LinkLayer, made: int, most: int | None = None
) -> Iterator[int]:
    """Write packets as they come, at most `most`; yields how many are written, each time the file has all.

    `made`: when the fabric was made, in ns since 1970. A packet before which others were lost says so.
    """
    packets = Packets(tapped.introduction)
    writer = Writer(file, link_layer, packets.ports)
    missed = 0
    with suppress(UnsupportedOperation):  # it is no file of the system
        tapped.output = file.fileno()
    flush = FileWriter(file).flush
    flush()
    for piece in tapped:
        missed += piece.missed
        for packet in packets.of(piece.entries):
            comment = [f"{missed:,} packets before this one were lost: the reader was slow"] * (missed > 0)
            comment += [packet.comment] * bool(packet.comment)
            writer.write(packet._replace(t=packet.t + made, comment="\n".join(comment)))
            tapped.written += 1
            missed = 0
            if tapped.written == most:
                break
        flush()
        yield tapped.written
        if tapped.written == most:
            return
