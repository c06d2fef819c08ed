"""The collective of a communicator: the calls of a program, and their steps.

A call is a sequence of agreements (`_agree`) with the transfer of bytes (`_carry`) in between. All ranks take
the same steps in the same order; a rank that fails in one says so in the next agreement, and the call then
raises on every rank. The first agreement of a call waits for `wait` seconds, the later ones for a multiple of
`peer_timeout` (`_bound`). What uses multicast for the first time is tried on all ranks (`_try_on_all`): if
one rank cannot, `reason` is set on all, and MPI or gloo carries the bytes from then on. After an error other
than wrong arguments the collective has ended, because nobody knows what still waits in MPI.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from math import inf
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self, SupportsIndex, TypeVar, cast

from typing_extensions import Buffer

from mcast.api import Backend, BackendError, Handle, McastAddress, McastError
from mcast.arguments.buffers import flat_bytes, writable_bytes
from mcast.cast.protocol.members import MAX_MEMBERS_PER_ADDRESS
from mcast.cast.protocol.sender import Timers
from mcast.collective.agreement import CallKind, Intent, RankFailed, Ranks, outcome
from mcast.collective.communicator import Communicator
from mcast.collective.job import JobTerms, group_of, job_terms, opened
from mcast.collective.mpi import MpiRanks
from mcast.collective.root_group import IncompleteError, RootGroup, open_root_group
from mcast.collective.torch_group import ProcessGroup, Tensor, TorchRanks, is_group, shown
from mcast.endpoint.blocking import Endpoint

if TYPE_CHECKING:
    from mpi4py import MPI

logger: logging.Logger = logging.getLogger("mcast")

T = TypeVar("T")

DEFAULT_PEER_TIMEOUT = 30.0
"""Default time in seconds that a rank may be silent in a call that all have begun."""

STALL_TIMEOUT = Timers().stall
"""Seconds without progress after which the root gives up a rank."""

MAX_ROOT_GROUPS = 64
"""Maximum number of ranks with a group to send in.

