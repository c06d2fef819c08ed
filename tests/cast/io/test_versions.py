"""Versions: receivers have the newest one, whole, whoever is killed or stopped. Most time here is virtual."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
from typing_extensions import Buffer

import mcast
from mcast import cast
from mcast.aio import open_endpoint
from mcast.backends.sim import Fabric, open_fabric
from mcast.cast.io.driver import SessionSteps
from mcast.cast.io.files import Sink
from mcast.cast.io.receiving import Missed, ReceivingSession
from mcast.cast.io.sending import ObjectReport, SendingSession
from mcast.cast.io.sinks import Offered, ReceiveTarget
from mcast.cast.protocol.sender import ObjectSender
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


def test_a_late_replica_gets_the_newest_version() -> None:
    """It joins after the last call of `publish`; the other one is not sent anything twice."""
    world, whole = World(), {bytes(SIZE): -1}
    publisher = Publisher(world, 1, whole)
    publisher.last = 2
    first = Replica(world, "10.0.0.2", 2, whole)
    world.run(5.0)
    late, returned = (Replica(world, f"10.0.0.{end}", 3, whole) for end in (3, 4))
    returned.stop(10 * PEER_TIMEOUT)
    world.run(30.0)
    assert [*first.versions.values()] == [[0, 1, 2]]
    assert [late.versions, returned.versions] == [{("10.0.0.1", "10.0.0.1"): [2]}] * 2
    assert [(one.address, one.version) for one in publisher.out.versions] == [
        ("10.0.0.2", 2),
        ("10.0.0.3", 2),
        ("10.0.0.4", 2),
    ]


def test_a_given_up_replica_returns_by_itself() -> None:
    """It is stopped for longer than the sender waits, and has joined under a new number."""
    world, whole = World(), {bytes(SIZE): -1}
    publisher = Publisher(world, 1, whole, strategy=all_receivers)
    stopped, other = (Replica(world, f"10.0.0.{end}", 2, whole) for end in (2, 3))
    world.run(2.0)
    stopped.stop(5.0)
    world.run(5.0)
    (reason,) = {report.reason for one in publisher.reports for report in one.receivers if report.reason}
    assert reason == "was silent"
    assert max(report.seconds for report in publisher.reports) < 2 * PEER_TIMEOUT, "the other one waits"
    held = {report.name: report.version for report in publisher.reports[-1].receivers}
    assert held == {"10.0.0.3": publisher.version}
    publisher.last = publisher.version
    world.run(12.0)
    assert [stopped.newest, other.newest] == [publisher.last] * 2
    assert stopped.number_in(publisher) != stopped.context.number


def test_a_killed_replica_is_given_up_over_several_versions() -> None:
    """Each deadline ends before the replica was silent for long enough; the waits add up."""
    world, whole = World(), {bytes(SIZE): -1}
    publisher = Publisher(world, 1, whole, strategy=lambda: deadline(PEER_TIMEOUT / 4))
    killed, other = (Replica(world, f"10.0.0.{end}", 2, whole) for end in (2, 3))
    world.run(2.0)
    killed.kill()
    world.run(2.0 + 12 * PEER_TIMEOUT)
    assert [one.name for one in publisher.out.versions] == ["10.0.0.3"]
    assert other.newest >= publisher.version - 1


def test_an_unfinished_version_is_dropped() -> None:
    """The publisher waits for the fast one alone. The log has no warning of it."""
    world, whole = World(), {bytes(SIZE): -1}
    publisher = Publisher(world, 1, whole, strategy=lambda: quorum(1))
    fast, slow = (Replica(world, f"10.0.0.{end}", 2, whole) for end in (2, 3))
    world.cut = lambda source, target, now: target is slow and 2.0 < now < 2.9 and world.random.random() < 0.6
    world.run(6.0)
    assert len(slow.missed) > 0
    (took,) = fast.versions.values()
    assert took == [*range(took[0], publisher.reports[-1].version + 1)]  # type: ignore[operator]
    assert took[0] < 2, "the other one may have been admitted a moment before"
    (seen,) = slow.versions.values()
    assert {one.offered.version for one in slow.missed}.isdisjoint(seen)
    assert slow.newest >= publisher.version - 1


def test_a_changed_file_is_not_sent_again(tmp_path: Path) -> None:
    """It would be two versions of one number. A file that was replaced is read as it was."""
    world = World()
    end = End(world, "10.0.0.1")
    out = SendingSession(end.context, 1 << 20, 2e6, PEER_TIMEOUT, None)
    path = tmp_path / "weights"
    path.write_bytes(b"1" * SIZE)

    def sends() -> SessionSteps[None]:
        yield from out.wait_for_receivers(1, None)
        yield from out.publish(path, 1, all_receivers(), "", b"")
        (tmp_path / "new").replace(path)
        yield from out.wait_for_receivers(2, None)
        yield from out.wait_for_receivers(None, 1.0)
        yield from out.publish(path, 2, all_receivers(), "", b"")
        path.write_bytes(b"3" * SIZE)
        yield from out.wait_for_receivers(3, None)
        yield from out.wait_for_receivers(None, 1.0)

    (tmp_path / "new").write_bytes(b"2" * SIZE)
    whole = {bytes((48 + version,)) * SIZE: version for version in (1, 2)} | {bytes(SIZE): -1}
    end.start(sends())
    replicas = []
    for at in (2, 3):
        replicas.append(Replica(world, f"10.0.0.{at}", 1, whole))
        world.run(world.now + 3.0)
    assert [[*one.versions.values()] for one in replicas] == [[[1, 2]], [[1, 2]]]
    replicas.append(Replica(world, "10.0.0.4", 1, whole))
    with pytest.raises(OSError, match="has changed since it was published: publish it as a new version"):
        world.run(world.now + 3.0)
    assert not replicas[-1].versions


def test_a_late_replica_waits_for_nobody() -> None:
    """A version is sent again at once to one that is new, and each second to one that could not take it."""
    world, whole = World(), {bytes(SIZE): -1}
    publisher = Publisher(world, 1, whole)
    publisher.last = 0
    refuses = Replica(world, "10.0.0.2", 1, whole)
    refuses.inn = ReceivingSession(
        refuses.context,
        bytearray(1),
        refuses.missed.append,
        1,
        1 << 20,
        PEER_TIMEOUT,
        None,
        None,
        latest=True,
    )
    refuses.start(refuses.inn.next(None))
    world.run(9.9)
    assert 8 <= len(refuses.missed) <= 11
    for end in range(3, 8):
        late = Replica(world, f"10.0.0.{end}", 1, whole)
        world.run(world.now + 0.3)
        assert late.newest == 0


@pytest.mark.parametrize("kind", ["buffer", "file", "chosen", "sink", "chosen file"])
def test_two_publishers_do_not_mix(kind: str, tmp_path: Path) -> None:
    """What the program is given is in its buffer or file then, and not yet what the other one published."""
    buffer, file, written = bytearray(SIZE), tmp_path / "weights", list[bytes]()

    class OwnSink(Sink):
        name = "my sink"

        def open(self) -> None:
            written.clear()

        def write(self, data: Buffer) -> None:
            written.append(bytes(data))

    with drawn(0):
        world, whole = World(0, 0.02, 0.002), dict[tuple[str, int | None], bytes]()
        for address in ("10.0.0.1", "10.0.0.9"):
            end = End(world, address)
            out = SendingSession(end.context, 1 << 20, 2e6, PEER_TIMEOUT, None)

            def publishes(address: str, out: SendingSession) -> SessionSteps[None]:
                yield from out.wait_for_receivers(1, None)
                for version in range(40):
                    whole[address, version] = world.random.randbytes(SIZE)
                    yield from out.publish(whole[address, version], version, deadline(PAUSE), "", b"")
                    yield from out.wait_for_receivers(None, 0.05)

            end.start(publishes(address, out))
        taker, seen = End(world, "10.0.0.2"), set[str]()
        targets: dict[str, ReceiveTarget] = {
            "buffer": buffer,
            "file": file,
            "chosen": lambda _: buffer,
            "sink": OwnSink(),
            "chosen file": lambda _: file,
        }
        latest = kind != "chosen file"
        inn = ReceivingSession(
            taker.context, targets[kind], bool, 1 << 20, 1 << 20, PEER_TIMEOUT, None, None, latest=latest
        )

        def takes() -> SessionSteps[None]:
            while (received := (yield from inn.next(None))) is not None:
                found = b"".join(written) or bytes(buffer)
                found = file.read_bytes() if received.path else found
                offered = received.offered
                assert found == whole[offered.address, offered.version]
                seen.add(offered.address)

        taker.start(takes())
        world.run(8.0)
        inn.close()
    assert seen == {"10.0.0.1", "10.0.0.9"}


def test_a_refused_device_is_closed() -> None:
    """It was opened to see whether it takes a version as a whole."""

    def opened() -> int:
        return sum(os.path.realpath(one) == "/dev/null" for one in Path("/proc/self/fd").iterdir())

    before = opened()
    with (
        mcast.open_backend("sim", clock="wall") as backend,
        mcast.open_endpoint(backend, "10.0.0.1") as ep,
        ep.join("239.1.2.3") as group,
        mcast.open_endpoint(backend, "10.0.0.2") as other,
        other.join("239.1.2.3") as theirs,
        ThreadPoolExecutor(1) as pool,
    ):
        refused = pool.submit(lambda: next(cast.receive(theirs, Path("/dev/null"), latest=True)))
        with cast.open_session(group) as session:
            session.wait_for_receivers(1, 30.0)
            session.publish(b"1", version=1)
            with pytest.raises(TypeError, match="into: /dev/null takes a version in parts"):
                refused.result(30.0)
        assert opened() == before


def test_a_broken_session_closes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It published the file, and kept it open for receivers that join later."""
    (path := tmp_path / "weights").write_bytes(b"1")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with (
        mcast.open_backend("sim", clock="wall") as backend,
        mcast.open_endpoint(backend, "10.0.0.1") as ep,
        ep.join("239.1.2.3") as group,
        cast.open_session(group) as session,
    ):
        session.publish(path, version=1)
        monkeypatch.setattr(ObjectSender, "messages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.wait_for_receivers(timeout=1.0)
    assert str(path) not in [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]


def test_an_object_without_a_version_is_refused() -> None:
    world = World()
    end = End(world, "10.0.0.1")
    out = SendingSession(end.context, 1 << 20, 2e6, PEER_TIMEOUT, None)
    reports: list[ObjectReport] = []

    def sends() -> SessionSteps[None]:
        yield from out.wait_for_receivers(1, None)
        reports.append((yield from out.send(bytes(SIZE), all_receivers(), "plain", b"")))

    end.start(sends())
    replica = Replica(world, "10.0.0.2", 1, {})
    world.run(5.0)
    assert not replica.versions
    assert [one.reason for one in reports[0].receivers] == [
        "no version: this receiver takes published objects alone"
    ]


def test_what_publish_refuses() -> None:
    """Each error says what to give, and changes nothing: the session goes on."""
    with (
        mcast.open_backend("sim", clock="wall") as backend,
        mcast.open_endpoint(backend, "10.0.0.1") as ep,
        ep.join("239.1.2.3") as group,
        cast.open_session(group) as session,
    ):
        assert session.publish(b"1", version=7).version == 7
        for version, error, text in (
            (
                7,
                ValueError,
                "version 7 is not newer than version 7, which this session has published: give at least 8",
            ),
            (-1, ValueError, "version -1: give a number from 0 to 9,223,372,036,854,775,807"),
            (1 << 63, ValueError, "give a number from 0"),
            (8.0, TypeError, "version is a float: give an int"),
        ):
            with pytest.raises(error, match=re.escape(text)):
                session.publish(b"2", version=version)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="publish sends a version to receivers that answer"):
            session.publish(b"2", version=8, strategy=cast.carousel())
        for data in (iter([b"2"]), BytesIO(b"2"), Path("/dev/null")):
            with pytest.raises(TypeError, match="cannot be read again: give a buffer, a tensor or the path"):
                session.publish(data, version=8)
        with pytest.raises(ValueError, match="513 bytes of metadata"):
            session.publish(b"2", version=8, metadata=bytes(513))
        assert session.publish(b"2", version=8).version == 8
        with pytest.raises(TypeError, match="into: the program takes a version in parts, and latest=True"):
            next(cast.receive(ep.join("239.1.2.5"), cast.Chunks(), latest=True))
        with pytest.raises(TypeError, match="into: the stream takes a version in parts, and latest=True"):
            next(cast.receive(ep.join("239.1.2.4"), BytesIO(), latest=True))


