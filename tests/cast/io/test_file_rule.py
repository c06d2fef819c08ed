"""Existing files: one rule for a path, a folder and `mcast recv -o`."""

from __future__ import annotations

import errno as E
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from mcast import cast
from mcast.backends.sim import Fabric
from mcast.backends.sim.testbed import SimObserver
from mcast.cast.io.bundle import Content, Folder, OneFile, bundle_of
from mcast.cast.io.files import Sink
from mcast.cast.io.sinks import Offered, sink_of

from .test_bundle import offered
from .test_objects import BOUND, member, others

DATA = bytes(range(256)) * 40


def to_path(path: Path) -> Sink:
    """Open a sink as `cast.receive(into=path)` does."""
    return sink_of(path, None, 1 << 30)


def to_output(path: Path) -> Sink:
    """Open a sink as `mcast recv -o FILE` does."""
    return OneFile(str(path))(offered("x"))


def to_folder(path: Path) -> Sink:
    """Open a sink as `mcast recv -o FOLDER/ --overwrite` does."""
    sink = Folder(path.parent, replace=True)(offered(path.name))
    assert sink is not None
    return sink


WAYS: list[Callable[[Path], Sink]] = [to_path, to_output, to_folder]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Callable[[Path], Sink]:
    found: Callable[[Path], Sink] = request.param
    return found


def write(sink: Sink, data: bytes = DATA) -> None:
    """Write the whole and commit."""
    with closing(sink):
        sink.open()
        while data:
            assert sink.ready()
            sink.write(data[: sink.max_write])
            data = data[len(data[: sink.max_write]) :]
        sink.finish()


