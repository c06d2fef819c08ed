"""An awaited call, one suspension after another, for tests in which something comes at one of them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Generator
from typing import Any

from mcast import aio

PUBLIC = {
    name
    for each in (aio.Endpoint, aio.Membership)
    for name, call in inspect.getmembers(each, inspect.isfunction)
    if not name.startswith("_") and name not in ("now", "stats")
}
"""The public calls of awaited endpoints and groups."""


class Steps:
    """Awaits a call, and counts how often it was suspended."""

    def __init__(self, call: Awaitable[Any]) -> None:
        self._call = call
        self.suspended = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._call.__await__()
        given: BaseException | None = None
        while True:
            try:
                what = steps.send(None) if given is None else steps.throw(given)
            except StopIteration as done:
                return done.value
            self.suspended += 1
            given = None
            try:
                yield from self.suspend(what)
            except BaseException as error:
                given = error

    def suspend(self, what: Any) -> Generator[Any, Any, None]:
        """Wait for what the call waits for; a test may have more happen before or after that."""
        yield what
