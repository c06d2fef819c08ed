"""Options of the whole test suite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from .card.build import build
from .card.card import Card
from .card.provider import loaded


def pytest_addoption(parser: pytest.Parser) -> None:
    oracle = parser.getgroup("oracle", "comparison with OpenSM (tests/oracle)")
    oracle.addoption(
        "--oracle-requests", type=int, default=20_000, metavar="N", help="compare at least N requests"
    )
    oracle.addoption("--oracle-seed", type=int, default=0, metavar="SEED", help="draw from this seed on")


# For a guest without hardware virtualisation, where each step takes long (`--hypothesis-profile lab`).
settings.register_profile("lab", max_examples=8, deadline=None)


def pytest_configure() -> None:
    """Programs that tests start are sent Ctrl-C, which a shell's background job would let them ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The two long guests first, so that two workers run them side by side."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/lab/test_real_"))


@pytest.fixture
def card(tmp_path: Path) -> Iterator[Card]:
    """A card without devices, loaded in place of the real libraries.

    Whatever was done wrong with it, or is left of it at the end, fails the test.
    """
    with loaded(build(), tmp_path) as card:
        yield card
        reports, leftovers = card.reports(), [one for one in card.leftovers() if not one.excused]
        card.reset()
        assert reports == ()
        assert leftovers == []
