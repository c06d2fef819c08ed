"""The events that the models write into a trace, and the trace as they know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, ParamSpec, Protocol, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from mcast.wire.addresses import Gid

P = ParamSpec("P")

U16: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 16)]
U24: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 24)]
U63: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]
Signed: TypeAlias = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]


class LogEvent(BaseModel):
    """Base of the kinds of events."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", defer_build=True
    )  # not before there is a trace


class JoinAccepted(LogEvent):
    """A join call of an id was accepted; `qp` is the id's queue pair if it has one."""

    what: Literal["join"] = "join"
    port: str
    id: U63
    qp: U24 | None
    address: str
    group: Gid
    send_only: bool


class EventQueued(LogEvent):
    """An event was queued for an id; `group` is the group that it is about."""

    what: Literal["event"] = "event"
    port: str | None
    id: U63
    type: str
    status: Signed
    errno: Signed
    group: Gid | None


class Leave(LogEvent):
    """A membership ended: by leave, by destroy, or with its device."""

    what: Literal["leave"] = "leave"
    port: str
    id: U63
    group: Gid


class Attach(LogEvent):
    """A QP is attached, or why not."""

    what: Literal["attach"] = "attach"
    port: str
    qp: U24
    group: Gid
    lid: U16
    errno: Signed


class Detach(LogEvent):
    """A QP is detached, or why not."""

    what: Literal["detach"] = "detach"
    port: str
    qp: U24
    group: Gid
    lid: U16
    errno: Signed


ModelEvent: TypeAlias = JoinAccepted | EventQueued | Leave | Attach | Detach


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
