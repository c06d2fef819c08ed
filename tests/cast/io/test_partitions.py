"""An object that has ended at a receiver has ended for the whole session, whatever the network does.

Each object is handed out once at most, and is either handed out or reported missed. The time is virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from random import Random

import pytest

from mcast.cast.io import placing
from mcast.cast.io.sending import Object, ObjectReport
from mcast.cast.io.sinks import Offered, Target
from mcast.cast.protocol.carousel import Carousel
from mcast.cast.protocol.packets import MAX_CAROUSEL, Describe
from mcast.cast.protocol.strategy import Strategy, all_receivers, best_effort, carousel, deadline, quorum

from .world import End, Job, Receiving, Sending, World, between, drawn, named

KEY = bytes(range(32))
SILENCE = 10.0
"""Seconds for which the receivers let the sender be silent."""
STRATEGIES = {
    "all": all_receivers(),
    "quorum": quorum(2),
    "deadline": deadline(40.0),
    "best effort": best_effort(),
}


def slow(first: bytes, rest: bytes, wait: Callable[[], bool]) -> Iterator[bytes]:
    """The first bytes, and the rest when that may come."""
    yield first
    while not wait():
        yield b""
    yield rest


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "closed"])
@pytest.mark.parametrize("heals", [8.0, 20.0, inf], ids=["before", "after", "never"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_has_an_object_does_not_take_it_again(strategy: str, heals: float, key: bytes | None) -> None:
    """The other receiver lacks it: repairs go to the group, to both."""
    world = World()
    jobs = [Job([one], STRATEGIES[strategy], 0.5) for one in named(b"first", b"second")]
    sender = Sending(world, jobs, 2, peer_timeout=30.0, key=key)
    one = Receiving(world, "10.0.0.2", SILENCE, key=key)
    other = Receiving(world, "10.0.0.3", 60.0, key=key)

    def cut(_: End, target: End, now: float) -> bool:
        return (target is one and 1.0 < now < 13.0) or (target is other and 0.4 < now < heals)

    world.cut = cut
    world.run(200.0)
    assert sender.over
    for end in (one, other):
        end.right({"object 0": b"first", "object 1": b"second"})
    assert list(one.got) == ["object 0", "object 1"][: 2 - (strategy == "best effort")]  # nobody asks for it
    assert not one.missed
    first = {account.number: account.complete for account in sender.reports[0].receivers}
    assert first[one.context.number]


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "closed"])
@pytest.mark.parametrize("seconds", [5.0, 12.0, 35.0])
def test_a_carousel_brings_each_once_after_a_partition(seconds: float, key: bytes | None) -> None:
    objects = [*named(b"x" * 5000, b"y" * 3000, b"")]
    world = World()
    Sending(world, [Job(objects, carousel(seconds=60.0))], 0, rate=1e5, key=key)
    end = Receiving(world, "10.0.0.2", SILENCE, key=key)
    world.cut = lambda source, target, now: 5.0 < now < 5.0 + seconds
    world.run(100.0)
    assert end.got == {one.name: one.data for one in objects}
    assert not end.missed
    end.right({one.name: bytes(one.data) for one in objects})  # type: ignore[arg-type]


def test_carousel_continues_after_a_partition() -> None:
    """Incomplete objects are missed; an object that had not begun before the partition arrives."""
    objects = [*named(*(bytes((at,)) * 8000 for at in range(8)))]
    world = World()
    Sending(world, [Job(objects, carousel(seconds=60.0))], 0, rate=30e3)
    end = Receiving(world, "10.0.0.2", 2.0)
    world.cut = lambda source, target, now: 1.0 < now < 5.0
    world.run(100.0)
    assert list(end.missed.values()) == ["the sender was silent for 2 s"]
    assert len(end.got) == 7
    end.right({f"object {at}": bytes((at,)) * 8000 for at in range(8)})


def test_what_was_missed_is_not_taken_up_again(tmp_path: Path) -> None:
    """The program has heard that it was missed, and the sender hears the same."""
    world = World()
    data = Random(1).randbytes(100_000)
    sender = Sending(world, [Job([Object(data, "first")], all_receivers())], 1, peer_timeout=30.0, rate=50e3)
    end = Receiving(world, "10.0.0.2", 2.0, lambda _: tmp_path / "copy")
    world.cut = lambda source, target, now: 1.0 < now < 5.0
    world.run(100.0)
    assert end.missed == {"first": "the sender was silent for 2 s"}
    assert not end.got
    (report,) = sender.reports
    assert [account.reason for account in report.receivers] == ["the sender was silent for 2 s"]
    assert report.seconds < 10.0
    assert not (tmp_path / "copy").exists()


def test_lost_ack_is_repeated_after_a_silence() -> None:
    """The receiver has the object, and the sender learns so when it asks again."""
    world = World()
    sender = Sending(world, [Job([Object(b"bytes", "first")], all_receivers())], 1, peer_timeout=30.0)
    end = Receiving(world, "10.0.0.2", 2.0)
    world.cut = lambda source, target, now: now < 10.0 and bool(end.begun if source is end else end.got)
    world.run(100.0)
    end.right({"first": b"bytes"})
    (report,) = sender.reports
    assert report.strategy_met
    assert 10.0 < report.seconds < 12.0
    assert [account.complete for account in report.receivers] == [True]


def test_another_session_of_the_sender_is_another_one() -> None:
    """Numbers of objects begin anew in it."""
    world = World()
    sender = Sending(world, [Job([Object(b"one", "of the first session")], all_receivers())])
    end = Receiving(world, "10.0.0.2", 2.0)
    world.run(5.0)
    assert sender.over
    world.ends.remove(sender)
    Sending(world, [Job([Object(b"two", "of the second session")], all_receivers())], salt=2)
    world.run(20.0)
    assert end.got == {"of the first session": b"one", "of the second session": b"two"}


def test_session_is_rejoined_after_a_pause() -> None:
    """The sender's program pauses for longer than the peer timeout."""
    world = World()
    jobs = [Job([one], quorum(2), 0.5 + 30.0 * index) for index, one in enumerate(named(b"a", b"b", b"c"))]
    sender = Sending(world, jobs, 2)
    ends = [Receiving(world, f"10.0.0.{at}", SILENCE) for at in (2, 3)]
    world.run(200.0)
    for end in ends:
        assert end.got == {"object 0": b"a", "object 1": b"b", "object 2": b"c"}
    for report in sender.reports:
        assert report.strategy_met
        assert len({account.number for account in report.receivers}) == len(report.receivers) == 2


