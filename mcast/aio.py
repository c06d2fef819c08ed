"""Endpoints for asyncio: the classes and `open_endpoint` of `mcast`, with calls that are awaited."""

from mcast.endpoint.awaiting import Endpoint, Membership, Sender, open_endpoint

__all__ = ["Endpoint", "Membership", "Sender", "open_endpoint"]
