"""The trace as the models know it: importing it does not import pydantic, which the events need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, Protocol

if TYPE_CHECKING:
    from mcast.backends.model.log_events import ModelEvent

P = ParamSpec("P")


class Log(Protocol):
    """A trace that is written. Code on the path of a message checks `is_enabled` first."""

    @property
    def is_enabled(self) -> bool:
        """True while anybody asks for the events."""

    def note(self, kind: Callable[P, ModelEvent], *args: P.args, **fields: P.kwargs) -> None:
        """Record an event, if anybody asks."""


class NoLog:
    """A log that nobody reads."""

    is_enabled = False

    def note(self, kind: Callable[P, ModelEvent], *args: P.args, **fields: P.kwargs) -> None:
        """Do nothing."""
