"""Files go on from what an earlier run has left, whatever that is: what is wrong there is taken anew."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from mcast import cast
from mcast.backends.sim import Fabric
from mcast.backends.sim.testbed import SimObserver
from mcast.cast.io.bundle import Folder
from mcast.cast.io.files import FileSink
from mcast.cast.io.sinks import Offered
from mcast.cast.protocol.blocks import Digest
from mcast.cast.protocol.packets import UNKNOWN_SIZE, Data, Flush, Seal

from ...waiting import until
from .alone import SEGMENT, SESSION, Alone, K, cut
from .test_flow import takes
from .test_objects import BOUND, gets, member, others

DATA = Random(8).randbytes(2_500_000)
WINDOW = 1 << 19
"""Bytes that the sender sends before it has heard of the receivers' disks, at most."""


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric.roce(3, clock="wall")
    yield made
    assert SimObserver(made).leftovers() == ()


def leaves(part: Path, data: bytes) -> None:
    """An earlier run, which was killed, has left that."""
    part.write_bytes(data)
    part.chmod(0o1600)


def sends(fabric: Fabric, data: bytes, target: Path | Folder, key: bytes | None = None) -> cast.ObjectReport:
    """One receiver gets it into that file."""
    with (
        others(lambda: gets(fabric, 1, 1, target, key=key)) as (end,),
        member(fabric, 0) as group,
        cast.open_session(group, memory=WINDOW, key=key) as session,
    ):
        session.wait_for_receivers(1, BOUND)
        report = session.send(data)
        (one,) = end.result(BOUND)
    assert one.digest == report.digest
    return report


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["open", "closed"])
def test_stored_blocks_are_not_sent_again(fabric: Fabric, tmp_path: Path, key: bytes | None) -> None:
    """A killed receiver resumes from its part file."""
    target, part = tmp_path / "copy", tmp_path / ".copy.part"
    leaves(part, DATA[:2_000_000])
    report = sends(fabric, DATA, target, key)
    assert target.read_bytes() == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    about = report.segments - report.skipped
    assert about < report.segments * (len(DATA) - 2_000_000 + 2 * WINDOW) / len(DATA)


LEFT: dict[str, bytes] = {
    "all of it": DATA,
    "another object": Random(9).randbytes(len(DATA)),
    "another byte": DATA[:700_000] + b"\0\0" + DATA[700_002:],
    "more than the object": DATA + DATA,
    "less than a block": DATA[:7],
}


@pytest.mark.parametrize("left", LEFT)
def test_whatever_was_left_the_file_is_right(fabric: Fabric, tmp_path: Path, left: str) -> None:
    leaves(tmp_path / ".copy.part", LEFT[left])
    report = sends(fabric, DATA, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA
    assert report.strategy_met
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_file_that_is_there_whole_is_not_sent_again(fabric: Fabric, tmp_path: Path) -> None:
    there = tmp_path / "object 0"
    there.write_bytes(DATA)
    before = there.stat().st_ino
    report = sends(fabric, DATA, Folder(tmp_path))
    assert report.strategy_met
    assert report.skipped > 0
    assert (there.stat().st_ino, there.read_bytes() == DATA) == (before, True)


def test_different_existing_file_stays(fabric: Fabric, tmp_path: Path) -> None:
    """An object for a file that exists and differs is refused."""
    mine = DATA[:400_000] + b"mine" + DATA[400_004:]
    (tmp_path / "object 0").write_bytes(mine)
    missed: list[cast.Missed] = []
    with (
        others(lambda: takes(fabric, 1, Folder(tmp_path), missed.append)) as (end,),
        member(fabric, 0) as group,
    ):
        report = cast.send(group, DATA, timeout=BOUND)
        assert end.result(BOUND) == []
    assert [one.reason for one in missed] == [one.reason for one in report.receivers] == ["File exists"]
    assert (tmp_path / "object 0").read_bytes() == mine
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("wrong", [0, 1])
def test_the_differing_block_is_not_disclosed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: int
) -> None:
    """The sender cannot learn an existing file block by block."""
    size = SEGMENT * K
    (tmp_path / "thing").write_bytes(DATA[: 2 * size])
    guess = [DATA[:size], DATA[size : 2 * size]]
    guess[wrong] = guess[wrong][::-1]
    seals = tuple(one.info for one in reversed(cut(b"".join(guess))))
    alone = Alone(Folder(tmp_path), 2 * size)
    alone.on_packets(Seal(SESSION, 0, 1, 0, 0, 1, 1000, seals))
    assert alone.blocks == 2, "the receiver says so of a guess that is wrong, too"
    digest = bytes(Digest(b"".join(guess)))
    alone.on_packets(Flush(SESSION, 0, 2, 2, 0, 1, 1, 1000, 1, digest, 0, 0))
    assert [one.message.rpartition(": ")[2] for one in caplog.records] == ["File exists"]


