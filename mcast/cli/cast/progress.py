"""The progress bar of a transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcast.cli.terminal import console

if TYPE_CHECKING:
    from rich.progress import Progress


def bar() -> Progress:
    """On stderr, where that is a terminal; it goes when the work is done."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    err = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(None), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
