"""`mcast send`, `mcast recv`: what they print, and how they end."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from signal import SIGHUP, SIGINT, SIGTERM
from typing import Any, cast

import pytest
from blake3 import blake3

from mcast.cast.io.bundle import bundle_of
from mcast.cast.io.driver import error_text
from mcast.cast.protocol.packets import MAX_MEMBERS
from mcast.cast.protocol.strategy import all_receivers
from mcast.cli.recv import _target
from mcast.cli.send import _sent
from mcast.cli.terminal import Failure

from ..commands import MCAST, QUOTED, Run, written_to_terminal
from ..interleave import interrupted_everywhere

DATA = Random(1).randbytes(20_000)
BLAKE3 = blake3(DATA).hexdigest()
PYTHON = Path(sys.executable)
TEXT = "a line of text\n" * 5000

BAD_INPUT = {
    "missing file": (("send", "missing", "239.1.1.1"), "cannot read missing: No such file"),
    "two of one name": (("send", MCAST, MCAST, "239.1.1.1"), "2 of these would be named mcast"),
    "no strategy": (("send", MCAST, "239.1.1.1", "--strategy", "some"), "'some' is not a strategy"),
    "a carousel without a rate": (
        ("send", MCAST, "239.1.1.1", "--strategy", "carousel"),
        "a carousel needs --rate",
    ),
    "a simulated carousel": (("sim", "cast", "--strategy", "carousel"), "a carousel has no answers to count"),
    "no key file": (("send", MCAST, "239.1.1.1", "--key-file", "no"), "cannot read no: No such file"),
    "no key": (("recv", "239.1.1.1", "-o", "f", "--key-file", "/dev/null"), "/dev/null: "),
    "no rate": (("send", MCAST, "239.1.1.1", "--rate", "fast"), "'fast' is not a rate"),
    "rate of nothing": (("send", MCAST, "239.1.1.1", "--rate", "0G"), "'0G' is not a rate"),
    "unicast": (("send", MCAST, "10.0.0.1"), "10.0.0.1 is a unicast address"),
    "simulator": (("send", MCAST, "239.1.1.1", "--backend", "sim"), "'sim' is a fabric inside this process"),
    "unknown backend": (("send", MCAST, "239.1.1.1", "--backend", "x"), "'x' is not a backend"),
    "no receiver": (("send", MCAST, "239.1.1.1", "-n", "0"), "'--receivers' / '-n': 0: give"),
    "no address": (("send", MCAST, "239.1.1.1", "-b", "x"), "'x' is not an IPv4 or IPv6 address"),
    "no group": (("send", MCAST), "Missing argument 'FILE'"),
    "no output": (("recv", "239.1.1.1"), "Missing option '--output'"),
    "a name that is empty": (("send", "", "239.1.1.1"), "cannot read '': No such file"),
    "an output that is empty": (("recv", "239.1.1.1", "-o", ""), "cannot write '': No such file"),
    "no such directory": (("recv", "239.1.1.1", "-o", "no/file"), "cannot write no/file: No such file"),
    "no such folder": (("recv", "239.1.1.1", "-o", "no/in/"), "cannot write no/in/: Not a directory"),
    "name too long": (("recv", "239.1.1.1", "-o", "x" * 256), "xxx: File name too long"),
    "file as directory": (
        ("recv", "239.1.1.1", "-o", f"{MCAST}/x"),
        f"cannot write {MCAST}/x: Not a directory",
    ),
    "simulated sender": (("recv", "239.1.1.1", "-o", "f", "--backend", "sim-ib"), "'sim-ib' is a fabric"),
    "no device": (("recv", "239.1.1.1", "-o", "f", "--device", "x/y"), "'x/y' is not a device"),
    "both": (("recv", "239.1.1.1", "-o", "f", "--device", "x", "-b", "10.0.0.1"), "give one of them"),
    "negative patience": (
        ("recv", "239.1.1.1", "-o", "f", "--peer-timeout", "-1"),
        "'-1' is not a time: give seconds",
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
import logging, socket, sys, threading
from contextlib import closing
from pathlib import Path
from mcast import cast, open_endpoint
from mcast.backends.sim import open_fabric
from mcast.cli import main
from acme_mcast import FABRIC

socket.gethostname = lambda: "host"

# A busy machine is slow to receive, and says so.
logging.getLogger("mcast").addFilter(lambda record: "the receive queue was" not in record.getMessage())

def other(host, call):
    with (
        open_fabric(FABRIC, host=host) as backend,
        open_endpoint(backend, loopback="off") as endpoint,
        endpoint.join("239.1.1.1") as group,
    ):
        call(group)

def receiving(group):
    with closing(cast.receive(group, one_session=True, peer_timeout=60.0, missed=lambda _: None)) as objects:
        for one in objects:
            pass

def sending(group):
    cast.send(group, Path("file"), name="file", peer_timeout=60.0)

hosts, call = ((1, 2), receiving) if sys.argv[1] == "send" else ((1,), sending)
threads = [threading.Thread(target=other, args=(host, call), daemon=True) for host in hosts]
for thread in threads:
    thread.start()
main()
"""
"""The command of the arguments on host 0, and what it needs on the others, in one process."""

