"""The networks that most tests of this room run on, and what none of them may see."""

from collections.abc import Iterator

import pytest

from ..networks import backend, network

__all__ = ["backend", "network"]


@pytest.fixture(autouse=True)
def no_change_that_cannot_be(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The table of a membership's life says of each change whether it can be; see `IGNORED`."""
    yield
    assert [one for one in caplog.get_records("call") if "please report it" in one.getMessage()] == []
