"""One grammar for all commands: units, bounds, `-`, `--json`, and the variables that are defaults."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from mcast.backends.sim.scenario.fault_syntax import parse_fault
from mcast.backends.sim.scenario.model import MAX_FABRIC_PORTS, BadScenario
from mcast.cast import Strategy
from mcast.cast.protocol.packets import MAX_MEMBERS
from mcast.cli import SUMMARIES, load
from mcast.cli.values import (
    MAX_PORTS,
    MAX_RECEIVERS,
    bit_rate,
    factor,
    memory,
    message_size,
    microseconds,
    rate,
    seconds,
    size,
    strategy,
)

from ..commands import Run

SIZES = {"0": 0, "7": 7, "64K": 65536, "64KiB": 65536, "64ki": 65536, "64KB": 64000, "5B": 5, "1m": 1 << 20}
RATES = {"7": 7, "25K": 25_000, "25Ki": 25_600, "2.5M/s": 2.5e6, "10g": 1e10, "1e12": 1e12}
BIT_RATES = {"10G": 1e10, "2.5Gbit": 2.5e9, "800Mbit/s": 8e8, "1gbps": 1e9, "1Gibit": 1 << 30, "7": 7}
TIMES = {"0.5": 0.5, "5": 5, "50us": 5e-5, "250ms": 0.25, "1.5s": 1.5, "2min": 120, "1h": 3600}
ENDLESS = {
    "count": "a number to compare with, of any size",
    "comp_vector": "the device says how many it has",
    "receive_depth": "the device says how many it can have",
    "ports": "the lab says how many it makes",
    "switches": "the lab says how many it makes",
}
"""Numbers that have no bound here, and why."""


def parameters() -> Iterator[tuple[str, TyperOption | TyperArgument]]:
    """Each command's name, with each of its options and arguments."""
    for name in SUMMARIES:
        command = load(name)
        for one in [command, *getattr(command, "commands", {}).values()]:
            for each in one.get_params(typer.Context(one)):
                assert isinstance(each, TyperOption | TyperArgument)
                yield f"{name} {one.name}", each


@pytest.mark.parametrize("text", SIZES)
def test_a_size_takes_units_of_1024(text: str) -> None:
    assert (size(text), message_size(0, 1 << 30)(text)) == (SIZES[text], SIZES[text])


@pytest.mark.parametrize("text", RATES)
def test_a_rate_takes_units_of_1000(text: str) -> None:
    assert rate(text) == RATES[text]


@pytest.mark.parametrize("text", BIT_RATES)
def test_a_rate_of_bits_may_say_so(text: str) -> None:
    assert bit_rate(text) == BIT_RATES[text]
    if "b" in text:  # which messages a second are not
        with pytest.raises(typer.BadParameter, match="is not a rate"):
            rate(text)


@pytest.mark.parametrize("text", TIMES)
def test_a_time_takes_units(text: str) -> None:
    assert seconds(0, 3600)(text) == pytest.approx(TIMES[text])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2 weeks", "'2 weeks' is not a time: give seconds, or a number with a unit: us, ms, s, min or h"),
        ("61min", "61min is out of range: give 0.5 to 3,600 s"),
        ("-1", "'-1' is not a time: give seconds"),
        ("nan", "'nan' is not a time: give seconds"),
    ],
)
def test_no_time_is_refused(text: str, says: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"^{says}"):
        seconds(0.5, 3600)(text)


def test_microseconds_and_factors_take_their_units() -> None:
    read, times = microseconds(0, 1e9), factor(0.001, 1e6)
    assert [read(text) for text in ("50", "50us", "0.05ms", "1e9", "1s", 7)] == [50, 50, 50, 1e9, 1e6, 7]
    assert [times(text) for text in ("10", "10x", "0.5X", "1e6", 2.0)] == [10, 10, 0.5, 1e6, 2]
    for refused, says in {
        (read, "nan"): "'nan' is not a time: give microseconds",
        (read, "-1"): "'-1' is not a time",
        (read, "17min"): "17min is out of range: give 0 to 1,000,000,000 us",
        (times, "nan"): "'nan' is not a factor: give a number",
        (times, "2us"): "'2us' is not a factor",
        (times, "0"): "0 is out of range: give 0.001 to 1,000,000$",
    }.items():
        with pytest.raises(typer.BadParameter, match=f"^{says}"):
            refused[0](refused[1])


def test_a_memory_is_in_mib_or_has_a_unit() -> None:
    read = memory(128, 4096)
    assert [read(text) for text in ("128", 512, "1G", "1GiB", "256Mi")] == [128, 512, 1024, 1024, 256]
    for text, says in {
        "1GB": "not a whole number of MiB",
        "127": "give 128 to 4,096 MiB",
        "x": "not a size",
    }.items():
        with pytest.raises(typer.BadParameter, match=says):
            read(text)