PATIENT = ("--peer-timeout", "60")
"""On a busy machine the other end may say nothing for longer than the usual 10 s."""

Install = Callable[..., dict[str, str]]


@pytest.fixture
def with_others(run: Run, third_party: Install, tmp_path: Path) -> Run:
    """Run the command where the other end is there as well."""
    (tmp_path / "file").write_bytes(DATA)
    (tmp_path / "script.py").write_text(OTHER_END)
    env = third_party(source=ONE_FABRIC)
    return lambda *words: run(PYTHON, "script.py", *words, *PATIENT, "--backend", "acme", env=env)


def test_send_shows_each_receiver(with_others: Run) -> None:
    done = with_others("send", "file", "239.1.1.1", "-n", 2)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"file: 20,000 bytes, BLAKE3 {BLAKE3[:16]}..."
    assert lines[1].startswith("10.0.0.1 -> 239.1.1.1 on sim-roce, 21 segments, 0 repairs, ")
    assert [line.split()[-1] for line in lines[4:6]] == ["verified"] * 2
    assert lines[-1] == "send: 2/2 receivers verified, 21 segments each"
    assert max(map(len, lines)) <= 80


def test_a_name_is_no_markup(with_others: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OTHER_END.replace('"host"', '"[red]me[/]"'))
    assert "[red]me[/]" in with_others("send", "file", "239.1.1.1").stdout


def test_send_as_json(with_others: Run) -> None:
    done = with_others("send", "file", "239.1.1.1", "-n", 2, "--json")
    outcome = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (outcome["strategy_met"], outcome["size"], outcome["segments"], outcome["sent_again"]) == (
        True,
        20_000,
        21,
        0,
    )
    sent = {"name": "file", "kind": "file", "size": 20_000, "offered": 20_000, "blake3": BLAKE3}
    sent |= {"strategy_met": True}
    assert (outcome["files"], outcome["left_out"]) == ([sent], {})
    assert sorted(receiver["address"] for receiver in outcome["receivers"]) == ["10.0.0.2", "10.0.0.3"]
    assert all(receiver["verified"] and not receiver["missed"] for receiver in outcome["receivers"])


def test_send_of_many_says_what_each_lacks(with_others: Run, tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "one").write_bytes(DATA)
    done = with_others("send", "many", "file", "239.1.1.1", "-n", 2)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "3 files and folders: 40,000 bytes"
    assert lines[-1] == "send: 2/2 receivers verified, 3 files and folders each"
    os.mkfifo(tmp_path / "many" / "pipe")
    (tmp_path / "many" / "link").symlink_to("../site")
    done = with_others("send", "many", "239.1.1.1", "-n", 2, "--rate", "1G", "--json")
    many = json.loads(done.stdout)
    kinds = [(one["name"], one["kind"]) for one in many["files"]]
    assert kinds == [("many", "folder"), ("many/one", "file")]
    assert many["left_out"] == {"many/link": "a link to a folder", "many/pipe": "a named pipe"}
    assert all(f"mcast: {path} is not sent: {why}\n" in done.stderr for path, why in many["left_out"].items())


