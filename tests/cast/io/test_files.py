"""Where a file comes from and goes: nothing half-written is left, whatever happens."""

from __future__ import annotations

import errno as E
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from signal import SIGINT, pthread_kill
from typing import Any

import pytest

from mcast.cast.io.files import FileSink, Source, StreamSink, open_sink


def placed(sink: FileSink) -> None:
    """Wait until it is where it belongs."""
    limit = time.monotonic() + 60
    while not sink.commit():
        assert time.monotonic() < limit


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the sync and rename calls of a publication, in order."""
    done: list[str] = []

    def noting(name: str, call: Callable[..., Any], about: Callable[..., str]) -> None:
        def noted(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            done.append(f"{name} {about(*arguments)}")
            return result

        monkeypatch.setattr(os, name, noted)

    def kind(fd: int) -> str:
        return "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else f"{os.fstat(fd).st_size} bytes"

    noting("fsync", os.fsync, kind)
    noting("replace", os.replace, lambda source, target: Path(target).name)
    return done


def test_what_is_verified_survives_a_crash(tmp_path: Path, synced: list[str]) -> None:
    with closing(FileSink(tmp_path / "file")) as sink:
        sink.open()
        sink.write(b"new")
        assert synced == []
        placed(sink)
    assert synced == ["fsync 3 bytes", "replace file", "fsync folder"]


def test_a_slow_disk_does_not_silence_the_receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, sync = threading.Event(), os.fsync

    def fsync(fd: int) -> None:
        assert slow.wait(60)
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with closing(FileSink(tmp_path / "file")) as sink:
        sink.open()
        assert not sink.commit()
        assert not sink.commit()
        assert not (tmp_path / "file").exists()
        slow.set()
        placed(sink)
    assert (tmp_path / "file").exists()


def test_failed_publication_leaves_no_file(tmp_path: Path) -> None:
    """A file that cannot get its name raises an error."""
    with closing(FileSink(tmp_path / "file")) as sink:
        sink.open()
        (tmp_path / "file").mkdir()
        with pytest.raises(IsADirectoryError):
            placed(sink)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


NAMES = {
    "255 bytes of 3": "\u5b57" * 85,
    "255 bytes of 4": "x" * 3 + "\U0001f4c4" * 63,
    "255 bytes of 1": "x" * 255,
    "no text at all": os.fsdecode(bytes([255] * 255)),
    "one byte": "x",
}


@pytest.mark.parametrize("case", NAMES)
def test_every_legal_name_can_be_written(tmp_path: Path, case: str) -> None:
    target = tmp_path / NAMES[case]
    with closing(open_sink(str(target))) as sink:
        assert isinstance(sink, FileSink)
        sink.open()
        sink.write(b"new")
        placed(sink)
    assert target.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == [NAMES[case]]


def test_a_file_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    target.chmod(0o640)
    with closing(FileSink(target)) as sink:
        sink.open()
        sink.write(b"new")
        assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_bytes() == b"old"
    with closing(FileSink(target)) as sink:
        sink.open()
        sink.write(b"new")
        placed(sink)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_setuid_is_not_inherited(tmp_path: Path) -> None:
    """Otherwise users would run the received bytes as the owner of the file that was replaced."""
    target = tmp_path / "file"
    target.write_bytes(b"old")
    target.chmod(0o6755)
    with closing(FileSink(target)) as sink:
        sink.open()
        placed(sink)
    assert stat.S_IMODE(target.stat().st_mode) == 0o755


def test_second_interrupt_during_fsync_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncing, slow = threading.Event(), threading.Event()

    def fsync(fd: int) -> None:
        syncing.set()
        assert slow.wait(60)

    def interrupted(placing: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fsync)
    sink = FileSink(tmp_path / "file")
    sink.open()
    assert not sink.commit()
    assert syncing.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr("concurrent.futures.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sink.close()
    slow.set()
    sink._publisher.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_closed_without_a_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is collected anywhere, even where a thread begins, and a join there would never end."""

    def joined(*_: object) -> None:
        raise AssertionError("a thread is joined")

    sink = FileSink(tmp_path / "file")
    sink.open()
    sink.commit()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", joined)
        sink.close()
    assert not [*tmp_path.glob(".*")]


