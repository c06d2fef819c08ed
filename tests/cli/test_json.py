"""The option --json: one object on stdout, also where a command ends before it has a result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mcast.cli import SUMMARIES, load

from ..commands import Run

if TYPE_CHECKING:
    from pathlib import Path

    from typer._click.core import Command

GROUP = "239.1.1.1"
REFUSED = {
    "bench": ["--server --client", "--receivers 0", "--backend sim --size 9000"],
    "conformance": ["--fabric infiniband", "--backend nope", "--no-such-option"],
    "demo": ["--receivers 0", "nowhere.bin", "--size 1K 1 2 3"],
    "doctor": ["EWHAT", "--backend nope"],
    "groups": ["--backend sim-roce", "no-group"],
    "info": ["too much"],
    "lab check": ["too much"],
    "listen": [f"{GROUP} --backend sim-roce", "", f"{GROUP} --hex"],
    "mgid": ["10.0.0.1", "", "--scope"],
    "ping": ["", f"{GROUP} --backend sim-roce", f"{GROUP} -S 1"],
    "record": [f"{GROUP} -o x.pcapng --backend sim-roce", "", f"{GROUP}"],
    "recv": [f"{GROUP} -o x --backend sim-roce", "", GROUP, f"{GROUP} -o '' --backend sim-roce"],
    "replay": ["nowhere.pcapng", "", "nowhere.pcapng --max --speed 2"],
    "send": [f"nowhere {GROUP} --backend sim-roce", "", f"{GROUP}", f"x {GROUP} --rate no"],
    "sim cast": ["--strategy carousel --rate 1G", "--loss 2"],
    "sim run": ["nowhere.toml", "", "late-join --trace - --pcap -"],
    "top": [f"{GROUP} --backend sim-roce", "--interval no"],
}
"""Command with --json -> calls that are refused."""


def with_json(name: str, command: Command) -> list[str]:
    below: dict[str, Command] = getattr(command, "commands", {})
    if below:
        return [found for each in below for found in with_json(f"{name} {each}", below[each])]
    return [name] if any("--json" in one.opts for one in command.params) else []


def test_each_commandwith_json_is_tried_here() -> None:
    found = [name for each in SUMMARIES for name in with_json(each, load(each))]
    assert sorted(found) == sorted(REFUSED)


@pytest.mark.parametrize(
    ("command", "words"), [(command, words) for command, calls in REFUSED.items() for words in calls]
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_refusal_is_one_object(here: Run, command: str, words: str, first: bool) -> None:
    """It has the sentence that stderr has, and the exit status, wherever --json stands."""
    given = [word.strip("'") for word in words.split()]
    done = here(*command.split(), *(["--json", *given] if first else [*given, "--json"]))
    _, end = json.JSONDecoder().raw_decode(done.stdout)
    assert done.stdout[end:] == "\n"
    found = json.loads(done.stdout)
    assert done.returncode == found["status"] == 2
    assert found["error"] in done.stderr


def test_refusal_is_no_object_without_json(here: Run) -> None:
    done = here("recv", GROUP, "-o", "x", "--backend", "sim-roce")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("words", [f"{GROUP} -o - --backend sim-roce", f"{GROUP} --output=- --wait never"])
def test_object_is_on_stderr_beside_data(here: Run, words: str) -> None:
    """Stdout has nothing but what is received."""
    done = here("recv", "--json", *words.split())
    assert done.stdout == ""
    assert json.loads(done.stderr)["status"] == done.returncode == 2


def test_error_after_the_start_is_one_object(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the contract comes up to the command's end."""
    from mcast.errors.cause import Phase
    from mcast.errors.tree import McastError

    def fail(*_: Any, **__: Any) -> None:
        raise McastError(19, "open", Phase.OPEN)

    monkeypatch.setattr("mcast.api.provider", fail)
    done = here("ping", GROUP, "--backend", "rdma", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["status"]) == (1, 1)
    assert found["error"] in done.stderr


def test_result_that_fails_is_one_object(here: Run) -> None:
    """A limit that is missed adds no second object to the measurement."""
    done = here("bench", "--backend", "sim", "--seconds", "0.01", "--min-rate", "100M", "--json")
    assert (done.returncode, json.loads(done.stdout)["receivers"]) == (1, 1)


@pytest.mark.parametrize("moment", ["its module", "its options", "its work"])
@pytest.mark.parametrize("data", [False, True], ids=["on stdout", "beside data"])
def test_interrupt_is_one_object(here: Run, monkeypatch: pytest.MonkeyPatch, moment: str, data: bool) -> None:
    """Also where the command has not begun to heed signals itself, as in all of `mcast doctor`."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    place = {
        "its module": "mcast.cli.load",
        "its options": "mcast.cli.options.backend_name",
        "its work": "mcast.cli.recv.refuse_in_process" if data else "mcast.cli.doctor._examine",
    }
    monkeypatch.setattr(place[moment], interrupt)
    words = ["recv", GROUP, "--backend", "sim", "-o", "-"] if data else ["doctor", "--backend", "sim"]
    if moment == "its options" and not data:
        words = ["ping", GROUP, "--backend", "sim"]
    done = here(*words, "--json")
    empty, printed = (done.stdout, done.stderr) if data else (done.stderr, done.stdout)
    assert (done.returncode, empty) == (130, "")
    assert json.loads(printed) == {"error": "interrupted", "status": 130}


def test_stream_ends_with_its_error(here: Run, tmp_path: Path) -> None:
    """`listen` prints an object on each line."""
    words = ["--demo", "--backend", "sim-roce", "--seconds", "0.05", "--count", "100000", "--json"]
    done = here("listen", GROUP, *words)
    *messages, last = map(json.loads, done.stdout.splitlines())
    assert done.returncode == last["status"] == 1
    assert all("hex" in one for one in messages)


def test_explanation_is_one_object(here: Run) -> None:
    found = json.loads(here("doctor", "EINVAL", "--json").stdout)
    assert found["explained"] == "EINVAL"
    assert found["causes"]