def test_send_of_many_fails_if_one_joined_after_the_first(
    run: Run, third_party: Install, tmp_path: Path
) -> None:
    (tmp_path / "many").mkdir()
    for at in range(60):
        (tmp_path / "many" / f"{at}").write_bytes(DATA)
    late = OTHER_END.replace("    with (\n", "    if host == 2:\n        begun.wait()\n    with (\n", 1)
    late = late.replace("            pass\n", "            begun.set()\n", 1)
    (tmp_path / "script.py").write_text(f"import threading\nbegun = threading.Event()\n{late}")
    words = ("send", "many", "239.1.1.1", "-n", 1, "--rate", "5M", "--json", *PATIENT, "--backend", "acme")
    done = run(PYTHON, "script.py", *words, env=third_party(source=ONE_FABRIC))
    rows = {one["address"]: one["verified"] for one in json.loads(done.stdout)["receivers"]}
    assert rows == {"10.0.0.2": True, "10.0.0.3": False}
    assert done.returncode == 1
    assert "mcast: the strategy all was not met: 1 of 2 receivers has all" in done.stderr


NAMES = (b"gr\xc3\xbcn", b"inv\xff\xfe", b"\xe5\xad\x97" * 85)
"""File names: with an umlaut, of no text at all, and as long as a name may be."""

SENDS_NAMES = """
def sending(group):
    from mcast.cast.io.bundle import Content, bundle_of
    with cast.open_session(group, peer_timeout=60.0) as session:
        session.wait_for_receivers(1, 60)
        for path, label in bundle_of(["many"]).items:
            session.send(b"" if label.kind is Content.FOLDER else Path(path), metadata=label.encode())

hosts, """
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("locale", [{}, ASCII], ids=["UTF-8", "ASCII"])
def test_names_and_times_survive_every_locale(
    run: Run, third_party: Install, tmp_path: Path, locale: dict[str, str]
) -> None:
    (tmp_path / "many").mkdir()
    for at, name in enumerate(NAMES):
        path = tmp_path / "many" / os.fsdecode(name)
        path.write_bytes(DATA[:at])
        os.utime(path, ns=(0, 10**18 + at))
    os.utime(tmp_path / "many", ns=(0, 10**17))
    env = third_party(source=ONE_FABRIC) | locale
    script = tmp_path / "script.py"

    def ends(*words: object) -> subprocess.CompletedProcess[str]:
        done = run(PYTHON, "script.py", *words, *PATIENT, "--backend", "acme", env=env)
        assert (done.returncode, done.stderr) == (0, "")
        assert words[-1] == "--json" or max(map(len, done.stdout.splitlines())) <= 80
        return done

    script.write_text(OTHER_END)
    names = ["many", *sorted(f"many/{name.decode(errors='surrogateescape')}" for name in NAMES)]
    ends("send", os.fsdecode(b"many/" + NAMES[0]), "239.1.1.1", "-n", 2)
    sent = json.loads(ends("send", "many", "239.1.1.1", "-n", 2, "--json").stdout)
    assert sorted(one["name"] for one in sent["files"]) == names
    script.write_text(OTHER_END.replace("hosts, ", SENDS_NAMES, 1))
    came = json.loads(ends("recv", "239.1.1.1", "-o", os.fsdecode(NAMES[0]) + "/", "--json").stdout)
    assert sorted(one["name"] for one in came["files"]) == names
    copy = tmp_path / os.fsdecode(NAMES[0]) / "many"
    assert copy.stat().st_mtime_ns == 10**17
    assert sorted(one.name for one in copy.iterdir()) == sorted(map(os.fsdecode, NAMES))
    for at, name in enumerate(NAMES):
        assert (copy / os.fsdecode(name)).stat().st_mtime_ns == 10**18 + at


REFUSES = """
import mcast.cast.io.sinks as bytes_in
before = bytes_in.NewMemorySink.__init__
def make(self, size):
    if not taken:
        taken.append(1)
        raise OSError(28, "No space left on device", "/secret/path")
    before(self, size)
taken = []
bytes_in.NewMemorySink.__init__ = make
"""
"""The first of the receivers has no room."""


