"""Joins many groups from many processes at once, in the lab's guest; all are in before the first one leaves.

usage: join_storm.py GROUPS PROCESSES ADDRESS...

The processes are dealt to the addresses in turn, and each joins every group. At the end, when the SA has no
member of them any more, the group LAST is joined and left. What is printed is how often the SA did not answer
a join in time. Lines on file descriptor 3 tell how far the storm is.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from ipaddress import IPv4Address

from mcast.api import Backend, EventChannel, McastAddress
from mcast.wire.addresses import Gid

FIRST, LAST = IPv4Address("239.98.0.1"), McastAddress(address=IPv4Address("239.98.255.255"))
AT_ONCE = 16
"""Joins and leaves of a process at a time, so that the SA answers within the kernel's 3 s (SA-SHARE-2)."""
BOUND = 120.0


def numbered(number: int) -> McastAddress:
    return McastAddress(address=FIRST + number)


def is_of_storm(mgid: Gid) -> bool:
    """Return True if a PortSpace.UDP join of 239.98.x.y leads to the MGID, LAST left out."""
    return mgid[:4] == b"\xff\x12\x40\x01" and mgid[12:14] == b"\x0f\x62" and mgid[14:] != b"\xff\xff"


class Member:
    """An id on the address. `silent`: how many of its joins the SA has not answered in time."""

    def __init__(self, channel: EventChannel, address: str) -> None:
        self.channel, self.id, self.silent = channel, channel.create_id(), 0
        self.id.bind_addr(IPv4Address(address))
        self.id.create_qp()

    def join(self, wanted: Sequence[McastAddress]) -> None:
        """Join all at once; join again what is not answered."""
        for group in wanted:
            self.id.join_multicast(group, group)
        for _ in wanted:
            event = self.channel.get_event(BOUND)
            assert event is not None, "no event"
            if event.errno == errno.ETIMEDOUT:
                self.silent += 1
                self.id.leave_multicast(event.context)
                self.join([event.context])
            else:
                event.check()


def life(
    backend: Backend, address: str, number: int, count: int, tell: Callable[[int], object]
) -> Iterator[int]:
    """Join `count` groups, and yield how many joins the SA did not answer; leave them.

    Nobody is told when a leave has been answered. A join after some leaves tells it, of a group that no other
    process joins.
    """
    batches = [list(map(numbered, range(count)[at : at + AT_ONCE])) for at in range(0, count, AT_ONCE)]
    with backend.event_channel() as channel:
        member = Member(channel, address)
        for done, batch in enumerate(batches, 1):
            member.join(batch)
            tell(done * AT_ONCE)
        yield member.silent
        before = member.silent
        for done, batch in enumerate(batches, 1):
            for group in batch:
                member.id.leave_multicast(group)
            own = numbered(0x8000 + number * 0x100 + done)
            member.join([own])
            member.id.leave_multicast(own)
            tell(count - done * AT_ONCE)
        yield member.silent - before


def in_process(address: str, number: int, count: int, arrived: int, go: int) -> None:
    """One process: its joins, a byte for each that was not answered and a newline, and the rest at the go."""
    from mcast.backends.rdma.backend import RdmaBackend

    def tell(joined: int) -> None:
        os.write(3, b"process %d is in %d groups\n" % (number, joined))

    with RdmaBackend() as backend:
        storm = life(backend, address, number, count, tell)
        os.write(arrived, b"." * next(storm) + b"\n")
        os.read(go, 1)
        os.write(arrived, b"." * next(storm))


def main(count: int, processes: int, addresses: Sequence[str]) -> int:
    """The storm; how many joins the SA did not answer in time."""
    import mcast.backends.rdma.qp  # noqa: F401  (for all processes)
    from mcast.backends.rdma.backend import RdmaBackend
    from mcast.backends.rdma.infiniband_bed import trusted_records

    (came, arrived), (go, start) = os.pipe(), os.pipe()
    for number in range(processes):
        if os.fork() == 0:
            status = 1
            try:
                os.close(start)
                in_process(addresses[number % len(addresses)], number, count, arrived, go)
                status = 0
            except BaseException:
                traceback.print_exc()  # for os._exit shows nothing
            finally:
                os._exit(status)
    os.close(arrived)
    received = b""
    while received.count(b"\n") < processes and (more := os.read(came, 4096)):
        received += more
    os.close(start)
    while more := os.read(came, 4096):
        received += more
    assert [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(processes)] == [0] * processes
    end = time.monotonic() + BOUND
    while any(is_of_storm(one.mgid) for one in trusted_records()):
        assert time.monotonic() < end, "the SA keeps members"
    with RdmaBackend() as backend, backend.event_channel() as channel:
        Member(channel, addresses[0]).join([LAST])
    return received.count(b".")


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