@pytest.mark.parametrize(
    "text", ["", "-1", "K", "1BK", "1T", "1 K", "nan", "inf", "0x1", "\u0661", "9" * 21, "1.K", "1iB"]
)
def test_no_amount_is_refused(text: str) -> None:
    for read in size, rate, bit_rate, message_size(0, 9):
        with pytest.raises(typer.BadParameter, match=r"is not a (size|rate): give"):
            read(text)


def test_a_size_has_no_fraction_and_a_rate_is_not_0() -> None:
    for read, text in ((size, "1.5K"), (rate, "0"), (rate, "0.0K")):
        with pytest.raises(typer.BadParameter, match=r"is not a (size|rate)"):
            read(text)


def test_each_number_has_both_bounds() -> None:
    """Each number has both bounds or a reason why not."""
    for name, one in parameters():
        kind, info = one.type_descriptor.annotation, one.type_descriptor.parameter_info
        number = any(word in str(kind) for word in ("int", "float")) and info.parser is None
        if number and one.name not in ENDLESS:
            assert info.min is not None, (name, one.name)
            assert info.max is not None, (name, one.name)


NO_NUMBERS = ["", "1_000", "\u0663", "\uff11", "nan", "inf", "1e-320", "1e400", "1,5", "--1", "1.", "+1"]
"""Texts that Python takes for a number, at least in part, and no option does."""


def takes_a_number(one: TyperOption | TyperArgument) -> bool:
    """True for the type int or float, and for a parser that makes a number of some text."""
    if one.type_descriptor.parameter_info.parser is None:
        return one.type_descriptor.annotation in (int, float)
    for text in ("1", "64", "1024"):
        with suppress(typer.BadParameter):
            if isinstance(one.process_value(typer.Context(TyperCommand("x")), text), int | float):
                return True
    return False


NUMBERS = [pytest.param(one, id=f"{name} {one.name}") for name, one in parameters() if takes_a_number(one)]


def test_numbers_are_found_among_all_options() -> None:
    assert len(NUMBERS) > 60


@pytest.mark.parametrize("one", NUMBERS)
def test_every_number_has_one_grammar(one: TyperOption | TyperArgument) -> None:
    """Each refusal is one sentence that names the text, says what it is not, and what to write."""
    context = typer.Context(TyperCommand("x"))
    for text in NO_NUMBERS:
        with pytest.raises(typer.BadParameter) as caught:
            one.process_value(context, text)
        sentence = caught.value.format_message()
        assert "\n" not in sentence
        assert text[:20] in sentence
        assert re.search("give|write|none of", sentence), sentence


@pytest.mark.parametrize("text", NO_NUMBERS[1:])
def test_strategies_and_faults_share_a_grammar(text: str) -> None:
    """Strategies and faults in words have the same grammar."""
    for kind in ("quorum", "deadline", "carousel"):
        with pytest.raises(ValueError, match="is not a strategy"):
            Strategy.of(f"{kind}:{text}")
    for word in (f"drop rate={text}", f"drop after={text}", f"cut until={text}"):
        with pytest.raises(BadScenario):
            parse_fault(word.split(), {"roce0": 0})


@pytest.mark.parametrize("loss", ["0", "1e-99", ".5", "5e-1"])
def test_a_loss_however_small_is_played(here: Run, loss: str) -> None:
    done = here(*f"sim cast --receivers 2 --size 64K --loss {loss}".split())
    assert (done.returncode, done.stderr) == (0, "")