The group that was unused longest is left for a new one.
"""

_UNFIT = (BackendError, OSError, RuntimeError, ValueError)
"""Errors that keep a rank from multicast, so that no rank uses it."""


def communicator(comm: MPI.Comm | ProcessGroup) -> Communicator:
    """Return the ranks of an mpi4py communicator, or of a group of torch.distributed.

    Raises TypeError if it is neither, ValueError for a group without gloo.
    """
    if is_group(comm):
        return TorchRanks(cast("ProcessGroup", comm))
    return MpiRanks(cast("MPI.Comm", comm))


class Collective(Handle):
    """Broadcast and allgather among the ranks of an MPI or PyTorch job, over RDMA multicast.

    All ranks make one together, call its methods in the same order, as with MPI, and close it, best by
    `with`. mpi4py or torch.distributed numbers the ranks and lets them wait for one another; multicast
    carries the bytes, which leave the root's port once, however many ranks there are.

        with Collective(MPI.COMM_WORLD) as ranks:
            for step in range(1000):
                ranks.broadcast(weights, root=0)

    comm      of mpi4py; the collective duplicates it, and its messages meet no others. Or a group of
              torch.distributed with gloo, whose timeout holds, too: each call counts among its collectives,
              so a thread that uses it meanwhile needs another one
    backend   the name of a provider, or an open backend, which stays open
    bind      the local IP address; None: the ranks of a host take its active ports in turn
    group     the IP group of rank 0; rank n sends in the n-th after it. None: rank 0 draws one of
              239.192.0.0/14. Rank 0's argument counts
    peer_timeout  for so many seconds a rank may be silent in a call that all have begun
    wait      for so many seconds a rank that calls waits for the others to call, too; inf: as MPI does
    rate      the most bytes a second that leave a root's port
    authenticated  True: rank 0 draws a key and the communicator brings it to all, so what other programs say
              in the groups, or say again, changes nothing. It costs each rank time for each message. Rank 0's
              argument counts, as its `peer_timeout`, `wait` and `rate` do

    Where a rank cannot use multicast, all use MPI or gloo for the bytes, too: `reason` says why, and rank 0
    logs a warning. The ranks find that out when they make the collective, with an empty object from rank 0;
    and when another rank is the root for the first time, which takes some round trips then and none later.

    A call in which a rank fails raises on every rank: there the error itself, elsewhere `RankFailed`. So does
    the next call after an error has ended the `with` of a rank. After arguments that cannot be, the
    collective goes on; after any other error it has ended. One thread at a time may call.

    Where a process dies, mpirun and torchrun end the job, unless they were told to go on. Then, and where a
    process stands still, the others raise within a bound: `RankFailed`, or a TimeoutError or ConnectionError
    where nobody knows of which rank. In a call that all have begun, that is after at most 6 times
    `peer_timeout`, a minute, and twice as long as the call has taken there; before that, after `wait` and 2
    times `peer_timeout`. No exchange of gloo lasts longer than the timeout of its group. To make and to close
    a collective are such calls. To leave the `with` by an error takes up to 2 times `peer_timeout` more. A
    process that stood still and goes on raises, too, or returns if the others have waited for it.

    After such an error call MPI no more with these ranks, which may be anywhere, and end the job by
    `comm.Abort()`: at the end of a process MPI waits for all others, without a bound. Until then MPI keeps
    the memory of what was given up, also that of a buffer of the program, and may write there. A group of
    torch cannot be used any more, either: end the process, which gloo holds up to the bound above.
    """

    def __init__(
        self,
        comm: MPI.Comm | ProcessGroup,
        backend: str | Backend = "rdma",
        *,
        bind: str | None = None,
        group: McastAddress | str | None = None,
        peer_timeout: float = DEFAULT_PEER_TIMEOUT,
        wait: float = inf,
        rate: float = inf,
        authenticated: bool = False,
    ) -> None:
        library = communicator(comm)
        terms, error = _attempt(
            lambda: job_terms(library.size, backend, group, peer_timeout, wait, rate, authenticated)
        )
        self._peer_timeout, self._wait = (
            (DEFAULT_PEER_TIMEOUT, inf) if terms is None else (terms.peer_timeout, terms.wait)
        )
        self._ranks = Ranks(library, self._bound(error))
        self._stack = ExitStack()
        self.endpoint: Endpoint | None = None
        """The endpoint whose groups carry the bytes; None while MPI or gloo does."""
        self._root_groups: OrderedDict[int, RootGroup] = OrderedDict()
        self._ended = ""
        self._known = False
        """True if the other ranks know that the collective has ended."""
        self.reason: str = ""
        """Reason why MPI or gloo carries the bytes; empty while multicast does."""
        try:
            self._agree(Intent(CallKind.MAKE), error)
            self._terms: JobTerms = self._ranks.bcast(terms, self._bound(begun=True))
            self._peer_timeout, self._wait = self._terms.peer_timeout, self._terms.wait
            if self.size > 1:
                local_rank = self._ranks.local_rank(self._bound(begun=True))
                self._try_on_all(lambda: self._open(backend, bind, local_rank))
                self._require_capacity()
                self._root_group(0)
        except BaseException as error:
            self._leave(error)
            raise

    # --- the calls -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._ranks.size

    @property
    def ended(self) -> str:
        """Reason why there can be no more calls; empty while there can."""
        return self._ended

    def broadcast(self, buffer: Buffer | Tensor, root: int = 0) -> None:
        """Fill the buffers of all ranks with the bytes of the root's; return when all have them.

        buffer  contiguous, such as a numpy array or a CPU tensor of torch, with as many bytes on each rank,
                and writable on all but the root. The bytes go from where they are to where they belong
        root    the rank that sends, the same on each

        Raises ValueError if the ranks differ in size or root, TypeError for what is no such buffer, and
        RankFailed where another rank failed. What the buffers hold is then undefined, unless the arguments
        were the reason.
        """
        view, error = _attempt(lambda: self._ours(buffer, root))
        # a root that is none may not even be a number that the ranks can compare
        self._agree(
            Intent(CallKind.BROADCAST) if view is None else Intent(CallKind.BROADCAST, root, len(view)), error
        )
        assert view is not None
        self._carry(root, view)

    def allgather(self, buffer: Buffer | Tensor, into: Buffer | Tensor | None = None) -> list[memoryview]:
        """The bytes of all ranks' buffers, in the order of the ranks; return when all have all.

        buffer  contiguous; the sizes may differ
        into    a writable buffer of as many bytes as all have together, which are put there one after
                another; None: new memory

        The list has a view of bytes for each rank: `numpy.frombuffer(view, dtype)` makes an array of one, and
        `torch.frombuffer(view, dtype=dtype)` a tensor. The ranks send one after another, each in a group of
        its own. Raises as `broadcast` does.
        """
        mine, error = _attempt(lambda: flat_bytes(shown(buffer)))
        self._agree(Intent(CallKind.ALLGATHER), error)
        assert mine is not None
        statements = self._together(
            lambda: self._ranks.exchange(len(mine).to_bytes(8), self._bound(begun=True))
        )
        sizes = [int.from_bytes(size) for size in statements]
        whole, error = _attempt(lambda: _result_buffer(into, sum(sizes)))
        self._agree(Intent(CallKind.ALLGATHER), error, begun=True)
        assert whole is not None
        ends = [sum(sizes[: rank + 1]) for rank in range(self.size)]
        parts = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        parts[self.rank][:] = mine
        for rank, part in enumerate(parts):
            self._carry(rank, part)
        return parts

    def close(self) -> None:
        """Leave the groups, all ranks together. Idempotent. Raises RankFailed if a rank left by an error."""
        if not self._ended:
            self._agree(Intent(CallKind.CLOSE), None)
            self._ended, self._known = "it is closed", True
            self.abandon()
            self._ranks.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._leave(error)

    # --- the steps -------------------------------------------------------------------------------

    def _ours(self, buffer: Buffer | Tensor, root: int) -> memoryview:
        if not isinstance(root, SupportsIndex):
            raise TypeError(f"root is {root!r}: give an int, the ranks are 0..{self.size - 1}")
        if not 0 <= root < self.size:
            raise ValueError(f"root is {root}: the ranks are 0..{self.size - 1}")
        memory = shown(buffer)
        return flat_bytes(memory) if root == self.rank else writable_bytes(memory)

    def _carry(self, root: int, view: memoryview) -> None:
        """Let the bytes go from the root to all, and agree that they have."""
        root_group = self._root_group(root)
        try:
            if (
                root_group is None
            ):  # what comes of a rank that has given up may be anything, so all agree then, too
                self._ranks.broadcast(view, root, self._bound(begun=True))
            else:
                root_group.broadcast(view)
        except BaseException as error:
            self.abandon()  # the others hear it, and do not wait for this rank
            self._agree(Intent(CallKind.DONE), error)
        else:
            self._agree(Intent(CallKind.DONE), None, begun=True)

    def _together(self, step: Callable[[], T]) -> T:
        """Take a step that all ranks have agreed on. An error in it ends the collective."""
        try:
            return step()
        except BaseException as error:
            self._end(error)
            raise

    def _agree(self, step: Intent, error: BaseException | None, begun: bool = False) -> None:
        """Say what has become of this rank; raise on every rank if one has failed, or does something else."""
        if self._ended:
            raise RuntimeError(f"this collective has ended: {self._ended}. Make a new one on every rank")
        try:
            trouble = None if error is None else describe_error(error)
            statements = self._ranks.agree(step, trouble, self._bound(error, begun), 2 * self._peer_timeout)
        except BaseException as late:
            self._end(error or late)
            if isinstance(error, IncompleteError):
                raise RankFailed({self.rank: describe_error(error)}) from error
            raise error or late from None
        if statements:
            found = outcome(statements)
            if any(one.step.kind not in (CallKind.BROADCAST, CallKind.ALLGATHER) for one in statements):
                self._end(found, known=True)
            if error is None or isinstance(error, IncompleteError):
                raise found from error
            raise error

    def _bound(self, error: BaseException | None = None, begun: bool = False) -> float:
        """Return the seconds to wait for the others; `begun`: all have begun this call.

        A rank that has failed does not wait for others that may be gone. One that has the bytes knows that
        the others lack at most what is under way at once, and that the root gives up who is silent or stands
        still.
        """
        if error is not None:
            return 2 * self._peer_timeout
        if begun:
            return 4 * self._peer_timeout + STALL_TIMEOUT + 2 * (monotonic() - self._ranks.agreed)
        return self._wait

    def _leave(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, unless they know."""
        if not self._known:
            self._known = True
            with suppress(Exception):  # what is being raised says more
                bound = self._bound(error)
                self._ranks.agree(Intent(CallKind.LEAVE), describe_error(error), bound, bound)
        self._end(error, known=True)

    def _end(self, error: BaseException, known: bool = False) -> None:
        # The communicator is not freed: nobody knows what still waits in it.
        self._ended, self._known = self._ended or describe_error(error), self._known or known
        self.abandon()

    def abandon(self) -> None:
        """Leave the groups without a word to the others, when the process ends. Idempotent."""
        while self._root_groups:
            with suppress(McastError):  # a device that is gone needs no farewell
                self._root_groups.popitem()[1].close()
        self.endpoint = None
        with suppress(McastError):
            self._stack.close()

    # --- multicast, or not -----------------------------------------------------------------------

    def _root_group(self, root: int) -> RootGroup | None:
        """The group of that root, tried out when it is opened; None where multicast is not used."""
        if self.size == 1 or self.reason:
            return None
        if root in self._root_groups:
            self._root_groups.move_to_end(root)
            return self._root_groups[root]
        if len(self._root_groups) >= MAX_ROOT_GROUPS:
            self._root_groups.popitem(last=False)[1].close()
        self._try_on_all(lambda: self._join(root))
        self._try_on_all(lambda: self._root_groups[root].broadcast(memoryview(bytearray())))
        return self._root_groups.get(root)

    def _try_on_all(self, call: Callable[[], object]) -> None:
        """Do it on every rank; if one cannot, MPI carries the bytes from now on."""
        if self.reason:
            return
        why = None
        try:
            call()
        except _UNFIT as error:
            why = describe_error(error)
        try:
            self.reason = self._ranks.reasons(why, self._bound(begun=True), 2 * self._peer_timeout)
        except BaseException as late:
            self._end(late)
            raise
        if self.reason:
            self.abandon()
            level = logging.WARNING if self.rank == 0 else logging.DEBUG
            words = "%s carries the bytes of %d ranks, not multicast: %s"
            logger.log(level, words, self._ranks.library, self.size, self.reason)

    def _open(self, backend: str | Backend, bind: str | None, local_rank: int) -> None:
        self.endpoint = opened(self._stack, backend, bind, local_rank)

    def _require_capacity(self) -> None:
        if not self.reason:
            assert self.endpoint is not None
            mine = str(self.endpoint.address).encode()
            at = Counter(self._ranks.exchange(mine, self._bound(begun=True)))
            address, most = at.most_common(1)[0]
            self._try_on_all(lambda: _require_room(address.decode(), most))

    def _join(self, root: int) -> None:
        assert self.endpoint is not None
        receivers = self.size - 1 if root == self.rank else None
        group = group_of(self._terms, root)
        self._root_groups[root] = open_root_group(self.endpoint, group, self._terms, receivers)


def _require_room(address: str, ranks: int) -> None:
    if ranks > MAX_MEMBERS_PER_ADDRESS:
        raise ValueError(
            f"{ranks} ranks send from the address {address}, and a sender admits "
            f"{MAX_MEMBERS_PER_ADDRESS} receivers "
            "at one address: start fewer ranks for each port, or bind them to several"
        )


def _result_buffer(into: Buffer | Tensor | None, size: int) -> memoryview:
    view = memoryview(bytearray(size)) if into is None else writable_bytes(shown(into))
    if len(view) != size:
        raise ValueError(
            f"into has {len(view)} bytes, and the ranks together send {size}: give a buffer of {size}"
        )
    return view


def describe_error(error: BaseException) -> str:
    """Return the description of an error for the other ranks."""
    return f"{type(error).__name__}: {error}"


def _attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the call's result, or its error, which the other ranks must hear before it is raised."""
    try:
        return call(), None
    except Exception as error:
        return None, error
