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
    text = TextColumn("{task.description}", markup=False)  # "[ff0e::1]:5000" is no style
    return Progress(
        text,
        BarColumn(None),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
