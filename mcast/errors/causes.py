"""Likely causes of an errno, the likeliest first, each with a check and a next step.

`mcast.errors.rows` has a row for each cause. `McastError.causes`, the text of an error, `mcast doctor ERROR`
and the errno atlas of the documentation (`atlas`) are made from these rows.
"""

from __future__ import annotations

import errno as E
from collections.abc import Iterator
from functools import cache
from itertools import groupby

from mcast.errors.cause import ENOTSUPP, Cause, Phase, Row
from mcast.wire.kinds import LinkLayer

_NAMES = {ENOTSUPP: "ENOTSUPP", E.EOPNOTSUPP: "EOPNOTSUPP", E.EDEADLK: "EDEADLK"}
"""Names that Python lacks, or that the manual pages prefer."""


def errno_name(errno: int) -> str:
    """`EINVAL` for 22; 524, which libc does not name, is the kernel's `ENOTSUPP`."""
    return _NAMES.get(errno) or E.errorcode.get(errno, f"errno {errno}")


def likely_causes(
    phase: Phase, errno: int, call: str = "", link_layer: LinkLayer | None = None, status: str = ""
) -> tuple[Cause, ...]:
    """The causes of `errno` in `phase`, the likeliest first; () where the errno says all there is to say.

    An argument that is "" or None is not known, and leaves every row in. A known one leaves out the rows for
    other values.
    """
    try:
        known = _by_errno()
    except (OSError, ImportError):
        # The process may open no more files, not even that of the rows: which may be the error. Or a signal's
        # handler looks at an error while this thread reads the rows: they are not there yet.
        return ()
    return tuple(
        row.cause
        for row in known.get(errno, ())
        if row.phase in (None, phase)
        and (not call or not row.calls or call in row.calls)
        and (link_layer is None or row.link_layer in (None, link_layer))
        and (not status or row.status in ("", status))
    )


def causes_of_status(status: str) -> tuple[Cause, ...]:
    """The causes that go only with this SaStatus or WcStatus, by its name."""
    return tuple(
        dict.fromkeys(row.cause for rows in _by_errno().values() for row in rows if row.status == status)
    )


def rows_for(error: str) -> tuple[Row, ...]:
    """Return the rows of an errno, an SaStatus or a WcStatus; () if there are none.

    An errno is given by name or number; as in C, -22 and -EINVAL are the errno, too. The others are given by
    name.
    """
    wanted = error.upper().removeprefix("-")
    return tuple(
        row
        for rows in _by_errno().values()
        for row in rows
        if wanted in (errno_name(row.errno), str(row.errno), row.status or None)
    )


def names() -> list[str]:
    """Return the names of errnos, SaStatus and WcStatus that `rows_for` knows, in alphabetical order."""
    rows = [row for found in _by_errno().values() for row in found]
    return sorted({errno_name(row.errno) for row in rows} | {row.status for row in rows if row.status})


@cache
def _by_errno() -> dict[int, tuple[Row, ...]]:
    from mcast.errors.rows import ROWS  # imported when the first error is explained

    found: dict[int, tuple[Row, ...]] = {}
    for row in ROWS:
        found[row.errno] = (*found.get(row.errno, ()), row)
    return found


def atlas() -> str:
    """The errno atlas as Markdown: a section for each phase, and in it a table for each errno."""
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
                # A pipe between backticks ends no cell, and a backslash there would be shown.
                cells = cause.why, row_scope(row), f"`{cause.check}`", cause.next_step, row.source
                yield f"| {' | '.join(cells)} |"
            yield ""


def row_scope(row: Row) -> str:
    """Where a row holds: its calls, link layer and status, or the reason why no simulated fabric shows it."""
    link_layer = row.link_layer.value if row.link_layer else ""
    parts = (" / ".join(row.calls), link_layer, row.status, row.only)
    return ", ".join(filter(None, parts)) or "everywhere"
