"""A card for each test, and what the test may not leave of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .build import build
from .card import Card
from .provider import CardBackend, loaded


@pytest.fixture
def card(tmp_path: Path) -> Iterator[Card]:
    """An empty card; whatever was done wrong with it, or is left at the end, fails the test."""
    with loaded(build(), tmp_path) as card:
        card.reset()
        yield card
        card.fail_no_more()
        assert card.reports() == ()
        assert [one for one in card.leftovers() if not one.refused] == []
        card.reset()


@pytest.fixture
def backend(card: Card) -> Iterator[CardBackend]:
    """The provider, over devices that the test has added, or adds."""
    with CardBackend(card) as backend:
        yield backend
