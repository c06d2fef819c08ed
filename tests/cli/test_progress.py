"""Long work says how far it has come, on a terminal and elsewhere; and which option a warning means."""

from __future__ import annotations

from itertools import count

import pytest

from mcast.cast.protocol import fec
from mcast.cli import SUMMARIES, load, progress
from mcast.cli.progress import PlainLines, Watch
from mcast.endpoint.policy import ReceiveQueueLow

from ..commands import Run


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later."""
    clock = count()
    monkeypatch.setattr("mcast.cli.progress.monotonic", lambda: float(next(clock)))


@pytest.mark.usefixtures("seconds")
def test_plain_lines_come_ever_more_seldom(capsys: pytest.CaptureFixture[str]) -> None:
    """A minute is not silent, and the log of a day is short."""
    lines = PlainLines(disable=False)
    for at in range(86_400):
        lines.show(f"{at}")
    times = [int(line) for line in capsys.readouterr().err.splitlines()]
    assert times[:3] == pytest.approx([10, 30, 70], abs=4)
    assert len(times) < 300


@pytest.mark.usefixtures("seconds")
def test_a_transfer_shows_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with Watch("receivers join") as watch:
        for done in range(12):
            watch.show("playing", done * 1000, 64_000)
    assert capsys.readouterr().err == "playing: 9,000 of 64,000 bytes\n"


def test_a_play_says_how_far_it_is(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is counted from the first bytes that are sent, not from the first that all have."""
    monkeypatch.setattr(progress, "_FIRST", 0.0)
    monkeypatch.setattr(progress, "_LONGEST", 0.0)
    done = here("sim", "cast", "--receivers", "2", "--size", "8M", "--loss", "0.01")
    shown = [int(line.split()[1].replace(",", "")) for line in done.stderr.splitlines()]
    assert shown == sorted(shown)
    assert shown[-1] == 8 << 20
    assert len({*shown}) > 3


def test_short_work_says_nothing(here: Run) -> None:
    done = here("sim", "cast", "--receivers", "2", "--size", "64k")
    assert done.stderr == ""


def test_a_recording_says_how_far(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_FIRST", 0.0)
    monkeypatch.setattr(progress, "_LONGEST", 0.0)
    done = here("record", "239.1.1.1", "-o", "a.pcapng", "--demo", "--backend", "sim", "--count", "30")
    assert "recorded so far: " in done.stderr


def test_a_long_measurement_says_how_it_goes(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcast.cli.bench.PROGRESS_EVERY", 0.05)
    done = here("bench", "--backend", "sim", "--seconds", "0.3")
    assert done.returncode == 0
    assert " messages/s " in done.stderr
    assert " - " not in done.stdout, "parts are shown with --interval alone"


def test_without_fec_a_play_says_what_it_lacks(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's command runs without the extra, and names it before the work begins."""
    monkeypatch.setattr(fec, "available", lambda: False)
    arguments = ("sim", "cast", "--receivers", "3", "--loss", "0.01", "--size", "256k")
    done = here(*arguments)
    assert done.returncode == 0
    assert "pip install 'rdma-mcast[fec]'" in done.stderr
    assert "losses were repaired by repeating segments" in done.stdout
    assert here(*arguments, "--no-parity").stderr == "", "it was not asked for"


RECEIVES = ["demo", "send", "recv", "listen", "top", "record", "bench"]


@pytest.mark.parametrize("name", RECEIVES)
def test_a_low_queue_names_an_option(name: str) -> None:
    """The setting that the warning names is an option of each command that can log it."""
    assert name in SUMMARIES
    (option,) = (word for word in str(ReceiveQueueLow(1, 64)).strip(")").split() if word.startswith("--"))
    assert option in {option for one in load(name).params for option in one.opts}


def test_bench_refuses_a_depth_that_it_does_not_use(here: Run) -> None:
    for arguments in (("--backend", "sim"), ("--client",)):
        done = here("bench", *arguments, "--receive-depth", "9")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "--receive-depth" in done.stderr
