"""Measurements over the processes of an MPI job: rank 0 sends, the others receive.

MPI starts the processes, numbers them, lets them wait for one another and gathers what they count; every
message goes over the group. Processes on one host take its ports in turn. The extra `mpi`
installs mpi4py.

Theory of operation. Each rank has one queue pair and no thread. All ranks go through the same phases, and a
collective call of MPI separates them, so a rank that is late holds the others up instead of losing messages:

    hello    rank 0 sends empty messages until every rank has received one (`allgather` after each), because
             a switch may learn of a member only after a while; MAX_HELLOS of them end in TimeoutError
    batches  rank 0 sends a window, which fits every receive queue; a barrier follows each. `bcast` says
             whether another window comes
    pings    rank 0 sends number n, rank 1 + (n - 1) % receivers answers over the next group
    end      rank 0 repeats _END_NUMBER until a barrier that does not block (`Ibarrier`) says that every rank
             has seen it: any single message may be lost

The counts of the ranks are summed by `reduce`. Deliberately not handled: a rank that dies, or that fails
between two collective calls. MPI ends the job then, as mpirun does by default.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from mcast.api import Backend, Destination, McastAddress, Message, QpInit
from mcast.bench.end import BENCH_TIMEOUT, BenchEnd
from mcast.bench.measure import MAX_PINGS, BenchResult, result, send_window, window_for
from mcast.bench.receiver import MAX_HELLOS, Receiver
from mcast.endpoint.ports import active
from mcast.endpoint.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from mpi4py import MPI

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")
"""The variables by which launchers tell a process how many processes the job has."""

_NUMBER = struct.Struct("!I")
"""The first bytes of a ping: its number, from 1, which says what rank has to answer."""

_END_NUMBER = 0xFFFFFFFF
"""In place of a number, the end of the pings: not 0, as a late message of the batches begins."""


def started_by_mpi() -> bool:
    """Return True if a launcher started this process as one of several."""
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
    """Measure between the ranks; return the result on rank 0, None on the others.

    One rank answers each ping, over the next group, and the latency is half the round trip. The rate includes
    a barrier after each window.
    """
    from mpi4py import MPI

    rank, receivers = comm.Get_rank(), comm.Get_size() - 1
    try:
        local_ports = active(backend, group)
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None
    local_rank = comm.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()
    back = _next(group)
    window = window_for(receivers)
    with backend.event_channel() as channel:
        end = BenchEnd(
            channel, local_ports[local_rank % len(local_ports)], QpInit(max_recv_wr=2 * window), settings
        )
        end.join(group if rank else back)
        destination = end.join(back if rank else group, send_only=True)
        peers = comm.allgather(end.sends_as(destination))
        receiver = Receiver(end, peers[:1] if rank else peers[1:], backend.now)
        if rank:
            comm.reduce(_receive(comm, receiver, destination, window))
            comm.reduce(receiver.strangers)
            return None
        messages, spent, latencies = _send(comm, receiver, destination, size, seconds, window)
        lost = (comm.reduce(0) or 0) + sum(half is None for half in latencies)
        strangers = comm.reduce(receiver.strangers) or 0
        arrived = [half for half in latencies if half is not None]
        processes = comm.Get_size()
        return result(backend.name, size, receivers, processes, messages, spent, lost, strangers, arrived)


def _send(
    comm: MPI.Comm, receiver: Receiver, destination: Destination, size: int, seconds: float, window: int
) -> tuple[int, float, list[float | None]]:
    """Messages sent in batches, the seconds that took, and half of each ping's round trip in seconds."""
    qp = receiver.qp
    for _ in range(MAX_HELLOS):
        qp.send_one(destination, b"", timeout=BENCH_TIMEOUT)
        if all(comm.allgather(True)):
            break
    else:
        raise TimeoutError(f"a rank receives nothing from {receiver.end.address} within {BENCH_TIMEOUT:g} s")
    comm.Barrier()
    payloads = [bytes(size)] * window
    messages = 0
    start = perf_counter()
    while comm.bcast(not messages or perf_counter() < start + seconds):
        send_window(qp, destination, payloads)
        messages += window
        comm.Barrier()
    spent = perf_counter() - start
    return messages, spent, list(_ping(comm, receiver, destination, size, seconds))


def _ping(
    comm: MPI.Comm, receiver: Receiver, destination: Destination, size: int, seconds: float
) -> Iterator[float | None]:
    """Return half of each round trip, with the receivers in turn.

    Afterwards notify the receivers that the pings are over.
    """
    receiver.drain()
    qp, stop = receiver.qp, perf_counter() + seconds
    for number in range(1, MAX_PINGS + 1):
        ping = _NUMBER.pack(number).ljust(size, b"\0")
        start = perf_counter()
        qp.send_one(destination, ping)
        answer = receiver.take_one(ping)
        yield None if answer is None else (perf_counter() - start) / 2
        if start > stop:
            break
    everybody = comm.Ibarrier()
    while not everybody.Test():
        qp.send_one(destination, _NUMBER.pack(_END_NUMBER))
        sleep(0.01)


def _receive(comm: MPI.Comm, receiver: Receiver, answer_to: Destination, window: int) -> int:
    """The messages that this rank lost."""
    heard = False
    for _ in range(MAX_HELLOS):
        heard = heard or receiver.receives_one()
        if all(comm.allgather(heard)):
            break
    else:
        raise TimeoutError(
            f"rank {comm.Get_rank()}: {receiver.end.address} received nothing within {BENCH_TIMEOUT:g} s: "
            "does the network forward the group to it?"
        )
    receiver.drain()
    comm.Barrier()  # messages count from here on
    lost = 0
    while comm.bcast(None):
        lost += receiver.take(window)
        comm.Barrier()
    while (number := _number(message := receiver.take_one())) != _END_NUMBER:
        if message is not None and number and _asked(number, comm.Get_size() - 1) == comm.Get_rank():
            receiver.qp.send_one(answer_to, message.payload)
    comm.Ibarrier().Wait()
    return lost


def _number(message: Message | None) -> int:
    """The number of a ping; 0 if no message came, or one that is no ping."""
    if message is None or len(message.payload) < _NUMBER.size:
        return 0
    (number,) = _NUMBER.unpack_from(message.payload)
    return int(number)


def _asked(number: int, receivers: int) -> int:
    """The rank that has to answer that ping."""
    return 1 + (number - 1) % receivers


def _next(group: McastAddress) -> McastAddress:
    """The next group, for answers."""
    if isinstance(group.address, bytes):
        raise ValueError("a raw MGID has no neighbour for answers: use an IPv4 or IPv6 group")
    return McastAddress(address=group.address + 1, port=group.port)
