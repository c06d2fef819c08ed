"""`mcast send`, `mcast recv`: what they print, and how they end."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from signal import SIGHUP, SIGINT, SIGTERM

import pytest

from mcast.cast.packets import MOST_RECEIVERS

from ..commands import MCAST, Run, written_to_terminal

DATA = Random(1).randbytes(20_000)
SHA256 = hashlib.sha256(DATA).hexdigest()
PYTHON = Path(sys.executable)
TEXT = "a line of text\n" * 5000

BAD_INPUT = {
    "missing file": (("send", "missing", "239.1.1.1"), "cannot read missing: No such file"),
    "directory": (("send", ".", "239.1.1.1"), "a directory cannot be sent: pack it"),
    "unicast": (("send", MCAST, "10.0.0.1"), "10.0.0.1 is a unicast address"),
    "simulator": (("send", MCAST, "239.1.1.1", "--backend", "sim"), "'sim' is a fabric inside this process"),
    "unknown backend": (("send", MCAST, "239.1.1.1", "--backend", "x"), "'x' is no backend"),
    "no receiver": (("send", MCAST, "239.1.1.1", "-n", "0"), "--receivers is 0: give"),
    "no address": (("send", MCAST, "239.1.1.1", "-b", "x"), "'x' is not an IPv4 or IPv6 address"),
    "no group": (("send", MCAST), "Missing argument"),
    "no output": (("recv", "239.1.1.1"), "Missing option '--output'"),
    "no such directory": (("recv", "239.1.1.1", "-o", "no/file"), "cannot write no/file: No such file"),
    "output directory": (("recv", "239.1.1.1", "-o", "."), "cannot write .: this is a directory"),
    "name too long": (("recv", "239.1.1.1", "-o", "x" * 256), "xxx: File name too long"),
    "file as directory": (
        ("recv", "239.1.1.1", "-o", f"{MCAST}/x"),
        f"cannot write {MCAST}/x: Not a directory",
    ),
    "simulated sender": (("recv", "239.1.1.1", "-o", "f", "--backend", "sim-ib"), "'sim-ib' is a fabric"),
    "no device": (("recv", "239.1.1.1", "-o", "f", "--device", "x/y"), "'x/y' is no device"),
    "both": (("recv", "239.1.1.1", "-o", "f", "--device", "x", "-b", "10.0.0.1"), "give one of them"),
    "negative patience": (
        ("recv", "239.1.1.1", "-o", "f", "--patience", "-1"),
        "--patience is -1: give",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(here: Run, tmp_path: Path, case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mcast")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_loop_of_links_is_one_sentence_and_status_2(here: Run, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    for arguments in (("recv", "239.1.1.1", "-o", "one"), ("send", "one", "239.1.1.1")):
        done = here(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith(" one: Too many levels of symbolic links\n")


@pytest.mark.parametrize("command", ["send", "recv", "ping"])
def test_help_fits_80_columns(here: Run, command: str) -> None:
    done = here(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80


ONE_FABRIC = """
from mcast.backends.sim import Fabric, ROCE, open_fabric

FABRIC = Fabric.roce(3, clock="wall")
PROVIDER = ROCE._replace(open=lambda: open_fabric(FABRIC, host=0))
"""

OTHER_END = """
import sys, threading
from contextlib import closing
from mcast import McastAddress, open_endpoint
from mcast.backends.sim import open_fabric
from mcast.cli import main
from mcast.cast.drive import DEPTH, ReceivingParty, SendingParty, run
from mcast.cast.files import Source, open_sink
from acme_mcast import FABRIC

def other(host, make):
    with open_fabric(FABRIC, host=host) as backend:
        with open_endpoint(backend, loopback="off", receive_depth=DEPTH) as endpoint:
            run(make(endpoint, McastAddress.of("239.1.1.1")))

def receiving(endpoint, group):
    return ReceivingParty(endpoint, group, open_sink("/dev/null"), 60.0)

def sending(endpoint, group):
    return SendingParty(endpoint, group, Source("file"), 1)

hosts, make = (1, 2) if sys.argv[1] == "send" else (1,), receiving if sys.argv[1] == "send" else sending
threads = [threading.Thread(target=other, args=(host, make), daemon=True) for host in hosts]
for thread in threads:
    thread.start()