@pytest.mark.parametrize("strategy", ["all", "quorum:2", "quorum:1"])
def test_strategy_decides_if_a_loss_is_a_failure(with_others: Run, tmp_path: Path, strategy: str) -> None:
    """Who did not get it is named and the strategy says whether that is a failure."""
    status = int(strategy != "quorum:1")
    script = tmp_path / "script.py"
    script.write_text(REFUSES + OTHER_END)
    done = with_others("send", "file", "239.1.1.1", "-n", 2, "--strategy", strategy)
    missed = f"mcast: the strategy {strategy} was not met: 1 of 2 receivers has all\n"
    assert (done.returncode, done.stderr) == (status, missed * status)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    # The promise may be kept before the other receiver has said why it cannot take part.
    why, promised = sorted(line.split()[-1] for line in lines[4:6])
    assert promised == "verified"
    assert why == "device" or (status == 0 and why == "receiver")
    assert lines[-1] == "send: 1/2 receivers verified, 21 segments each"
    assert "/secret" not in done.stdout


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "JSON"])
@pytest.mark.parametrize(
    ("strategy", "why"),
    [("quorum:3", "2 of 2 receivers have all"), ("deadline:1ms", "none of 2 receivers has all")],
)
def test_missed_strategy_is_a_sentence(with_others: Run, strategy: str, why: str, form: list[str]) -> None:
    slow = ("--rate", "100K") if "deadline" in strategy else ()
    done = with_others("send", "file", "239.1.1.1", "-n", 2, "--strategy", strategy, *slow, *form)
    assert done.stderr == f"mcast: the strategy {strategy.replace('1ms', '0.001')} was not met: {why}\n"
    assert done.returncode == 1
    assert not form or json.loads(done.stdout)["strategy_met"] is False


def test_carousel_with_and_without_receivers(with_others: Run) -> None:
    """A carousel goes round without receivers and with them."""
    carousel = ("--strategy", "carousel:40", "--rate", "50M")
    done = with_others("send", "file", "239.1.1.1", *carousel)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[1].startswith("10.0.0.1 -> 239.1.1.1 on sim-roce, 21 segments in each cycle, ")
    assert lines[2:] == ["", "send: 40 cycles, without answers from receivers"]
    outcome = json.loads(with_others("send", "file", "239.1.1.1", "-n", 1, *carousel, "--json").stdout)
    assert (outcome["strategy_met"], outcome["cycles"], outcome["receivers"]) == (True, 40, [])
    assert outcome["sent_again"] >= 39 * outcome["segments"]


GOES_ROUND = """
def sending(group):
    from mcast.cast.io.bundle import Content, bundle_of
    given = [
        cast.Object(b"" if label.kind is Content.FOLDER else Path(path), metadata=label.encode())
        for path, label in bundle_of(["many", "file"]).items
    ]
    with cast.open_session(group, rate=1e6) as session:
        session.send_carousel(given)

hosts, """