def test_an_error_names_the_call_that_was_made() -> None:
    """Not the calls of the membership that it made."""
    with mcast.open_backend("sim", clock="wall") as backend, mcast.open_endpoint(backend, "10.0.0.1") as ep:
        group = ep.join("239.1.2.3")
        session = cast.open_session(group)
        with pytest.raises(mcast.TimedOut, match=r"^session\.wait_for_receivers\(\)"):
            session.wait_for_receivers(1, timeout=0.0)
        assert session.wait_for_receivers(timeout=0.0) == 0, "nobody is no error"
        group.leave()
        calls = {
            "session.publish": lambda: session.publish(b"1", version=1),
            "session.send": lambda: session.send(b"1"),
            "session.wait_for_receivers": lambda: session.wait_for_receivers(1),
            "session.close": session.close,
            "cast.send": lambda: cast.send(group, b"1", receivers=0),
        }
        for name, call in calls.items():
            with pytest.raises(mcast.Closed) as failed:
                call()  # type: ignore[no-untyped-call]
            assert failed.value.call == name
    for name, closed in (
        ("cast.open_session", cast.open_session),
        ("cast.receive", lambda it: next(cast.receive(it))),
    ):
        with pytest.raises(mcast.Closed) as failed:
            closed(group)
        assert failed.value.call == name


