"""Files and folders as objects: what is sent of them, and where a stranger's names lead."""

from __future__ import annotations

import errno as E
import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from mcast.cast.io.bundle import SAME_NAME, Bundle, Content, Folder, Item, Label, OneFile, bundle_of
from mcast.cast.io.files import ExistingFile, Sink
from mcast.cast.io.sinks import Offered


def offered(name: str, kind: Content = Content.FILE, files: int = 1) -> Offered:
    label = Label(kind, files, None, name)
    return Offered("an object", 3, label.encode(), "sender", "10.0.0.1", 0)


def placed(sink: Sink | None, data: bytes = b"new") -> None:
    assert sink is not None
    with closing(sink):
        sink.open()
        sink.write(data)
        sink.commit()
        sink.finish()


def names(bundle: Bundle) -> list[tuple[str, Content]]:
    return [(item.label.name, item.label.kind) for item in bundle.items]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "empty").mkdir(parents=True)
    (top / "in").mkdir()
    (top / "in" / "run").write_bytes(b"#!/bin/sh\n")
    (top / "in" / "run").chmod(0o700)
    (top / "plain").write_bytes(b"12345")
    (top / "link").symlink_to("plain")
    (top / "nowhere").symlink_to("missing")
    (top / "round").symlink_to(".")
    os.mkfifo(top / "pipe")
    return top


def test_a_folder_is_its_files_and_folders(tree: Path) -> None:
    bundle = bundle_of([str(tree)])
    assert names(bundle) == [
        ("tree", Content.FOLDER),
        ("tree/link", Content.FILE),
        ("tree/plain", Content.FILE),
        ("tree/empty", Content.FOLDER),
        ("tree/in", Content.FOLDER),
        ("tree/in/run", Content.PROGRAM),
    ]
    assert bundle.size == 20
    assert {(item.label.files, item.label.size) for item in bundle.items} == {(6, 20)}
    assert {Path(path).name: reason for path, reason in bundle.skipped.items()} == {
        "nowhere": "a broken link",
        "pipe": "a named pipe",
        "round": "a link to a folder",
    }


def test_stdin_is_a_file_of_that_name_if_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bundle_of(["-"]) == Bundle([Item("-", Label(Content.FILE, 1, None, "stdin"))], None, {})
    status = os.fstat

    def closed(fd: int) -> os.stat_result:
        if fd == 0:
            raise OSError(E.EBADF, os.strerror(E.EBADF))
        return status(fd)

    monkeypatch.setattr(os, "fstat", closed)
    with pytest.raises(OSError, match=os.strerror(E.EBADF)):
        bundle_of(["-"])


def test_unreadable_and_unwritable_paths_are_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the path that only another user may read or write."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    calls: list[tuple[Callable[[], object], Path]] = [
        (lambda: bundle_of([str(tree / "plain")]), tree / "plain"),
        (lambda: Folder(tree), tree),
    ]
    for call, path in calls:
        with pytest.raises(PermissionError) as caught:
            call()
        assert caught.value.args == (E.EACCES, os.strerror(E.EACCES))
        assert caught.value.filename == str(path)


def test_what_is_in_a_folder_arrives_as_it_was(tree: Path, tmp_path: Path) -> None:
    target = Folder(tmp_path / "copy")
    times = {one: 10**18 + 1000 * at for at, one in enumerate(("in/run", "plain", "empty", "in", "."))}
    for one, mtime in times.items():
        os.utime(tree / one, ns=(0, mtime))
    for path, label in bundle_of([str(tree)]).items:
        sink = target(Offered("x", None, label.encode(), "sender", "10.0.0.1", 0))
        if label.kind is not Content.FOLDER:
            placed(sink, Path(path).read_bytes())
        else:
            assert sink is target(Offered("x", None, label.encode(), "sender", "10.0.0.1", 0)) is None
    copy = tmp_path / "copy" / "tree"
    assert sorted(str(one.relative_to(copy)) for one in copy.rglob("*")) == [
        "empty",
        "in",
        "in/run",
        "link",
        "plain",
    ]
    assert (copy / "in" / "run").read_bytes() == b"#!/bin/sh\n"
    target.close()
    assert os.access(copy / "in" / "run", os.X_OK)
    assert [(copy / one).stat().st_mtime_ns for one in times] == list(times.values())
    assert not (copy / "plain").stat().st_mode & 0o111


def test_two_of_one_name_are_refused(tree: Path) -> None:
    with pytest.raises(ValueError, match="2 of these would be named plain"):
        bundle_of([str(tree / "plain"), f"{tree}/in/../plain"])


def test_a_path_that_no_label_can_have_is_refused(tmp_path: Path) -> None:
    deep = tmp_path.joinpath("top", *(["x" * 200] * 3))
    deep.mkdir(parents=True)
    with pytest.raises(ValueError, match="the path is longer than 487 bytes"):
        bundle_of([str(tmp_path / "top")])


def test_a_label_is_read_as_it_was_written() -> None:
    label = Label(Content.PROGRAM, 3, 1 << 40, os.fsdecode(b"caf\xe9/\xff"), -1)
    assert Label.decode(label.encode()) == label
    for unsayable in (None, 1 << 63, -1 << 63):
        assert Label.decode(label._replace(mtime=unsayable).encode()) == label._replace(mtime=None)
    packed = label.encode()
    assert Label.decode(packed[:25]) is None
    assert Label.decode(packed[:4] + b"\x09" + packed[5:]) is None
    assert Label.decode(b"a program's own metadata") is None


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "..", ".", "a//x", "a/.", "link/x", "link/a/x"]
)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "link").symlink_to("../out")
    (tmp_path / "out" / "there").write_bytes(b"old")
    for kind in Content:
        for replace in (False, True):
            with pytest.raises(OSError, match="the name leads out of the folder"):
                Folder(tmp_path / "in", replace)(offered(name, kind))
    assert sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")) == [
        "in",
        "in/link",
        "out",
        "out/there",
    ]


