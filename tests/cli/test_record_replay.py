"""`mcast record` and `mcast replay`: what they print, and how they end."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcast.capture.replay import COPY_REASON, CaptureSummary, RecordedMessage, summarize
from mcast.cli.replay import _send_all
from mcast.cli.terminal import Failure, stdin_as_file
from mcast.endpoint.blocking import open_endpoint
from mcast.wire.addresses import Gid

from ..capture.captures import GROUP, Made, capture, cooked, frame
from ..commands import QUOTED, Run
from ..file_objects import Reader


@pytest.mark.parametrize("backend", ["sim-roce", "sim-ib"])
def test_made_up_traffic_is_recorded(here: Run, tmp_path: Path, backend: str) -> None:
    arguments = (GROUP, "239.1.1.2", "-o", "a.pcapng", "--demo", "--backend", backend)
    done = here("record", *arguments, "--count", "100", "--json")
    outcome = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (outcome["messages"], outcome["sources"], outcome["dropped"]) == (100, 1, {})
    contents = summarize(io.BytesIO((tmp_path / "a.pcapng").read_bytes()))
    assert contents.messages == 100
    assert len(contents.groups) == 2
    assert outcome["bytes"] == 100 * contents.largest


def test_stdout_takes_the_packets_and_stderr_the_words(run: Run, here: Run, tmp_path: Path) -> None:
    done = run("sh", "-c", f"{QUOTED} record {GROUP} -o - --demo --backend sim --count 3 >a.pcapng")
    assert done.stdout == ""
    assert done.stderr.startswith("record: 3 messages, ")
    assert summarize(io.BytesIO((tmp_path / "a.pcapng").read_bytes())).messages == 3


def test_a_capture_called_minus_is_named_so(
    here: Run, monkeypatch: pytest.MonkeyPatch, acme: dict[str, str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello, world")))
    done = here("replay", "-", "--backend", "acme", env=acme)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mcast: cannot read -: at offset 0: the file is neither pcapng nor pcap")


def test_stdin_that_does_not_block_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of it may have nothing yet, which is not the end."""

    class Stdin(Reader):
        def fileno(self) -> int:
            return null.fileno()

    data, turns = bytes(range(256)) * 100, cycle((0, 700))

    def some(size: int) -> int | None:
        return min(size, next(turns)) or None

    with Path(os.devnull).open("rb") as null:
        for most in (None, 10_000):
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Stdin(data, some)))
            with stdin_as_file("-", most=most) as name:
                assert Path(name).read_bytes() == data[:most]


def test_a_recording_is_not_lost_to_a_mistake(here: Run, tmp_path: Path) -> None:
    (tmp_path / "a.pcapng").write_bytes(b"precious")
    done = here("record", GROUP, "-o", "a.pcapng", "--demo", "--backend", "sim", "--bind", "10.9.9.9")
    assert (done.returncode, "no port has the address" in done.stderr) == (2, True)
    assert (tmp_path / "a.pcapng").read_bytes() == b"precious"


def test_too_few_messages_are_a_failure(here: Run) -> None:
    done = here(
        *("record", GROUP, "-o", "a.pcapng", "--demo", "--backend", "sim"),
        *("--count", "1000000", "--seconds", "0.2"),
    )
    assert done.returncode == 1
    assert "of 1,000,000 messages arrived in " in done.stderr


@pytest.fixture
def acme(third_party: Callable[..., dict[str, str]]) -> dict[str, str]:
    """A simulated fabric under a name that is not known to be one."""
    return third_party()


REPLAY = ("replay", "a.pcapng", "--backend", "acme", "--bind", "10.0.0.1")


def test_a_file_is_replayed_to_another_group(here: Run, tmp_path: Path, acme: dict[str, str]) -> None:
    (tmp_path / "a.pcapng").write_bytes(capture([0.0, 100.0]))
    done = here(*REPLAY, "--group", "239.7.7.7", "--json", env=acme)
    outcome = json.loads(done.stdout)
    assert done.returncode == 0
    assert outcome["longest_pause_seconds"] == 100
    assert outcome["groups"] == [{"recorded": f"::ffff:{GROUP}", "group": "239.7.7.7", "messages": 2}]
    assert outcome["sent"] == 2
    assert 100 <= outcome["seconds"] < 101, "virtual time"


def test_the_packets_of_a_simulated_run_are_replayed(here: Run, acme: dict[str, str]) -> None:
    assert here("sim", "run", "sm-failover-under-load", "--pcap", "a.pcapng").returncode == 0
    done = here(*REPLAY, "--max", env=acme)
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = done.stdout.splitlines()
    assert first.startswith("replay: ")
    assert any("without a GRH, so not for a group" in line for line in others), "the SA's MADs"


