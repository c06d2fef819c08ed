"""Delivery of one object in transfer to its sink: its blocks, its digest so far, and the threads that verify.

Theory of operation. The receiving session says what has arrived, and a `Delivery` has the bytes. A block is

- open, in `_blocks`, while its segments arrive: in the sink's own memory if it has any, otherwise in new
  memory. The placer knows open blocks, and puts segments into place; `put` does the same in Python.
- ready, in `_ready`, from `add` on: the core has enough segments of it. A thread restores and verifies ready
  blocks, one task of an object at a time, because the digest continues that of the block before. Until the
  task ends, the digest and its blocks belong to the thread.
- verified, in `_assembled`, until it is written. Blocks are written in order while the sink is ready. Those
  of a carousel are written out of order where the sink can do so, and read back for the digest of the object
  (`_on_disk`).

`store` takes all of these steps as far as threads and sink are, and yields what the core must know. Blocks of
an earlier run are compared one at a time (`verify_stored`), before those that follow them. `close` writes
what is verified, and what a thread still verifies, to a part file from which a later run resumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mcast.cast.io.files import Sink
from mcast.cast.io.placing import DataRun, encode_bitmap
from mcast.cast.io.sinks import BufferSink, GrowingMemorySink, NewMemorySink, Offered, Target
from mcast.cast.io.workers import Task, Workers
from mcast.cast.protocol.blocks import BlockBuffer, Digest
from mcast.cast.protocol.incoming import ReadyBlock
from mcast.cast.protocol.layout import ObjectLayout
from mcast.cast.protocol.packets import BlockInfo, Describe, Seal

if TYPE_CHECKING:  # it may not be built
    from mcast.cast._plane import Placer

MAX_READ_BACK = 8
"""Maximum number of stored blocks that are read back in one step."""
_MAX_TASK = 8
"""Maximum number of blocks that are verified in one task of a thread."""


class _Job(NamedTuple):
    """A block to verify, and its segments; `buffer` is None if there are none."""

    ready: ReadyBlock
    buffer: BlockBuffer | None


def _verified(jobs: Sequence[_Job], digest: Digest | None) -> list[memoryview | None]:
    """Return the bytes of blocks; None for one that differs from its digest, or that cannot be restored.

    digest  of the bytes before the first block, to be continued, and the first block that differs is the last
            one of the result; None if each block has a digest of its own
    """
    found: list[memoryview | None] = []
    for (info, segments), buffer in ((job.ready[2:], job.buffer) for job in jobs):
        data = None
        if buffer is not None and digest is None:
            data = buffer.assemble_verified(info, segments)
        elif buffer is not None and digest is not None:
            data = buffer.assemble(info, segments)
            if data is not None and not digest.update_if(data, info.digest):
                data = None
        found.append(data)
        if data is None and digest is not None:
            break
    return found


class Delivery:
    """One object in transfer: its blocks, its digest so far, and its sink."""

    def __init__(self, about: Describe, offered: Offered, placer: Placer | None, workers: Workers) -> None:
        self.offered = offered
        self.target: Target = None
        """Destination that other objects may share: the caller's buffer, stream or sink; None for a path."""
        self.sink: Sink | None = None
        self.path: Path | None = None
        self.size: int = 0
        self.digest: Digest = Digest()
        self._layout = ObjectLayout.of(about)
        self._block_size = self._layout.offset_of(1)
        self._key = about.session, about.object
        self._placer, self._workers = placer, workers
        self._blocks: dict[int, BlockBuffer] = {}
        self._ready: dict[int, _Job] = {}
        self._task: tuple[Task[list[memoryview | None]], Sequence[_Job]] | None = None
        """Blocks that a thread verifies; the digest is the thread's meanwhile."""
        self._next_check = 0
        """Next block to verify; in a carousel, whose blocks are verified in any order, it has no meaning."""
        self._next = 0
        self._assembled: dict[int, memoryview] = {}
        """Verified blocks to be written, or the rest of one."""
        self._is_partly_written = False
        self.committing: bool = False
        """True while the sink replaces the destination, which may take a disk some time."""
        self._in_place = False
        """True if blocks are assembled in the sink's own memory, so that `write` has nothing to copy."""
        self.stored_block: ReadyBlock | None = None
        """Next block that an earlier run may have stored, to be verified."""
        self.abandoned: bool = False
        """True if this receiver has failed the object: a later run must not resume from its bytes."""
        self.carousel: bool = about.carousel > 0
        self._on_disk = set[int]()
        """Blocks that were written out of order, to be read back for the object's digest."""

    def open(self, block: int, wanted: int, need: int) -> None:
        """Have the placer store these segments of a block, and stop when so many have arrived."""
        assert self._placer is not None
        buffer, layout = self._buffer_of(block), self._layout
        memory = buffer.memory, buffer.parity
        self._placer.open(*self._key, block, encode_bitmap(wanted), need, *memory, layout.segment, layout.k)

    def put(self, run: DataRun, new: int) -> None:
        """Store the segments of a run whose bit is set in `new`."""
        self._close(run.block)  # the placer would store them once more
        block = self._buffer_of(run.block)
        first, count, memory, begin, step, size = run[3:]
        if new == (1 << count) - 1 << first:
            block.put_run(first, count, memory, begin, step, size)
            return
        for segment in range(first, first + count):
            if new >> segment & 1:
                block.put_run(segment, 1, memory, begin, step, size)
            begin += step

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop the segments of blocks that the core has dropped: the carousel sends them again."""
        for block in blocks:
            self._take(block)

    def stop(self) -> None:
        """Store no more segments, because the object has ended here."""
        self.forget([*self._blocks])

    def close_sealed(self, seal: Seal) -> None:
        """Have blocks opened anew: from now on it is known when they are ready to verify."""
        for block in range(seal.block, seal.block - len(seal.blocks), -1):
            if block in self._blocks:
                self._close(block)

    def _take(self, block: int) -> BlockBuffer | None:
        """Remove and return the buffer of an open block."""
        self._close(block)
        return self._blocks.pop(block, None)

    def _close(self, block: int) -> None:
        if self._placer is not None:
            self._placer.close(*self._key, block)

    def _buffer_of(self, block: int) -> BlockBuffer:
        """Return the buffer of an open block: the sink's own memory if it has any, otherwise new memory."""
        if (found := self._blocks.get(block)) is not None:
            return found
        layout, size, memory = self._layout, self._block_size, None
        length = None if layout.size is None else min(size, layout.size - block * size)
        if self.sink is not None and length is not None:
            memory = self.sink.buffer_at(block * size, length)
            self._in_place = memory is not None
        if memory is None:
            memory = memoryview(bytearray(size if length is None else length))
        found = self._blocks[block] = BlockBuffer(memory, layout.segment, layout.k)
        return found

    def add(self, ready: ReadyBlock) -> None:
        """Queue a block for `store`."""
        self._ready[ready.block] = _Job(ready, self._take(ready.block))

    def store(self, wait: bool = False) -> Iterator[tuple[int, bool]]:
        """Have the queued blocks verified and written as far as threads and sink are.

        Yields the number of each block that is written completely, and True; and that of each block that
        differs from its digest, and False.

        wait  wait for the thread that verifies blocks
        """
        yield from self._verify(wait)
        yield from self._write()

    def _verify(self, wait: bool) -> Iterator[tuple[int, bool]]:
        """Have the queued blocks verified; yield as `store` does, but for those that `_write` writes.

        A block of a carousel has a digest of its own. Other digests cover the object up to the block's end:
        these blocks are verified in order.
        """
        while True:
            if self._task is None:
                if not (jobs := self._next_jobs()):
                    return
                size = sum([job.ready.info.size for job in jobs])
                digest = None if self.carousel else self.digest
                self._task = self._workers.submit(partial(_verified, jobs, digest), size), jobs
            task, jobs = self._task
            if not (wait or task.done):
                return
            self._task, wait = None, False
            for job, data in zip(jobs, task.result(), strict=False):
                block = job.ready.block
                del self._ready[block]
                if data is None:
                    yield block, False
                elif self.random_access and not self._in_place:
                    assert self.sink is not None
                    self.sink.write_at(self._layout.offset_of(block), data)
                    self._on_disk.add(block)
                    yield block, True
                else:
                    self._assembled[block] = data
                    self._next_check += 1
                    if self.random_access:
                        yield block, True

    def _next_jobs(self) -> Sequence[_Job]:
        """Return the blocks that can be verified next."""
        if self.carousel:
            return [*islice(self._ready.values(), _MAX_TASK)]
        jobs: list[_Job] = []
        while len(jobs) < _MAX_TASK and (job := self._ready.get(self._next_check + len(jobs))) is not None:
            jobs.append(job)
        return jobs

    @property
    def busy(self) -> bool:
        """True while a thread verifies blocks."""
        return self._task is not None

    @property
    def random_access(self) -> bool:
        """True if blocks are written to their offset as they arrive, in any order."""
        return self.carousel and self.sink is not None and self.sink.random_access

    @property
    def stored_blocks(self) -> int:
        """Number of blocks that an earlier run may have stored."""
        stored = 0 if self.sink is None else self.sink.stored_size
        size, block = self._layout.size, self._layout.offset_of(1)
        if size is None or stored < size:
            return stored // block
        return (self._layout.blocks or 0) if stored == size else 0  # the last block may be shorter

    def verify_stored(self, info: BlockInfo) -> bool:
        """Verify the next stored block; if it differs, drop the received blocks after it and return False."""
        sink = self.sink
        data = b"" if sink is None else sink.read_back(info.size)
        if self.carousel:
            verified = bytes(Digest(data)) == info.digest
        else:
            verified = self.digest.update_if(data, info.digest)
        if sink is None or not (verified or sink.mismatch):
            if not self.carousel:
                self._clear()
            return False
        sink.mark_verified(len(data))
        if self.carousel or not verified:
            self.digest.update(data)
        self.size += len(data)
        self._next += 1
        self._next_check += 1
        return True

    @property
    def pending(self) -> bool:
        """True if a block is being verified, written, or read back."""
        return self.busy or self._next in self._assembled or self._next in self._on_disk

    def _write(self) -> Iterator[tuple[int, bool]]:
        """Write verified blocks in order while the sink is ready; yield as `store` does.

        Blocks that were written out of order are read back, and not yielded again.
        """
        sink = self.sink
        for _ in range(MAX_READ_BACK):
            if sink is None or self._next not in self._on_disk:
                break
            stored = sink.read_back(self._layout.length(self._next) or 0)
            sink.mark_verified(len(stored))
            self.digest.update(stored)
            self.size += len(stored)
            self._on_disk.remove(self._next)
            self._next += 1
        while sink is not None and self._next in self._assembled:
            data = self._assembled[self._next]
            if self.carousel and not self._is_partly_written:
                self.digest.update(data)
            while data and sink.ready():
                part = data[: sink.max_write]
                if not self._in_place:
                    sink.write(part)
                self.size += len(part)
                data = data[len(part) :]
            self._assembled[self._next] = data
            self._is_partly_written = bool(data)
            if data:
                return
            del self._assembled[self._next]
            self._next += 1
            yield self._next - 1, True

    @property
    def data(self) -> bytearray | memoryview | None:
        """The bytes of a complete object, as `Received` has them."""
        sink = self.sink
        if isinstance(sink, GrowingMemorySink):
            return sink.data
        if isinstance(sink, NewMemorySink):
            return sink.take()
        return sink.view[: self.size] if isinstance(sink, BufferSink) else None

    def _clear(self) -> None:
        """Drop all blocks that are not written."""
        self.stop()
        self._ready.clear()
        self._assembled.clear()

    def close(self) -> None:
        """Close the sink; leave a part file if this receiver has not failed the object."""
        with suppress(Exception):  # the object has ended
            keeps = self.sink is not None and not self.sink.streams and not self.abandoned
            while keeps and (self.busy or self._next_jobs()):
                for _ in self.store(wait=True):
                    pass  # a later run resumes from these blocks, too
        task, self._task = self._task, None
        if task is not None:
            with suppress(Exception):
                task[0].result()
        self._clear()
        if self.sink is not None:
            if not self.abandoned:
                self.sink.keep_part()
            self.sink.close()
