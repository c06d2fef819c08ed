"""The same measurements over the processes of an MPI job: rank 0 sends, the others receive.

MPI starts the processes, numbers them, lets them wait for one another and gathers what they count; every
message goes over the group. Processes on one host take its ports in turn. The extra `mpi`
installs mpi4py.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from mcast.api import Backend, McastAddress, Message, QpInit
from mcast.bench.end import BOUND, BenchEnd
from mcast.bench.measure import (
    GRACE,
    KNOCKS,
    PINGS,
    BenchResult,
    drain,
    hears,
    result,
    send_window,
    take,
    window_for,
)
from mcast.endpoint.ports import active
from mcast.endpoint.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from mpi4py import MPI

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")
"""The variables by which launchers tell a process how many processes the job has."""

_WHO = struct.Struct("!I")
"""The first bytes of a ping: the rank that has to answer."""


def started_by_mpi() -> bool:
    """Whether a launcher started this process as one of several."""
    return any(os.environ.get(name, "1") not in ("", "0", "1") for name in _SIZES)


def world() -> Any:
    """MPI's communicator of all processes. Raises ImportError without mpi4py."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def measure(
    comm: MPI.Comm,
    backend: Backend,
    group: McastAddress,
    size: int,
    seconds: float,
    settings: Settings = DEFAULTS,
) -> BenchResult | None:
    """As `mcast.bench.measure.measure`, between the ranks; the result on rank 0, None on the others.

    One rank answers each ping, over the next group, and the latency is half the round trip. The rate includes
    a barrier after each window.
    """
    from mpi4py import MPI

    rank, receivers = comm.Get_rank(), comm.Get_size() - 1
    try:
        ports = active(backend, group)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None
    seat = comm.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()
    back = _next(group)
    window = window_for(receivers)
    with backend.event_channel() as channel:
        address = ports[seat % len(ports)].address
        end = BenchEnd(channel, address, QpInit(max_recv_wr=2 * window), settings)
        run = _send if rank == 0 else _receive
        counted = run(comm, end, group, back, size, seconds, window)
        lost = comm.reduce(counted[0])
        if rank:
            return None
        _, messages, spent, latencies = counted
        missed = sum(heard is None for heard in latencies)
        arrived = [heard for heard in latencies if heard is not None]
        processes = comm.Get_size()
        return result(
            backend.name, size, receivers, processes, messages, spent, (lost or 0) + missed, arrived
        )


Counted = tuple[int, int, float, list[float | None]]
"""Messages that this rank lost, messages sent, seconds that took, and half of each round trip in seconds."""


def _send(
    comm: MPI.Comm,
    end: BenchEnd,
    group: McastAddress,
    back: McastAddress,
    size: int,
    seconds: float,
    window: int,
) -> Counted:
    destination = end.join(group, send_only=True)
    end.join(back)
    comm.Barrier()
    for _ in range(KNOCKS):
        end.qp.send_one(destination, b"", timeout=BOUND)
        if all(comm.allgather(True)):
            break
    else:
        raise TimeoutError(f"a rank hears nothing of {end.address} within {BOUND:g} s")
    comm.Barrier()
    payloads = [bytes(size)] * window
    messages = 0
    start = perf_counter()
    while comm.bcast(perf_counter() < start + seconds):
        send_window(end.qp, destination, payloads)
        messages += window
        comm.Barrier()
    spent = perf_counter() - start
    return 0, messages, spent, list(_ping(comm, end, destination, size, seconds))


def _ping(
    comm: MPI.Comm, end: BenchEnd, destination: Any, size: int, seconds: float
) -> Iterator[float | None]:
    """Half of each round trip, with the receivers in turn; then tell the receivers that the pings are
    over."""
    drain(end.qp)
    receivers = comm.Get_size() - 1
    stop = perf_counter() + seconds
    for number in range(PINGS):
        message = _WHO.pack(1 + number % receivers).ljust(size, b"\0")
        start = perf_counter()
        end.qp.send_one(destination, message)
        answer = end.qp.recv_one(GRACE)
        yield None if answer is None else (perf_counter() - start) / 2
        if start > stop:
            break
    everybody = comm.Ibarrier()
    while not everybody.Test():
        end.qp.send_one(destination, _WHO.pack(0))
        sleep(0.01)


def _receive(
    comm: MPI.Comm,
    end: BenchEnd,
    group: McastAddress,
    back: McastAddress,
    size: int,
    seconds: float,
    window: int,
) -> Counted:
    end.join(group)
    answer_to = end.join(back, send_only=True)
    comm.Barrier()
    heard = False
    for _ in range(KNOCKS):
        heard = heard or hears(end.qp)
        if all(comm.allgather(heard)):
            break
    else:
        raise TimeoutError(
            f"rank {comm.Get_rank()}: {end.address} does not hear every message within {BOUND:g} s"
        )
    drain(end.qp)
    comm.Barrier()  # messages count from here on
    lost = 0
    while comm.bcast(None):
        lost += take(end.qp, window)
        comm.Barrier()
    who = -1
    while who:
        message = end.qp.recv_one(GRACE)
        who = _asked(message)
        if message is not None and who == comm.Get_rank():
            end.qp.send_one(answer_to, message.payload)
    comm.Ibarrier().Wait()
    return lost, 0, 0.0, []


def _asked(message: Message | None) -> int:
    """The rank that has to answer a ping, 0 at the end; -1 if no message came, or one that is no ping."""
    if message is None or len(message.payload) < _WHO.size:
        return -1
    (who,) = _WHO.unpack_from(message.payload)
    return int(who)


def _next(group: McastAddress) -> McastAddress:
    """The next group, for answers."""
    if isinstance(group.address, bytes):
        raise ValueError("a raw MGID has no neighbour for answers: use an IPv4 or IPv6 group")
    return McastAddress(address=group.address + 1, port=group.port)
