"""The MPI job of test_collective.py: ranks on `udp`, each of which checks what it gets."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from traceback import print_exc
from typing import Any
from unittest.mock import patch

import numpy
import pytest
from mpi4py import MPI

from examples.mpi_weights.mpi_weights import train
from mcast import collective, open_endpoint
from mcast.cast.io.sinks import BufferSink
from mcast.cast.io.sources import MemorySource
from mcast.cast.protocol.packets import ALL_MEMBERS, Bye, encode
from mcast.cast.protocol.sender import Timers
from mcast.collective import Collective, RankFailed, agreement, calls, job
from mcast.collective.mpi import MpiRanks
from mcast.collective.root_group import open_root_group

from ..buffers import PAYLOADS, REFUSED, content

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.Get_rank(), COMM.Get_size()
UDP = "udp"


@contextmanager
def all_raise(failing: int | None, error: type[Exception], words: str) -> Iterator[None]:
    """The rank that fails raises its own error, and each of the others one that names the rank."""
    found: Exception = RuntimeError(f"rank {RANK} went on, although rank {failing} had failed")
    try:
        yield
    except Exception as raised:
        found = raised
    expected = error if failing in (RANK, None) else RankFailed
    named = not isinstance(found, RankFailed) or failing in found.failed
    if type(found) is not expected or words not in str(found) or not named:
        raise found


def the_loop_joins_once_for_each_root(ranks: Collective) -> None:
    with patch.object(calls, "open_root_group", side_effect=open_root_group) as opening:
        for turn in range(3):
            for root in (0, 3):
                mine: Any = numpy.arange(6, dtype="c16").reshape(2, 3) * (turn + root)
                array: Any = mine.copy() if root == RANK else numpy.zeros_like(mine)
                ranks.broadcast(array, root)
                assert (array == mine).all()
    assert opening.call_count == 1  # of rank 3: that of rank 0 was opened when the collective was made


def any_buffer_is_filled_in_its_place(ranks: Collective) -> None:
    data = bytes(range(256)) * 300
    target = bytearray(len(data) + 10)
    ranks.broadcast(data if RANK == 0 else memoryview(target)[10:])
    assert RANK == 0 or target == bytes(10) + data
    empty: Any = numpy.empty((0, 4))
    ranks.broadcast(empty)


def a_queue_shorter_than_the_object_loses_nothing(ranks: Collective) -> None:
    assert ranks.endpoint is not None
    data = bytes(range(251)) * 6000
    buffer = bytearray(data if RANK == 0 else len(data))
    before = ranks.endpoint.stats().sent_bytes
    ranks.broadcast(buffer)
    assert buffer == data
    if RANK == 0:
        assert 1 < (ranks.endpoint.stats().sent_bytes - before) / len(data) < 1.05


def all_get_what_each_has(ranks: Collective) -> None:
    into: Any = numpy.empty(sum(range(SIZE)), dtype="i8")
    mine: Any = numpy.full(RANK, RANK)
    parts = ranks.allgather(mine, into)
    assert into.tolist() == [rank for rank in range(SIZE) for _ in range(rank)]
    assert [len(part) for part in parts] == [8 * rank for rank in range(SIZE)]
    assert [bytes(part) for part in ranks.allgather(b"%d" % RANK)] == [b"%d" % rank for rank in range(SIZE)]


def what_cannot_be_is_refused_on_all_ranks(ranks: Collective) -> None:
    with all_raise(2, TypeError, "is read-only"):
        ranks.broadcast(bytes(2) if RANK == 2 else bytearray(2))
    with all_raise(1, TypeError, "lie apart in memory"):
        apart: Any = numpy.zeros((4, 4))[:, :2]
        ranks.broadcast(apart if RANK == 1 else bytearray(64))
    with all_raise(3, ValueError, f"the ranks are 0..{SIZE - 1}"):
        ranks.broadcast(bytearray(2), SIZE if RANK == 3 else 0)
    with all_raise(None, ValueError, "rank 1 broadcasts 3 bytes from rank 0"):
        ranks.broadcast(bytearray(2 + (RANK == 1)))
    with all_raise(None, ValueError, "rank 1 broadcasts 2 bytes from rank 3"):
        ranks.broadcast(bytearray(2), 3 * (RANK == 1))
    with all_raise(None, ValueError, "rank 1 calls allgather"):
        (ranks.allgather if RANK == 1 else ranks.broadcast)(bytearray(2))
    with all_raise(3, ValueError, "the ranks together send"):
        ranks.allgather(b"ab", bytearray(SIZE * 2 + (RANK == 3)))


def what_no_rank_can_compare_is_refused_on_all_ranks(ranks: Collective) -> None:
    for wrong in (1 << 70, -1, None, 0.5, "0"):
        with all_raise(1, ValueError if isinstance(wrong, int) else TypeError, "the ranks are 0.."):
            ranks.broadcast(bytearray(2), wrong if RANK == 1 else 0)  # type: ignore[arg-type]
    objects: Any = numpy.zeros(2, dtype=[("few", "i4"), ("any", "O")])
    with all_raise(1, TypeError, "has Python objects as items"):
        ranks.broadcast(objects if RANK == 1 else bytearray(objects.nbytes))
    with all_raise(1, TypeError, "has Python objects as items"):
        ranks.allgather(b"", objects[:0] if RANK == 1 else None)
    named: Any = numpy.full(2, 7 * (RANK == 0), dtype=[("O", "i4"), ("aO", "i4")])
    ranks.broadcast(named)
    assert named["aO"].tolist() == named["O"].tolist() == [7, 7]


def payloads_alone_are_carried(ranks: Collective) -> None:
    """The table of tests/buffers.py."""
    for make in PAYLOADS.values():
        assert {bytes(part) for part in ranks.allgather(make())} == {content(make())}
    for make in REFUSED.values():
        with all_raise(1, TypeError, ""):
            ranks.broadcast(make() if RANK == 1 else bytearray(8))
        with all_raise(1, TypeError, ""):
            ranks.allgather(make() if RANK == 1 else b"")


def a_rank_that_fails_in_the_middle_ends_the_call_on_all(ranks: Collective) -> None:
    broken = (
        patch.object(BufferSink, "buffer_at", side_effect=MemoryError("no room"))
        if RANK == 3
        else ExitStack()
    )
    with all_raise(3, MemoryError, "no room"), broken:
        ranks.broadcast(bytearray(100_000))
    with all_raise(None, RuntimeError, "this collective has ended"):
        ranks.broadcast(bytearray(1))


def an_error_between_two_calls_reaches_the_others() -> None:
    def leave(ranks: Collective) -> None:
        if RANK == 1:
            raise LookupError("of rank 1's own")
        ranks.allgather(b"")

    with all_raise(1, LookupError, "of rank 1's own"), Collective(COMM, UDP, bind=NOWHERE) as ranks:
        leave(ranks)


NOWHERE = "10.254.0.9" if RANK == 2 else None


def mpi_carries_the_bytes_where_one_rank_has_no_device() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mcast")
    logger.addHandler(handler)
    with Collective(COMM, UDP, bind=NOWHERE) as ranks:
        assert ranks.reason.startswith("rank 2: ValueError: no port has the address 10.254.0.9"), ranks.reason
        any_buffer_is_filled_in_its_place(ranks)
        all_get_what_each_has(ranks)
        what_cannot_be_is_refused_on_all_ranks(ranks)
    assert [words for words in said if ranks.reason in words] == [
        f"MPI carries the bytes of {SIZE} ranks, not multicast: {ranks.reason}"
    ][: RANK == 0]
    logger.removeHandler(handler)


def a_key_closes_the_groups_to_all_but_the_ranks() -> None:
    """A sender at the root's own address that knows its session ends nothing without the key."""
    with Collective(COMM, UDP, authenticated=True) as ranks:
        data = bytes(range(256)) * 40
        buffer = bytearray(data if RANK == 0 else len(data))
        if RANK == 0:
            root_group: Any = ranks._root_groups[0]
            lies = encode(Bye(root_group._session._sending.core.session, ALL_MEMBERS, "a lie"))
            group = job.group_of(ranks._terms, 0)
            assert ranks.endpoint is not None
            with (
                open_endpoint(ranks.endpoint.backend, str(ranks.endpoint.address)) as other,
                other.sender(group) as stranger,
            ):
                stranger.send_batch([lies] * 3)
        COMM.Barrier()
        ranks.broadcast(buffer)
        assert buffer == data
        assert [bytes(part) for part in ranks.allgather(b"%d" % RANK)] == [b"%d" % at for at in range(SIZE)]


