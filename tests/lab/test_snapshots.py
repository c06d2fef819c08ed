"""Guests that are kept in files, with a thread in the place of QEMU's monitor; no guest is booted."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rdma_lab import snapshots
from rdma_lab.snapshots import GuestKind, GuestSnapshot

STATE = b"a guest that stands" * 10_000
DONE, FAILED, DIED = "completed", "failed", "died"
A, B, C = (letter * 32 for letter in "abc")
KIND = GuestKind(A)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rdma-lab/guests"


@contextmanager
def qemu(status: str = DONE, refused: str = "", goes_on: bool = True) -> Iterator[socket.socket]:
    """A monitor whose machine migrates as STATE; that ends with `status`, or `refused` is refused.

    If it `goes_on`, the machine must have been told to.
    """
    ours, theirs = socket.socketpair()
    ours.settimeout(600)
    asked: list[str] = []

    def serve() -> None:
        with theirs, theirs.makefile("rwb") as stream:

            def say(what: object) -> None:
                stream.write(json.dumps(what).encode() + b"\n")
                stream.flush()

            say({"QMP": {}})
            fds: list[int] = []
            while line := take(theirs, fds):
                command = json.loads(line)
                asked.append(command["execute"])
                if command["execute"] == refused:
                    say({"error": {"class": "GenericError", "desc": "this machine cannot be migrated"}})
                    continue
                if command["execute"] == "migrate":
                    assert command["arguments"] == {"uri": "fd:kept"}
                    say({"event": "MIGRATION", "data": {"status": "setup"}})
                    sent = send(fds.pop(), STATE)
                    if status == DIED:
                        stream.write(b'{"event": "MIGR')
                        break
                    ended = status if sent else FAILED
                finalized = asked.count("query-status") > 2
                if command["execute"] == "cont" and not finalized:
                    say({"error": {"class": "GenericError", "desc": "Migration is not finalized yet"}})
                    continue
                say({"return": {"status": "postmigrate" if finalized else "finish-migrate"}})
                if command["execute"] == "migrate":
                    say({"event": "MIGRATION", "data": {"status": ended}})
            for fd in fds:
                os.close(fd)

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        yield ours
    thread.join()
    if status == DONE and not refused and goes_on:
        assert asked[-1] == "cont", "it goes on, as it was stopped"


def take(monitor: socket.socket, fds: list[int]) -> bytes:
    """One line, and the descriptors that come with it; b"" at the end."""
    line = b""
    while not line.endswith(b"\n"):
        data, came, _, _ = socket.recv_fds(monitor, 1, 1)
        if not data:
            return b""
        line, fds[:] = line + data, fds + came
    return line


def send(fd: int, data: bytes) -> bool:
    """Return True if all could be sent."""
    with socket.socket(fileno=fd) as stream:
        try:
            stream.sendall(data)
        except OSError:
            return False
    return True


def keep(kind: GuestKind = KIND, status: str = DONE, refused: str = "", goes_on: bool = True) -> None:
    with qemu(status, refused, goes_on) as monitor:
        kind.keep(monitor)


def found(kind: GuestKind = KIND) -> bytes | None:
    """Return the bytes that a QEMU that resumes the guest reads."""
    guest = kind.find()
    if guest is None:
        return None
    with guest.file:
        return read(guest)


def read(guest: GuestSnapshot) -> bytes:
    option, uri = guest.resumed()
    assert option == "-incoming"
    # The first shell is QEMU, which has inherited the descriptor; the second one is the shell that it starts.
    parent = ["sh", "-c", 'sh -c "$1"; exit $?', "qemu", uri.removeprefix("exec:")]
    return subprocess.run(parent, stdout=subprocess.PIPE, check=True, pass_fds=[guest.file.fileno()]).stdout


def test_snapshot_is_found_unchanged(folder: Path) -> None:
    """A snapshot is found, and given to QEMU unchanged."""
    assert found() is None
    keep()
    assert found() == STATE
    assert [path.name for path in folder.iterdir()] == [KIND.key]
    assert found(GuestKind(B)) is None


@pytest.mark.parametrize("meanwhile", ["replaced", "removed"])
def test_found_snapshot_survives_other_runs(meanwhile: str, folder: Path) -> None:
    """A guest that was found is resumed whatever another run does."""
    keep()
    guest = KIND.find()
    assert guest is not None
    path = folder / KIND.key
    path.unlink()
    if meanwhile == "replaced":
        path.write_bytes(b"another state of another size")
    with guest.file:
        assert read(guest) == STATE
        guest.discard("could not be resumed")
    assert path.exists() is (meanwhile == "replaced"), "another run's guest is not discarded"


@pytest.mark.parametrize("open_to", ["group", "all", "folder", "another owner"])
def test_snapshot_of_another_user_is_refused(
    open_to: str, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest that another user could have written is not resumed."""
    keep()
    assert (folder.stat().st_mode & 0o777, (folder / KIND.key).stat().st_mode & 0o777) == (0o700, 0o600)
    place = folder if open_to == "folder" else folder / KIND.key
    if open_to == "another owner":
        place, user = folder, os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    else:
        place.chmod(0o602 if open_to == "all" else 0o720)
    assert found() is None
    assert caplog.messages == [
        f"the lab boots a new guest instead of resuming one: others may write to {place}"
    ]
    assert (folder / KIND.key).exists()


