"""The fixture of `mcast.testing.plugin` that pytest-asyncio runs, loaded where that plugin is."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from mcast.testing.plugin import McastAioEndpoints, McastEndpoints


@pytest_asyncio.fixture
async def _mcast_asyncio_endpoints(mcast_endpoints: McastEndpoints) -> AsyncIterator[McastAioEndpoints]:
    async with McastAioEndpoints(mcast_endpoints) as endpoints:
        yield endpoints
