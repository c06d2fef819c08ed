"""One fabric and its peers for the tests that need real devices."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from mcast.backends.rdma import PROVIDER
from mcast.contract.testbed import Testbed

_KERNEL = tuple(int(number) for number in platform.release().split(".")[:2])

mckey_sends = pytest.mark.xfail(
    _KERNEL >= (6, 12),
    run=False,
    reason="mckey ends right after its last post; on Linux 6.12 Soft-RoCE has sent one of five messages then",
)


@pytest.fixture
def lab_bed() -> Iterator[Testbed]:
    """A fresh test bed; what a test leaves behind is its failure."""
    with PROVIDER.testbed() as bed:
        yield bed
        bed.backend.close()
        assert bed.observer.leftovers() == ()