def test_a_cache_that_cannot_be_written_still_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    keep()
    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", refuse)
        assert found() == STATE
    with (folder / KIND.key).open("r+b") as file:
        file.write(b"damage")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        assert found() is None
    assert len(caplog.messages) == 1


def test_what_is_no_file_is_left_alone(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(folder / A)
    (folder / B).mkdir()
    assert (found(), found(GuestKind(B))) == (None, None)
    assert {path.name for path in folder.iterdir()} == {A, B}


@pytest.mark.parametrize("damage", ["a byte", "the end", "all"])
def test_a_damaged_file_is_discarded_with_one_sentence(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep()
    path = folder / KIND.key
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes({"a byte": bytes(data), "the end": path.read_bytes()[:-1000], "all": b""}[damage])
    assert found() is None
    assert not path.exists()
    assert caplog.messages == [f"the lab boots a new guest: the snapshot {path} is damaged"]


def machine(tmp_path: Path, **other: str) -> GuestKind:
    """The kind of a machine whose words and files are these, but for `other`."""
    said = {"run": "1", "memory": "1024M", "kernel": "elf", "initrd": "cpio", "qemu": "program"} | other
    for name in ("kernel", "initrd", "qemu"):
        path = tmp_path / name
        if not path.exists() or path.read_text() != said[name]:
            path.write_text(said[name])
    job = tmp_path / said["run"]
    job.mkdir(exist_ok=True)
    (job / "initrd").write_text(said["initrd"])
    words = [str(tmp_path / "qemu"), "-m", said["memory"], "-kernel", str(tmp_path / "kernel")]
    words += [
        "-initrd",
        str(job / "initrd"),
        "-fsdev",
        f"local,id=job,path={str(job).replace(',', ',,')},readonly=on",
    ]
    return GuestKind.of([*words, "-chardev", f"socket,id=lab.go,fd={len(said['run'])}"])


def test_same_machine_has_the_same_kind(tmp_path: Path) -> None:
    """A run has the kind of every run of the same machine."""
    assert machine(tmp_path) == machine(tmp_path, run="second, with other descriptors")


@pytest.mark.parametrize("what", ["memory", "kernel", "initrd", "qemu"])
def test_another_machine_is_another_kind(what: str, tmp_path: Path) -> None:
    kind = machine(tmp_path)
    assert machine(tmp_path, **{what: "another size"}) != kind


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ((FAILED, ""), "QEMU could not send the guest"),
        ((DIED, ""), "QEMU has ended"),
        ((DONE, "migrate"), "this machine cannot be migrated"),
    ],
)
def test_a_guest_that_cannot_be_kept_goes_on(
    how: tuple[str, str], why: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(KIND, *how)
    (message,) = caplog.messages
    assert message.startswith(f"the lab's guest could not be saved, so later runs boot again: {why}")
    assert list(folder.iterdir()) == [], "nothing half-done is left"


def test_a_qemu_that_ends_meanwhile_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        KIND.keep(ours)
    (message,) = caplog.messages
    assert message.startswith("the lab's guest could not be saved, so later runs boot again: ")
    assert list(folder.iterdir()) == []


def test_without_a_cache_a_guest_boots_each_time(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in the way")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        KIND.keep(ours)
        assert found() is None
    assert len(caplog.messages) == 1


LIMITED = """
import resource, signal, sys
from tests.lab.test_snapshots import keep
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
keep(goes_on=False)
"""


def test_a_full_disk_keeps_nothing_and_is_told(folder: Path) -> None:
    warned = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True
    ).stderr
    assert "the lab's guest could not be saved, so later runs boot again: [Errno 27] File too large" in warned
    assert list(folder.iterdir()) == []


def test_parallel_runs_leave_one_sound_snapshot(folder: Path) -> None:
    """Who makes the same at once leaves one sound file."""
    makers = [threading.Thread(target=keep) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert [path.name for path in folder.iterdir()] == [KIND.key]
    assert found() == STATE


def aged(path: Path, seconds: float) -> None:
    os.utime(path, times=(0, path.stat().st_mtime - seconds))


def test_what_was_used_least_recently_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_BYTES", 2 * len(STATE) + 1000)
    for age, name in ((400, A), (300, B)):
        keep(GuestKind(name))
        aged(folder / name, age)
    assert found(GuestKind(A)) == STATE, "used, and so the newer one"
    for name in (".partial-killed", ".partial-at-work", "a-stranger's"):
        (folder / name).write_bytes(STATE)
        aged(folder / name, 500)
    with (folder / ".partial-at-work").open() as at_work:
        fcntl.flock(at_work, fcntl.LOCK_EX)
        keep(GuestKind(C))
    assert {path.name for path in folder.iterdir()} == {A, C, ".partial-at-work", "a-stranger's"}