def test_received_blocks_wait_for_stored_ones(tmp_path: Path) -> None:
    """A block that is whole before the stored blocks are compared is verified after them, at once."""
    data = DATA[: 3 * SEGMENT * K]
    leaves(tmp_path / ".copy.part", data[: 2 * SEGMENT * K])
    blocks = cut(data)
    alone = Alone(tmp_path / "copy", len(data))
    alone.on_packets(*(Data(SESSION, 0, 2, index, blocks[2].segment(index)) for index in range(K)))
    alone.on_packets(Seal(SESSION, 0, 2, 0, 0, 1, 1000, tuple(one.info for one in reversed(blocks))))
    alone.on_packets()
    assert alone.blocks == 3


def test_transfer_resumes_with_another_sender(fabric: Fabric, tmp_path: Path) -> None:
    """The first sender ends its session in the middle of the object."""

    def cut() -> Iterator[bytes]:
        yield DATA[:2_000_000]
        raise OSError("the sender's disk")

    missed: list[cast.Missed] = []

    def takes() -> None:
        with (
            member(fabric, 1) as group,
            closing(
                cast.receive(group, tmp_path / "copy", missed=missed.append, one_session=True)
            ) as objects,
        ):
            assert list(objects) == []

    with others(takes) as (end,), member(fabric, 0) as group:
        with pytest.raises(OSError, match="the sender's disk"):
            cast.send(group, cut(), timeout=BOUND)
        end.result(BOUND)
    part = tmp_path / ".copy.part"
    assert [one.part_file for one in missed] == [part]
    assert stat.S_IMODE(part.stat().st_mode) == 0o1600
    assert DATA.startswith(part.read_bytes())
    assert sends(fabric, DATA, tmp_path / "copy").skipped > 0
    assert (tmp_path / "copy").read_bytes() == DATA


@pytest.mark.parametrize(("total", "right"), [(12, True), (0, False)])
def test_object_shorter_than_the_part_file(tmp_path: Path, total: int, right: bool) -> None:
    """It is compared up to its end, which is known while the first block is yet to be compared."""
    size = SEGMENT * K
    leaves(tmp_path / ".copy.part", DATA[: 20 * size])
    blocks = [DATA[at : at + size] if right else bytes(size) for at in range(0, 12 * size, size)]
    digest = bytes(Digest(b"".join(blocks[:total])))
    seals = tuple(one.info for one in reversed(cut(b"".join(blocks))))
    alone = Alone(tmp_path / "copy", UNKNOWN_SIZE)
    alone.on_packets(
        Seal(SESSION, 0, 11, 0, 0, 1, 1000, seals),
        Flush(SESSION, 0, total, total, 0, 0, 1, 1000, 1, digest, 0, 0),
    )
    found: list[cast.Received] = []

    def is_whole() -> bool:  # a thread publishes the file
        try:
            alone.on_packets()
        except StopIteration as done:
            found.append(done.value)
        return bool(found)

    until(is_whole)
    assert found[0].digest == digest
    assert (tmp_path / "copy").read_bytes() == b"".join(blocks[:total])


