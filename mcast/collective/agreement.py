"""Agreement of the ranks of a job between two steps: all take the same one, and none has failed.

One reduction of some words says so; only where the ranks differ does a second exchange say how.

No exchange here waits without a bound, because a rank may stand still or die at any line, also between
two exchanges that belong together. So each has a deadline (`wait_for`). What is not complete by then is
abandoned: neither ended, which could take for ever, nor freed, because MPI goes on.

A rank that has abandoned an exchange takes part in no later one, but for one more reduction, by which it
says LEAVE. MPI matches the exchanges on a communicator by their order alone, so that reduction must not meet
another kind of exchange. Hence three communicators: one for the reductions, one for what the ranks tell each
other when they differ, and one for what they do when they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from pickle import dumps, loads
from socket import gethostname
from time import monotonic
from typing import Any, NamedTuple

from mcast.collective.communicator import Communicator

MAX_PART = 1 << 26
"""Maximum number of bytes of one broadcast by the ranks' library."""


class CallKind(IntEnum):
    """Steps that ranks agree on."""

    MAKE = 1
    BROADCAST = 2
    ALLGATHER = 3
    DONE = 4
    CLOSE = 5
    LEAVE = 6


class Intent(NamedTuple):
    """Next step of a rank, with its root and size where all ranks need the same."""

    kind: CallKind
    root: int = 0
    size: int = 0

    def __str__(self) -> str:
        return _WORDS[self.kind].format(self)


_WORDS = {
    CallKind.MAKE: "makes the collective",
    CallKind.BROADCAST: "broadcasts {0.size} bytes from rank {0.root}",
    CallKind.ALLGATHER: "calls allgather",
    CallKind.DONE: "has ended its part",
    CallKind.CLOSE: "closes the collective",
    CallKind.LEAVE: "leaves the collective after an error",
}


class Statement(NamedTuple):
    """Step of one rank, and the reason why it cannot take it; None if it can."""

    step: Intent
    trouble: str | None


class RankFailed(RuntimeError):
    """A rank has failed, and so has the call, on every rank.

    failed  rank -> in words, what went wrong there
    """

    def __init__(self, failed: Mapping[int, str]) -> None:
        self.failed: dict[int, str] = dict(failed)
        super().__init__(self.failed)  # as in a pickle, which calls the class with `args`

    def __str__(self) -> str:
        return "; ".join(f"rank {rank}: {words}" for rank, words in self.failed.items())


class Ranks:
    """The ranks of a communicator, with communicators of their own.

    Raises as `Communicator.copy` does if not all ranks have come to make these within `bound` seconds.
    """

    def __init__(self, comm: Communicator, bound: float) -> None:
        self._reducing = comm.copy(bound)
        self._telling = self._reducing.copy(bound)
        self._comm = self._reducing.copy(bound)
        """For what all have agreed to do."""
        self.library: str = comm.library
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.agreed: float = monotonic()
        """When the ranks have agreed last: what they do since then, they have begun together."""

    def agree(self, step: Intent, trouble: str | None, bound: float, more: float) -> Sequence[Statement]:
        """Wait for all ranks. Empty if all take the same step and none has trouble; else what each has said.

        Raises TimeoutError if not all have come within `bound` seconds, ConnectionError if one has left. If
        one has trouble, and not all have said so within `more` seconds, raises RankFailed without the reason.
        """
        troubled = 0 if trouble is None else 1 + self.rank
        most = self._reducing.maximum([*step, *(-value for value in step), troubled], bound)
        self.agreed = monotonic()
        half = len(step)
        if not most[-1] and all(most[at] == -most[half + at] for at in range(half)):
            return ()
        try:
            statements = _gathered(self._telling, dumps(Statement(step, trouble)), more)
            return [loads(said) for said in statements]
        except (TimeoutError, ConnectionError) as late:  # another rank waits no more
            if not most[-1]:
                raise
            raise RankFailed({most[-1] - 1: f"failed, and its reason did not arrive: {late}"}) from None

    def exchange(self, mine: bytes, bound: float) -> list[bytes]:
        """The bytes that each rank gives, in the order of the ranks.

        Raises TimeoutError if not all have come within `bound` seconds, ConnectionError if one has left.
        """
        return _gathered(self._comm, mine, bound)

    def broadcast(self, view: memoryview, root: int, bound: float) -> None:
        """Send the root's bytes, and fill the others', without multicast.

        Raises as `exchange` does; `bound` is for each part, so that a slow network does not end it.
        """
        for at in range(0, len(view), MAX_PART):
            self._comm.broadcast(view[at : at + MAX_PART], root, bound)

    def reasons(self, mine: str | None, bound: float, more: float) -> str:
        """Why a rank cannot do something, one of the reasons that there are; empty if all can.

        Raises as `agree` does, and RankFailed if a rank has left.
        """
        statements = self.agree(Intent(CallKind.DONE), mine, bound, more)
        if any(one.step.kind is not CallKind.DONE for one in statements):
            raise outcome(statements)
        troubled = [(rank, one.trouble) for rank, one in enumerate(statements) if one.trouble is not None]
        if not troubled:
            return ""
        rank, why = troubled[0]
        others = f" (and {len(troubled) - 1} other ranks)" if len(troubled) > 1 else ""
        return f"rank {rank}: {why}{others}"

    def local_rank(self, bound: float) -> int:
        """The number of this rank among those of its host, from 0. Raises as `exchange` does."""
        here = gethostname().encode()
        return self.exchange(here, bound)[: self.rank].count(here)

    def bcast(self, value: Any, bound: float) -> Any:
        """Return the value of rank 0. Raises as `exchange` does."""
        return loads(self.exchange(dumps(value) if self.rank == 0 else b"", bound)[0])

    def free(self) -> None:
        """Free the communicators, on which nothing is under way."""
        for comm in (self._comm, self._telling, self._reducing):
            comm.free()


def _gathered(comm: Communicator, mine: bytes, bound: float) -> list[bytes]:
    end = monotonic() + bound
    told = comm.allgather(len(mine).to_bytes(8), bound)
    sizes = [int.from_bytes(told[at : at + 8]) for at in range(0, len(told), 8)]
    # All of one width, because MPI would need the list of sizes until the end, and mpi4py frees that at once.
    width = max(1, *sizes)
    whole = comm.allgather(mine.ljust(width), max(0.0, end - monotonic()))
    return [whole[rank * width :][:size] for rank, size in enumerate(sizes)]


def outcome(statements: Sequence[Statement]) -> Exception:
    """The error that each rank raises which has no error of its own."""
    failed = {rank: one.trouble for rank, one in enumerate(statements) if one.trouble is not None}
    if failed:
        return RankFailed(failed)
    by_step: dict[Intent, list[int]] = {}
    for rank, one in enumerate(statements):
        by_step.setdefault(one.step, []).append(rank)
    said = "; ".join(f"rank {', '.join(map(str, ranks[:8]))} {step}" for step, ranks in by_step.items())
    return ValueError(f"the ranks make different calls: {said}")
