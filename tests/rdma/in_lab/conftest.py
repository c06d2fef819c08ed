"""One fabric and its peers for the tests that need real devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mcast.backends.rdma import PROVIDER
from mcast.testbed import Testbed


@pytest.fixture
def lab_bed() -> Iterator[Testbed]:
    """A fresh test bed; what a test leaves behind is its failure."""
    with PROVIDER.testbed() as bed:
        yield bed
        bed.backend.close()
        assert bed.observer.leftovers() == ()
