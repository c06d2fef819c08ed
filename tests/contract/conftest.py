"""The networks that most tests of this room run on."""

from ..networks import backend, network

__all__ = ["backend", "network"]
