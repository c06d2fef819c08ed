"""Objects over null verbs, each end on a core of its own: python -m benchmarks.rdma.objects

A sender and a receiver of `mcast.cast` take their turns in one thread, on the scripted card (tests/card),
and the processor time of each is counted apart. The card copies what is sent, in the sender's time. Digests
are compared, and parity is there to repair losses, of which there are none. In the same rounds as many bytes
are copied, and hashed by BLAKE3, as both ends have to at least: the floor. With --threads both ends compute
digests in other threads, whose time is not counted.
"""

from __future__ import annotations

import argparse
import cProfile
import os
from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import thread_time
from typing import Any, NamedTuple

from blake3 import blake3

from mcast.cast.io.driver import DEFAULT_MEMORY, MAX_RX_BATCH, SessionContext, SessionSteps, exclusive
from mcast.cast.io.receiving import Received, ReceivingSession
from mcast.cast.io.sending import ObjectReport, SendingSession
from mcast.cast.io.sinks import ReceiveTarget
from mcast.cast.protocol import fec
from mcast.cast.protocol.strategy import all_receivers
from mcast.endpoint.blocking import Membership, open_endpoint
from mcast.endpoint.waiting import Step
from tests.card.build import build as build_card
from tests.card.card import ethernet_port
from tests.card.provider import CardBackend, loaded

GROUP = "239.1.1.1"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
DEPTH = 1024
PIECE, BLOCK = 4064, 128 * 4064
"""Bytes of a piece in a message of 4096, and of a block."""


class End:
    """One end, and the processor time of its turns."""

    def __init__(
        self,
        group: Membership,
        context: SessionContext,
        steps: SessionSteps[Any],
        profile: cProfile.Profile | None,
    ) -> None:
        self.group, self.context, self.steps, self.profile = group, context, steps, profile
        self.seconds = 0.0
        self.finished = False
        self.step: Step | None = None

    def go(self) -> None:
        """Take a turn, if it is due or there is something to hear: a program would sleep until then."""
        if self.profile is not None:
            self.profile.enable()
        begun = thread_time()
        try:
            if self.step is None:
                self.step = next(self.steps)
                return
            for batch in self.step.post:
                self.group.send_batch(batch)
            self.step = self.step._replace(post=[])
            with self.group.recv_batch(MAX_RX_BATCH, 0.0) as heard:
                if not heard and self.context.now() < (self.step.until or inf):
                    begun = thread_time()
                    return
                self.step = self.steps.send(heard)
        except StopIteration:
            self.finished = True
        finally:
            self.seconds += thread_time() - begun
            if self.profile is not None:
                self.profile.disable()


class Cost(NamedTuple):
    """Seconds of processor time."""

    sender: float
    receiver: float
    copied: float
    hashed: float


def timed(call: Callable[[], object]) -> float:
    begun = thread_time()
    call()
    return thread_time() - begun


def floor(data: memoryview, place: memoryview) -> tuple[float, float]:
    """To copy the bytes block by block, and to hash them."""
    digest = blake3()
    starts = range(0, len(data), BLOCK)

    def copies() -> None:
        for at in starts:
            place[at : at + BLOCK] = data[at : at + BLOCK]

    def hashes() -> None:
        for at in starts:
            digest.update(data[at : at + BLOCK])

    return timed(copies), timed(hashes)


class Pair:
    """Both ends, in a group on the card."""

    def __init__(
        self, stack: ExitStack, profile: cProfile.Profile | None, whose: str, threads: int = 0
    ) -> None:
        self.threads = threads
        library, sysfs = build_card(), stack.enter_context(TemporaryDirectory())
        card = stack.enter_context(loaded(library, Path(sysfs)))
        card.add(ethernet_port(*ADDRESSES, any_address=1, active_mtu=5, max_mtu=5), name=b"null0", guid=1)
        backend = stack.enter_context(CardBackend(card))
        groups = [
            stack.enter_context(
                stack.enter_context(
                    open_endpoint(backend, address, loopback="off", receive_depth=DEPTH)
                ).join(GROUP)
            )
            for address in ADDRESSES
        ]
        self.groups, self.profile, self.whose = groups, profile, whose
        self.seats: list[SessionContext] = [
            stack.enter_context(exclusive(group, "objects")) for group in groups
        ]

    def send(self, data: memoryview, place: ReceiveTarget) -> tuple[float, float]:
        """Send it once; the processor time of sender and receiver."""
        reports: list[ObjectReport] = []
        found: list[Received] = []
        out = SendingSession(self.seats[0], DEFAULT_MEMORY, float("inf"), 60.0, None, None, self.threads)
        into = ReceivingSession(
            self.seats[1],
            place,
            None,
            0,
            DEFAULT_MEMORY,
            60.0,
            None,
            None,
            one_session=True,
            threads=self.threads,
        )

        def sends() -> SessionSteps[None]:
            yield from out.wait_for_receivers(1, 60.0)
            ends[0].seconds = ends[1].seconds = 0.0
            reports.append((yield from out.send(data, all_receivers(), "", b"")))
            yield from out.close("")

        def takes() -> SessionSteps[None]:
            while (one := (yield from into.next(None))) is not None:
                found.append(one)

        profiles = [self.profile if self.whose == end else None for end in ("sender", "receiver")]
        ends = [End(*one) for one in zip(self.groups, self.seats, (sends(), takes()), profiles, strict=True)]
        while busy := [end for end in ends if not end.finished]:
            for end in busy:
                end.go()
        (report,) = reports
        assert report.strategy_met
        assert report.repairs == 0, "the ends went on without each other"
        assert [one.digest for one in found] == [report.digest]
        return ends[0].seconds, ends[1].seconds


def measured(
    size: int, cycles: int, profile: cProfile.Profile | None, whose: str, threads: int = 0
) -> list[Cost]:
    data, place = memoryview(os.urandom(size)), memoryview(bytearray(size))
    with ExitStack() as stack:
        pair = Pair(stack, profile, whose, threads)
        found = [Cost(*pair.send(data, place), *floor(data, place)) for _ in range(cycles + 1)]
    return found[1:]  # the first warms all up


def show(size: int, found: list[Cost]) -> None:
    segments = size / PIECE
    print(f"{size / 1e6:g} MB, parity {'on' if fec.available() else 'not installed'}, {len(found)} rounds\n")
    print(f"{'processor time of':20}{'us a piece':>12}{'least':>8}{'Gbit/s':>9}{'/ floor':>9}{'/ copy':>9}")
    for name in Cost._fields:
        each = [getattr(one, name) for one in found]
        ratio = median(getattr(one, name) / (one.copied + one.hashed) for one in found)
        copies = median(getattr(one, name) / one.copied for one in found)
        gbits = size * 8e-9 / median(each)
        row = f"{median(each) / segments * 1e6:12.2f}{min(each) / segments * 1e6:8.2f}{gbits:9.1f}"
        row += f"{ratio:9.2f}{copies:9.2f}"
        print(f"{name:20}{row}")


def main() -> None:
    reason = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    reason.add_argument("--size", type=lambda text: int(float(text)), default=256_000_000, help="bytes")
    reason.add_argument("--rounds", type=int, default=7)
    reason.add_argument("--profile", choices=("sender", "receiver"), help="print what cProfile sees there")
    reason.add_argument("--threads", type=int, default=0, help="that compute digests")
    asked = reason.parse_args()
    profile = cProfile.Profile(thread_time) if asked.profile else None
    show(asked.size, measured(asked.size, asked.rounds, profile, asked.profile, asked.threads))
    if profile is not None:
        profile.print_stats("tottime")


if __name__ == "__main__":
    main()