def test_recv_ends_when_a_carousel_gave_it_all(with_others: Run, tmp_path: Path) -> None:
    """Files and folders go round and recv ends when it has all."""
    (tmp_path / "many" / "empty").mkdir(parents=True)
    for at in range(9):
        (tmp_path / "many" / f"file {at}").write_bytes(DATA[: at * 1000])
    carousel = ("--strategy", "carousel:3", "--rate", "50M")
    done = with_others("send", "many", "file", "239.1.1.1", *carousel)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "12 files and folders: 56,000 bytes"
    assert lines[-1] == "send: 3 cycles, without answers from receivers"
    script = tmp_path / "script.py"
    script.write_text(OTHER_END.replace("hosts, ", GOES_ROUND, 1))
    done = with_others("recv", "239.1.1.1", "-o", "in/", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    outcome = json.loads(done.stdout)
    assert (outcome["verified"], outcome["missed"], len(outcome["files"])) == (True, {}, 12)
    folders = {one["name"] for one in outcome["files"] if one["kind"] == "folder"}
    assert folders == {"many", "many/empty"}
    assert {one["kind"] for one in outcome["files"] if one["name"] not in folders} == {"file"}
    for path in [tmp_path / "file", *(tmp_path / "many").rglob("*")]:
        copy = tmp_path / "in" / path.relative_to(tmp_path)
        assert copy.is_dir() if path.is_dir() else copy.read_bytes() == path.read_bytes()
    done = with_others("recv", "239.1.1.1", "-o", "one")
    assert (done.returncode, done.stdout) == (1, "")
    assert "this receiver accepts one file only: name a folder, such as -o in/" in done.stderr


def test_a_signal_ends_a_carousel_with_its_outcome(with_others: Run, tmp_path: Path) -> None:
    """A receiver that has the object sends it."""
    script = OTHER_END.replace("(1, 2), receiving", "(1,), receiving")
    kills = "__import__('os').kill(__import__('os').getpid(), 2)"
    (tmp_path / "script.py").write_text(script.replace("            pass\n", f"            {kills}\n"))
    done = with_others("send", "file", "239.1.1.1", "--strategy", "carousel", "--rate", "50M")
    assert (done.returncode, done.stderr) == (130, "mcast: interrupted\n")
    lines = done.stdout.splitlines()
    assert lines[0] == f"file: 20,000 bytes, BLAKE3 {BLAKE3[:16]}..."
    assert re.fullmatch("send: [0-9,]+ cycles?, without answers from receivers", lines[-1])


def test_carousel_of_less_than_one_cycle_is_reported(with_others: Run) -> None:
    """A carousel that goes round not even once says so."""
    done = with_others("send", "file", "239.1.1.1", "--strategy", "carousel:1us", "--rate", "50M")
    assert (done.returncode, done.stderr) == (
        1,
        "mcast: the carousel ended before its first cycle was complete\n",
    )
    assert done.stdout.splitlines()[-1] == "send: 0 cycles, without answers from receivers"
    assert "BLAKE3" not in done.stdout


def test_recv_ends_when_it_has_the_file_of_a_carousel(with_others: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    sends = 'Path("file"), name="file", strategy=cast.carousel(), rate=1e6'
    script.write_text(OTHER_END.replace('Path("file"), name="file"', sends))
    done = with_others("recv", "239.1.1.1", "-o", "copy")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "copy").read_bytes() == DATA


def test_group_with_a_key_refuses_others(with_others: Run, tmp_path: Path) -> None:
    """A group with a key is closed to those without it."""
    (tmp_path / "key").write_bytes(DATA[:32])
    done = with_others("send", "file", "239.1.1.1", "--wait", 0.5, "--key-file", "key")
    assert (done.returncode, done.stdout) == (1, "")
    few = "mcast: 0 of 1 receivers joined within 0.5 s"
    hint = "start `mcast recv` at the others, give a longer --wait, or run `mcast doctor` there"
    keys = "without the same --key-file there, `mcast recv` prints that it rejected a message"
    assert done.stderr.splitlines()[-1] == f"{few}; {hint}; {keys}"
    script = tmp_path / "script.py"
    script.write_text(OTHER_END.replace("one_session=True", "one_session=True, key=Path('key').read_bytes()"))
    assert with_others("send", "file", "239.1.1.1", "-n", 2, "--key-file", "key").returncode == 0


def test_receivers_learn_of_unreadable_files(tmp_path: Path) -> None:
    """Receivers are told what the sender could not read."""

    class Fails:
        def send(self, *_: object, **__: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "file").write_bytes(DATA)
    sent = _sent(cast(Any, Fails()), bundle_of([str(tmp_path / "file")]), all_receivers(), cast(Any, None))
    with pytest.raises(Failure, match="file: Input/output error") as caught:
        list(sent)
    assert error_text(caught.value) == "Input/output error"


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
        f"copy: 20,000 bytes, BLAKE3 {BLAKE3[:16]}... verified",
        "10.0.0.2 (host roce1) -> 239.1.1.1 -> 10.0.0.1 (roce0)",
    ]
    outcome = json.loads(with_others("recv", "239.1.1.1", "-o", "copy", "--json").stdout)
    assert (outcome["verified"], outcome["missed"], outcome["sender_address"]) == (True, {}, "10.0.0.2")
    assert outcome["files"] == [{"name": "copy", "kind": "file", "size": 20_000, "blake3": BLAKE3}]