def test_proc_file_is_sent() -> None:
    """A file of /proc has size 0, and has bytes."""
    with closing(Source("/proc/self/status")) as source:
        assert source.size is None
        assert source.read(1 << 20)


@pytest.mark.parametrize(("code", "refused"), [(E.EINVAL, False), (E.ENOTSUP, False), (E.EIO, True)])
def test_folder_sync_unsupported_or_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, refused: bool
) -> None:
    """A file system that cannot sync a folder is no error; a sync that fails is one."""
    sync = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with closing(FileSink(tmp_path / "file")) as sink:
        sink.open()
        with pytest.raises(OSError, match=os.strerror(code)) if refused else nullcontext():
            placed(sink)


def test_refused_paths_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names a path that is not a file, or must not be written."""
    folder, file = str(tmp_path), str(tmp_path / "file")
    Path(file).touch()
    calls: list[tuple[Callable[[str], object], str]] = [
        (Source, "a directory cannot be sent: pack it into one file, with tar for example"),
        (open_sink, "this is a directory: name a file"),
    ]
    for opens, reason in calls:
        with pytest.raises(IsADirectoryError) as directory:
            opens(folder)
        assert (directory.value.args, directory.value.filename) == ((E.EISDIR, reason), folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for another user
    with pytest.raises(PermissionError) as refused:
        open_sink(file)
    assert (refused.value.args, refused.value.filename) == ((E.EACCES, os.strerror(E.EACCES)), file)


def test_a_dash_is_stdin_and_stdout() -> None:
    with closing(open_sink("-")) as sink, closing(Source("-")) as source:
        assert isinstance(sink, StreamSink)
        assert (source.name, sink.name) == ("stdin", "stdout")


def test_a_file_that_cannot_be_read_is_named() -> None:
    with closing(Source("/proc/self/mem")) as source, pytest.raises(OSError, match="error: '/proc/self/mem'"):
        source.read(1)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o177])
def test_new_file_obeys_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    before = os.umask(mask)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")  # to change it for a moment, which threads share, is no way to ask
            check_permissions(tmp_path)
    finally:
        os.umask(before)


def check_permissions(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with closing(FileSink(tmp_path / "file")) as sink:
        sink.open()
        placed(sink)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with closing(open_sink(str(tmp_path / "link"))) as sink:
        assert isinstance(sink, FileSink)
        sink.open()
        sink.write(b"new")
        placed(sink)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_device_is_written_to_and_not_replaced() -> None:
    with closing(open_sink("/dev/full")) as sink:
        assert isinstance(sink, StreamSink)
        with pytest.raises(OSError, match="No space left"):
            sink.write(b"x")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_empty_or_full_pipe_does_not_block(tmp_path: Path) -> None:
    out, into = os.pipe()
    with closing(StreamSink(into, "pipe")) as sink:
        while sink.ready():
            sink.write(bytes(4096))
        assert len(os.read(out, 1 << 20)) >= 4096
        assert sink.ready()
    os.close(out)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with closing(Source(str(fifo))) as source:
        assert (source.size, source.read(10)) == (None, None)
        end = os.open(fifo, os.O_RDWR)
        assert source.read(10) is None
        os.write(end, b"text")
        assert source.read(10) == b"text"
        os.close(end)
        assert source.read(10) == b""


def test_signal_during_creation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def interrupted(*arguments: int) -> None:
        lock(*arguments)
        pthread_kill(threading.get_ident(), SIGINT)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt), closing(FileSink(tmp_path / "file")) as sink:
        sink.open()
    assert list(tmp_path.iterdir()) == []