def test_a_version_arrives_in_asyncio() -> None:
    """In two sessions one after another, the second of which begins with a lower version."""
    fabric = Fabric.roce(ports=2, clock="wall")
    target = bytearray(4)

    async def takes() -> list[int | None]:
        found: list[int | None] = []
        with open_fabric(fabric, host=1) as backend:
            async with (
                open_endpoint(backend) as ep,
                await ep.join("239.1.2.3") as group,
                aclosing(cast.receive(group, target, latest=True, timeout=30.0)) as versions,
            ):
                async for one in versions:
                    found.append(one.offered.version)
                    assert bytes(one.data or b"") == b"v%03d" % (one.offered.version or 0) == target
                    if one.offered.version == 2:
                        return found
        return found

    async def publishes() -> None:
        with open_fabric(fabric, host=0) as backend:
            async with open_endpoint(backend) as ep, await ep.join("239.1.2.3") as group:
                for versions in ((4, 9), (1, 2)):
                    async with cast.open_session(group) as session:
                        await session.wait_for_receivers(1, 30.0)
                        for version in versions:
                            report = await session.publish(b"v%03d" % version, version=version)
                            assert [one.version for one in report.receivers] == [version]

    async def both() -> list[int | None]:
        taken = asyncio.create_task(takes())
        await publishes()
        return await taken

    assert asyncio.run(both()) == [4, 9, 1, 2]


def test_another_version_of_the_protocol_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The version before this one has no versions of objects."""
    with mcast.open_backend("sim", clock="wall") as backend:
        old = mcast.open_endpoint(backend, "10.0.0.1").join("239.1.2.3")
        with (
            mcast.open_endpoint(backend, "10.0.0.2") as ep,
            ep.join("239.1.2.3") as group,
            closing(cast.receive(group, latest=True, timeout=0.5)) as versions,
        ):
            old.send(b"mcC2" + bytes(40))
            assert [*versions] == []
    assert "of another version of this protocol: install the same mcast at both ends" in caplog.text


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
