"""Versions: a receiver has the newest one, whole, whoever is killed or stopped meanwhile. The time is virtual."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from mcast.cast.io.driver import SessionSteps
from mcast.cast.io.receiving import Missed, ReceivingSession
from mcast.cast.io.sending import ObjectReport, SendingSession
from mcast.cast.io.sinks import Offered
from mcast.cast.protocol.strategy import Strategy, all_receivers, best_effort, deadline, quorum

from .world import End, World, drawn

KEY = bytes(range(32))
SIZE = 12_000
PAUSE = 0.3
"""Seconds from one version to the next."""
PEER_TIMEOUT = 1.0


class Publisher(End):
    """A program that publishes a version every `PAUSE` seconds until `last`; then it lets receivers join.

    whole  contents of all versions, of this program and of others before it
    """

    def __init__(
        self,
        world: World,
        salt: int,
        whole: dict[bytes, int],
        first: int = 0,
        strategy: Callable[[], Strategy] = lambda: deadline(PAUSE),
        key: bytes | None = None,
    ) -> None:
        super().__init__(world, "10.0.0.1", salt)
        self.out = SendingSession(self.context, 1 << 20, 2e6, PEER_TIMEOUT, key)
        self.version, self.last = first - 1, 1 << 30
        self.reports: list[ObjectReport] = []
        self._whole, self._strategy = whole, strategy
        self.start(self._publish())

    def _publish(self) -> SessionSteps[None]:
        yield from self.out.wait_for_receivers(1, None)
        data = bytearray(SIZE)
        while True:
            if self.version < self.last:
                self.version += 1
                data[:] = self.world.random.randbytes(SIZE)
                self._whole[bytes(data)] = self.version
                strategy, begun = self._strategy(), self.world.now
                report = yield from self.out.publish(data, self.version, strategy, "weights", b"")
                data[:] = bytes(SIZE)  # the caller may do so: the session has a copy
                self.reports.append(report)
                assert self.world.now < self._stopped_until + 0.1 or (
                    strategy.seconds is None or self.world.now <= begun + strategy.seconds + 0.01
                )
            yield from self.out.wait_for_receivers(None, PAUSE)


class Replica(End):
    """A program that takes the newest version into a buffer or a file.

    versions  session -> the versions that it had, in order
    """

    def __init__(
        self,
        world: World,
        address: str,
        salt: int,
        whole: dict[bytes, int],
        file: Path | None = None,
        key: bytes | None = None,
        latest: bool = True,
    ) -> None:
        super().__init__(world, address, salt)
        self.buffer = bytearray(SIZE)
        self.file = file
        self.versions: dict[tuple[str, str], list[int]] = {}
        self.missed: list[Missed] = []
        self._whole = whole
        self.inn = ReceivingSession(
            self.context,
            self.buffer if file is None else file,
            self.missed.append,
            1 << 20,
            1 << 20,
            PEER_TIMEOUT,
            key,
            None,
            latest=latest,
        )
        self.start(self._take())

    def __del__(self) -> None:
        self.inn.close()

    @property
    def applied(self) -> bytes:
        """Bytes that another program would find now."""
        if self.file is None:
            return bytes(self.buffer)
        return self.file.read_bytes() if self.file.exists() else bytes(SIZE)

    def _take(self) -> SessionSteps[None]:
        while (received := (yield from self.inn.next(None))) is not None:
            offered: Offered = received.offered
            assert offered.version is not None
            assert self._whole[self.applied] == offered.version
            seen = self.versions.setdefault((offered.address, offered.sender), [])
            assert offered.version > max(seen, default=-1)
            seen.append(offered.version)

    def number_in(self, publisher: Publisher) -> int:
        """Number of this replica in the publisher's session, where it may have joined again."""
        session = self.inn.sessions.get(publisher.context.number)
        return 0 if session is None else session.core.config.number

    @property
    def newest(self) -> int:
        """Version that it had last; -1 if it had none."""
        return max((versions[-1] for versions in self.versions.values()), default=-1)


def story(seed: int, folder: Path, faults: int) -> None:
    """Kill and stop that many publishers and replicas, and look at what the replicas have at any time."""
    with drawn(seed):
        _story(seed, folder, faults)


def _story(seed: int, folder: Path, faults: int) -> None:
    random = Random(seed)
    world = World(
        seed, random.choice((0.0, 0.02, 0.2)), random.choice((0.0, 0.002)), random.choice((0.0, 0.1))
    )
    whole = {bytes(SIZE): -1}
    key = KEY if random.random() < 0.2 else None
    strategies = [all_receivers(), deadline(PAUSE), deadline(2.0), best_effort(), quorum(1)]
    ends: list[End] = []
    salts = 0

    def starts(at: int) -> None:
        nonlocal salts
        salts += 1
        if at:
            file = folder / f"{seed} {at}" if at % 3 == 0 else None
            ends.append(Replica(world, f"10.0.0.{at + 1}", salts, whole, file, key))
        else:
            first = max(whole.values()) + 1
            ends.append(Publisher(world, salts, whole, first, lambda: random.choice(strategies), key))

    for at in range(4):
        starts(at)

    def check() -> None:
        for end in ends:
            assert not isinstance(end, Replica) or end.applied in whole, f"seed {seed}: a mixed version"

    for _ in range(faults):
        world.run(world.now + random.expovariate(3.0))
        check()
        if not ends:  # all restart at this moment
            world.run(world.now + 1.0)
        end = random.choice(ends)
        if random.random() < 0.5:
            end.stop(random.choice((0.05, 0.5, 1.5 * PEER_TIMEOUT, 4 * PEER_TIMEOUT)))
        else:
            end.kill()
            ends.remove(end)
            at = int(end.address.rpartition(".")[2]) - 1
            world.at(world.now + random.random(), lambda at=at: starts(at))  # type: ignore[misc]
    for _ in range(20):
        world.run(world.now + 10 * PEER_TIMEOUT)
        check()
        replicas = [end for end in ends if isinstance(end, Replica)]
        (publisher,) = (end for end in ends if isinstance(end, Publisher))
        publisher.last = min(publisher.last, publisher.version)
        known = {one.number: one.version for one in publisher.out.versions}  # the killed ones are there, too
        found = [(end.newest, known.get(end.number_in(publisher))) for end in replicas]
        if found == [(publisher.last, publisher.last)] * 3:
            return
    pytest.fail(f"seed {seed}: {found} instead of version {publisher.last} at all three, as the sender knows")


@pytest.mark.parametrize("first", range(0, 4, 2))
def test_no_version_is_mixed(first: int, tmp_path: Path) -> None:
    """Eighty kills and stops in each of four stories."""
    for seed in range(first, first + 2):
        story(seed, tmp_path, 80)


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1125, 5))
def test_ten_thousand_kills_mix_no_version(first: int, tmp_path: Path) -> None:
    """Eighty kills and stops in each of 125 stories."""
    for seed in range(first, first + 5):
        story(seed, tmp_path, 80)
