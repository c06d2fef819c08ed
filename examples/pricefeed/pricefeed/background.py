"""Tasks beside a `with`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(*runs: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run these until the `with` ends; if one fails, the `with` is cancelled and the failure raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run()) for run in runs]
            yield
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        if len(failures.exceptions) > 1:
            raise
        raise failures.exceptions[0] from None