def test_link_in_folder_is_replaced(tmp_path: Path) -> None:
    """A link in the folder is not followed: the file that it leads to stays."""
    (tmp_path / "in").mkdir()
    (tmp_path / "out").write_bytes(b"old")
    (tmp_path / "in" / "x").symlink_to("../out")
    with pytest.raises(FileExistsError):
        Folder(tmp_path / "in")(offered("x"))
    placed(Folder(tmp_path / "in", replace=True)(offered("x")))
    assert (tmp_path / "out").read_bytes() == b"old"
    assert not (tmp_path / "in" / "x").is_symlink()
    assert (tmp_path / "in" / "x").read_bytes() == b"new"


@pytest.mark.parametrize("said", ["a\x1b[2Jb", "a\nb", "a\u202eb", "a\x00b", "a\x7fb"])
def test_a_name_moves_no_cursor(tmp_path: Path, said: str) -> None:
    placed(Folder(tmp_path)(offered(said)))
    (one,) = tmp_path.iterdir()
    assert one.name in ("a_b", "a_[2Jb")


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(
    "said", [("a\nb", "a_b"), ("a_b", "a\nb"), ("x/a\nb", "x/a\tb"), ("a\nb/x", "a_b/x")]
)
def test_two_names_never_share_a_file(tmp_path: Path, said: tuple[str, str], replace: bool) -> None:
    """Without the refusal the second file replaces the first, and both ends report two copies."""
    folder = Folder(tmp_path, replace)
    first, second = said
    placed(folder(offered(first)))
    with pytest.raises(OSError, match=SAME_NAME):
        folder(offered(second))
    placed(folder(offered(first)), b"new")  # the same name again is the same file
    (path,) = (one for one in tmp_path.rglob("*") if one.is_file())
    assert path.read_bytes() == b"new"


def test_files_that_are_there_stay_unless_they_may_go(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileExistsError):
        Folder(tmp_path)(offered("folder"))
    with pytest.raises(FileExistsError):
        placed(Folder(tmp_path)(offered("x")))
    with pytest.raises(FileExistsError):
        Folder(tmp_path, replace=True)(offered("folder"))
    with pytest.raises(FileExistsError):
        Folder(tmp_path, replace=True)(offered("x", Content.FOLDER))
    assert (tmp_path / "x").read_bytes() == b"old"
    placed(Folder(tmp_path, replace=True)(offered("x")))
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_file_that_is_there_counts_if_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "x"
    there.write_bytes(b"old")
    before = there.stat().st_mtime_ns
    with closing(ExistingFile(there, 3)) as sink:
        assert sink.stored_size == 3
        sink.write(memoryview(b"ol"))
        with pytest.raises(FileExistsError) as refused:
            sink.commit()
        assert (refused.value.errno, refused.value.filename) == (E.EEXIST, str(there))
        assert sink.read_back(1) == b"d"
        sink.mark_verified(1)
        assert sink.commit()
    for said in (b"oLd", b"older"):
        with closing(ExistingFile(there, None)) as sink:
            assert sink.stored_size == 0
            sink.write(said)
            with pytest.raises(FileExistsError):
                sink.commit()
    os.mkfifo(tmp_path / "pipe")
    for path, size in ((there, 4), (there, 0), (tmp_path / "pipe", None), (tmp_path, None)):
        with pytest.raises(FileExistsError):
            ExistingFile(path, size)
    assert (there.read_bytes(), there.stat().st_mtime_ns) == (b"old", before)
    monkeypatch.delattr("os.open")  # to open a pipe or a device is to do something to it
    with pytest.raises(FileExistsError):
        ExistingFile(tmp_path / "pipe", None)


@pytest.mark.parametrize("meanwhile", [b"mine", b"new"])
def test_file_created_during_transfer_is_not_replaced(tmp_path: Path, meanwhile: bytes) -> None:
    """A file that appears meanwhile stays, unless replacing is allowed. A transfer may take hours."""
    sink = Folder(tmp_path)(offered("x"))
    assert sink is not None
    with closing(sink):
        sink.open()
        sink.write(b"new")
        (tmp_path / "x").write_bytes(meanwhile)
        with pytest.raises(FileExistsError) if meanwhile == b"mine" else nullcontext():
            sink.finish()
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("x", meanwhile)]


def test_objects_of_other_programs_have_their_name(tmp_path: Path) -> None:
    placed(Folder(tmp_path)(Offered("step", 3, b"its own", "sender", "10.0.0.1", 7)))
    placed(Folder(tmp_path)(Offered("", 3, b"", "sender", "10.0.0.1", 7)))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["object 7", "step"]


def test_one_file_takes_one_object_alone(tmp_path: Path) -> None:
    with closing(OneFile(str(tmp_path / "copy"))) as target:
        for refused in (offered("x", files=2), offered("x", Content.FOLDER)):
            with pytest.raises(OSError, match="this receiver accepts one file only"):
                target(refused)
        placed(target(offered("../x")))
    assert [one.name for one in tmp_path.iterdir()] == ["copy"]


def test_a_place_that_no_object_took_leaves_nothing(tmp_path: Path) -> None:
    with closing(OneFile(str(tmp_path / "copy"))) as target:
        target.open()
        assert len(list(tmp_path.iterdir())) == 1
    Folder(tmp_path / "folder").close()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for below, lacking in (("file", "file"), ("no/folder", "no")):
        with pytest.raises(NotADirectoryError) as caught:
            Folder(tmp_path / below)
        assert (caught.value.errno, caught.value.filename) == (E.ENOTDIR, str(tmp_path / lacking))
