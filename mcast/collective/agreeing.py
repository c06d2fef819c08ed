"""What the ranks of a job agree on between two steps: that all take the same one, and that none has failed.

One reduction of some words over MPI says so; only where the ranks differ does a second exchange say how.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from math import inf
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

_NAP = 0.001
"""The longest pause between two looks at whether all ranks have come, in seconds."""

_PENDING: list[object] = []
"""Reductions that this rank has stopped waiting for: MPI may still write into their memory."""


class Act(IntEnum):
    """What ranks agree to do."""

    MAKE = 1
    BROADCAST = 2
    ALLGATHER = 3
    DONE = 4
    CLOSE = 5
    LEAVE = 6


class Intent(NamedTuple):
    """What a rank is about to do: with which root, and with how many bytes, where all need the same."""

    kind: Act
    root: int = 0
    size: int = 0

    def __str__(self) -> str:
        return _WORDS[self.kind].format(self)


_WORDS = {
    Act.MAKE: "makes the collective",
    Act.BROADCAST: "broadcasts {0.size} bytes from rank {0.root}",
    Act.ALLGATHER: "calls allgather",
    Act.DONE: "has ended its part",
    Act.CLOSE: "closes the collective",
    Act.LEAVE: "leaves the collective by an error",
}


class Statement(NamedTuple):
    """What one rank has said: its step, and in words why it cannot take it; None if it can."""

    step: Intent
    trouble: str | None


class RankFailed(RuntimeError):
    """A rank has failed, and so has the call, on every rank.

    failed  rank -> in words, what went wrong there
    """

    def __init__(self, failed: Mapping[int, str]) -> None:
        self.failed: dict[int, str] = dict(failed)
        super().__init__("; ".join(f"rank {rank}: {words}" for rank, words in self.failed.items()))

    def __reduce__(self) -> tuple[type[RankFailed], tuple[dict[int, str]]]:
        return RankFailed, (self.failed,)


class Ranks:
    """The ranks of a communicator, and a communicator of their own to agree over."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm: MPI.Comm = comm.Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.agreed: float = monotonic()
        """When the ranks have agreed last: what they do since then, they have begun together."""

    def agree(self, step: Intent, trouble: str | None, bound: float = inf) -> Sequence[Statement]:
        """Wait for all ranks. Empty if all take the same step and none has trouble; else what each has said.

        Raises TimeoutError if not all have come within `bound` seconds.
        """
        from mpi4py import MPI

        mine = array("q", [*step, *(-value for value in step), trouble is not None])
        most = array("q", bytes(8 * len(mine)))
        self._await(self.comm.Iallreduce([mine, MPI.INT64_T], [most, MPI.INT64_T], MPI.MAX), bound)
        self.agreed = monotonic()
        half = len(step)
        if not most[-1] and all(most[at] == -most[half + at] for at in range(half)):
            return ()
        return self.comm.allgather(Statement(step, trouble))

    @staticmethod
    def _await(request: MPI.Request, bound: float) -> None:
        """Blocking calls of MPI would keep a core busy until the last rank comes."""
        end, nap = monotonic() + bound, 0.0
        try:
            while not request.Test():
                if monotonic() > end:
                    raise TimeoutError(
                        f"not all ranks have come to agree within {bound:.3g} s: one has died, stands still "
                        "or is late"
                    )
                sleep(nap)
                nap = min(_NAP, nap + _NAP / 64)
        except BaseException:
            _PENDING.append(request)
            raise

    def reasons(self, mine: str | None, bound: float) -> str:
        """Why a rank cannot do something, one of the reasons that there are; empty if all can.

        Raises TimeoutError as `agree` does.
        """
        told = self.agree(Intent(Act.DONE), mine, bound)
        troubled = [(rank, one.trouble) for rank, one in enumerate(told) if one.trouble is not None]
        if not troubled:
            return ""
        rank, why = troubled[0]
        more = f" (and {len(troubled) - 1} other ranks)" if len(troubled) > 1 else ""
        return f"rank {rank}: {why}{more}"

    def seat(self) -> int:
        """The number of this rank among those of its host, from 0."""
        from mpi4py import MPI

        here = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        seat = here.Get_rank()
        here.Free()
        return seat

    def first(self, value: Any) -> Any:
        """What rank 0 says."""
        return self.comm.bcast(value)


def outcome(told: Sequence[Statement]) -> Exception:
    """The error that each rank raises which has no error of its own."""
    failed = {rank: one.trouble for rank, one in enumerate(told) if one.trouble is not None}
    if failed:
        return RankFailed(failed)
    by_step: dict[Intent, list[int]] = {}
    for rank, one in enumerate(told):
        by_step.setdefault(one.step, []).append(rank)
    said = "; ".join(f"rank {', '.join(map(str, ranks[:8]))} {step}" for step, ranks in by_step.items())
    return ValueError(f"the ranks do not call the same: {said}")
