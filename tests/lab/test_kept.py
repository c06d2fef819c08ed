"""Guests that are kept in files, with a thread in the place of QEMU's monitor; no guest is booted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mcast.lab import kept
from mcast.lab.kept import GuestKind

STATE = b"a guest that stands" * 10_000
DONE, FAILED = "completed", "failed"
KIND = GuestKind("0123abcd")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mcast/lab/guests"


@contextmanager
def qemu(status: str = DONE, refused: str = "") -> Iterator[socket.socket]:
    """A monitor whose machine migrates as STATE; that ends with `status`, or `refused` is refused."""
    ours, theirs = socket.socketpair()
    ours.settimeout(600)
    asked: list[str] = []

    def serve() -> None:
        with theirs, theirs.makefile("rwb") as stream:

            def say(what: object) -> None:
                stream.write(json.dumps(what).encode() + b"\n")
                stream.flush()

            say({"QMP": {}})
            for line in stream:
                command = json.loads(line)
                asked.append(command["execute"])
                if command["execute"] == refused:
                    say({"error": {"class": "GenericError", "desc": "this machine cannot be migrated"}})
                    continue
                if command["execute"] == "migrate":
                    say({"event": "MIGRATION", "data": {"status": "setup"}})
                    shell = command["arguments"]["uri"].removeprefix("exec:")
                    subprocess.run(["sh", "-c", shell], input=STATE, check=True)
                finalized = asked.count("query-status") > 2
                if command["execute"] == "cont" and not finalized:
                    say({"error": {"class": "GenericError", "desc": "Migration is not finalized yet"}})
                    continue
                say({"return": {"status": "postmigrate" if finalized else "finish-migrate"}})
                if command["execute"] == "migrate":
                    say({"event": "MIGRATION", "data": {"status": status}})

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        yield ours
    thread.join()
    assert ("cont" in asked) is (status == DONE and not refused), "it goes on, if it was stopped"


def keep(kind: GuestKind = KIND, status: str = DONE, refused: str = "") -> None:
    with qemu(status, refused) as monitor:
        kind.keep(monitor)


def test_what_is_kept_is_found_and_given_to_qemu_as_it_was(folder: Path) -> None:
    assert KIND.find() is None
    keep()
    path = KIND.find()
    assert path is not None
    assert list(folder.iterdir()) == [path]
    option, uri = kept.resumed_from(path)
    assert option == "-incoming"
    shell = uri.removeprefix("exec:")
    assert subprocess.run(["sh", "-c", shell], capture_output=True, check=True).stdout == STATE
    assert GuestKind("another").find() is None


@pytest.mark.parametrize("damage", ["a byte", "the end", "all"])
def test_a_damaged_file_is_discarded_with_one_sentence(
    damage: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep()
    path = folder / KIND.key
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes({"a byte": bytes(data), "the end": path.read_bytes()[:-1000], "all": b""}[damage])
    assert KIND.find() is None
    assert not path.exists()
    assert caplog.messages == [f"the lab boots a guest anew, for {path}, which was kept, is damaged"]


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
    return GuestKind.of([*words, "-chardev", f"socket,id=mcast.go,fd={len(said['run'])}"])


def test_a_run_has_the_kind_of_every_run_of_the_same_machine(tmp_path: Path) -> None:
    assert machine(tmp_path) == machine(tmp_path, run="second, with other descriptors")


@pytest.mark.parametrize("what", ["memory", "kernel", "initrd", "qemu"])
def test_another_machine_is_another_kind(what: str, tmp_path: Path) -> None:
    kind = machine(tmp_path)
    assert machine(tmp_path, **{what: "another size"}) != kind


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ((FAILED, ""), "QEMU could not write it to "),
        ((DONE, "migrate"), "this machine cannot be migrated"),
    ],
)
def test_a_guest_that_cannot_be_kept_goes_on(
    how: tuple[str, str], why: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(KIND, *how)
    (message,) = caplog.messages
    assert message.startswith(f"the lab's guest is not kept for later runs: {why}")
    assert list(folder.iterdir()) == [], "nothing half-done is left"


def test_a_qemu_that_ends_meanwhile_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        KIND.keep(ours)
    (message,) = caplog.messages
    assert message.startswith("the lab's guest is not kept for later runs: ")
    assert list(folder.iterdir()) == []


def test_without_a_cache_a_guest_boots_each_time(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in the way")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        KIND.keep(ours)
        assert KIND.find() is None
    assert len(caplog.messages) == 1


def test_who_makes_the_same_at_once_leaves_one_sound_file(folder: Path) -> None:
    makers = [threading.Thread(target=keep) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert [path.name for path in folder.iterdir()] == [KIND.key]
    assert KIND.find() is not None


def aged(path: Path, seconds: float) -> None:
    os.utime(path, times=(0, path.stat().st_mtime - seconds))


def test_what_was_used_least_recently_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_BYTES", 2 * len(STATE) + 1000)
    for age, name in ((400, "a"), (300, "b")):
        keep(GuestKind(name))
        aged(folder / name, age)
    assert GuestKind("a").find() is not None, "used, and so the newer one"
    for name, old in ((".partial-killed", 2 * kept.ABANDONED), (".partial-at-work", 10)):
        (folder / name).touch()
        aged(folder / name, old)
    keep(GuestKind("c"))
    assert {path.name for path in folder.iterdir()} == {"a", "c", ".partial-at-work"}