def test_a_pcap_of_tcpdump_is_replayed(here: Run, tmp_path: Path, acme: dict[str, str]) -> None:
    data = frame(b"hello")
    head = struct.pack("<IHHIIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)
    (tmp_path / "a.pcapng").write_bytes(head + struct.pack("<IIII", 1, 2, len(data), len(data)) + data)
    assert here(*REPLAY, env=acme).stdout.startswith(f"replay: 1 messages to {GROUP} in ")


PAUSE = "replay: the longest pause between two messages takes {}, as in the recording: --speed X "


@pytest.mark.parametrize(
    ("times", "options", "says"),
    [
        ([0.0, 59.0, 118.0], (), None),
        ([0.0, 61.0], (), "61 seconds"),
        ([0.0, 1200.0], ("--speed", "2"), "10 minutes"),
        ([0.0, 1e8], (), "1,157 days"),
        ([0.0, 1e5], ("--speed", "10"), "3 hours"),
        ([0.0, 1e5], ("--speed", "10000"), None),
        ([0.0, 1e5], ("--max",), None),
    ],
)
def test_a_long_pause_is_announced(
    here: Run,
    tmp_path: Path,
    acme: dict[str, str],
    times: list[float],
    options: tuple[str, ...],
    says: str | None,
) -> None:
    (tmp_path / "a.pcapng").write_bytes(capture(times))
    done = here(*REPLAY, *options, env=acme)
    assert done.returncode == 0
    expected = "" if says is None else PAUSE.format(says) + "divides all pauses, --max leaves them out\n"
    assert done.stderr == expected


def test_copies_of_any_interface_are_left_out(here: Run, tmp_path: Path, acme: dict[str, str]) -> None:
    seen = [(1.0, cooked(frame(b"one"), way, number)) for number, way in ((2, 4), (3, 2), (4, 4), (5, 0))]
    (tmp_path / "a.pcapng").write_bytes(Made().pcap(*seen, link_type=276))
    said = " ".join(here(*REPLAY, env=acme).stdout.split())
    assert said.startswith("replay: 1 messages to ")
    assert said.endswith(f" s 3 packets left out: {COPY_REASON}; --keep-copies sends these, too")
    done = here(*REPLAY, "--keep-copies", "--json", env=acme)
    assert (json.loads(done.stdout)["sent"], json.loads(done.stdout)["skipped"]) == (4, {})


def test_a_file_that_is_cut_is_replayed_and_named(here: Run, tmp_path: Path, acme: dict[str, str]) -> None:
    whole = Made().pcap((1.0, frame(b"one", 0)), (1.0, frame(b"two", 1)), (1.0, frame(b"three", 2)))
    (tmp_path / "a.pcapng").write_bytes(whole[:-1])
    said = " ".join(here(*REPLAY, env=acme).stdout.split())
    assert said.startswith("replay: 2 messages to ")
    assert said.endswith(" s 1 packet left out: the last packet, at offset 196: the file ends in its middle")


BAD_FILES: dict[str, tuple[bytes | None, str]] = {
    "none": (None, "cannot read a.pcapng: No such file or directory"),
    "empty": (b"", "cannot read a.pcapng: at offset 0: the file is truncated"),
    "text": (b"hello, world", "cannot read a.pcapng: at offset 0: the file is neither pcapng nor pcap"),
    "packed": (
        gzip.compress(capture([0.0])),
        "neither pcapng nor pcap: it is compressed by gzip: decompress it first",
    ),
    "cut short": (
        capture([0.0])[:-9],
        "a.pcapng has no multicast message; 1 packet left out: the last packet, at offset 84: the file ends "
        "in its middle",
    ),
    "no message": (capture([]), "a.pcapng has no multicast message"),
    "too large": (capture([0.0], [4000]), "has 4,000 bytes, one MTU of roce0 carries 1,024"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_sentence_and_status_2(
    here: Run, tmp_path: Path, acme: dict[str, str], case: str
) -> None:
    data, says = BAD_FILES[case]
    if data is not None:
        (tmp_path / "a.pcapng").write_bytes(data)
    done = here(*REPLAY, env=acme)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr


BAD_INPUT = {
    "no group": (("record", "-o", "a"), "Missing argument 'GROUP'"),
    "no file": (("record", GROUP), "Missing option '--output'"),
    "no such folder": (
        ("record", GROUP, "-o", "no/a", "--demo", "--backend", "sim"),
        "cannot write no/a: No such file",
    ),
    "a directory": (("record", GROUP, "-o", ".", "--demo", "--backend", "sim"), "cannot write .: Is a dir"),
    "nobody to hear": (("record", GROUP, "-o", "a", "--backend", "sim"), "add --demo for made-up messages"),
    "count": (("record", GROUP, "-o", "a", "--count", "0"), "'--count' / '-C': 0: give a whole number"),
    "nobody to send to": (("replay", "a", "--backend", "sim"), "on which no other program can receive"),
    "twice how fast": (("replay", "a", "--speed", "2", "--max"), "give one of them"),
    "speed": (("replay", "a", "--speed", "0"), "0 is out of range: give 0.001 to 1,000,000"),
    "directory": (("replay", ".", "--backend", "acme"), ". is not a regular file"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_status_2(here: Run, acme: dict[str, str], case: str) -> None:
    arguments, says = BAD_INPUT[case]
    done = here(*arguments, env=acme)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr


@pytest.mark.parametrize(
    ("later", "says"),
    [
        (("239.1.1.1",), "1 of 2 messages were sent: the file was shortened during the replay"),
        (
            ("239.1.1.1", "239.1.1.2"),
            "there was no message to ::ffff:239.1.1.2 then",
        ),
    ],
    ids=["shorter", "another group"],
)
def test_file_that_changes_is_one_sentence(later: tuple[str, ...], says: str) -> None:
    """A file that changes between two readings is one sentence."""
    contents = CaptureSummary({Gid("::ffff:239.1.1.1"): 2}, 1, 0, {})
    with open_endpoint("sim", "10.0.0.1") as endpoint:
        senders = {Gid("::ffff:239.1.1.1"): endpoint.sender(GROUP)}
        found = iter([RecordedMessage(0, Gid(f"::ffff:{group}"), b"x", None) for group in later])
        with pytest.raises(Failure, match=says):
            _send_all(endpoint, senders, found, None, contents)