def test_what_is_remembered_of_a_session_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many objects it had: those that went round together take a bit each."""
    world = World()
    jobs = [Job([Object(bytes(4), f"{index}")], all_receivers()) for index in range(300)]
    Sending(world, jobs, 1)
    end = Receiving(world, "10.0.0.2", SILENCE)
    world.cut = lambda source, target, now: len(end.got) == 300
    world.run(30.0)
    assert len(end.got) == 300
    (past,) = end.inn._past.values()
    assert past is not None
    assert past.core.about is not None
    assert past.core.about.object == 299
    assert past.core.incoming is not None
    assert not past.core.incoming._open
    assert not past.core.incoming._done
    carousel = Carousel(Describe(1, 0, 1, 976, 1, 0, MAX_CAROUSEL, 0, "", b""), 1, 0.0)
    for number in range(MAX_CAROUSEL):
        assert carousel.described(number, 0.0)
        carousel.on_end(number)
        assert not carousel.described(number, 0.0)
    assert carousel.finished
    assert len(carousel._ended._bits) == MAX_CAROUSEL // 8


def story(seed: int, folder: Path, losses: tuple[float, ...] = (0.0, 0.02, 0.2)) -> None:
    """A session with partitions, losses, kills and pauses that the seed draws."""
    with drawn(seed):
        _story(seed, folder, losses)


def _story(seed: int, folder: Path, losses: tuple[float, ...]) -> None:
    random = Random(seed)
    world = World(seed, random.choice(losses), random.choice((0.0, 0.01)), random.choice((0.0, 0.1)))
    receivers = random.randint(1, 4)
    key = KEY if random.random() < 0.2 else None
    silences = [random.choice((2.0, 2.0, 5.0)) for _ in range(receivers)]
    objects: dict[str, bytes] = {}

    def made(count: int) -> list[Object]:
        found = []
        for _ in range(count):
            name = f"object {len(objects)}"
            objects[name] = random.randbytes(random.choice((0, 1, 3000, 60_000)))
            found.append(Object(objects[name], name))
        return found

    def strategy() -> Strategy:
        seconds = random.choice((0.3, 3.0, 8.0))
        return random.choice(
            (all_receivers(), best_effort(), quorum(random.randint(1, receivers)), deadline(seconds))
        )

    jobs = []
    for _ in range(random.randint(1, 4)):
        cycling = random.random() < 0.3
        goes = carousel(seconds=random.choice((2.0, 9.0))) if cycling else strategy()
        jobs.append(
            Job(made(random.randint(1, 4) if cycling else 1), goes, random.choice((0.0, 0.1, 1.0, 7.0)))
        )
    sender = Sending(
        world,
        jobs,
        random.randint(0, receivers),
        random.choice((1.0, 4.0, 20.0)),
        random.choice((3e4, 1e5)),
        key,
    )
    ends: list[Receiving] = []

    def comes(at: int, run: int) -> None:
        def into(offered: Offered) -> Target:
            return folder / f"{seed} {at} {run} {offered.name}" if at % 2 else None

        pause = random.choice((0.0, 0.0, 0.5, 3.0))
        ends.append(Receiving(world, f"10.0.0.{at + 2}", silences[at], into, key, pause, salt=run))

    def comes_again(at: int, end: Receiving) -> None:
        end.kill()
        world.at(world.now + random.random(), lambda: comes(at, 2))

    deaf: dict[str, Callable[[float], bool]] = {}
    mute: dict[str, Callable[[float], bool]] = {}
    for at, silence in enumerate(silences):
        comes(at, 1)
        if random.random() < 0.1:
            end = ends[-1]
            world.at(random.random() * 10, lambda at=at, end=end: comes_again(at, end))  # type: ignore[misc]
        times = []
        for _ in range(random.randint(0, 3)):
            begin = random.random() * 25
            times.append((begin, begin + silence * random.choice((0.3, 0.9, 1.1, 1.5, 4.0))))
        for kind in (deaf, mute):
            kind[ends[-1].address] = between(*times) if random.random() < 0.8 else between()

    def cut(source: End, target: End, now: float) -> bool:
        never = between()
        return deaf.get(target.address, never)(now) or mute.get(source.address, never)(now)

    world.cut = cut
    while not sender.over:
        world.run(world.now + 50.0)
        assert world.now < 5000.0, f"seed {seed} hangs"
    world.run(world.now + 100.0)
    for end in ends:
        end.right(objects)
        assert end not in world.ends or set(end.begun) == end.got.keys() | end.missed.keys()
    for report in sender.reports:
        agrees(report, ends)


def agrees(report: ObjectReport, ends: list[Receiving]) -> None:
    """Fail if the report counts a receiver twice, or one that has not got the object as one that has."""
    numbers = [account.number for account in report.receivers]
    assert len(set(numbers)) == len(numbers)
    by_number = {end.context.number: end for end in ends}
    for account in report.receivers:
        assert (
            not account.complete
            or report.name in by_number[account.number].got
            or (by_number[account.number] not in by_number[account.number].world.ends)
        )


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_each_object_ends_once_in_any_weather(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the stories with segments that are placed in Python, as where no compiler was."""
    if first % 50:
        monkeypatch.setattr(placing, "PLACER", None)
    for seed in range(first, first + 25):
        story(seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("losses", [(0.0, 0.02, 0.2), (0.4, 0.6)], ids=["any weather", "storm"])
@pytest.mark.parametrize("first", range(1000, 5000, 200))
def test_each_object_ends_once_in_thousands(
    first: int, losses: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if first % 400:
        monkeypatch.setattr(placing, "PLACER", None)
    for seed in range(first, first + 200):
        story(seed, tmp_path, losses)