def test_one_run_at_a_time_has_what_was_left(tmp_path: Path) -> None:
    with closing(FileSink(tmp_path / "copy")) as first, closing(FileSink(tmp_path / "copy")) as second:
        first.open()
        first.write(b"first")
        second.open()
        assert second.stored_size == 0
        second.write(b"second")
        second.keep_part()
        first.keep_part()
    assert second.part_file is None
    assert [path.name for path in tmp_path.iterdir()] == [".copy.part"]
    assert (tmp_path / ".copy.part").read_bytes() == b"first"


@pytest.mark.parametrize("own", ["bytes", ""])
def test_a_file_that_has_such_a_name_of_its_own_stays(tmp_path: Path, own: str) -> None:
    """A folder that is sent may have in it what an earlier transfer has left there."""
    folder, files = Folder(tmp_path), {".copy.part": own, "copy": "copy"}
    for name, text in files.items():
        sink = folder(Offered(name, len(text), b"", "sender", "10.0.0.3", 0))
        assert sink is not None
        with closing(sink):
            sink.open()
            assert sink.stored_size == 0
            sink.write(text.encode())
            sink.finish()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("whole", [True, False])
def test_removed_part_file_leaves_others(tmp_path: Path, whole: bool) -> None:
    """Another run may have created one of the same name since."""
    with closing(FileSink(tmp_path / "copy")) as second:
        with closing(FileSink(tmp_path / "copy")) as first:
            first.open()
            first.write(b"first")
            (tmp_path / ".copy.part").unlink()
            second.open()
            second.write(b"second")
            if whole:
                with pytest.raises(FileNotFoundError):
                    first.finish()
            first.keep_part()
        assert first.part_file is None
        second.finish()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"copy": b"second"}


def test_part_file_is_resumable_during_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, part = list[int](), tmp_path / ".copy.part"
    monkeypatch.setattr(os, "fsync", lambda fd: found.append(os.fstat(fd).st_mode if part.exists() else 0))
    with closing(FileSink(tmp_path / "copy")) as sink:
        sink.open()
        sink.write(b"new")
        sink.finish()
    assert [stat.S_IMODE(mode) for mode in found] == [0o1600, 0]


def failing(*arguments: object, **options: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_what_a_failing_disk_has_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would come again in each run that followed."""
    leaves(tmp_path / ".copy.part", b"left")
    with closing(FileSink(tmp_path / "copy")) as sink:
        sink.open()
        monkeypatch.setattr(os, "pread", failing)
        assert sink.read_back(4) == b""
        sink.write(b"new")
        sink.finish()
    assert (tmp_path / "copy").read_bytes() == b"new"


def test_failed_removal_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a write error a file system often refuses all changes."""
    sink = FileSink(tmp_path / "copy")
    sink.open()
    monkeypatch.setattr(Path, "unlink", failing)
    sink.close()
    assert sink.part_file is None


def linked(part: Path, other: Path) -> None:
    os.link(other, part)


def symlinked(part: Path, other: Path) -> None:
    part.symlink_to(other)


@pytest.mark.parametrize("lay", [linked, symlinked, Path.mkdir, os.mkfifo], ids=lambda lay: lay.__name__)
def test_what_another_has_laid_there_is_not_written_to(tmp_path: Path, lay: Callable[..., object]) -> None:
    other, part = tmp_path / "other", tmp_path / ".copy.part"
    other.write_bytes(b"precious")
    lay(part, other) if lay in (linked, symlinked) else lay(part)
    with closing(FileSink(tmp_path / "copy")) as sink:
        sink.open()
        assert sink.stored_size == 0
        sink.write(b"new")
        sink.finish()
    assert other.read_bytes() == b"precious"
    assert (tmp_path / "copy").read_bytes() == b"new"