main()
"""
"""The command of the arguments on host 0, and what it needs on the others, in one process."""

Install = Callable[..., dict[str, str]]


@pytest.fixture
def with_others(run: Run, third_party: Install, tmp_path: Path) -> Run:
    """Run the command where the other end is there as well."""
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "script.py").write_text(OTHER_END)
    env = third_party(source=ONE_FABRIC)
    return lambda *words: run(PYTHON, "script.py", *words, "--backend", "acme", env=env)


def test_send_shows_each_receiver(with_others: Run) -> None:
    done = with_others("send", "file", "239.1.1.1", "-n", 2)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"file: 20,000 bytes, SHA-256 {SHA256[:16]}..."
    assert lines[1].startswith("10.0.0.1 -> 239.1.1.1 on sim-roce, 20 pieces, 0 sent again, ")
    assert [line.split()[-1] for line in lines[4:6]] == ["verified"] * 2
    assert lines[-1] == "send: 2/2 receivers verified, 20 pieces each"
    assert max(map(len, lines)) <= 80


def test_a_name_is_no_markup(with_others: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    named = "drive.name_of = lambda endpoint: '[red]me[/]'"
    script.write_text(f"from mcast.cast import drive\n{named}\n{OTHER_END}")
    assert "[red]me[/]" in with_others("send", "file", "239.1.1.1").stdout


def test_send_as_json(with_others: Run) -> None:
    done = with_others("send", "file", "239.1.1.1", "--json")
    outcome = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (outcome["sha256"], outcome["size"], outcome["pieces"]) == (SHA256, 20_000, 20)
    assert sorted(receiver["address"] for receiver in outcome["receivers"]) == ["10.0.0.2", "10.0.0.3"]
    assert all(receiver["verified"] and not receiver["missed"] for receiver in outcome["receivers"])


def test_send_without_enough_receivers_is_status_1(with_others: Run) -> None:
    """Two join, be it that a slow machine needs longer."""
    for wait in ("0.5", "5", "50"):
        done = with_others("send", "file", "239.1.1.1", "-n", 3, "--wait", wait)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1
        if f" 2 of 3 receivers joined within {wait} s: 10.0.0." in done.stderr:
            break
    assert done.stderr.startswith(f"mcast: 2 of 3 receivers joined within {wait} s: 10.0.0.")


def test_recv_writes_the_file_and_says_so(with_others: Run, tmp_path: Path) -> None:
    done = with_others("recv", "239.1.1.1", "-o", "copy")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "copy").read_bytes() == DATA
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        f"copy: 20,000 bytes, SHA-256 {SHA256[:16]}... verified",
        f"10.0.0.2 ({socket.gethostname()} roce1) -> 239.1.1.1 -> 10.0.0.1 (roce0)",
    ]
    outcome = json.loads(with_others("recv", "239.1.1.1", "-o", "copy", "--json").stdout)
    assert (outcome["verified"], outcome["sha256"], outcome["lost"]) == (True, SHA256, [])


@pytest.mark.parametrize("name", ["\u5b57" * 85, os.fsdecode(b"caf\xe9")], ids=["long", "no UTF-8"])
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["words", "JSON"])
def test_recv_takes_every_name(
    with_others: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    done = with_others("recv", "239.1.1.1", "-o", name, *form)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / name).read_bytes() == DATA


def test_recv_to_stdout_says_nothing_else(with_others: Run, tmp_path: Path) -> None:
    text = TEXT
    (tmp_path / "file").write_text(text)
    done = with_others("recv", "239.1.1.1", "-o", "-")
    assert (done.returncode, done.stdout, done.stderr) == (0, text, "")


def test_recv_to_a_full_device_is_one_sentence(with_others: Run) -> None:
    done = with_others("recv", "239.1.1.1", "-o", "/dev/full")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("mcast: /dev/full: No space left on device")
    assert done.stderr.count("\n") == 1


def test_recv_that_waits_in_vain_is_one_sentence_and_leaves_nothing(
    run: Run, third_party: Install, tmp_path: Path
) -> None:
    done = run(
        MCAST,
        "recv",
        "239.1.1.1",
        "-o",
        "copy",
        "--wait",
        0.2,
        "--backend",
        "acme",
        env=third_party(source=ONE_FABRIC),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mcast: no transfer began on 239.1.1.1 as 10.0.0.1 (roce0) within 0.2 s\n"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


@pytest.mark.parametrize("signal", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_leaves_nothing(third_party: Install, tmp_path: Path, signal: int) -> None:
    env = {**os.environ, **third_party(source=ONE_FABRIC)}
    command = [str(MCAST), "recv", "239.1.1.1", "-o", "copy", "--backend", "acme"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True) as process:
        limit = time.monotonic() + 200
        while not list(tmp_path.glob(".copy.*")):
            assert time.monotonic() < limit
            time.sleep(0.02)
        process.send_signal(signal)
        try:
            _, said = process.communicate(timeout=200)
        finally:
            process.kill()
    assert (process.returncode, said) == (128 + signal, "mcast: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


@pytest.mark.parametrize("command", [("send", "file", "239.1.1.1"), ("recv", "239.1.1.1", "-o", "copy")])
def test_a_terminal_gets_a_bar(third_party: Install, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "file").write_bytes(Random(1).randbytes(3_000_000))
    (tmp_path / "script.py").write_text(OTHER_END)
    env = {"TERM": "xterm-256color", "COLUMNS": "80"} | {**os.environ, **third_party(source=ONE_FABRIC)}
    written = written_to_terminal([str(PYTHON), "script.py", *command, "--backend", "acme"], env, tmp_path)
    assert {"send": "sending", "recv": "receiving"}[command[0]] in written
    assert "━" in written


@pytest.mark.parametrize(
    ("command", "said"), [("send - 239.1.1.1 <&-", "read"), ("recv 239.1.1.1 -o - >&-", "write")]
)
def test_a_closed_stream_is_one_sentence(run: Run, command: str, said: str) -> None:
    done = run("sh", "-c", f"{MCAST} {command}")
    assert (done.returncode, done.stderr) == (2, f"mcast: cannot {said} -: Bad file descriptor\n")


def test_stdout_by_its_path_is_the_pipe_that_it_is(with_others: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(TEXT)
    done = with_others("recv", "239.1.1.1", "-o", "/dev/stdout")
    assert (done.returncode, done.stdout[: len(TEXT)]) == (0, TEXT)


def test_more_receivers_than_a_transfer_takes_are_refused(here: Run) -> None:
    done = here("send", __file__, "239.1.1.1", "--receivers", MOST_RECEIVERS + 1)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"{MOST_RECEIVERS + 1} is more than {MOST_RECEIVERS}\n")
