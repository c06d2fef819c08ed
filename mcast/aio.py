"""Endpoints for asyncio: the names of `mcast`'s endpoints, awaited."""

from mcast.endpoint.awaiting import Endpoint, Membership, Sender, open_endpoint

__all__ = ["Endpoint", "Membership", "Sender", "open_endpoint"]
