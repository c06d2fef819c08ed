"""Cores that say they are pure: their imports hold no clock, thread, socket or source of chance.

What such a core needs of the kind is handed in: times, answers, a `random.Random` that was made from a seed.
Whatever a core imports of its own room is held to the same; the rooms below it are values and rules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .test_rooms import FILES, PACKAGE, ROOT, knows, room

CORES = (
    "backends/sim/core/*",
    "backends/sim/faults/*",
    "backends/sim/shared/frames",
    "backends/sim/trace/events",
    "backends/sim/trace/pcapng",
    "backends/sim/trace/story",
    "bench/echo",
    "bench/parts",
    "cast/nack/header",
    "cast/nack/receiver",
    "cast/nack/sender",
    "cast/nack/shape",
    "endpoint/inbox",
    "endpoint/low_water",
    "endpoint/meter",
    "endpoint/policy",
    "endpoint/probe",
    "endpoint/recovery",
    "endpoint/sequence",
    "endpoint/stats",
    "endpoint/waiting",
    "errors/cause*",
    "errors/finding",
    "errors/rows",
    "errors/sa_refusal",
    "pcapng/*",
    "wire/*",
)
"""The files that say so of themselves, or of which CONTRIBUTING.md does."""

CLAIM = re.compile(r"\b(pure|(no|without) (I/O|clock))\b", re.I)
"""How a docstring says so."""

HANDED_IN = {"endpoint/recovery": {"endpoint/membership", "endpoint/station"}}
"""Core -> what it acts on and is given: memberships, with a lock for who sends; a station, which asks the
contract."""

LIBRARY = frozenset(
    """
    __future__ abc bisect collections contextlib copy dataclasses enum errno functools hashlib heapq ipaddress
    itertools json math operator pydantic pydantic_core re string struct types typing typing_extensions zlib
    """.split()  # noqa: SIM905
)
"""What computes, and does nothing else. Whoever adds a name looks whether that is so."""

ACTS = frozenset({"open", "print", "input", "breakpoint", "exec", "eval"})


def impurities(text: str) -> Iterator[str]:
    """What a text imports or calls that a pure core does not."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if not allowed(alias.name, None))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = ((f"{node.module}", alias.name) for alias in node.names)
            yield from (f"{module}.{name}" for module, name in names if not allowed(module, name))
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ACTS or (called == "Random" and not node.args):
                yield f"{called}()"


def allowed(module: str, name: str | None) -> bool:
    """`import module`, or `from module import name`. Of the package all but what waits and locks."""
    top, _, rest = module.partition(".")
    if top == PACKAGE:
        return rest.partition(".")[0] != "interrupts" and name != "interrupts"
    return top in LIBRARY or (module, name) == ("random", "Random")


def reached(core: str) -> set[str]:
    """The core, and what it imports of its own room, directly or not."""
    found, ahead = set[str](), [core]
    while ahead:
        file = ahead.pop()
        if file not in found:
            found.add(file)
            ours = {one for one in knows()[file] if one in knows() and room(one) == room(core)}
            ahead += ours - HANDED_IN.get(file, set())
    return found


def cores() -> list[str]:
    found = [file for pattern in CORES for file in FILES if Path(file).match(pattern)]
    assert all(any(Path(file).match(pattern) for file in FILES) for pattern in CORES)
    return found


@pytest.mark.parametrize("core", cores())
def test_a_core_is_pure(core: str) -> None:
    found = {file: list(impurities((ROOT / f"{file}.py").read_text())) for file in sorted(reached(core))}
    assert {file: what for file, what in found.items() if what} == {}


def claims(text: str) -> list[str]:
    """The docstrings of a text that say of their module or class that it is pure."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef))
    return [told for node in nodes if CLAIM.search(told := ast.get_docstring(node) or "")]


def test_what_says_that_it_is_pure_is_held_to_it() -> None:
    """The docstring of a folder speaks of other files, which say it themselves."""
    saying = {
        file
        for file in FILES
        if not file.endswith("__init__") and claims((ROOT / f"{file}.py").read_text("utf-8"))
    }
    assert len(saying & set(cores())) > 5
    assert saying - set(cores()) == set()


def test_a_claim_is_seen() -> None:
    text = '"""Rules.\n\nNo clock, no lock."""\nclass A:\n    """Pure."""\nclass B:\n    """Purely."""\n'
    assert [told.partition(".")[0] for told in claims(text)] == ["Rules", "Pure"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import time", "time"),
        ("from time import monotonic", "time.monotonic"),
        ("def late():\n    import threading", "threading"),
        ("import socket as s", "socket"),
        ("import os", "os"),
        ("from os import urandom", "os.urandom"),
        ("import random", "random"),
        ("from random import random", "random.random"),
        ("from random import SystemRandom", "random.SystemRandom"),
        ("from random import Random\nRandom()", "Random()"),
        ("from concurrent.futures import Future", "concurrent.futures.Future"),
        ("from mcast.interrupts import Lock", "mcast.interrupts.Lock"),
        ("from mcast import interrupts", "mcast.interrupts"),
        ("open('x')", "open()"),
    ],
)
def test_what_is_not_pure_is_seen(text: str, what: str) -> None:
    assert list(impurities(text)) == [what]


def test_what_computes_is_allowed() -> None:
    assert (
        list(impurities("import errno\nfrom random import Random\nfrom mcast.api import Gid\nRandom(7)"))
        == []
    )


def test_what_a_core_reaches_is_followed() -> None:
    assert "backends/sim/clock" in reached("backends/sim/fabric")
    assert "backends/sim/core/qp" in reached("backends/sim/core/cm")