def a_rank_that_is_gone_in_a_call_ends_it_on_the_others() -> None:
    """Rank 3 is as dead as one that was killed: it neither speaks nor agrees any more."""
    ranks = Collective(COMM, UDP)
    ranks._peer_timeout = 0.1
    if RANK == 0:
        root_group: Any = ranks._root_groups[0]
        root_group._session._sending.core._timers = Timers(peer_timeout=0.1)
    gone = patch.object(Collective, "_carry", side_effect=EOFError) if RANK == 3 else ExitStack()
    expected = {0: RankFailed, 3: EOFError}.get(RANK, (RankFailed, TimeoutError))
    with patch.object(calls, "STALL_TIMEOUT", 0.1), gone, pytest.raises(expected):
        ranks.broadcast(bytearray(10_000))
    assert ranks.ended or RANK == 3
    COMM.Barrier()
    ranks.abandon()


def a_rank_that_does_not_come_is_waited_for_so_long() -> None:
    ranks = Collective(COMM, UDP, wait=60)
    assert ranks._wait == 60
    ranks._wait = 0.1
    if RANK != 1:
        with pytest.raises(TimeoutError, match=r"took part within 0\.1 s: one has died"):
            ranks.broadcast(bytearray(1))
        with pytest.raises(RuntimeError, match="this collective has ended: TimeoutError"):
            ranks.broadcast(bytearray(1))
    COMM.Barrier()
    ranks.abandon()


