"""What an errno most likely means: ranked causes, each with how to check it and what to do.

Data, not code: `mcast.errors.rows` has a row for each cause. `McastError.causes`, its text, `mcast doctor
ERROR` and the errno atlas of the documentation (`atlas`) are all made from these rows.
"""

from __future__ import annotations

import errno as E
from collections.abc import Iterator
from functools import cache
from itertools import groupby

from mcast.errors.cause import ENOTSUPP, Cause, Phase, Row
from mcast.wire.kinds import LinkLayer

_NAMES = {ENOTSUPP: "ENOTSUPP", E.EOPNOTSUPP: "EOPNOTSUPP", E.EDEADLK: "EDEADLK"}
"""Where Python knows none, or prefers another than the manual pages."""


def errno_name(errno: int) -> str:
    """`EINVAL` for 22; 524, which libc does not name, is the kernel's `ENOTSUPP`."""
    return _NAMES.get(errno) or E.errorcode.get(errno, f"errno {errno}")


def likely_causes(
    phase: Phase, errno: int, call: str = "", link_layer: LinkLayer | None = None, status: str = ""
) -> tuple[Cause, ...]:
    """The causes of `errno` in `phase`, the likeliest first; empty where the errno says all there is to say.

    What is not known ("" or None) leaves every row in; what is known leaves those out that need another.
    """
    return tuple(
        row.cause
        for row in _by_errno().get(errno, ())
        if row.phase in (None, phase)
        and (not call or not row.calls or call in row.calls)
        and (link_layer is None or row.link_layer in (None, link_layer))
        and (not status or row.status in ("", status))
    )


def causes_of_status(status: str) -> tuple[Cause, ...]:
    """The causes that go with this SaStatus or WcStatus alone, by its name."""
    return tuple(
        dict.fromkeys(row.cause for rows in _by_errno().values() for row in rows if row.status == status)
    )


def rows_of(error: str) -> tuple[Row, ...]:
    """The rows of an errno, by name or number, or of an SaStatus or WcStatus, by name; () if it has none."""
    wanted = error.upper()
    return tuple(
        row
        for rows in _by_errno().values()
        for row in rows
        if wanted in (errno_name(row.errno), str(row.errno), row.status or None)
    )


@cache
def _by_errno() -> dict[int, tuple[Row, ...]]:
    from mcast.errors.rows import ROWS  # read when the first error is explained

    found: dict[int, tuple[Row, ...]] = {}
    for row in ROWS:
        found[row.errno] = (*found.get(row.errno, ()), row)
    return found


def atlas() -> str:
    """The errno atlas as Markdown: a section for each phase, a table for each errno of it."""
    from mcast.errors.rows import ROWS

    return "\n".join(_atlas_lines(ROWS)) + "\n"


def _atlas_lines(rows: tuple[Row, ...]) -> Iterator[str]:
    order = [*Phase, None]
    rows = tuple(sorted(rows, key=lambda row: order.index(row.phase)))
    for phase, in_phase in groupby(rows, key=lambda row: row.phase):
        yield f"## {phase.value if phase else 'In every phase'}\n"
        by_errno: dict[int, list[Row]] = {}
        for row in in_phase:
            by_errno.setdefault(row.errno, []).append(row)
        for errno, some in by_errno.items():
            yield f"### {phase.value + ': ' if phase else ''}{errno_name(errno)}\n"
            yield "| why | where | how to check | what to do | known from |"
            yield "|---|---|---|---|---|"
            for row in some:
                cause = row.cause
                cells = (cause.why, where(row), f"`{cause.check}`", cause.next_step, row.source)
                yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
            yield ""


def where(row: Row) -> str:
    """Where a row holds: calls, link layer, status, or the reason why no simulated fabric shows it."""
    link_layer = row.link_layer.value if row.link_layer else ""
    parts = (" / ".join(row.calls), link_layer, row.status, row.only)
    return ", ".join(filter(None, parts)) or "everywhere"