def test_long_host_name_leaves_room_for_the_device(with_others: Run, tmp_path: Path) -> None:
    """A long name of a host leaves room for that of the device."""
    (tmp_path / "script.py").write_text(OTHER_END.replace('"host"', '"h" * 64'))
    done = with_others("recv", "239.1.1.1", "-o", "copy")
    assert f"\n10.0.0.2 ({'h' * 58} roce1) -> " in done.stdout


CUT_OFF = """
def sending(group):
    def cut_off():
        yield Path("file").read_bytes()
        raise OSError("the tape is torn")
    try:
        cast.send(group, cut_off(), name="file")
    except OSError:
        pass

hosts, """
"""The sender breaks off when all has been sent."""


def test_recv_names_the_part_file_it_leaves(with_others: Run, tmp_path: Path) -> None:
    """Recv names the file that stays of a transfer that was cut off."""
    data = Random(2).randbytes(1_000_000)
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "script.py").write_text(OTHER_END.replace("hosts, ", CUT_OFF, 1))
    done = with_others("recv", "239.1.1.1", "-o", "copy")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "mcast: copy: the sender has ended the session: the tape is torn: "
        "the part that arrived stays in .copy.part, and the next recv goes on from there\n"
    )
    assert data.startswith((tmp_path / ".copy.part").read_bytes())
    (tmp_path / "script.py").write_text(OTHER_END)
    assert with_others("recv", "239.1.1.1", "-o", "copy").returncode == 0
    assert (tmp_path / "copy").read_bytes() == data
    assert not (tmp_path / ".copy.part").exists()


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "JSON"])
def test_send_says_how_much_a_receiver_had_from_before(
    with_others: Run, tmp_path: Path, form: list[str]
) -> None:
    data = Random(2).randbytes(4_000_000)
    for name in ("file", ".copy.part"):
        (tmp_path / name).write_bytes(data)
    (tmp_path / ".copy.part").chmod(0o1600)
    script = OTHER_END.replace("(1, 2), receiving", "(1,), receiving")
    (tmp_path / "script.py").write_text(script.replace("receive(group, ", "receive(group, Path('copy'), "))
    # All of it would take more than a minute, and the receiver says at once what it has.
    done = with_others("send", "file", "239.1.1.1", "--rate", "500K", *form)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "copy").read_bytes() == data
    if form:
        outcome = json.loads(done.stdout)
        assert 0 < outcome["skipped"] <= outcome["segments"]
        return
    words = r"([0-9,]+) of ([0-9,]+) segments sent, ([0-9,]+) were there already, [0-9,]+ repairs?, "
    found = re.search(words, " ".join(done.stdout.split()))
    assert found is not None, done.stdout
    sent, segments, there = (int(number.replace(",", "")) for number in found.groups())
    assert 0 <= sent == segments - there < segments


def test_recv_replaces_nothing_unasked(with_others: Run, tmp_path: Path) -> None:
    """Recv fills a folder and replaces nothing unasked."""
    (tmp_path / "in").mkdir()
    done = with_others("recv", "239.1.1.1", "-o", "in")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "in" / "file").read_bytes() == DATA
    again = with_others("recv", "239.1.1.1", "-o", "in")
    assert (again.returncode, again.stderr) == (0, ""), "it is there already"
    (tmp_path / "in" / "file").write_bytes(b"mine")
    refused = with_others("recv", "239.1.1.1", "-o", "in")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "mcast: file: File exists: --overwrite replaces it\n"
    assert (tmp_path / "in" / "file").read_bytes() == b"mine"
    (tmp_path / "in" / "file").chmod(0o444)
    refused = with_others("recv", "239.1.1.1", "-o", "in", "--overwrite")
    assert refused.stderr == "mcast: file: Permission denied: the file or its folder is read-only here\n"
    (tmp_path / "in" / "file").chmod(0o644)
    assert with_others("recv", "239.1.1.1", "-o", "in/", "--overwrite").returncode == 0
    assert (tmp_path / "in" / "file").read_bytes() == DATA
    assert [one.name for one in (tmp_path / "in").iterdir()] == ["file"]


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