def test_a_file_is_replaced_at_once(way: Callable[[Path], Sink], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    before = path.stat().st_ino
    with path.open("rb") as reader:
        write(way(path))
        assert (reader.read(), path.read_bytes()) == (b"old", DATA)
    assert path.stat().st_ino != before


def test_a_named_pipe_is_written_to(way: Callable[[Path], Sink], tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write(way(path))
    assert os.read(reader, len(DATA) + 1) == DATA
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("way", [to_path, to_folder])
def test_a_named_pipe_waits_for_its_reader(way: Callable[[Path], Sink], tmp_path: Path) -> None:
    """It is not waited for in the call: other objects go on meanwhile."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with closing(way(path)) as sink:
        sink.open()
        assert not sink.ready()
        assert not sink.commit()
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        assert sink.ready()
        assert sink.commit()
        sink.write(b"bytes")
        assert os.read(reader, 10) == b"bytes"
    os.close(reader)


def test_a_socket_stays_and_the_system_says_why(way: Callable[[Path], Sink], tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        with pytest.raises(OSError, match=os.strerror(E.ENXIO)):
            write(way(path))
    assert stat.S_ISSOCK(path.stat().st_mode)


def test_a_read_only_file_is_refused(way: Callable[[Path], Sink], tmp_path: Path) -> None:
    """Even where root could write to it."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o444)
    with pytest.raises(PermissionError, match=os.strerror(E.EACCES)) as refused:
        write(way(path))
    assert (refused.value.errno, refused.value.filename) == (E.EACCES, str(path))
    assert path.read_bytes() == b"old"


def protect(path: Path) -> None:
    path.write_bytes(b"old")
    path.chmod(0o444)


@pytest.mark.parametrize("comes", [os.mkfifo, protect], ids=["pipe", "read-only file"])
def test_what_comes_to_be_there_meanwhile_stays(
    way: Callable[[Path], Sink], tmp_path: Path, comes: Callable[[Path], None]
) -> None:
    """A transfer may take hours."""
    path = tmp_path / "file"
    with closing(way(path)) as sink:
        sink.open()
        sink.write(b"new")
        comes(path)
        before = path.lstat()
        with pytest.raises(OSError, match=r"is not replaced|Permission denied"):
            sink.finish()
    assert os.path.samestat(before, path.lstat())
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("way", [to_path, to_output])
def test_a_link_that_the_user_names_is_followed(way: Callable[[Path], Sink], tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write(way(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == DATA


def test_a_link_that_a_sender_names_is_replaced(tmp_path: Path) -> None:
    """The file that it leads to stays, because a stranger chose the name."""
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "out")
    (tmp_path / "in" / "link").symlink_to("../out")
    write(to_folder(tmp_path / "in" / "link"))
    assert stat.S_ISREG((tmp_path / "in" / "link").lstat().st_mode)
    assert stat.S_ISFIFO((tmp_path / "out").stat().st_mode)


@pytest.mark.parametrize("begun", [False, True])
def test_a_link_in_place_of_a_folder_is_not_followed(begun: bool, tmp_path: Path) -> None:
    """Somebody who may write in the folder exchanges a folder in it, before or while the file comes."""
    here, there = tmp_path / "in", tmp_path / "there"
    (here / "sub").mkdir(parents=True)
    there.mkdir()
    (there / "file").write_bytes(b"old")
    sink = Folder(here, replace=True)(offered("sub/file"))
    assert sink is not None
    with closing(sink):
        if begun:
            sink.open()
            sink.write(DATA)
        (here / "sub").rename(here / "other")
        (here / "sub").symlink_to(there)
        with pytest.raises(NotADirectoryError, match="the folder was replaced by a link"):
            write(sink)
    assert [(one.name, one.read_bytes()) for one in there.iterdir()] == [("file", b"old")]


def test_another_name_of_a_file_keeps_the_old_bytes(way: Callable[[Path], Sink], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "other").hardlink_to(tmp_path / "file")
    write(way(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == DATA
    assert (tmp_path / "other").read_bytes() == b"old"


def test_hard_links_and_sparse_files_are_sent_as_files(tmp_path: Path) -> None:
    top, copy = tmp_path / "top", Folder(tmp_path / "copy")
    top.mkdir()
    with (top / "sparse").open("wb") as file:
        file.truncate(100_000)
    (top / "other").hardlink_to(top / "sparse")
    bundle = bundle_of([str(top)])
    assert bundle.size == 200_000
    for path, label in bundle.items:
        if label.kind is not Content.FOLDER:
            sink = copy(Offered("", None, label.encode(), "sender", "10.0.0.1", 0))
            assert sink is not None
            write(sink, Path(path).read_bytes())
    one, other = ((tmp_path / "copy" / "top" / name) for name in ("sparse", "other"))
    assert one.read_bytes() == other.read_bytes() == bytes(100_000)
    assert not one.samefile(other)


def test_a_file_named_dash_is_no_stdout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(to_path(Path("-")))
    assert (tmp_path / "-").read_bytes() == DATA


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    made = Fabric.roce(2, clock="wall")
    yield made
    assert SimObserver(made).leftovers() == ()


def test_pipe_is_written_and_read_only_file_refused(fabric: Fabric, tmp_path: Path) -> None:
    pipe, fixed = tmp_path / "pipe", tmp_path / "fixed"
    os.mkfifo(pipe)
    protect(fixed)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    missed: list[cast.Missed] = []

    def receives(path: Path) -> list[cast.Received]:
        with member(fabric, 1) as group:
            return list(cast.receive(group, path, one_session=True, missed=missed.append))

    for path, whole in ((pipe, True), (fixed, False)):
        with others(partial(receives, path)) as ends, member(fabric, 0) as group:
            report = cast.send(group, DATA, timeout=BOUND)
            assert [one.path for one in ends[0].result(BOUND)] == [path] * whole
        assert report.receivers[0].complete is whole
    assert os.read(reader, len(DATA) + 1) == DATA
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert fixed.read_bytes() == b"old"
    assert [one.reason for one in missed] == ["Permission denied"]


IN_ASCII = r"""
import os
from pathlib import Path
from mcast.cast.io.sources import source_of
from tests.cast.io.test_file_rule import to_path, write
for name in (Path("gr\u00fcn"), Path(os.fsdecode(b"gr\xc3\xbc\xc3\x9fe")), Path("\u5b57" * 85)):
    write(to_path(name), b"bytes")
    assert source_of(name).read(9) == b"bytes"
assert sorted(os.listdir(b"."))[:2] == [b"gr\xc3\xbcn", b"gr\xc3\xbc\xc3\x9fe"]
"""


def test_a_path_with_an_umlaut_goes_in_an_ascii_locale(tmp_path: Path) -> None:
    check_script(tmp_path, [sys.executable, "-c", IN_ASCII], {"LC_ALL": "C", "PYTHONUTF8": "0"})


IN_A_NAMESPACE = r"""
import errno, os, stat, sys, subprocess
from pathlib import Path

disk, full = Path("disk"), Path("full")
for path, size in ((disk, "1m"), (full, "64k")):
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], check=True)
(disk / "file").write_bytes(b"old")
(disk / "folder").mkdir()
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)

from mcast.cast.io.bundle import Folder
from tests.cast.io.test_file_rule import WAYS, write

def refused(code, call):
    try:
        call()
    except OSError as error:
        assert error.errno == code, error
        assert error.strerror == os.strerror(code), error
    else:
        raise AssertionError("not refused")

for way in WAYS:
    for name in ("file", "new"):
        refused(errno.EROFS, lambda: write(way(disk / name)))
for folder in (disk, disk / "folder", disk / "no"):
    refused(errno.EROFS, lambda: Folder(folder))
for way in WAYS:
    refused(errno.ENOSPC, lambda: write(way(full / "file"), bytes(200_000)))
assert [*full.iterdir()] == []
for name in ("file", "new", "folder/"):
    command = [sys.executable, "-m", "mcast", "recv", "239.1.1.1", "-o", f"disk/{name}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done
    assert done.stderr == f"mcast: cannot write disk/{name}: Read-only file system\n", done
null = Path("null")
null.touch()
subprocess.run(["mount", "--bind", "/dev/null", null], check=True)
for way in WAYS:
    write(way(null))
    assert stat.S_ISCHR(null.stat().st_mode), way
"""


def test_in_a_namespace(tmp_path: Path) -> None:
    """Errors of a read-only and of a full file system say what the system says; a device stays one."""
    check_script(tmp_path, ["unshare", "-rm", sys.executable, "-c", IN_A_NAMESPACE])


def check_script(folder: Path, command: list[str], env: dict[str, str] | None = None) -> None:
    """Run the command, which knows the tests, in that folder; it has nothing to say."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | (env or {}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