def what_a_rank_has_given_up_is_said_as_it_was() -> None:
    """MPI reads the words of a rank when the last one comes, and the rank has other things in its memory."""
    ranks = agreement.Ranks(MpiRanks(COMM), 60.0)
    step = agreement.Intent(agreement.CallKind.BROADCAST, 1, 7)
    others: list[bytearray] = []
    if RANK != 1:
        with suppress(TimeoutError):
            ranks.agree(step, None, 0.1, 0.1)
            raise RuntimeError("agreed without rank 1")
        others = [bytearray(b"\xff" * size) for size in range(1, 500) for _ in range(20)]
    COMM.Barrier()
    if RANK == 1:
        assert ranks.agree(step, None, 60.0, 60.0) == ()
    COMM.Barrier()
    assert len(others) == (RANK != 1) * 499 * 20


def a_rank_that_gives_no_reason_is_named() -> None:
    """The reduction names it; the reason takes a second exchange, to which the rank does not come."""
    ranks = agreement.Ranks(MpiRanks(COMM), 60.0)
    silent = patch.object(agreement, "dumps", side_effect=TimeoutError) if RANK == 2 else ExitStack()
    with pytest.raises(RankFailed) as raised, silent:
        ranks.agree(agreement.Intent(agreement.CallKind.DONE), "trouble" if RANK == 2 else None, 60.0, 0.3)
    assert list(raised.value.failed) == [2]
    COMM.Barrier()


def single_calls_share_a_collective() -> None:
    with patch.object(calls, "open_root_group", side_effect=open_root_group) as opening:
        for turn in range(2):
            buffer = bytearray([turn + 1]) * 9 if RANK == 0 else bytearray(9)
            collective.broadcast(buffer, backend=UDP)
            assert buffer == bytes([turn + 1]) * 9
    assert opening.call_count == 1
    broken = patch.object(MemorySource, "read", side_effect=OSError("no more")) if RANK == 0 else ExitStack()
    with all_raise(0, OSError, "no more"), broken:
        collective.broadcast(bytearray(9), backend=UDP)


def main() -> None:
    with patch.object(job, "_DEPTH", 1024), Collective(COMM, UDP) as ranks:
        assert not ranks.reason, ranks.reason
        checks: tuple[Callable[[Collective], None], ...] = (
            the_loop_joins_once_for_each_root,
            any_buffer_is_filled_in_its_place,
            a_queue_shorter_than_the_object_loses_nothing,
            all_get_what_each_has,
            what_cannot_be_is_refused_on_all_ranks,
            what_no_rank_can_compare_is_refused_on_all_ranks,
            payloads_alone_are_carried,
            a_rank_that_fails_in_the_middle_ends_the_call_on_all,
        )
        for check in checks:
            check(ranks)
    mpi_carries_the_bytes_where_one_rank_has_no_device()
    an_error_between_two_calls_reaches_the_others()
    single_calls_share_a_collective()
    a_key_closes_the_groups_to_all_but_the_ranks()
    a_rank_that_is_gone_in_a_call_ends_it_on_the_others()
    a_rank_that_does_not_come_is_waited_for_so_long()
    what_a_rank_has_given_up_is_said_as_it_was()
    a_rank_that_gives_no_reason_is_named()
    assert train(COMM, UDP) == [6.0 + rank for rank in range(SIZE)]
    sys.stdout.write(f"rank {RANK} is done\n")  # at once: an unbuffered print may mix with another rank's


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        print_exc()
        COMM.Abort(1)  # the others wait for this rank
