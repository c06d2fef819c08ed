"""Time limits."""

from __future__ import annotations

from time import monotonic


class Deadline:
    """`timeout` seconds from now; None is never."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else monotonic() + timeout

    def left(self) -> float | None:
        """Seconds, not below 0; None for never."""
        return None if self._end is None else max(0.0, self._end - monotonic())
