"""The provider on the card."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .card import Card
from .provider import CardBackend


@pytest.fixture
def backend(card: Card) -> Iterator[CardBackend]:
    """The provider, over devices that the test has added, or adds."""
    with CardBackend(card) as backend:
        yield backend
