"""What a reader is promised: every public name says what it is, and some words are not ours."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest
from pydantic import BaseModel

import mcast
import mcast.aio
from mcast import api

ROOT = Path(__file__).parents[2]

INSTEAD = {
    r"""(?<![`"])(?<!ctl )mend(s|ed|ing)?""": "repair, but for the command's own word, quoted or after ctl",
    r"whoever": "the noun: the member that, the call that",
    r"(as|for|from|of|than|to) who": "the noun: to the program that, than the caller",
    r"befalls?|befell": "happens to, or: a fault of",
    r"of ours": "the noun",
}
"""Words, as patterns -> what to write."""

HEADLESS = {
    r"([;:|(]|(?<=[a-z])\.|, and) who (?!.*\?)": "the noun: the program that, a call that",
    r"(\"\"\"|\||/\*) ?(It|They|Its|Their) ": "the noun: nothing stands before it that the word could mean",
}
"""How a sentence or a cell begins without its subject -> what to write."""


def pages() -> Iterator[Path]:
    """Every page and module that users read."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))
    for top in ("docs", "mcast", "examples", "tests/conformance"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in {".md", ".py", ".pyi", ".c", ".h", ".sh"} and not path.is_symlink():
                yield path


def found_in(text: str, pattern: str) -> list[str]:
    """The lines with such a word, also inside of a name_in_parts."""
    word = re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", re.I)
    return [line.strip() for line in text.splitlines() if word.search(line)]


@pytest.mark.parametrize("pattern", INSTEAD)
def test_a_plain_word_is_used(pattern: str) -> None:
    found = {path.relative_to(ROOT): found_in(path.read_text("utf-8"), pattern) for path in pages()}
    assert {path: lines for path, lines in found.items() if lines} == {}, INSTEAD[pattern]


@pytest.mark.parametrize("pattern", HEADLESS)
def test_a_sentence_has_its_subject(pattern: str) -> None:
    lines = [(path, line) for path in pages() for line in path.read_text("utf-8").splitlines()]
    found = [f"{path.relative_to(ROOT)}: {line.strip()}" for path, line in lines if re.search(pattern, line)]
    assert found == [], HEADLESS[pattern]


@pytest.mark.parametrize(
    ("line", "there"),
    [
        ("| who wants the lowest latency", True),
        ("moderated: who waits for a send", True),
        ("the caller, who looks again", False),
        ('"""It runs wherever', True),
        ("/* Its users leave", True),
        ("A lab boots. It ends", False),
    ],
)
def test_a_sentence_without_subject_is_seen(line: str, there: bool) -> None:
    assert any(re.search(pattern, line) for pattern in HEADLESS) is there


def public() -> Iterator[tuple[str, object]]:
    """Every public name of the package and its contract, and every member that the name's class defines."""
    for module in (mcast, api, mcast.aio):
        for name in vars(module).get("__all__", dir(module)):
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            yield f"{module.__name__}.{name}", thing
            bases = thing.__mro__ if isinstance(thing, type) and not issubclass(thing, Enum) else ()
            for base in reversed(bases):
                for member, value in vars(base).items() if base.__module__.startswith("mcast") else ():
                    if not member.startswith("_") and (
                        inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
                    ):
                        yield f"{module.__name__}.{name}.{member}", value


def test_every_public_name_has_a_docstring() -> None:
    named = dict(public())
    assert len(named) > 300
    assert [name for name, thing in named.items() if not inspect.getdoc(thing)] == []


def fields(thing: object) -> tuple[str, ...]:
    if isinstance(thing, type) and issubclass(thing, BaseModel):
        return tuple(thing.model_fields)
    return tuple(getattr(thing, "_fields", ()))


def test_the_docstring_of_a_value_names_each_field() -> None:
    """Shapes and units stand there; a field whose type says all is named all the same."""
    lacking = [
        f"{name}: {field}"
        for name, thing in public()
        for field in fields(thing)
        if not re.search(rf"\b{field}\b", inspect.getdoc(thing) or "")
    ]
    assert lacking == []


@pytest.mark.parametrize("opener", [mcast.open_endpoint, mcast.aio.open_endpoint])
def test_the_docstring_of_open_endpoint_names_each_argument(opener: object) -> None:
    assert callable(opener)
    told = f"{mcast.open_endpoint.__doc__}"
    assert [name for name in inspect.signature(opener).parameters if name not in told] == []
