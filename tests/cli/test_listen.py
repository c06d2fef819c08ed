"""`mcast listen`: each message in the form that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import IPv4Address

import pytest

from mcast.api import Gid, Message
from mcast.cli.listen import _as_hex, _as_json, _as_text

from ..commands import Run
from .test_top import LOSSY

GROUP = "239.1.1.1"
LISTEN = ("listen", GROUP, "--backend", "sim", "--demo")


def message(payload: bytes) -> Message:
    source, group = (Gid(bytes(10) + b"\xff\xff" + IPv4Address(one).packed) for one in ("10.0.0.7", GROUP))
    return Message(memoryview(payload), source, 7, group, None, False)


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"hello", "hello"),
        ("caf\u00e9".encode(), "caf\u00e9"),
        (b"a\nb\x1b[2J", r"a\nb\x1b[2J"),
        (b"\xff\x00", r"\xff\x00"),
        (b"", ""),
    ],
)
def test_text_is_a_line_and_what_is_none_is_escaped(payload: bytes, shown: str) -> None:
    assert _as_text(message(payload)) == [f"10.0.0.7 -> {GROUP}  {shown}"]


def test_hex_shows_each_byte_in_80_columns() -> None:
    head, *lines = _as_hex(message(bytes(range(60, 100))))
    assert head == f"10.0.0.7 -> {GROUP}  40 bytes"
    assert bytes.fromhex("".join(line[8:56] for line in lines)) == bytes(range(60, 100))
    assert [line[57:] for line in lines] == ["<=>?@ABCDEFGHIJK", "LMNOPQRSTUVWXYZ[", "\\]^_`abc"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("payload", "text"), [(b"a\n", "a\n"), (b"\xff", None)])
def test_json_line_has_bytes_and_text(payload: bytes, text: str | None) -> None:
    """A line of JSON has the bytes and the text if there is one."""
    (line,) = _as_json(message(payload))
    reported = json.loads(line)
    assert reported.pop("time") > 1.7e9
    assert reported == {
        "source": "10.0.0.7",
        "qp": 7,
        "group": GROUP,
        "bytes": len(payload),
        "text": text,
        "hex": payload.hex(),
        "number": None,
        "missing": [],
    }


def test_it_ends_after_so_many_messages(here: Run) -> None:
    done = here(*LISTEN, "-C", "30", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reported) == 30
    assert {(one["source"], one["group"]) for one in reported} == {("10.0.0.2", GROUP)}
    assert {bytes.fromhex(one["hex"]) for one in reported} == {16 * b"made-up message "}
    assert [one["number"] for one in reported] == list(
        range(reported[0]["number"], reported[0]["number"] + 30)
    )
    assert [one["missing"] for one in reported] == [[]] * 30


@pytest.mark.parametrize("form", [(), ("--hex",), ("--json",)])
def test_it_names_gaps(mcast: Run, third_party: Callable[..., dict[str, str]], form: tuple[str, ...]) -> None:
    """Every tenth message is lost; no byte of a header is shown."""
    arguments = ("listen", GROUP, "--backend", "acme", "--device", "roce0", "--demo", "-C", "20", *form)
    done = mcast(*arguments, env=third_party(source=LOSSY))
    assert (done.returncode, "mSeq" in done.stdout, "6d 53 65 71" in done.stdout) == (0, False, False)
    lines = done.stdout.splitlines()
    if form == ("--json",):
        gaps = [gap for line in lines for gap in json.loads(line)["missing"]]
        assert gaps == [[9, 9], [19, 19]]
    else:
        gap = lines.index(f"{GROUP}: message 9 of 10.0.0.2 is missing")
        assert lines[gap + 1].startswith(f"10.0.0.2 -> {GROUP}  #10  ")
        assert f"{GROUP}: message 19 of 10.0.0.2 is missing" in lines


def test_fewer_messages_than_asked_for_are_status_1(here: Run) -> None:
    done = here(*LISTEN, "-C", "1000000", "--seconds", "0.1")
    assert done.returncode == 1
    assert done.stderr == f"mcast: {len(done.stdout.splitlines()):,} of 1,000,000 messages arrived\n"


def test_two_forms_are_one_sentence(here: Run) -> None:
    done = here(*LISTEN, "--json", "--hex")
    assert (done.returncode, done.stdout.count("\n"), done.stderr.count("\n")) == (2, 1, 1)