def test_recv_without_a_sender_leaves_nothing(run: Run, third_party: Install, tmp_path: Path) -> None:
    """Recv that waits in vain is one sentence and leaves nothing."""
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


@pytest.mark.parametrize("part", ["cast/", "cli/"])
def test_signal_while_the_file_is_made(tmp_path: Path, part: str) -> None:
    """A signal while the file is made leaves nothing."""
    _target(stack := ExitStack(), str(tmp_path / "copy"), False)  # what is imported late is there

    def check(_: bool) -> None:
        stack.close()
        assert list(tmp_path.iterdir()) == []

    check(True)
    lines = interrupted_everywhere(
        lambda: _target(stack, str(tmp_path / "copy"), False), check, part, every=1
    )
    assert lines > 5


@pytest.mark.parametrize(
    "command", [("send", "file", "239.1.1.1", "-n", "2"), ("recv", "239.1.1.1", "-o", "copy")]
)
@pytest.mark.parametrize("size", [1, 3_000_000])
def test_a_terminal_gets_a_bar(
    third_party: Install, tmp_path: Path, command: tuple[str, ...], size: int
) -> None:
    (tmp_path / "file").write_bytes(Random(1).randbytes(size))
    (tmp_path / "script.py").write_text(OTHER_END)
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"} | third_party(source=ONE_FABRIC)
    words = [str(PYTHON), "script.py", *command, *PATIENT, "--backend", "acme"]
    written = written_to_terminal(words, env, tmp_path)
    assert {"send": "sending", "recv": "receiving"}[command[0]] in written
    assert "━" in written


def test_a_play_on_a_terminal_gets_a_bar() -> None:
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"}
    written = written_to_terminal([str(MCAST), "sim", "cast", "--receivers", "2", "--size", "1M"], env)
    assert "playing" in written
    assert "losses were repaired by parity" in written


def test_killed_simulation_restores_the_terminal() -> None:
    """A play that is killed leaves the terminal as it was."""
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"}
    command = [str(MCAST), "sim", "cast", "--receivers", "1000"]
    written = written_to_terminal(command, env, killed_at="receivers join", status=143)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert written.rindex(shown) > written.rindex(hidden)
    assert "mcast: interrupted" in written


def test_dumb_terminal_gets_no_progress_bar() -> None:
    """A terminal that moves no cursor gets no line for a bar."""
    command = [str(MCAST), "sim", "cast", "--receivers", "1", "--size", "1k"]
    written = written_to_terminal(command, os.environ | {"TERM": "dumb"})
    assert written.startswith("receivers ")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("send - 239.1.1.1 <&-", "read -"),
        ("recv 239.1.1.1 -o - >&-", "write -"),
        ("sim run - <&-", "read -"),
        ("demo - <&-", "read -"),
        ("record 239.1.1.1 --demo --backend sim -o - >&-", "write to stdout"),
    ],
)
def test_a_closed_stream_is_one_sentence(run: Run, command: str, said: str) -> None:
    done = run("sh", "-c", f"{QUOTED} {command}")
    assert (done.returncode, done.stderr) == (2, f"mcast: cannot {said}: Bad file descriptor\n")


def test_stdout_by_its_path_is_the_pipe_that_it_is(with_others: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(TEXT)
    done = with_others("recv", "239.1.1.1", "-o", "/dev/stdout")
    assert (done.returncode, done.stdout[: len(TEXT)]) == (0, TEXT)


def test_too_many_receivers_are_refused(here: Run) -> None:
    """More receivers than a transfer takes are refused."""
    done = here("send", __file__, "239.1.1.1", "--receivers", MAX_MEMBERS + 1)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f": {MAX_MEMBERS + 1}: give a whole number from 1 to {MAX_MEMBERS:,}\n")