def test_a_loss_below_all_numbers_is_refused(here: Run) -> None:
    done = here(*["sim", "cast", "--loss", "1e-320"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "mcast sim cast: Invalid value for '--loss': 1e-320: give a number from 0 to 0.9, its exponent of at "
        "most two digits\n"
    )


def test_as_many_as_there_can_be_may_be_asked_for() -> None:
    assert (MAX_RECEIVERS, MAX_PORTS) == (MAX_MEMBERS, MAX_FABRIC_PORTS)
    (ports,) = (one for name, one in parameters() if (name, one.name) == ("sim serve", "ports"))
    assert ports.type_descriptor.parameter_info.max == MAX_PORTS


def test_strategy_deadline_is_parsed_as_a_time() -> None:
    """The deadline of a strategy is a time like any other."""
    assert [strategy(f"deadline:{text}").seconds for text in ("5", "500ms", "2min")] == [5, 0.5, 120]
    for text, says in {
        "deadline:1e99": "deadline:1e99 is out of range: give 0 to 604,800 s",
        "deadline:soon": "'deadline:soon' is not a strategy",
        "deadline:nan": "'deadline:nan' is not a strategy",
        "deadline:-1": "'deadline:-1' is not a strategy",
        "quorum:0": "a quorum of 0 receivers: at least 1",
    }.items():
        with pytest.raises(typer.BadParameter, match=f"^{says}"):
            strategy(text)


def test_options_have_the_same_names_everywhere() -> None:
    """JSON is a flag and a time is called seconds in each command."""
    for name, one in parameters():
        if "--json" in one.opts:
            assert isinstance(one, TyperOption), name
            assert one.is_flag, name
        assert not {"--duration", "--time"} & set(one.opts), name


def test_a_number_is_refused_in_words_of_ours(here: Run) -> None:
    for given, says in {
        "bench --receivers 0": "'--receivers': 0: give a whole number from 1 to 256",
        "bench --receivers 1.5": "'--receivers': 1.5: give a whole number from 1 to 256",
        "top -C " + 5000 * "9" + "x": f"'--count' / '-C': {20 * '9'}...: give a whole number of at least 1",
    }.items():
        done = here(*given.split())
        assert (done.returncode, done.stderr) == (2, f"mcast {given.split()[0]}: Invalid value for {says}\n")


@pytest.mark.parametrize(("option", "begins"), [("--html", "<!doctype html>"), ("--trace", "{")])
def test_a_file_called_minus_is_stdout(here: Run, tmp_path: Path, option: str, begins: str) -> None:
    done = here("sim", "run", "late-join", option, "-")
    assert done.stdout.startswith(begins)
    assert done.stderr.startswith("sim: 700 messages sent, ")
    assert list(tmp_path.iterdir()) == []
    done = here("sim", "run", "late-join", option, "-", "--json")
    assert (done.returncode, json.loads(done.stdout)["status"]) == (2, 2)
    assert "only one output can go to stdout" in done.stderr


def test_scenario_from_stdin_with_another_seed(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scenario called minus is stdin and its seed can be another."""
    text = 'name = "given"\nseconds = 1\n[[members]]\ngroup = "239.1.1.1"\nports = [0]\n'

    def given(data: str, *more: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data.encode())))
        done = here("sim", "run", "-", *more)
        return done.stdout or done.stderr

    assert json.loads(given(text, "--json", "--seed", "9"))["scenario"]["seed"] == 9
    assert given("?").startswith("mcast: - is not TOML: ")


class Stdin(io.RawIOBase):
    """A MiB of zeros, of which `left` bytes are not read; what is read behind them is an I/O error."""

    left = 1 << 20

    def readable(self) -> bool:
        return True

    def readinto(self, room: memoryview) -> int:  # type: ignore[override]  # of a raw stream
        if not self.left:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        size = min(len(room), self.left)
        self.left -= size
        room[:size] = bytes(size)
        return size


@pytest.mark.parametrize("words", ["run -", "serve -", "serve --scenario -"])
def test_endless_stdin_is_read_in_part(here: Run, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """No more of an endless stdin is read than a scenario has."""
    given = Stdin()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(given)))
    done = here("sim", *words.split())
    assert (done.returncode, done.stderr) == (2, "mcast: - is no scenario: it is larger than 65,536 bytes\n")
    assert given.left > 1 << 19


def test_a_stdin_that_cannot_be_read_is_one_sentence(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Stdin())))
    done = here("demo", "-")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("mcast: cannot read - into .*/stdin-.*: Input/output error\n", done.stderr)


@pytest.mark.parametrize("words", ["-", "--scenario -"])
def test_a_fabric_called_minus_is_stdin(here: Run, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    text = "ports = 0" if words == "-" else 'name = "x"\nseconds = -1'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    done = here("sim", "serve", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"mcast: -: {text.splitlines()[-1].replace('=', 'is')}: give ")


def test_a_file_called_minus_is_stdin_for_demo(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"some bytes")))
    found = json.loads(here("demo", "-", "--receivers", "1", "--json").stdout)
    assert (found["file"], found["size"], found["receivers"][0]["outcome"]) == ("-", 10, "verified")


def test_lost_messages_are_status_1_if_asked_for(here: Run) -> None:
    assert here("sim", "run", "late-join").returncode == 0
    done = here("sim", "run", "late-join", "--fail-if-lost")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.endswith("expected copies lost\n")


def test_variables_are_defaults_that_options_beat(here: Run) -> None:
    record = ("record", "239.1.1.1", "--demo", "-C", "1", "-o", "made", "--json")
    env = {"MCAST_BACKEND": "sim-ib", "MCAST_BIND": "10.0.0.2"}
    for more, device in {(): "ib1", ("--device", "ib0"): "ib0", ("--bind", "10.0.0.1"): "ib0"}.items():
        assert json.loads(here(*record, *more, env=env).stdout)["device"] == device
    assert json.loads(here(*record, "--backend", "sim", env=env).stdout)["device"] == "roce1"
    for name, value in {"MCAST_BACKEND": "nope", "MCAST_BIND": "x"}.items():
        done = here(*record, env=env | {name: value})
        assert (done.returncode, json.loads(done.stdout)["status"]) == (2, 2)
        assert name in done.stderr
