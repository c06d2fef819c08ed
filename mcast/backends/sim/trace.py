"""What happened on a fabric, in order, with virtual time: the same seed gives the same bytes."""

from __future__ import annotations

import json


class Trace:
    """A list of events as JSON lines: `t` in ns, `what`, and the event's own fields."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, now: int, what: str, **fields: object) -> None:
        """Record one event; values that JSON lacks are written as text."""
        self.lines.append(json.dumps({"t": now, "what": what, **fields}, default=str))

    def __str__(self) -> str:
        return "\n".join(self.lines)
